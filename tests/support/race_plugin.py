"""Watches every interpreted launch of a test, and fails the test where something was found that a GPU may do otherwise.

Programs run in random order, or as `--program-order` says. The header names the seed; `--program-seed` repeats it.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import pytest

from support.program_order import ORDERS, RANDOM

KERNELS = Path(__file__).parents[1] / "kernels"


WATCH = pytest.StashKey[Any]()


class RaceError(AssertionError):
    """A launch of the test does what a GPU may do otherwise."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernels", "interpreted Triton kernels")
    group.addoption("--program-order", choices=ORDERS, default=RANDOM, help="in which order a launch's programs run")
    group.addoption("--program-seed", type=int, help="repeats the random orders of an earlier run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "unwatched: fresh memory is not filled, which would be a part of captured passes"
    )
    if config.option.program_seed is None:
        config.option.program_seed = random.SystemRandom().randrange(10**6)  # workers get it with the options


def pytest_report_header(config: pytest.Config) -> str:
    return f"programs of a launch: {config.option.program_order}, --program-seed={config.option.program_seed}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test's fixtures, and the test."""
    with _watching(item) as watch:
        item.stash[WATCH] = watch
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    result = yield
    watch = item.stash[WATCH]
    if watch is not None and (found := watch.take()):
        lines = [f"{finding.kind} in {finding.kernel}: {finding.text}" for finding in found]
        raise RaceError("\n".join([*lines, f"(--program-seed={item.config.option.program_seed})"]))
    return result


@pytest.fixture
def watch(request: pytest.FixtureRequest) -> Any:
    """The watch of this test, a `support.watched_launch.Watch`; tests of kernels have one."""
    return request.node.stash[WATCH]


def _watching(item: pytest.Item) -> Any:
    """Tests of kernels are always watched, others where an interpreter is there."""
    is_needed = "triton.runtime.interpreter" in sys.modules or KERNELS in item.path.parents
    if not is_needed or item.get_closest_marker("unwatched") is not None:
        return nullcontext()
    from support.watched_launch import Watch, watched

    option = item.config.option
    seed = crc32(item.nodeid.encode()) + cast(int, option.program_seed)
    return watched(Watch(option.program_order, seed))
