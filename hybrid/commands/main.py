"""The command line."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType

from rich.console import Console

from hybrid import __version__
from hybrid.commands.commands import COMMANDS, check_encoding
from hybrid.errors import HybridError
from hybrid.observe.draw import in_ascii

ENDS = ("SIGTERM", "SIGHUP")
"""Signals that end a process, where the system has them."""

EPILOG = """examples:
  hybrid demo                                   the prefix cache on real text, compared with a run without it
  hybrid generate tiny "The with statement"     continue a prompt with the model inside the package
  hybrid generate Qwen/Qwen3.5-0.8B --chat "Why is the sky blue?" --memory 2GiB
  hybrid serve tiny --port 8000                 OpenAI's and Anthropic's APIs on http://127.0.0.1:8000
  hybrid tree --out tree.html                   the prefix tree as a page for a browser
  hybrid cache show support.hybrid              the prefixes in a file of engine.save
  hybrid doctor log.jsonl --out report.html     what of logged requests hits, what does not, and why
  hybrid parity --model ./my-checkpoint         compare cache hits with cold runs, and logits with transformers
  hybrid parity --all-families                  the same on a small random checkpoint of every model family
  hybrid stress --seconds 30 --seed 7           random requests with injected failures, audited

Exit status: 0 on success, 1 if a check failed, 2 if the command or its input was wrong, or the output cannot be
written, 130 if interrupted, 143 if terminated.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    if sys.stdout is None:  # closed by the caller: `hybrid demo >&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        check_encoding(sys.argv[1:] if arguments is None else arguments)
        if isinstance(sys.stdout, io.TextIOWrapper):
            codecs.register_error("hybrid.in_ascii", _in_ascii)
            sys.stdout.reconfigure(errors="hybrid.in_ascii")  # a terminal without the characters of a tree
        with ended_by_signals():
            status = run(parse(arguments))
        sys.stdout.flush()
    except HybridError as error:
        complain(str(error))
        return 2
    except BrokenPipeError:  # the reader has seen enough: `hybrid demo | head`
        forget_output()
        return 2
    except OSError as error:
        if error.filename is None:  # not a file that was to be read: the output, on a disk that is full
            forget_output()
            complain(f"the output cannot be written: {error.strerror or error}")
        else:
            complain(str(error))
        return 2
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    return status


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Handle characters that an output does not have, as `codecs.register_error` asks for it."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return in_ascii(error.object[error.start : error.end]), error.end


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have the signals that end a process end it as Ctrl-C does: what is on its way is undone, such as
    directories of copies. Only those whose handler is Python's default."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ends = [number for number in signal.Signals if number.name in ENDS and signal.getsignal(number) is signal.SIG_DFL]
    for number in ends:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)


def end(number: int, frame: FrameType | None) -> None:
    """Handle a signal that ends the process."""
    raise SystemExit(128 + number)


class Terminal(Console):
    """The console of a command. A reader that has gone is an error like others, which `main` handles."""

    def on_broken_pipe(self) -> None:
        """Raise, where rich would end the process."""
        raise BrokenPipeError


def run(args: argparse.Namespace) -> int:
    """Run the command that was parsed; returns its exit status."""
    console = Terminal(highlight=False, quiet=args.json, width=None if sys.stdout.isatty() else 100)
    with unannounced() if args.json else nullcontext():
        outcome = args.command.run(args, console)
    if args.json:
        print(json.dumps(outcome.result))
    return 0 if outcome.passed else 1


@contextmanager
def unannounced() -> Iterator[None]:
    """Do not say that operations are compiled, for programs that read what a command prints."""
    logger = logging.getLogger("hybrid.kernels.cpu.prepare")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def complain(text: str) -> None:
    """Say on stderr why the command ends. Where that cannot be written either, the exit status says it alone."""
    if sys.stderr is None:  # closed by the caller; print would write to stdout
        return
    with suppress(OSError):
        print(f"hybrid: {text}".encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)


def forget_output() -> None:
    """Do not try to write the rest of the output again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)


class Print(argparse.Action):
    """Prints a text and ends the command. Those of argparse ignore that it cannot be written."""

    def __init__(self, option_strings: Sequence[str], dest: str, text: str | None = None, help: str = "") -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)
        self._text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(self._text or parser.format_help(), end="" if self._text is None else "\n", flush=True)
        parser.exit()


def add_help(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action=Print, help="print this help")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line; what it parses has as `command` the `Command` that was named."""
    parser = argparse.ArgumentParser(
        prog="hybrid",
        description="A prefix cache for hybrid-architecture language models, with the engine that runs them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    add_help(parser)
    parser.add_argument("--version", action=Print, text=f"hybrid {__version__}", help="print the version")
    parsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        own = parsers.add_parser(command.name, help=command.help, description=command.description, add_help=False)
        add_help(own)
        own.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        command.add_arguments(own)
        own.set_defaults(command=command)
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments of the command line; without any the help is printed."""
    given = sys.argv[1:] if arguments is None else arguments
    return make_parser().parse_args(given or ["--help"])


if __name__ == "__main__":
    sys.exit(main())
