"""In which order the programs of a launch run. A GPU promises none."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from itertools import islice

FORWARD, REVERSE, RANDOM, WOVEN = "forward", "reverse", "random", "woven"
ORDERS = (FORWARD, REVERSE, RANDOM, WOVEN)

AT_ONCE = 4
"""Programs that are under way at the same time where they are woven."""


class Stopped(BaseException):
    """Another program failed: this one ends."""


class Loom:
    """Lets several programs take turns.

    Each has a thread, and one of them runs at a time. Whoever calls `turn` hands on to one that is drawn.

    Args:
        draw: draws who is next.
        resume: called with the number of the program that goes on.
    """

    def __init__(self, draw: random.Random, resume: Callable[[int], object]) -> None:
        self._draw = draw
        self._resume = resume
        self._gates: dict[int, threading.Semaphore] = {}
        self._all_done = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._running = 0

    def run(self, programs: Sequence[int], execute: Callable[[int], object]) -> None:
        """Execute all programs, `AT_ONCE` of them at a time, begun in this order.

        Raises:
            BaseException: what the first of them raised that failed.
        """
        waiting = iter(programs)
        begun = list(islice(waiting, AT_ONCE))
        self._gates = {program: threading.Semaphore(0) for program in begun}
        threads = []
        for program in begun:
            context = copy_context()
            thread = threading.Thread(target=context.run, args=(self._weave, program, waiting, execute), daemon=True)
            threads.append(thread)
            thread.start()
        self._hand_on()
        self._all_done.acquire()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def turn(self) -> None:
        """Let another program go on, or this one."""
        program, following = self._running, self._draw.choice(list(self._gates))
        if following != program:
            self._gates[following].release()
            self._wait(program)

    def _weave(self, program: int, waiting: Iterator[int], execute: Callable[[int], object]) -> None:
        try:
            self._wait(program)
            while True:
                execute(program)
                follower = next(waiting, None)
                if follower is None:
                    break
                self._gates[follower] = self._gates.pop(program)
                program = self._running = follower
                self._resume(program)
        except Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error
        del self._gates[program]
        if self._gates:
            self._hand_on()
        else:
            self._all_done.release()

    def _hand_on(self) -> None:
        self._gates[self._draw.choice(list(self._gates))].release()

    def _wait(self, program: int) -> None:
        self._gates[program].acquire()
        if self._error is not None:
            raise Stopped
        self._running = program
        self._resume(program)


def sequence(order: str, count: int, draw: random.Random) -> list[int]:
    """The numbers of programs in the order in which they begin."""
    programs = list(range(count))
    if order == REVERSE:
        programs.reverse()
    elif order in (RANDOM, WOVEN):
        draw.shuffle(programs)
    return programs
