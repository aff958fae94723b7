"""Programs that are posted: other threads compute them in order, and whoever waits for one computes what is left."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid.kernels.cpu import tasks
from hybrid.kernels.cpu.compiled.vectors import INDEX, numbers
from hybrid.kernels.cpu.kinds import FLOAT
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.memory import fill
from hybrid.kernels.cpu.tasks import Task, Tasks
from hybrid.kernels.cpu.team import Posted, Team
from hybrid.kernels.reference.memory import fill_in_tokens

THREADS = 3


def add(args: Any, kind: Any, first: int, last: int) -> None:
    """Write the sum of two numbers, the slower the larger the third."""
    a = numbers(args, INDEX)
    x, y, target = numbers(a[0], INDEX), numbers(a[1], INDEX), numbers(a[2], INDEX)
    for element in range(first, last):
        total, noise = x[element] + y[element], np.int64(element)
        for _ in range(a[3]):
            noise = noise * 6364136223846793005 + 1442695040888963407
            if noise == 1:
                total += 1
        target[element] = total


def fails(args: Any, kind: Any, first: int, last: int) -> None:
    place = numbers(numbers(args, INDEX)[0], INDEX)
    for element in range(first, last):
        if place[element] == 7:
            raise MemoryError


def halve(args: Any, kind: Any, first: int, last: int) -> None:
    a = numbers(args, INDEX)
    x, y = numbers(a[0], kind), numbers(a[1], kind)
    for element in range(first, last):
        y[element] = x[element] / np.float32(2)


ADD, FAILS, HALVE = (Compiled(__name__, name) for name in ("add", "fails", "halve"))

SMALLEST = 2.0**-126
"""The smallest number in fp32 that is not subnormal."""

SLOW = 5_000_000
"""Spins of some milliseconds, in every element."""


@pytest.fixture(autouse=True)
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    """A new team, whose threads have not been started."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    new = Team(THREADS - 1)
    monkeypatch.setattr(tasks, "team", lambda: new)
    yield new
    new.close()
    torch.set_num_threads(before)


class Sum:
    """`x + y` into `target`, as a program of one task after a copy to `x` and before one from `target`."""

    def __init__(self, source: Tensor, spins: int = 0) -> None:
        self.source, self.target, self.found = source, torch.zeros_like(source), torch.zeros_like(source)
        self.x, self.y = torch.zeros_like(source), torch.ones_like(source)
        addresses = tuple(tensor.data_ptr() for tensor in (self.x, self.y, self.target))
        self.task = Task(ADD, FLOAT, (*addresses, spins), len(source), 1, len(source))

    def post(self) -> Posted | None:
        return Tasks([self.task]).post(fill(self.source, self.x), fill(self.target, self.found), self)


def numbers_to(count: int) -> Tensor:
    return torch.arange(count)


def posted(work: Sum) -> Posted:
    found = work.post()
    assert found is not None
    return found


def test_other_threads_compute_what_nobody_waits_for() -> None:
    work = Sum(numbers_to(9))
    pending, deadline = posted(work), time.monotonic() + 60
    while work.found[-1] != 9 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert work.found.tolist() == [*range(1, 10)]
    pending.wait()


@pytest.mark.parametrize("count", [2, 3, 7])
def test_programs_come_in_the_order_in_which_they_were_posted(count: int) -> None:
    """Each continues from the one before, which takes long."""
    works = [Sum(numbers_to(5), SLOW)]
    for _ in range(count - 1):
        works.append(Sum(works[-1].found, 0))
    pending = [posted(work) for work in works]
    pending[-1].wait()
    assert works[-1].found.tolist() == [*range(count, count + 5)]
    for each in reversed(pending):
        each.wait()


def test_what_is_run_comes_after_what_was_posted() -> None:
    first = Sum(numbers_to(5), SLOW)
    pending = posted(first)
    second = Sum(first.found)
    second.x = first.found
    addresses = tuple(tensor.data_ptr() for tensor in (second.x, second.y, second.target))
    Tasks([Task(ADD, FLOAT, (*addresses, 0), 5, 1, 5)])()
    assert second.target.tolist() == [*range(2, 7)]
    pending.wait()


def test_who_waits_computes_what_no_other_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    works = [Sum(numbers_to(5)), Sum(numbers_to(6))]
    pending = [posted(work) for work in works]
    assert not any(work.found.any() for work in works)
    pending[1].wait()
    assert [work.found.tolist() for work in works] == [[*range(1, 6)], [*range(1, 7)]]
    pending[0].wait()


def test_two_that_were_not_waited_for_do_not_keep_a_third_from_being_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    works = [Sum(numbers_to(5)) for _ in range(4)]
    pending = [posted(work) for work in works]
    pending[-1].end()
    assert all(work.found.tolist() == [*range(1, 6)] for work in works)


