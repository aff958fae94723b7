"""Chats that keep the ids of their turns: every turn hits the turns before it."""

import asyncio
from typing import Any

import pytest

from hybrid import AsyncEngine, Conversation, Engine, PromptError, RequestError, SamplingParams
from support.engines import GRID, answer, assert_nothing_held, engine_on

THINKS = (
    "{# </think> #}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""Leaves reasoning out of earlier answers."""

PARAMS = SamplingParams(max_new_tokens=3 * GRID, temperature=1.0, seed=8)
SYSTEM = {"role": "system", "content": "The with statement wraps the execution of a block. " * 3}


def ends_thinking(engine: Engine) -> Any:
    """A logits processor: an answer thinks for two tokens."""
    assert engine.tokenizer is not None
    said = engine.tokenizer("</think>\n\n", add_special_tokens=False).input_ids

    def process(answer: list[int], logits: Any) -> Any:
        if 2 <= len(answer) < 2 + len(said):
            logits.fill_(-1e9)[said[len(answer) - 2]] = 0
        return logits

    return process


@pytest.mark.parametrize("template", [None, THINKS])
def test_each_turn_hits_all_before_it(tiny: Engine, monkeypatch: pytest.MonkeyPatch, template: str | None) -> None:
    if template is not None:
        monkeypatch.setattr(tiny.tokenizer, "chat_template", template)
    engine = engine_on(tiny)
    more = {} if template is None else {"logits_processors": [ends_thinking(engine)]}
    params = SamplingParams(max_new_tokens=3 * GRID, temperature=1.0, seed=8, **more)
    chat = Conversation(engine, [SYSTEM], params)
    first = chat.ask("What is a tuple?")
    assert first.prompt_token_ids == engine.encode([SYSTEM, {"role": "user", "content": "What is a tuple?"}])
    for number, said in enumerate(("And a list?", [{"role": "user", "content": "And <|im_end|>?"}])):
        known = len(chat.token_ids)
        output = chat.ask(said)
        assert output.usage.cached_tokens >= (known - 1) // GRID * GRID
        assert len(chat.messages) == 5 + 2 * number
    shown = engine.tokenizer.decode(output.prompt_token_ids)
    if template is None:  # it shows answers as they are: the whole chat has the same text
        text = engine.tokenizer.apply_chat_template(chat.messages[:-1], tokenize=False, add_generation_prompt=True)
        assert shown.replace("<|im_end|>", "").split() == text.replace("<|im_end|>", "").split()
    else:
        assert shown.count("</think>") == 2
        assert output.reasoning
        assert "</think>" not in output.content
    assert_nothing_held(engine)


def test_a_stream_is_part_of_the_chat_when_it_ends(tiny: Engine) -> None:
    engine = engine_on(tiny)
    chat = Conversation(engine, params=PARAMS)
    stream = chat.stream("What is a tuple?")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert chat.messages == chat.token_ids == []
    text = "".join(chat.stream("What is a tuple?"))
    assert chat.messages[-1]["content"] == text.strip()
    assert engine.chat(chat.messages[:1], PARAMS).message() == chat.messages[-1]
    failed = answer(engine, chat.prompt("And"), SamplingParams(logits_processors=[lambda answer, logits: 1 // 0]))
    with pytest.raises(RequestError, match="is no answer"):
        chat.note("And", failed)
    assert len(chat.messages) == 2
    assert_nothing_held(engine)


def test_a_chat_of_an_async_engine(tiny: Engine) -> None:
    async def test() -> None:
        async with AsyncEngine(engine_on(tiny)) as engine:
            chat = Conversation(engine.engine, [SYSTEM], PARAMS)
            for said in ("What is a tuple?", "And a list?"):
                output = (await engine.generate(chat.prompt(said), chat.params))[0]
                chat.note(said, output)
            assert output.usage.cached_tokens > 2 * GRID

    asyncio.run(test())


def test_a_template_that_does_not_show_answers_is_refused(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.tokenizer, "chat_template", "{{ messages[-1]['content'] }}")
    chat = Conversation(engine_on(tiny), params=PARAMS)
    chat.ask("What")
    with pytest.raises(PromptError, match="does not show an answer"):
        chat.ask("And")
