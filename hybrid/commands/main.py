"""The command line. Each command is a module that defines a `Command`; `COMMANDS` lists them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console

from hybrid import __version__
from hybrid.commands import demo, generate, parity, stress, tree
from hybrid.commands.command import Command
from hybrid.errors import HybridError

COMMANDS: tuple[Command, ...] = (demo.COMMAND, generate.COMMAND, tree.COMMAND, parity.COMMAND, stress.COMMAND)

EPILOG = """examples:
  hybrid demo                                   the prefix cache on real text, compared with a run without it
  hybrid generate tiny "The with statement"     continue a prompt with the model inside the package
  hybrid generate Qwen/Qwen3.5-0.8B --chat "Why is the sky blue?" --memory 2GiB
  hybrid tree --out tree.html                   the prefix tree as a page for a browser
  hybrid parity --model ./my-checkpoint         compare cache hits with cold runs, and logits with transformers
  hybrid parity --all-families                  the same on a small random checkpoint of every model family
  hybrid stress --seconds 30 --seed 7           random requests with injected failures, audited

Exit status: 0 on success, 1 if a check failed, 2 if the command or its input was wrong, 130 if interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    args = parse(arguments)
    console = Console(highlight=False, quiet=args.json, width=None if sys.stdout.isatty() else 100)
    try:
        outcome = args.command.run(args, console)
    except HybridError as error:
        print(f"hybrid: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hybrid: interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(outcome.result))
    return 0 if outcome.passed else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command line; `command` is the `Command` that was named."""
    parser = argparse.ArgumentParser(
        prog="hybrid",
        description="A prefix cache for hybrid-architecture language models, with the engine that runs them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hybrid {__version__}")
    parsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        own = parsers.add_parser(command.name, help=command.help, description=command.description)
        own.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        command.add_arguments(own)
        own.set_defaults(command=command)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
