"""Recorded sessions of agents: they are read, share what sessions share, and are replayed by their times and closed."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid.commands.main import main
from hybrid.doctor import Sizes, Traffic, replay
from hybrid.doctor.arrivals import Pace, SessionArrivals
from hybrid.doctor.sessions import SessionLog
from hybrid.errors import ArgumentError
from support.agent_sessions import write_sessions

SIZES = Sizes(32768, 51511296, crossover=140_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sessions(tmp_path_factory.mktemp("sessions"))


@pytest.fixture(scope="module")
def traffic(folder: Path) -> Traffic:
    return Traffic.read(folder)


def common(one: Any, other: Any) -> int:
    """Tokens that two requests have in common."""
    pairs = zip(one.hashes, other.hashes, strict=False)
    return 16 * next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one.hashes), len(other.hashes)))


def conversation(traffic: Traffic, number: int) -> list[Any]:
    return [one for one, _ in traffic if one.turn is not None and one.turn.conversation == number]


def test_a_conversation_goes_on_from_its_answers(traffic: Traffic) -> None:
    requests = conversation(traffic, 0)
    assert len(requests) == 6
    for before, after in pairwise(requests):
        assert len(before.hashes) == math.ceil(before.num_tokens / 16)
        assert common(before, after) >= before.num_tokens // 16 * 16


def test_sessions_with_equal_sizes_share_tools_and_system_prompt(traffic: Traffic) -> None:
    first = {one.turn.session: one for one, _ in reversed(list(traffic)) if one.turn is not None}
    assert common(first[0], first[1]) == 2048 // 64 * 64
    assert common(first[0], first[2]) == 0  # it has other tools


def test_a_subagent_of_another_session_has_the_same_tools(traffic: Traffic) -> None:
    agents = [one for one, _ in traffic if one.num_prompt < 2000]
    assert len(agents) == 4
    assert common(agents[0], agents[2]) == 1024


def test_made_up_token_ids_share_as_hashes_do(folder: Path) -> None:
    log = SessionLog.read([folder])
    for pair in pairwise(log.requests):
        one, other = map(log.token_ids, pair)
        assert len(one) == pair[0].num_tokens and min(one) >= 0
        alike = [a == b for a, b in zip(one, other, strict=False)]
        hashes = zip(*map(log.hashes, pair), strict=False)
        assert [*alike, False].index(False) // 64 * 4 == sum(a == b for a, b in hashes) // 4 * 4


def test_pauses_are_cut_and_sessions_begin_apart(folder: Path) -> None:
    requests = SessionLog.read([folder], gap=1000.0, max_pause=10.0).requests
    starts = [min(one.time for one in requests if one.turn.session == number) for number in range(3)]
    assert starts == sorted(starts) and starts[2] > 500
    for number in range(3):
        times = [one.time for one in requests if one.turn.session == number]
        assert max(after - before for before, after in pairwise(times)) <= 10.0
        assert max(one.turn.pause for one in requests) <= 10.0


def test_in_a_closed_loop_a_request_comes_after_its_answer_and_its_pause(traffic: Traffic) -> None:
    arrivals, came, ended = SessionArrivals(traffic, Pace(None, 1000.0, 50.0, users=2)), {}, {}
    while (arrival := arrivals.peek()) is not None or arrivals.wait():
        if arrival is None:
            continue
        arrivals.take()
        came[arrival.number] = arrivals.now
        arrivals.passed(arrival.request.num_prompt, arrival.request.num_tokens - arrival.request.num_prompt)
        ended[arrival.number] = arrivals.now
        arrivals.ended(arrival)
    assert len(came) == traffic.num_requests
    for number, turn in enumerate(traffic.turns):
        assert all(came[number] >= ended[other] + turn.pause - 1e-6 for other in turn.after)
    waiting = [number for number, turn in enumerate(traffic.turns) if len(turn.after) > 1]
    assert len(waiting) == 2  # the main agent waits for its subagent
    last = max(came, key=lambda number: came[number])
    assert traffic.turns[last].session == 2  # there are two users: the third session begins when one ends


@pytest.mark.parametrize("engine", ["vllm", "sglang", "hybrid"])
def test_a_replay_says_what_is_saved_and_how_long_the_first_token_takes(traffic: Traffic, engine: str) -> None:
    report = replay(traffic, SIZES, engine, "8GiB", models=True, cures=False, users=2, prefill_rate=20_000)
    (row,) = report.rows
    assert 50 < row.hit_rate < 100
    assert row.saved_compute is not None and 0 < row.saved_compute < 100
    assert len(row.waits) == traffic.num_requests
    assert row.first_token["mean"] >= row.computed / 20_000 / traffic.num_requests
    assert "2 sessions at a time" in report.summary
    assert json.loads(json.dumps(report.to_json()))["replays"][0]["first_token"]["p90"] > 0


def test_one_at_a_time_the_first_token_takes_what_is_computed(traffic: Traffic) -> None:
    (row,) = replay(traffic, SIZES, "lru", "8GiB", cures=False, concurrency=1, prefill_rate=10_000).rows
    assert sum(row.waits) == pytest.approx(row.computed / 10_000)


def test_the_command_reads_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "32768,51511296,8,24,140000"
    options = ["--engine", "lru", "--memory", "8GiB", "--no-cures", "--users", "3", "--gap", "60"]
    assert main(["doctor", str(folder), "--model", model, *options, "--json"]) == 0
    replays = json.loads(capsys.readouterr().out)["replays"]
    assert replays[0]["saved_compute"] > 0


def test_a_packed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "packed.npz"
    row = [0, 0, 0, 200, 60, 1, 0, 2000, 3, -1, 0, 3, 0], [0, 0, 9000, 300, 10, 2, 1, 1000, 4, 0, 3, 1, 0]
    np.savez(path, sess=np.array([[7, 64, 64, 5000]]), rows=np.array(row), raw=np.array([], np.int32))
    (first, _), (second, fact) = Traffic.read(path)
    assert (first.time, second.time, first.turn.stop, second.turn.pause) == (5.0, 14.0, "tool_use", 7.0)  # type: ignore[union-attr]
    assert fact.seen == 256 == common(first, second)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"requests": [{"t": 0, "in": 0, "hash_ids": []}]}', "not a recorded session"),
        ('{"requests": [{"t": 0, "hash_ids": [1]}]}', "'in'"),
        ('{"requests": [], "hash_ids": 0}', "no session with a request"),
        ('{"block_size": 24, "requests": [{"t": 0, "in": 30, "hash_ids": [1]}]}', "multiple of 16"),
    ],
)
def test_what_is_no_session_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=says):
        Traffic.read(path)


def test_sessions_and_logs_are_not_mixed(tmp_path: Path, folder: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"input_tokens": [1, 2, 3]}\n')
    with pytest.raises(ArgumentError, match="sessions alone"):
        Traffic.read([folder, log])
    with pytest.raises(ArgumentError, match="--users"):
        replay(log, SIZES, "lru", users=2)


def test_a_packed_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sessions.npz"
    path.write_bytes(b"PK\3\4 and no more")
    with pytest.raises(ArgumentError, match="not a recorded session"):
        Traffic.read([path])
