"""Prefixes that are computed in advance, and places in messages up to which a prompt is kept."""

import time
from typing import Any

import pytest

from hybrid import Engine, PromptError, SamplingError, SamplingParams
from hybrid.cache import breakpoints
from support.engines import GRID, answer, assert_nothing_held, cold, engine_on, greedy, ids

LONG = "The with statement wraps the execution of a block with methods defined by a context manager. "


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_prompt_that_was_prewarmed_hits_and_has_no_answer(tiny: Engine, deterministic: bool) -> None:
    engine = engine_on(tiny, deterministic=deterministic)
    prompt = ids(4 * GRID)
    output = engine.prewarm(prompt, ttl=60)
    assert (output.finish_reason, output.token_ids, output.text) == ("length", [], "")
    assert output.pin is not None
    assert output.pin.num_tokens == 4 * GRID
    longer = prompt + ids(9, seed=1)
    found = answer(engine, longer, greedy(8))
    assert found.usage.cached_tokens == 4 * GRID
    if deterministic:
        assert found.token_ids == cold(tiny, longer, greedy(8)).token_ids
    engine.cache.clear()
    assert engine.explain(longer).usable_hit == 4 * GRID
    engine.unpin(output.pin)
    engine.cache.clear()
    assert engine.explain(longer).usable_hit == 0
    assert engine.prewarm(prompt).pin is None
    assert engine.generate([prompt, longer], SamplingParams(max_new_tokens=0))[0].usage.cached_tokens == 3 * GRID
    with pytest.raises(SamplingError, match="n=2 answers"):
        SamplingParams(max_new_tokens=0, n=2)
    assert_nothing_held(engine)


def chat(*names: str, ttl: Any = "1h") -> list[dict[str, Any]]:
    """A system's message with two parts, and two of a user; those that are named have a breakpoint."""
    control = {"cache_control": {"type": "ephemeral", "ttl": ttl}}
    parts = [{"type": "text", "text": LONG * 2}, {"type": "text", "text": LONG[:60]}]
    if "part" in names:
        parts[0] |= control
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": parts},
        {"role": "user", "content": LONG},
        {"role": "user", "content": "Why?"},
    ]
    for at, name in enumerate(("system", "user")):
        if name in names:
            messages[at] |= control if name == "system" else {"prompt_cache_breakpoint": True}
    return messages


def test_breakpoints_are_found_in_the_tokens_and_change_none_of_them(tiny: Engine) -> None:
    engine = engine_on(tiny)
    assert tiny.tokenizer is not None
    plain = engine.encode(chat())
    for split in (False, True):
        for whole in ({"messages": chat("part", "system", "user"), "split_special_tokens": split}, chat("user")):
            found = engine.prepare(whole, None, "", "name")
            assert found.prompt_token_ids == plain
            texts = [tiny.tokenizer.decode(plain[: one.num_tokens]) for one in found.breakpoints]
            ends = [LONG * 2, LONG * 2 + LONG[:60], LONG][-len(texts) :]
            for text, end in zip(texts, ends, strict=True):
                assert end.strip()[-20:] in text[-30:]
            assert [one.ttl for one in found.breakpoints] == [3600.0, 3600.0, 300.0][-len(texts) :]
    for ttl in ("5 minutes", -1, True):
        with pytest.raises(PromptError, match="ttl"):
            engine.encode(chat("system", ttl=ttl))


def test_a_breakpoint_is_pinned_with_its_checkpoint_and_renewed_when_it_is_used(tiny: Engine) -> None:
    engine = engine_on(tiny, pages=256)
    engine.add_request(chat("system", "user", ttl=100), greedy(40))
    while not engine.cache.breakpoints:
        engine.step()
    assert engine.scheduler.running  # while it runs
    while engine.has_work:
        engine.step()
    assert len(engine.cache.breakpoints) == 2
    first = min(engine.cache.pins, key=lambda pin: pin.num_tokens)
    was = first.expires = time.monotonic() + 1  # as if most of its time were over
    engine.cache.clear()
    other = [chat()[0], {"role": "user", "content": "Another question, which is new"}]
    assert answer(engine, other, greedy(2)).usage.cached_tokens == first.num_tokens
    assert first.expires > was + 50
    answer(engine, chat("system", "user", ttl=100), greedy(2))
    assert len(engine.cache.breakpoints) == len(engine.cache.pins) == 2
    assert_nothing_held(engine)


def test_tenants_have_a_bounded_number_and_the_one_with_most_gives_way(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakpoints, "MAX_PER_TENANT", 3)
    engine = engine_on(tiny, pages=24, states=24)

    def send(text: str, tenant: str) -> None:
        messages = [{"role": "system", "content": text, "cache_control": {}}, {"role": "user", "content": "Why?"}]
        messages[0]["cache_control"] = {"type": "ephemeral"}
        answer(engine, messages, greedy(1, tenant=tenant))

    for number in range(5):
        send(f"{number} {LONG[:40]}", "many")
    assert len(engine.cache.breakpoints) == 3
    for number in range(4):
        send(f"{number} a larger one, {LONG}", "large")
    send("of a third " + LONG[:60], "third")
    sizes = engine.cache.breakpoints.num_tokens()
    assert sizes.keys() == {"many", "large", "third"}
    assert sizes["third"] > 0
    assert len(engine.cache.breakpoints) < 3 + 4 + 1
    engine.cache.audit()
    assert_nothing_held(engine)
