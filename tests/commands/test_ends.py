"""The end of a command where the terminal, the reader of its output or the system ends it."""

import argparse
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hybrid import HybridError
from hybrid.commands import stress
from hybrid.commands.commands import Outcome
from hybrid.commands.main import main

STRESS = ["stress", "--no-model", "--no-signals", "--operations", "20"]


@pytest.mark.parametrize("more", [[], ["--json"], ["--help"]], ids=" ".join)
def test_a_reader_that_has_gone_ends_the_command_with_status_2(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command is `hybrid stress | head -1`: status 1 would say that a check failed."""
    monkeypatch.setattr("hybrid.commands.main.forget_output", lambda: None)
    reader, writer = os.pipe()
    os.close(reader)
    with suppress(BrokenPipeError), open(writer, "w") as output:  # what was not written is when it is closed
        monkeypatch.setattr("sys.stdout", output)
        try:
            status = main([*STRESS, *more])
        finally:
            monkeypatch.undo()
    assert status == 2
    assert capfd.readouterr().err == ""


def test_what_is_wrong_is_not_printed_among_results(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is printed among results, even if stderr is closed."""
    monkeypatch.setattr("sys.stderr", None)
    assert main(["cache", "show", "/nowhere"]) == 2
    monkeypatch.undo()
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def handled() -> Iterator[Callable[[int, signal.Handlers], None]]:
    """Sets how a signal is handled, for a test: who started pytest may have had it ignored, as `nohup` does."""
    before: dict[int, Any] = {}

    def handle(number: int, how: signal.Handlers) -> None:
        before[number] = signal.signal(number, how)

    yield handle
    for number, how in before.items():
        signal.signal(number, how)


def test_a_signal_that_is_ignored_ends_no_command(
    handled: Callable[[int, signal.Handlers], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes as under `nohup`, when the terminal is closed."""
    handled(signal.SIGHUP, signal.SIG_IGN)

    def run(args: argparse.Namespace, console: Console) -> Outcome:
        signal.raise_signal(signal.SIGHUP)
        raise HybridError("it went on")

    monkeypatch.setattr(stress, "run", run)
    assert main(["stress"]) == 2
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_leaves_nothing_behind(
    number: int, handled: Callable[[int, signal.Handlers], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    handled(number, signal.SIG_DFL)
    made: list[Path] = []

    def run(args: argparse.Namespace, console: Console) -> Outcome:
        with tempfile.TemporaryDirectory() as path:
            made.append(Path(path))
            signal.raise_signal(number)
        raise AssertionError("it went on")

    monkeypatch.setattr(stress, "run", run)
    with pytest.raises(SystemExit) as ended:
        main(["stress"])
    assert ended.value.code == 128 + number
    assert not made[0].exists()
    assert signal.getsignal(number) is signal.SIG_DFL
