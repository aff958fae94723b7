"""Prompts are encoded beside the thread that computes: one that takes long holds up itself alone, and has limits."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hybrid import AsyncEngine, EncodingLimitError, Engine, EngineConfig, ImagePrompt, RequestError, SamplingParams
from hybrid.engine.forms import aside
from hybrid.engine.request import Request
from hybrid.prompts.encode import PART_BYTES, num_bytes
from support.engines import engine_on, greedy, ids
from support.scheduling import Counting, engine_without_model

SLOW = 77
"""Prompts of so many tokens are encoded until they are let go."""


@contextmanager
def held(engine: Engine) -> Iterator[threading.Event]:
    """Prompts of `SLOW` tokens are not encoded before the event is set."""
    prepare, let_go = engine.prepare, threading.Event()

    def slow(prompt: list[int], *arguments: Any) -> Request:
        if len(prompt) == SLOW:
            assert let_go.wait(20)
        return prepare(prompt, *arguments)

    engine.prepare = slow  # type: ignore[method-assign,assignment]
    try:
        yield let_go
    finally:
        let_go.set()


def run(test: Callable[[AsyncEngine, threading.Event], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run a test with an engine without a model, for a minute at most; nothing is left of its requests."""

    async def limited() -> None:
        own = engine_without_model(400, 40, config=EngineConfig(**settings), runner=Counting())
        async with asyncio.timeout(60), AsyncEngine(own) as engine:
            with held(own) as let_go:
                await test(engine, let_go)
            await asyncio.sleep(0.05)
            assert engine.stats().waiting == engine.stats().running == 0
            assert await engine.generate([ids(20)], greedy(2))

    asyncio.run(limited())


async def until_waiting(engine: AsyncEngine, count: int) -> None:
    while engine.stats().waiting != count:
        await asyncio.sleep(0.001)


def test_a_prompt_that_takes_long_holds_up_neither_what_runs_nor_other_prompts_nor_other_namespaces() -> None:
    async def test(engine: AsyncEngine, let_go: threading.Event) -> None:
        running = engine.stream(ids(20), greedy(900))
        await anext(running)
        began = time.perf_counter()
        slow = [asyncio.create_task(engine.generate([ids(SLOW)], greedy(2), namespace="a")) for _ in range(2)]
        await until_waiting(engine, 2)
        assert (await engine.generate([ids(20)], greedy(2), namespace="a"))[0].finish_reason == "length"
        slow += [asyncio.create_task(engine.generate([ids(SLOW)], greedy(2), namespace="a")) for _ in range(4)]
        await until_waiting(engine, 6)
        for _ in range(3):
            assert (await engine.generate([ids(20)], greedy(2), namespace="b"))[0].finish_reason == "length"
        assert (await anext(running)).delta_token_ids
        await running.aclose()
        until_let_go = time.perf_counter() - began
        let_go.set()
        found = [outputs[0] for outputs in await asyncio.gather(*slow)]
        assert [output.finish_reason for output in found] == ["length"] * 6
        assert found[0].time_to_first_token > until_let_go / 2  # from when it was asked

    run(test)


def test_a_thread_that_waits_for_a_form_elsewhere_is_not_missed() -> None:
    """Two tenants have all threads wait: a third one's prompts are encoded by others, which end with the wait."""

    async def test(engine: AsyncEngine, _: threading.Event) -> None:
        prepare, let_go = engine.engine.prepare, threading.Event()

        def wait(prompt: list[int], *arguments: Any) -> Request:
            if len(prompt) == SLOW + 1:
                with aside.get()():
                    assert let_go.wait(20)
            return prepare(prompt, *arguments)

        engine.engine.prepare = wait  # type: ignore[method-assign,assignment]
        before = threading.active_count()
        slow = [asyncio.create_task(engine.generate([ids(SLOW + 1)], greedy(2), namespace=name)) for name in "aabb"]
        await until_waiting(engine, 4)
        for _ in range(3):
            assert (await engine.generate([ids(20)], greedy(2), namespace="c"))[0].finish_reason == "length"
        let_go.set()
        assert len(await asyncio.gather(*slow)) == 4
        for _ in range(8):
            await engine.generate([ids(20)], greedy(2))
        assert threading.active_count() <= before + 2

    run(test, encoding_threads=2)


