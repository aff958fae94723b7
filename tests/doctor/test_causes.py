"""Each cause is planted in traffic, and is found first, with its place and the two texts that differ."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid.doctor import Report, Sizes, past, replay
from hybrid.doctor.causes import Cause
from hybrid.doctor.report import RANKS
from support.doctor_traffic import TOOLS, logged, message, prose

SIZES = Sizes(32768, 51511296)


def report_of(folder: Path, lines: list[dict[str, Any]], **options: Any) -> Report:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = replay(path, SIZES, options.pop("engine", "vllm"), options.pop("memory", "24GB"), **options)
    row = report.rows[0]
    assert sum(row.causes.values()) == row.computed == row.num_tokens - row.hit_tokens
    return report


def first_cause(report: Report) -> Cause:
    """The cause of most tokens, but for those that nobody could have had."""
    return report.causes[0][0]


def test_a_time_in_the_system_prompt(tmp_path: Path) -> None:
    lines = []
    for n in range(20):
        system = f"You help. It is 2026-11-26 10:{n:02d}:00 now. {prose(1, 1500)}"
        lines.append(
            logged([message("system", system), message("user", prose(n + 10, 30))], message("assistant", "Yes"))
        )
    report = report_of(tmp_path, lines)
    assert first_cause(report) is Cause.DATE
    example = report.examples[0]
    assert (example.line, example.before) == (2, 1)
    assert "10:00:00" in example.old and "10:01:00" in example.new
    assert example.character == len("<|system|>\nYou help. It is 2026-11-26 10:0")
    cure = next(cure for cure in report.cures if cure.name.startswith("dates"))
    assert cure.saved > 0.7 * dict(report.causes)[Cause.DATE]


def test_tools_in_random_order(tmp_path: Path) -> None:
    rng, lines = random.Random(0), []
    for n in range(20):
        tools = rng.sample(TOOLS, len(TOOLS))
        asked = [message("system", prose(1, 1500)), message("user", prose(n + 10, 30))]
        lines.append(logged(asked, message("assistant", "Yes"), tools=tools))
    report = report_of(tmp_path, lines)
    assert first_cause(report) is Cause.TOOLS
    assert "tool_" in report.examples[0].old and report.examples[0].old != report.examples[0].new
    assert max(report.cures, key=lambda cure: cure.saved).name == "tools in one order"


def test_one_cause_hides_another_and_all_changes_are_replayed_together(tmp_path: Path) -> None:
    rng, lines = random.Random(0), []
    for n in range(24):
        tools = rng.sample(TOOLS, len(TOOLS))
        system = f"You help. It is 2026-11-26 10:{n:02d}:00 now. {prose(1, 1500)}"
        asked = [message("system", system), message("user", prose(n + 10, 30))]
        lines.append(logged(asked, message("assistant", "Yes"), tools=tools))
    report = report_of(tmp_path, lines)
    saved = {cure.name: cure.saved for cure in report.cures}
    assert saved["all changes of texts together"] > 1.5 * saved["tools in one order"] > 0
    report.write(tmp_path / "report.html")
    assert RANKS in (tmp_path / "report.html").read_text()


def test_thinking_that_is_stripped(tmp_path: Path) -> None:
    lines, history = [], [message("system", prose(1, 300))]
    for n in range(12):
        history.append(message("user", prose(n + 10, 60)))
        answer = message("assistant", prose(n + 50, 1200), reasoning_content=prose(n + 100, 300))
        lines.append(logged(history, answer))
        history.append(message("assistant", answer["content"]))
    report = report_of(tmp_path, lines, engine="hybrid")
    assert first_cause(report) is Cause.THINKING
    assert "<think>" in report.examples[0].old and "<think>" not in report.examples[0].new
    assert report.cures[0].name == "thinking kept in the history"


def test_two_tenants(tmp_path: Path) -> None:
    asked = [[message("system", prose(1, 1500)), message("user", prose(n // 2 + 10, 600))] for n in range(20)]
    lines = [logged(each, message("assistant", "Yes"), cache_salt=f"tenant {n % 2}") for n, each in enumerate(asked)]
    report = report_of(tmp_path, lines, engine="hybrid")
    assert first_cause(report) is Cause.NAMESPACE


def test_a_title_generator_between_turns(tmp_path: Path) -> None:
    lines, history = [], [message("system", prose(1, 300))]
    for n in range(8):
        history.append(message("user", prose(n + 10, 900)))
        answer = message("assistant", prose(n + 50, 60))
        lines.append(logged(history, answer))
        history.append(answer)
        title = [message("system", "Write a title for this conversation."), *history[1:]]
        lines.append(logged(title, message("assistant", "A title")))
        history[1] = {**history[1]}
    report = report_of(tmp_path, lines, engine="hybrid")
    causes = dict(report.causes)
    assert first_cause(report) is Cause.BEGINNING, causes
    example = report.examples[0]
    assert "Write a title" in example.new or "Write a title" in example.old


def test_too_little_memory(tmp_path: Path) -> None:
    lines = [{"input_tokens": [n % 12 * 10000 + t for t in range(6000)], "output_tokens": [7] * 8} for n in range(60)]
    report = report_of(tmp_path, lines, engine="vllm", memory="900MB")
    assert first_cause(report) in (Cause.EVICTED, Cause.STATE_EVICTED)
    assert report.cures[0].name.endswith("times the memory") and report.cures[0].saved > 0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "hybrid"])
def test_the_causes_add_up_to_what_is_computed(tmp_path: Path, engine: str) -> None:
    rng, lines = random.Random(3), []
    histories: list[list[int]] = [[] for _ in range(12)]
    for n in range(110):
        history = histories[rng.randrange(12)]
        history += [rng.randrange(32000) for _ in range(rng.randrange(30, 900))]
        answer = [rng.randrange(32000) for _ in range(rng.randrange(1, 300))]
        lines.append({"input_tokens": list(history), "output_tokens": answer, "cache_salt": "ab"[n % 7 == 0]})
        history += answer
        if len(history) > 12000:
            history.clear()
    report = report_of(tmp_path, lines, engine=engine, memory="700MB", cures=False)
    row = report.rows[0]
    assert sum(row.causes.values()) == row.computed == row.num_tokens - row.hit_tokens
    assert all(count > 0 for count in row.causes.values()) and len(row.causes) > 3


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32000) for _ in range(count)]


def test_a_history_that_is_edited(tmp_path: Path) -> None:
    """An agent replaces what is older than four turns."""
    lines, turns = [], []
    for n in range(16):
        turns.append([message("user", prose(n + 10, 300)), message("assistant", prose(n + 50, 60))])
        kept = [[message("user", "[dropped]"), turn[1]] for turn in turns[:-4]] + turns[-4:]
        asked = [message("system", prose(1, 100)), *(one for turn in kept for one in turn)]
        lines.append(logged(asked[:-1], asked[-1]))
    report = report_of(tmp_path, lines, engine="hybrid")
    assert first_cause(report) is Cause.HISTORY
    assert "[dropped]" in report.examples[0].new and "[dropped]" not in report.examples[0].old


def test_no_state_where_prompts_part(tmp_path: Path) -> None:
    shared = tokens(1, 5000)
    lines = [{"input_tokens": shared + tokens(n, 1000), "output_tokens": [7] * 8} for n in (2, 3)]
    report = report_of(tmp_path, lines)
    assert first_cause(report) is Cause.NO_STATE


def test_an_answer_without_a_state(tmp_path: Path) -> None:
    lines, history = [], []
    for n in range(8):
        history += tokens(n, 40)
        answer = tokens(100 + n, 1500)
        lines.append({"input_tokens": list(history), "output_tokens": answer})
        history += answer
    report = report_of(tmp_path, lines)
    assert first_cause(report) is Cause.ANSWER
    assert report.cures[0].saved > 0.8 * dict(report.causes)[Cause.ANSWER]


def test_shorter_than_a_block(tmp_path: Path) -> None:
    shared = tokens(1, 500)
    lines = [{"input_tokens": shared + tokens(n, 100), "output_tokens": [7] * 8} for n in range(2, 22)]
    assert first_cause(report_of(tmp_path, lines)) is Cause.SHORT


def test_states_that_were_evicted_without_their_pages(tmp_path: Path) -> None:
    shared = [tokens(100 + n, 2000) for n in range(12)]
    lines = [{"input_tokens": shared[n % 12] + tokens(n, 60), "output_tokens": [7] * 8} for n in range(72)]
    report = report_of(tmp_path, lines, engine="hybrid", memory="1500MB", cures=False)
    assert first_cause(report) is Cause.STATE_EVICTED


def test_long_traffic_is_replayed_with_what_it_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "MAX_HASHES", 400)
    module = sys.modules["hybrid.doctor.replay"]
    monkeypatch.setattr(module, "MAX_ENDLESS", 1000)
    monkeypatch.setattr(module, "TIMES_ENDLESS", 2)
    sizes: list[int] = []
    add = past.Recent.add

    def watched(self: past.Recent, numbers: list[int], request: int) -> None:
        add(self, numbers, request)
        sizes.append(len(self))

    monkeypatch.setattr(past.Recent, "add", watched)
    lines = [logged([message("user", prose(n % 12, 6000))], message("assistant", "Yes")) for n in range(48)]
    for engine in ("vllm", "hybrid", "sglang"):
        report = report_of(tmp_path, lines, engine=engine, memory="900MB", cures=False)
        assert set(dict(report.causes)) <= {Cause.NEW, Cause.EVICTED, Cause.STATE_EVICTED}
    assert max(sizes) < 2 * (400 + 6000 // 4)
    # twelve prompts of 6,000 words are more than what is remembered
    assert dict(report.causes)[Cause.NEW] > 20 * 6000
