"""What runs in the process of one section of `bench/gpu/run.py`."""

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from common import Line
from gpu.harness import Bench, Cpu, Gpu, Planned, Roofline
from gpu.run import NO_DEVICE
from gpu.sizes import FULL, TOY

MARGIN = 0.1
"""Part of a section's time that is left when it stops to begin what would not end in time."""


def send_all(section: Callable[[Bench], Iterator[Any]], bench: Bench, send: Callable[..., None]) -> None:
    """Run a section. A case that raises is reported, and the next one runs unless the device is lost."""
    for item in section(bench):
        if not isinstance(item, Planned):
            send(**({"line": item.to_json()} if isinstance(item, Line) else item))
            continue
        send(at=item.name)
        try:
            for line in bench.measure(item):
                send(line=line.to_json())
        except Exception as error:
            traceback.print_exc()
            send(failed=f"{item.name}: {type(error).__name__}: {error}")
            bench.device.synchronize()  # raises if the device is lost
            bench.device.release()


def run(section: Callable[[Bench], Iterator[Any]], asked: Any, rehearse: bool, take: Callable[..., object]) -> None:
    """Run a section; `asked` are its seconds and the roofline as far as it is known, and `take` gets each message."""

    def send(**message: Any) -> None:
        message.get("line", {}).pop("reached", None)  # of what is judged when it is written
        take(message)

    (seconds, known), (device, sizes) = asked, (Cpu(), TOY) if rehearse else (Gpu(), FULL)
    end = time.perf_counter() + (1 - MARGIN) * seconds
    with torch.no_grad():
        send_all(section, Bench(device, sizes, Roofline(**(known or {})), end, rehearse, skip=send), send)


def main(module: str, function: str, pipe: str, rehearse: str) -> int:
    """Import a section, wait for a line with its seconds and the roofline, and write each result to the pipe.

    Returns the exit status: 0, or `NO_DEVICE`.
    """
    faulthandler.enable()
    section = getattr(import_module(module), function)
    asked = sys.stdin.readline()
    if not asked:
        return 0  # not needed any more
    if not int(rehearse) and not torch.cuda.is_available():
        return NO_DEVICE
    with os.fdopen(int(pipe), "w", buffering=1) as messages:
        write = partial(print, file=messages)
        run(section, json.loads(asked), bool(int(rehearse)), lambda message: write(json.dumps(message, default=str)))
    return 0
