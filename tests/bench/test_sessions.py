"""Recorded sessions through the real bookkeeping."""

import importlib
import json
from pathlib import Path

import pytest

from hybrid.doctor import replay
from support.agent_sessions import write_sessions

BENCH = Path(__file__).parents[2] / "bench"


def test_hit_rate_replays_sessions_as_the_doctor_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    main, folder = importlib.import_module("hit_rate").main, write_sessions(tmp_path)
    given = ["--trace", str(folder), "--geometry", "32768,51511296", "--budget-gb", "1.2", "--policy", "lru"]
    found = {}
    for users in (None, 1, 3):
        closed = [] if users is None else ["--users", str(users)]
        assert main([*given, *closed, "--crossover", "140000", "--json"]) == 0
        (line,) = json.loads(capsys.readouterr().out)["lines"]
        assert 0 < line["details"]["saved_compute"] < line["value"] < 100
        assert line["details"]["requests"] == 22
        found[users] = line["value"]
    assert found[1] > found[3]  # fewer sessions at a time
    own = replay(folder, "32768,51511296", "lru", 1_200_000_000, concurrency=1, cures=False).rows[0].hit_rate
    assert found[None] == pytest.approx(own, abs=0.01)


def test_a_cell_of_the_table_of_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    agents = importlib.import_module("agents")
    folder = write_sessions(tmp_path, turns=9)
    assert len(agents.drawn(folder, 2, 1)) == 2
    found = agents.replay_one([folder], "35B-A3B", 4.0, "lru", None)
    assert 0 < found["saved_compute"] < found["hit_rate"] and found["first_token"]["p90"] > 0
