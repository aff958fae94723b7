"""A model that says what a test has written, through the engine and its tokens: thinking, calls of tools, answers."""

from collections import deque
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from hybrid import CacheConfig, Engine

TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>system\nThere is {{ tool['function']['name'] }}.<|im_end|>\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['reasoning_content'] %}<think>\n{{ message['reasoning_content'] }}\n</think>\n{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n<function={{ call['function']['name'] }}>\n"
    "{% for key, value in call['function']['arguments'] | items %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)
"""A template of the kind of Qwen's, with thinking that is on unless it is turned off."""


def call_text(name: str, **arguments: Any) -> str:
    """A call of a tool, as a model of that template writes it."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


class Script:
    """The texts of the next answers. One that begins is the next of them; without any a model says what it likes.

    Args:
        engine: on the model inside the package.
    """

    def __init__(self, engine: Engine) -> None:
        self.texts: deque[str] = deque()
        self._saying: list[int] = []
        loaded = engine.loaded
        self._tokenizer: Any = deepcopy(loaded.tokenizer)
        self._tokenizer.chat_template = TEMPLATE
        (self._end,) = self._tokenizer("<|im_end|>", add_special_tokens=False).input_ids
        params = replace(loaded.default_params, logits_processors=(self,))
        cache = engine.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="32MiB")).cache
        self.engine: Engine = Engine(
            replace(loaded, tokenizer=self._tokenizer, default_params=params), cache, engine.config
        )

    def tokens(self, text: str) -> list[int]:
        """The tokens of an answer, without its end."""
        found: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return found

    def says(self, *texts: str) -> None:
        """What the next answers are."""
        self.texts = deque(texts)

    def __call__(self, answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Have the next token be the script's."""
        if not answer:
            text = self.texts.popleft() if self.texts else ""
            self._saying = [*self.tokens(text), self._end] if text else []
        if len(answer) < len(self._saying):
            logits.fill_(-1e9)[self._saying[len(answer)]] = 0
        return logits
