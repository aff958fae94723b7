"""Every program in examples/ runs, and shows what it says it shows."""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = [path for path in sorted(ROOT.glob("examples/*.py")) if not path.stem.startswith("train_")]  # an hour

SHOWN = {
    "agent": [r"branch ' Use a tuple when': '.+'", r"rewound from \d+ to \d+ tokens", r"[1-9]\d+ of \d+ tokens cached"],
    "asyncio_users": [
        r"user 0: '.+' \(length, [1-9]\d+ of \d+ tokens cached\)",
        r"user 2 left after \d+ tokens",
        r"7 answers, 1 aborted",
    ],
    "chat": [
        r"> Where is it defined\?",
        r"[1-9]\d+ of \d+ tokens cached",
        r"[1-9]\d% of the prompt tokens were not computed",
    ],
    "conversation": [
        r"texts: [1-9]\d+ of \d+ tokens cached",
        r"> Where is it defined\?",
        r"[1-9]\d+ of \d+ tokens are cached for the next turn",
    ],
    "images": [
        r"red square, turn 2: [1-9]\d+ of \d+ tokens cached",
        r"red square, turn 1: [1-9]\d+ of \d+ tokens cached",
        r"blue square, turn 1: 0 of \d+ tokens cached",
        r"[1-9]\d% of the prompt tokens were not computed",
    ],
    "pipeline": [
        r"Which module decodes JSON\?",
        r"160 of 161 tokens cached",
        r"[1-9]\d% of the prompt tokens were not computed",
        r"([1-9]\d*) of \1 drafts were accepted",
    ],
    "engine": [r"[1-9]\d+ of \d+ tokens cached", r"[1-9]\d% of the prompt tokens were not computed"],
    "adapters": [
        r"2 adapters of [1-9]\d+ bytes",
        r"cached None: '.+', [1-9]\d+ tokens cached",
        r"cached random-1: '.+', [1-9]\d+ tokens cached",
        r"0 adapters of 0 bytes",
    ],
    "restart": [
        r": 0 of \d+ tokens cached\n",
        r": [1-9]\d+ of \d+ tokens cached\n.*[1-9]\d+ tokens restored from disk",
    ],
    "tools": [
        r"calls look_up \{'statement': '(with|for|while|try)'\}",
        r"[1-9]\d+ of \d+ tokens cached",
        r"answers '.+'",
    ],
    "structured": [
        r"cold schema: '\{.*\}'",
        r"cached date: '20\d\d-\d\d', [1-9]\d+ tokens cached",
        r"cached choice: 'a (module|statement)'",
        r"parsed: \{'module': '(json|re|os)', 'functions': -?\d+\}",
    ],
    "generate": [
        r"one: .*[1-9]\d+ of \d+ tokens cached",
        r"batch: .*[1-9]\d* of \d+ tokens cached",
        r"beams: .*[1-9]\d* of \d+ tokens cached",
        r"session: ",
    ],
}


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_shows_hits(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    for pattern in SHOWN[path.stem]:
        assert re.search(pattern, shown), f"{pattern} is not in:\n{shown}"


def test_there_is_an_example_of_each_kind() -> None:
    assert {path.stem for path in EXAMPLES} == set(SHOWN)