def test_a_failure_is_raised_where_it_is_waited_for_and_nowhere_else() -> None:
    place = torch.arange(9)
    failing = Tasks([Task(FAILS, FLOAT, (place.data_ptr(),), 9, 1, 9)])
    work = Sum(numbers_to(5))
    copied = torch.zeros_like(place)
    bad = failing.post(fill(place, copied), fill(place, copied), copied)
    good = posted(work)
    good.wait()
    assert work.found.tolist() == [*range(1, 6)]
    assert bad is not None
    bad.end()
    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory"):
            bad.wait()
    with pytest.raises(MemoryError, match="no memory"):
        failing()
    posted(work).wait()


def has_subnormal_numbers() -> bool:
    return bool(torch.tensor([SMALLEST]).div(2).item())


@pytest.mark.parametrize("flushes", [False, True])
def test_operations_compute_0_for_subnormal_numbers_and_their_callers_what_they_did_before(flushes: bool) -> None:
    """Decays make many of them, and each takes as long as twenty others. What a product of torch's makes of them is
    the user's business, also where an operation has failed."""
    x, alone, run, found = torch.full((999,), SMALLEST), torch.ones(1), torch.ones(999), torch.ones(999)
    place, other = numbers_to(9), numbers_to(9)
    torch.set_flush_denormal(flushes)
    try:
        Tasks([Task(HALVE, FLOAT, (x.data_ptr(), alone.data_ptr()), 1, 1, 1)])()
        Tasks([Task(HALVE, FLOAT, (x.data_ptr(), run.data_ptr()), 999, 1, 999)])()
        halved = Tasks([Task(HALVE, FLOAT, (x.data_ptr(), found.data_ptr()), 999, 1, 999)])
        posted = halved.post(fill(place, other), fill(place, other), found)
        assert posted is not None
        posted.wait()
        assert has_subnormal_numbers() is not flushes
        with pytest.raises(MemoryError):
            Tasks([Task(FAILS, FLOAT, (place.data_ptr(),), 9, 1, 9)])()
        assert has_subnormal_numbers() is not flushes
    finally:
        torch.set_flush_denormal(False)
    assert not any(y.any() for y in (alone, run, found))


def test_memory_lasts_until_a_program_has_ended_that_nobody_waits_for() -> None:
    for _ in range(9):
        work = Sum(numbers_to(100), 20_000)
        found = work.found
        posted(work)
        del work
        gc.collect()
        assert found.tolist() == [*range(1, 101)]


def test_nothing_is_posted_where_no_other_thread_is_there(team: Team) -> None:
    torch.set_num_threads(1)
    assert Sum(numbers_to(5)).post() is None
    torch.set_num_threads(THREADS)
    team.close()
    assert Sum(numbers_to(5)).post() is None


def test_a_second_caller_posts_nothing_while_the_first_one_runs() -> None:
    """And what it was refused it may run by itself."""
    slow, refused = Sum(numbers_to(64), SLOW // 4), list[bool]()
    running = threading.Thread(target=Tasks([slow.task]))
    running.start()
    while running.is_alive():
        own = Sum(numbers_to(5))
        pending = own.post()
        refused.append(pending is None)
        if pending is None:
            Tasks([own.task])()
            assert own.target.tolist() == [1] * 5
        else:
            pending.wait()
    running.join()
    assert any(refused)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_numbers_of_a_pass_are_filled_in_as_the_reference_does(count: int) -> None:
    before, tokens = torch.arange(100, 120), torch.tensor([7, -1, 5])
    links = torch.tensor([[2, 0, 4, 8, 12], [1, 3, 7, 11, 15], [0, 1, 5, 9, 13]])[:count]
    expected, found = before.clone(), torch.zeros(25, dtype=torch.int64)
    fill_in_tokens(expected, tokens, links)
    Tasks([fill(before, found, tokens, links)])()
    assert found.tolist() == expected.tolist() + [0] * 5


@pytest.mark.usefixtures("untraced")
def test_a_fork_finds_what_was_posted_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the team of the process
    torch.set_num_threads(2)
    work = Sum(numbers_to(5), SLOW)
    pending = work.post()
    child = os.fork()
    if not child:
        right = work.found.tolist() == [*range(1, 6)]
        if pending is not None:
            pending.wait()
        del pending
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if pending is not None:
        pending.wait()


ENDING = """
import torch
torch.set_num_threads(3)
from kernels.test_team import SLOW, Sum, numbers_to
works = [Sum(numbers_to(9), SLOW), Sum(numbers_to(9), SLOW)]
pending = [work.post() for work in works]
print(len(pending))
"""


def test_a_process_may_end_while_a_program_is_under_way() -> None:
    tests = os.path.dirname(os.path.dirname(__file__))
    ended = subprocess.run(
        [sys.executable, "-c", ENDING],
        env={**os.environ, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2\n", "")