@pytest.mark.parametrize("how", ["cancelled", "closed", "aborted"])
def test_a_prompt_can_be_given_up_while_it_is_encoded(how: str) -> None:
    async def test(engine: AsyncEngine, let_go: threading.Event) -> None:
        stream = engine.stream(ids(SLOW), greedy(900), request_id="mine")
        task = asyncio.ensure_future(anext(stream))
        await until_waiting(engine, 1)
        if how == "cancelled":
            task.cancel()
        elif how == "closed":
            await stream.aclose()
        else:
            await engine.abort("mine")
        found = (await asyncio.gather(task, return_exceptions=True))[0]
        assert isinstance(found, RequestError if how == "aborted" else (asyncio.CancelledError, StopAsyncIteration))
        await until_waiting(engine, 0)
        again = engine.stream(ids(20), greedy(2), request_id="mine")  # the id is free
        assert [output async for output in again]
        let_go.set()
        await asyncio.sleep(0.05)
        assert engine.stats().finished["abort"] == 0, "it never became a request"

    run(test)


def test_ids_of_prompts_that_are_encoded_are_in_use() -> None:
    async def test(engine: AsyncEngine, let_go: threading.Event) -> None:
        first = asyncio.ensure_future(anext(engine.stream(ids(SLOW), greedy(1), request_id="request-0")))
        await until_waiting(engine, 1)
        with pytest.raises(ValueError, match="'request-0' is in use"):
            await anext(engine.stream(ids(20), greedy(1), request_id="request-0"))
        assert await engine.generate([ids(20)], greedy(1))  # is given another one
        let_go.set()
        assert (await first).request_id == "request-0"

    run(test)


def test_a_prompt_that_is_not_encoded_in_time_gets_an_error_and_the_others_do_not() -> None:
    async def test(engine: AsyncEngine, let_go: threading.Event) -> None:
        slow = asyncio.create_task(engine.generate([ids(SLOW)], greedy(2)))
        assert await engine.generate([ids(20)], greedy(2))
        with pytest.raises(EncodingLimitError, match=r"not encoded within 0.2 s: .*encoding_seconds"):
            await slow
        let_go.set()

    run(test, encoding_seconds=0.2)


@pytest.mark.parametrize("max_waiting", [None, 1])
def test_prompts_that_wait_have_so_many_bytes_and_no_more(max_waiting: int | None) -> None:
    async def test(engine: AsyncEngine, let_go: threading.Event) -> None:
        for are_given_up in (True, True, False):
            slow = [asyncio.create_task(engine.generate([ids(SLOW)], greedy(2))) for _ in range(3)]
            await until_waiting(engine, 3)
            with pytest.raises(EncodingLimitError, match=r"wait to be encoded, and 1 more exceed .*encoding_memory"):
                await engine.generate([ids(SLOW)], greedy(2))
            if are_given_up:
                assert all(task.cancel() for task in slow)
                await until_waiting(engine, 0)
        let_go.set()
        assert len(await asyncio.gather(*slow)) == 3

    run(test, encoding_memory=int(3.5 * PART_BYTES * SLOW), max_waiting=max_waiting)


def test_the_size_of_a_prompt_is_that_of_its_texts_and_pixels() -> None:
    limit = 10**12
    assert 10**6 <= num_bytes("x" * 10**6, limit) < 2 * 10**6
    assert 32 * 10**5 <= num_bytes(ids(10**5), limit) < 4 * 10**6
    picture = np.zeros((500, 400, 3), np.uint8)
    chat = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "x" * 999}]}]
    assert 600_999 <= num_bytes(chat, limit) < 602_000
    assert num_bytes([["x" * 10**6]] * 1000, 10**7) < 2 * 10**7, "it stops at the limit"
    assert num_bytes(ImagePrompt(ids(1000), []), limit) > 32_000


def test_what_several_threads_encode_is_what_one_encodes(tiny: Engine) -> None:
    """Though the tokenizer has a state for the names of control tokens, and grammars are shared."""
    engine = engine_on(tiny)
    name = tiny.tokenizer.all_special_tokens[0]
    params = SamplingParams(structured={"choice": ["yes", "no"]})

    def encoded(number: int) -> list[int]:
        text = f"{name} the with statement {name} {number % 7}" * 20
        prompt = {"prompt": text, "split_special_tokens": bool(number % 2)}
        return engine.prepare(prompt, params, str(number % 3), str(number)).prompt_token_ids

    alone = [encoded(number) for number in range(14)]
    assert alone[0] != alone[7], "the option does something"
    with ThreadPoolExecutor(8) as pool:
        for number, found in enumerate(pool.map(encoded, range(400))):
            assert found == alone[number % 14]
