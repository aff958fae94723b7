"""Settings that pytest needs before it collects."""

import gc
import os
import re
import shutil
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# What tests share is in tests/support, imported as `support.<name>`.
sys.path.insert(0, str(Path(__file__).parent))

pytest_plugins = ["support.race_plugin"]

# No test is timed: a machine that pauses for a moment fails none.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

KERNELS = Path(__file__).parent / "kernels"
BETWEEN = pytest.StashKey[bool]()  # of a test with a set of parameters that is neither its first nor its last


@contextmanager
def no_tracer() -> Iterator[None]:
    """No tracer in this thread and in those that start now."""
    tracer, of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.settrace(tracer)
        threading.settrace(of_threads)  # type: ignore[arg-type]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Names of tests are the same in every process: tests run in several, which must agree on them. Notes which sets of
    parameters are between the first and the last of their test."""
    with_address = [item.nodeid for item in items if re.search("0x[0-9a-f]{6}", item.nodeid)]
    if with_address:
        raise pytest.UsageError(f"an address is in the name of a test; give it an id: {with_address[0]}")
    sets: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("no_cover"):  # starts coverage anew, whose tracer of before would be put back
            raise pytest.UsageError(f"use the fixture `untraced` instead of the marker no_cover: {item.nodeid}")
        sets[item.nodeid.partition("[")[0]].append(item)
    for first_to_last in sets.values():
        for item in first_to_last[1:-1]:
            item.stash[BETWEEN] = True
        for item in first_to_last:
            if KERNELS in item.path.parents:
                item.stash[BETWEEN] = True


def pytest_collection_finish() -> None:
    """What was imported and collected is not looked through for garbage again: half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Coverage traces the first and the last set of parameters of each test: it makes Python up to twice as slow, and
    the sets between pass through the same lines. Nor does it trace tests that ask for `untraced`. The tracer is taken
    away and put back outside of all fixtures, and coverage is not called: it takes locks, in which a test with a timer
    or with a fork would leave it."""
    untraced = item.stash.get(BETWEEN, False) or "untraced" in getattr(item, "fixturenames", ())
    if not untraced or not item.config.pluginmanager.hasplugin("_cov"):
        return (yield)
    with no_tracer():
        return (yield)


# What the tests of the tensor half share: a tokenizer and a random checkpoint, made once per session. transformers
# takes seconds to import, and the tests of the books do without it, so the fixtures import it.

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: no test reaches the network
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated: without a GPU the kernels are interpreted


@pytest.fixture
def use_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets `HYBRID_KERNELS` for a test that calls operations: without this they stay what their first call chose."""
    from hybrid.kernels.ops import choose_again

    def use(setting: str) -> None:
        monkeypatch.setenv("HYBRID_KERNELS", setting)
        choose_again()

    yield use
    choose_again()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads for the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A byte-level BPE with a chat template, a `PreTrainedTokenizerFast`."""
    from support.checkpoints import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A random checkpoint with a tokenizer. Tests that change its files copy it."""
    from support.checkpoints import random_model, text_config, write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), random_model(text_config()), tokenizer)


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the random checkpoint, to be changed."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


# The tests of the engine run the model inside the package, with chunks of 16 so that short prompts cross many of them.


@pytest.fixture(scope="session")
def tiny() -> Any:
    """The engine on the model inside the package. Take caches of your own with `with_cache`."""
    from hybrid import CacheConfig, Engine, EngineConfig

    config = CacheConfig(page_size=16, chunk_size=16, memory="64MiB")
    # the audit is on: after each step the bookkeeping is checked
    limits = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, audit=True)
    return Engine.from_pretrained("tiny", cache=config, config=limits)


@pytest.fixture(scope="session", autouse=True)
def float32_by_default() -> Iterator[None]:
    """Engines of tests that ask for no type run in float32 on every CPU: tests mean the same on all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid.engine.build.prefers_bfloat16", lambda: False)
        yield


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for disks: what is a hit does not depend on what else the machine does. Tests of slow disks set
    their own times."""
    monkeypatch.setattr("hybrid.cache.restores.MIN_WAIT", 20.0)


@pytest.fixture
def untraced() -> None:
    """Keeps coverage from tracing a test and its fixtures, by `pytest_runtest_protocol`. For tests whose signal
    handlers raise at any moment, or that fork beside other threads: coverage takes a lock in the middle of the code
    that it traces, which a handler that raises there, or another thread at the moment of a fork, would leave locked for
    ever. And for tests that pass through the same lines thousands of times, or through those of other tests."""


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
