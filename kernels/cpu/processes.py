"""Compiling in processes of their own, as many as there are cores. They import Numba, and not torch."""

from __future__ import annotations

import os
import pickle
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from subprocess import DEVNULL, PIPE, Popen
from threading import Thread

from hybrid.kernels.cpu import kept
from hybrid.kernels.cpu.functions import COMPILED, Function
from hybrid.kernels.cpu.target import Target

PROGRAM = """
import sys
from types import ModuleType
sys.path[:] = {path!r}
package = sys.modules["hybrid"] = ModuleType("hybrid")
package.__path__ = [{folder!r}]
from {compiled}.worker import main
main()
"""
"""What a process runs: the package is one of folders only, since the real one imports torch."""


def compile_all(wanted: Sequence[Function], asked: Target) -> Iterator[tuple[Function, bytes]]:
    """The code of functions, as soon as each is compiled. Those that cannot be compiled, or whose process ends early,
    are left out.

    Args:
        wanted: those that take longest first.
        asked: what they are compiled for. Numba optimizes for it, too, and not for the CPU at hand.
    """
    environment = {**os.environ, "NUMBA_CPU_NAME": asked.cpu, "NUMBA_CPU_FEATURES": asked.features}
    left, processes = deque(wanted), list[Popen[bytes]]()
    found: SimpleQueue[tuple[Function, bytes] | None] = SimpleQueue()

    def serve() -> None:
        with suppress(OSError, EOFError, pickle.UnpicklingError, IndexError), _process(environment) as process:
            processes.append(process)
            assert process.stdin is not None and process.stdout is not None
            while True:
                function = left.popleft()
                pickle.dump(function, process.stdin)
                process.stdin.flush()
                code = pickle.load(process.stdout)
                if code is not None:
                    found.put((function, code))
        found.put(None)

    running = min(_cores(), len(wanted))
    for _ in range(running):
        Thread(target=serve, name="hybrid-compile", daemon=True).start()
    try:
        while running:
            answer = found.get()
            if answer is None:
                running -= 1
            else:
                yield answer
    finally:  # the caller may be interrupted
        left.clear()
        for process in processes:
            process.kill()


def _process(environment: Mapping[str, str]) -> Popen[bytes]:
    program = PROGRAM.format(path=sys.path, folder=str(kept.SOURCES.parents[1]), compiled=COMPILED)
    command = [sys.executable, "-I", "-W", "ignore", "-c", program]
    return Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env={**environment})


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
