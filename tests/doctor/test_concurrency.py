"""Requests that overlap: by their times or as many at a time, on every model of an engine."""

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid.doctor import Report, Sizes, Traffic, replay
from hybrid.doctor.arrivals import Arrivals, Pace
from hybrid.doctor.batch import ReplayLoop
from hybrid.doctor.causes import Cause
from hybrid.doctor.engine import MISS
from hybrid.doctor.engines import engine_of
from hybrid.doctor.evicted import AGES, EvictedKind, EvictedTokens, Replacement, age_of
from hybrid.doctor.past import Fact
from hybrid.doctor.request import LoggedRequest, hashed
from hybrid.errors import ArgumentError
from support.doctor_traffic import written

SIZES = Sizes(32768, 51511296)


def conversations(seed: int, count: int) -> list[dict[str, Any]]:
    """Requests of ten conversations in turns, two of which share a beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(32000) for _ in range(1200)]
    histories = [list(shared) if n < 2 else [] for n in range(10)]
    made = []
    for n in range(count):
        history = histories[rng.randrange(10)]
        history += [rng.randrange(32000) for _ in range(rng.randrange(30, 900))]
        answer = [rng.randrange(32000) for _ in range(rng.randrange(1, 300))]
        made.append({"input_tokens": list(history), "output_tokens": answer, "ts": n * 0.3})
        history += answer
        if len(history) > 9000:
            history.clear()
    return made


def at_once(count: int, apart: float = 0.0) -> list[dict[str, Any]]:
    """Requests that share a document, launched together."""
    return [
        {"input_tokens": [*range(6000), *range(9000 + n, 9050 + n)], "output_tokens": [7] * 40, "ts": n * apart}
        for n in range(count)
    ]


@pytest.mark.parametrize(("engine", "pace"), [("vllm", {}), ("sglang", {"concurrency": 6}), ("hybrid", {})])
def test_the_causes_add_up_and_nothing_is_left_held(tmp_path: Path, engine: str, pace: dict[str, Any]) -> None:
    lines = conversations(5, 60)
    report = replay(written(tmp_path, lines), SIZES, engine, "1.2GB", cures=False, **pace)
    row = report.rows[0]
    assert sum(row.causes.values()) == row.computed < row.num_tokens
    evicted = row.causes.get(Cause.EVICTED, 0) + row.causes.get(Cause.STATE_EVICTED, 0)
    assert evicted == sum(part.num_tokens for part in row.evicted) > 0
    assert all(99 <= sum(part.places.values()) <= 101 or not any(part.places.values()) for part in row.evicted)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "hybrid"])
def test_one_at_a_time_is_one_after_the_other(engine: str) -> None:
    """The loop of steps gives the hits of the model that serves whole requests."""
    requests = list(of_lines(conversations(3, 60)))
    whole, stepped = (engine_of(engine, SIZES, 2_000_000_000) for _ in range(2))
    begun = ReplayLoop(stepped, Arrivals(requests, Pace(1))).run()
    assert [each.hit.num_tokens for each in begun] == [whole.serve(request).num_tokens for request, _ in requests]


def of_lines(lines: list[dict[str, Any]]) -> Iterator[tuple[LoggedRequest, Fact]]:
    for line in lines:
        ids = line["input_tokens"] + line["output_tokens"]
        yield LoggedRequest(hashed(ids), len(line["input_tokens"]), len(ids), line["ts"]), Fact()


def test_what_was_launched_together_is_named(tmp_path: Path) -> None:
    report = replay(written(tmp_path, at_once(4)), SIZES, "sglang", "8GB")
    assert report.causes[0][0] is Cause.TOGETHER
    cure = next(cure for cure in report.cures if cure.name == "one request after the other")
    assert cure.saved == dict(report.causes)[Cause.TOGETHER] > 5000
    assert "by their times" in report.summary
    apart = replay(written(tmp_path, at_once(4, apart=60.0)), SIZES, "sglang", "8GB", cures=False)
    assert Cause.TOGETHER not in dict(apart.causes)
    alone = replay(written(tmp_path, at_once(4)), SIZES, "sglang", "8GB", concurrency=1, cures=False)
    assert alone.rows[0].hit_tokens == apart.rows[0].hit_tokens > report.rows[0].hit_tokens


def test_a_turn_comes_after_the_answer_that_it_has(tmp_path: Path) -> None:
    """Clocks of logs and rates of models differ: no prompt can have had an answer that was not there."""
    history, lines = list(range(3000)), []
    for n in range(5):
        answer = [40_000 + 1000 * n + at for at in range(600)]
        lines.append({"input_tokens": list(history), "output_tokens": answer, "ts": 0.1 * n})
        history += answer + [n] * 20
    path = written(tmp_path, lines)
    by_times: Report = replay(path, SIZES, "hybrid", "8GB", cures=False)
    assert by_times.rows[0].hit_tokens == replay(path, SIZES, "hybrid", "8GB", concurrency=1).rows[0].hit_tokens > 9000


def test_a_log_in_the_order_of_answers_is_put_in_order(tmp_path: Path) -> None:
    lines = conversations(7, 30)
    ordered = Traffic.read(written(tmp_path, lines))
    for before in range(0, 30, 6):
        lines[before : before + 6] = reversed(lines[before : before + 6])
    mixed = Traffic.read(written(tmp_path, lines))
    assert [request for request, _ in mixed] == [request for request, _ in ordered]
    assert all(a.time <= b.time for (a, _), (b, _) in pairwise(mixed) if a.time is not None and b.time is not None)


def test_where_no_times_are_known_requests_come_one_after_the_other(tmp_path: Path) -> None:
    lines = at_once(4)
    del lines[2]["ts"]
    report = replay(written(tmp_path, lines), SIZES, "sglang", "8GB", cures=False)
    assert report.pace == "one after the other"
    with pytest.raises(ArgumentError, match="--concurrency must be at least 1"):
        replay(written(tmp_path, lines), SIZES, concurrency=0)


def test_what_was_evicted_is_divided() -> None:
    """Two prompts come again; between them one that does not, and answers."""
    counted, size = EvictedTokens(), 640
    for number, (tokens, fact, lost) in enumerate(
        [
            (size, Fact(), 0),
            (3 * size, Fact(), 0),
            (size, Fact(seen=size - 64, answer_from=size, age=2), size - 64),
            (2 * size, Fact(seen=size, answer_from=size, age=1), 100),
        ]
    ):
        counted.add(number, LoggedRequest(hashed([number]), tokens, tokens + 100), fact, 0, lost)
    first, second = counted.parts()
    assert (first.part, first.age, first.num_tokens) == (EvictedKind.BEGINNING, age_of(2), size - 64)
    assert first.places == {
        Replacement.USED: 0,
        Replacement.UNUSED: pytest.approx(95.0, abs=0.1),
        Replacement.ANSWERS: 5.0,
    }
    assert second.part is EvictedKind.CONVERSATION and second.num_tokens == 100
    assert [age_of(n) for n in (1, 10, 11, AGES[-1] + 1)] == ["1 to 10", "1 to 10", "11 to 100", "more than 1,000"]


class FullEngine:
    """An engine that has no more room once the first request's answer has begun, until it has ended."""

    mixes = shares_at_once = True
    max_running = 256

    def __init__(self) -> None:
        self._has_failed = self._is_full = False

    def new_step(self) -> None:
        pass

    def begin(self, request: LoggedRequest, budget: int | None = None) -> Any:
        return None if self._is_full else SimpleNamespace(hit=MISS, computed=0, request=request)

    def end_of_part(self, running: Any, budget: int) -> int:
        return int(running.request.num_prompt)

    def next_event(self, running: Any) -> int:
        return int(running.computed) + 1

    def advance(self, running: Any, end: int) -> bool:
        if end > 110 and not self._has_failed:
            self._has_failed = self._is_full = True
            return False
        running.computed = end
        return True

    def end(self, running: Any) -> None:
        self._is_full &= running.request.num_tokens != LONG


LONG = 200


def test_a_request_comes_when_another_has_ended_also_while_one_begins_again() -> None:
    """The fifth comes when the second has ended, though the third begins again then; the fourth has the first's
    answer."""
    given = [LoggedRequest(hashed([n]), 100, size) for n, size in enumerate([LONG, 130, 180, 140, 150])]
    facts = [Fact(), Fact(), Fact(), Fact(seen=64, answer_from=64, age=3), Fact()]
    loop = ReplayLoop(FullEngine(), Arrivals(zip(given, facts, strict=True), Pace(3)))
    assert [one.arrival.number for one in loop.run()] == [0, 1, 2, 4, 3]
