"""What chat templates do about thinking, found by rendering them, and what a server makes of it."""

from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import Template

from hybrid import SamplingParams
from hybrid.prompts.thinking import Thinking
from hybrid.server.errors import HttpError
from hybrid.server.thinking import set_thinking

SWITCHED = (
    "<|im_start|>assistant\n<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>{% endif %}"
)
DEFAULT_OFF = "{% if thinking %}Think within <think> and </think>. {% endif %}assistant:"
ALWAYS = (
    "{% if enable_thinking %}{% endif %}<|im_start|>assistant\n<think>\n"  # it names the variable, and does not use it
)
BY_LEVELS = "Reasoning: {{ reasoning_effort or 'medium' }}\nassistant:"
REMOVES = "{{ messages[-1]['content'].split('</think>')[-1] }}<|im_start|>assistant\n"
FOUND = {
    SWITCHED: Thinking("enable_thinking", False, True),
    DEFAULT_OFF: Thinking("thinking", False, True),
    ALWAYS: Thinking(None, True, True),
    BY_LEVELS: Thinking(None, True, False),
    REMOVES: Thinking(None, False, True),
    "{{ messages[0]['content'] }}": Thinking(),
    "": Thinking(),
}


class Tokenizer(SimpleNamespace):
    """A tokenizer that has a chat template."""

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **variables: Any) -> str:
        return Template(self.chat_template).render(messages=messages, **variables)


@pytest.mark.parametrize("source", FOUND)
def test_what_a_template_does_is_found_by_rendering_it(source: str) -> None:
    assert Thinking.of(Tokenizer(chat_template=source)) == FOUND[source]


@pytest.mark.parametrize("source", FOUND)
def test_none_turns_thinking_off_or_is_refused_where_it_cannot(source: str) -> None:
    prompt: dict[str, Any] = {}
    if FOUND[source].is_always:
        with pytest.raises(HttpError, match="reasoning_effort: this model always thinks"):
            set_thinking(prompt, SamplingParams(), FOUND[source], "reasoning_effort", False)
        return
    params = set_thinking(prompt, SamplingParams(), FOUND[source], "reasoning_effort", False)
    switch = FOUND[source].switch
    assert prompt == ({} if switch is None else {"chat_template_kwargs": {switch: False}})
    assert params.bad_words == (("<think>",) if source == REMOVES else ())


def test_a_template_that_refuses_the_question_has_no_switch() -> None:
    refuses = Tokenizer(chat_template="{{ messages[5].content.x }}{% if enable_thinking %}<think>{% endif %}")
    assert Thinking.of(refuses) == Thinking(None, False, True)
