"""The interface of a command: a name, its arguments, and what it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rich.console import Console

MODEL_HELP = "folder or hub id of a checkpoint (default: 'tiny', the model inside the package)"


@dataclass(frozen=True)
class Outcome:
    """What a command found.

    Attributes:
        passed: False if something that was checked does not hold.
        result: what `--json` prints.
    """

    passed: bool
    result: dict[str, Any]


@dataclass(frozen=True)
class Command:
    """One command of `hybrid`.

    Attributes:
        name: as it is typed, and of the module of `hybrid.commands` whose function `run(args, console)` does the work
            and prints to the console what people read. With `--json` the console is silent.
        help: one line for the list of commands.
        description: a paragraph for `hybrid NAME --help`.
        add_arguments: adds the command's arguments to its parser; `--json` is added for every command.
    """

    name: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]

    def run(self, args: argparse.Namespace, console: Console) -> Outcome:
        """Import the command's module, and run it."""
        outcome: Outcome = import_module(f"hybrid.commands.{self.name}").run(args, console)
        return outcome
