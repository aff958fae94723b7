"""Whether a model thinks before it answers, and how its chat template turns that on and off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybrid.prompts.answer_parser import THINKING

SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn thinking on and off."""


@dataclass(frozen=True)
class Thinking:
    """What a chat template does about thinking.

    Attributes:
        switch: the variable that turns it on and off; None: there is none.
        is_always: it cannot be turned off: without such a variable the template begins each answer within reasoning, or
            reads how much of it there is to be.
        is_marked: the template knows the marks around reasoning. Where it neither begins it nor has a switch, the model
            begins it by itself, or never: the template of the same family's models that think is often the same.
    """

    switch: str | None = None
    is_always: bool = False
    is_marked: bool = False

    @classmethod
    def of(cls, tokenizer: Any) -> Thinking:
        """Find out by rendering a question. A variable is a switch if true and false make other prompts of it, and that
        of false does not end within reasoning."""
        source = str(getattr(tokenizer, "chat_template", None) or "")
        is_marked, is_always = any(mark in source for mark in THINKING), "reasoning_effort" in source

        def rendered(**variables: bool) -> str:
            asked = [{"role": "user", "content": "?"}]
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **variables)
            return str(text).rstrip()

        try:
            for name in SWITCHES:
                off = rendered(**{name: False}) if name in source else None
                if off is not None and not off.endswith(THINKING[0]) and off != rendered(**{name: True}):
                    return cls(name, False, is_marked)
            is_always = is_always or (is_marked and rendered().endswith(THINKING[0]))
        except Exception:  # a template may refuse a chat, as one without a system message
            return cls(None, is_always, is_marked)
        return cls(None, is_always, is_marked)
