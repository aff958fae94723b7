"""`sys.exit` in a function of the user's: in the engine's own thread it is a failure of what was under way, and in the
main thread it ends the process."""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from hybrid import AsyncEngine, Drafter, Engine, RequestError, RequestOutput, SamplingParams, SpeculationConfig
from hybrid.engine.request import Request
from hybrid.speculation.drafter import History
from support.engines import answer, assert_nothing_held, engine_on, greedy, ids


class Exiting(Drafter):
    """Ends the process, at the place that is named."""

    def __init__(self, place: str) -> None:
        self.place = place

    def prepare(self, wanted: Sequence[tuple[History, int]]) -> None:
        self._at("prepare")

    def propose(self, history: History, limit: int) -> tuple[Sequence[int], Sequence[int]]:
        self._at("propose")
        return (), ()

    def end(self, history: History) -> None:
        self._at("end")

    def _at(self, place: str) -> None:
        if place == self.place:
            sys.exit(f"of {place}")


def exits(ids: Sequence[int], logits: Any) -> Any:
    """A logits processor that ends the process with the third token."""
    if len(ids) >= 2:
        sys.exit(3)
    return logits


async def read(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    return (await engine.generate([prompt], params))[0]


def test_a_logits_processor_that_exits_ends_its_request_alone(tiny: Engine) -> None:
    expected = [answer(engine_on(tiny), ids(20, seed), greedy(12)).token_ids for seed in range(4)]

    async def test() -> None:
        async with AsyncEngine(engine_on(tiny)) as engine:
            for _ in range(4):  # more often than unexpected exceptions may come in a row
                asked = [read(engine, ids(20, seed), greedy(12)) for seed in range(4)]
                bad = read(engine, ids(20, 9), greedy(12, logits_processors=[exits]))
                *good, ended = await asyncio.gather(*asked, bad)
                assert [output.token_ids for output in good] == expected
                assert (ended.finish_reason, ended.error) == ("error", "SystemExit: 3")
            await engine.call(assert_nothing_held)

    asyncio.run(test())


@pytest.mark.parametrize("place", ["prepare", "propose", "end"])
def test_a_drafter_that_exits_is_refused(tiny: Engine, place: str) -> None:
    expected = answer(engine_on(tiny), ids(20), greedy(12)).token_ids
    drafts = SpeculationConfig(drafters=(Exiting(place),), adaptive=False)
    own = engine_on(tiny)

    async def test() -> None:
        async with AsyncEngine(Engine(own.loaded, own.cache, own.config, speculation=drafts)) as engine:
            outputs = await asyncio.gather(*(read(engine, ids(20), greedy(12)) for _ in range(4)))
            assert [output.token_ids for output in outputs] == [expected] * 4
            assert engine.stats().speculation["Exiting"].refused >= 4
            await engine.call(assert_nothing_held)

    asyncio.run(test())


def test_a_prompt_that_exits_gets_an_error_that_ends_no_event_loop(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = Engine.prepare

    def exits_for_one(engine: Engine, prompt: Any, *arguments: Any) -> Request:
        if len(prompt) == 7:
            sys.exit("of a prompt")
        return prepare(engine, prompt, *arguments)

    monkeypatch.setattr(Engine, "prepare", exits_for_one)

    async def test() -> None:
        async with AsyncEngine(engine_on(tiny)) as engine:
            with pytest.raises(
                RequestError, match="SystemExit: of a prompt was raised in a thread of the engine"
            ) as raised:
                await read(engine, ids(7), greedy(3))
            assert isinstance(raised.value.__cause__, SystemExit)
            assert len((await read(engine, ids(20), greedy(3))).token_ids) == 3

    asyncio.run(test())


@pytest.mark.parametrize("place", ["prepare", "propose", "end", "logits"])
def test_in_the_main_thread_it_ends_the_process(tiny: Engine, place: str) -> None:
    """And leaves an engine that continues, for a caller that catches it."""
    expected, drafter, own = answer(engine_on(tiny), ids(20), greedy(12)).token_ids, Exiting(place), engine_on(tiny)
    drafts = SpeculationConfig(drafters=(drafter,), adaptive=False)
    engine = Engine(own.loaded, own.cache, own.config, speculation=drafts)
    params = greedy(12, logits_processors=[exits] if place == "logits" else ())
    with pytest.raises(SystemExit):
        engine.generate([ids(20)], params, progress=False)
    drafter.place = ""
    engine.cache.audit()
    assert answer(engine, ids(20), greedy(12)).token_ids == expected
    assert_nothing_held(engine)
