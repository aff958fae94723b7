"""What runs in the process of one section of `bench/gpu/run.py`."""

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
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


def main(module: str, function: str, pipe: str, rehearse: str) -> int:
    """Import a section, wait for a line with its seconds and the roofline, and write each result to the pipe.

    Returns the exit status: 0, or `NO_DEVICE`.
    """
    faulthandler.enable()
    section = getattr(import_module(module), function)
    asked = sys.stdin.readline()
    if not asked:
        return 0  # not needed any more
    seconds, known = json.loads(asked)
    with os.fdopen(int(pipe), "w", buffering=1) as messages, torch.no_grad():

        def send(**message: Any) -> None:
            line = message.get("line")
            if line is not None:
                del line["reached"]  # of what is judged when it is written
            messages.write(json.dumps(message, default=str) + "\n")

        if not int(rehearse) and not torch.cuda.is_available():
            return NO_DEVICE
        device, sizes = (Cpu(), TOY) if int(rehearse) else (Gpu(), FULL)
        roofline = Roofline(**known) if known else Roofline()
        end = time.perf_counter() + (1 - MARGIN) * seconds
        send_all(section, Bench(device, sizes, roofline, end, bool(int(rehearse)), skip=send), send)
    return 0
