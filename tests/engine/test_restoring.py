"""Contents that a request needs from disk are read while it waits and while others run, and given to it whole or not at
all."""

import os
import random
import signal
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hybrid import ClosedError, Engine, EngineConfig, OwnershipError, RequestOutput
from hybrid.cache.config import CacheConfig
from hybrid.key import Key
from hybrid.tiers.store import DirectoryStore
from support.engines import GRID, answer, assert_nothing_held, cold, computing_is_slow, greedy, ids, run_to_end

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

PARAMS = greedy(8, logprobs=3)
PREFIX = 6 * GRID
COPIES = 7
"""Pages of a prefix, and its checkpoint."""


@dataclass
class SlowDisk:
    """Reads of all directories.

    Attributes:
        gate: a read waits until it is set.
        seconds: that a read takes after that.
        failing: chance of a read to fail.
        num_reads: that began.
        num_waited: reads whose gate was never opened.
    """

    gate: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0
    failing: float = 0.0
    num_reads: int = 0
    num_waited: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def opened(self) -> "SlowDisk":
        self.gate.set()
        return self


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    """A disk that does not answer until its gate is opened."""
    slow, get_into = SlowDisk(), DirectoryStore.get_into

    def slowly(store: DirectoryStore, name: str, start: int, buffer: memoryview) -> None:
        slow.num_reads += 1
        slow.num_waited += not slow.gate.wait(20)
        time.sleep(slow.seconds)
        if slow.rng.random() < slow.failing:
            raise OSError(5, "Input/output error")
        get_into(store, name, start, buffer)

    monkeypatch.setattr(DirectoryStore, "get_into", slowly)
    return slow


def engine_at(tiny: Engine, path: Path, *, config: EngineConfig | None = None, **settings: Any) -> Engine:
    page_bytes, state_bytes = tiny.cache.unit_bytes
    memory = settings.pop("memory", 80 * page_bytes + 24 * state_bytes)
    cache = CacheConfig(
        page_size=GRID, chunk_size=GRID, memory=memory, disk="64MiB", directory=path, deterministic=True, **settings
    )
    return tiny.with_cache(cache, config=config)


def after_restart(tiny: Engine, path: Path, *prefixes: list[int], **settings: Any) -> Engine:
    """An engine that finds the prefixes on disk, and for which restoring is worth it."""
    with engine_at(tiny, path) as engine:
        for prefix in prefixes:
            answer(engine, [*prefix, 5], PARAMS)
    engine = engine_at(tiny, path, **settings)
    computing_is_slow(engine)
    return engine


def until(engine: Engine, is_so: Callable[[], bool]) -> dict[str, RequestOutput]:
    """Step until something is so; the last outputs."""
    outputs, end = dict[str, RequestOutput](), time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end, "it never was"
        outputs.update({output.request_id: output for output in engine.step()})
    return outputs


def assert_same(output: RequestOutput, tiny: Engine, prompt: list[int]) -> None:
    expected = cold(tiny, prompt, PARAMS)
    assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)


def test_others_run_while_a_request_waits_for_the_disk(tiny: Engine, tmp_path: Path, disk: SlowDisk) -> None:
    prefix = ids(PREFIX, seed=1)
    with after_restart(tiny, tmp_path, prefix) as engine:
        for number in range(3):
            engine.add_request(ids(20, seed=10 + number), greedy(40), request_id=f"other {number}")
        until(engine, lambda: engine.stats().running == 3)
        late = engine.add_request([*prefix, 7], PARAMS)
        done = until(engine, lambda: not engine.has_work or engine.stats().running == 1)
        assert [done[f"other {number}"].finish_reason for number in range(3)] == ["length"] * 3
        stats = engine.stats()
        assert (stats.running, stats.restoring, stats.waiting) == (1, 1, 0)
        assert engine.step() == [], "there is nothing to compute, and it does not wait for ever"
        engine.cache.audit()
        disk.gate.set()
        output = run_to_end(engine)[late]
        assert output.usage.cached_tokens == PREFIX
        assert "96 tokens restored from disk" in str(output.explain)
        assert_same(output, tiny, [*prefix, 7])
        assert_nothing_held(engine)


def test_requests_that_come_later_start_before_one_that_waits_for_the_disk(
    tiny: Engine, tmp_path: Path, disk: SlowDisk
) -> None:
    prefix = ids(PREFIX, seed=1)
    with after_restart(tiny, tmp_path, prefix) as engine:
        late = engine.add_request([*prefix, 7], PARAMS)
        later = engine.add_request(ids(90, seed=2), PARAMS)
        done = until(engine, lambda: engine.stats().finished.get("length") == 1)
        assert done[later].finish_reason == "length"
        disk.gate.set()
        assert run_to_end(engine)[late].usage.cached_tokens == PREFIX


def test_what_a_queued_request_needs_is_read_before_it_starts(tiny: Engine, tmp_path: Path, disk: SlowDisk) -> None:
    prefix, config = ids(PREFIX, seed=1), EngineConfig(max_num_seqs=1)
    with after_restart(tiny, tmp_path, prefix, config=config) as engine:
        engine.add_request(ids(20), greedy(60))
        until(engine, lambda: engine.stats().running == 1)
        disk.opened()
        queued = engine.add_request([*prefix, 7], PARAMS)
        until(engine, lambda: disk.num_reads == COPIES)
        assert engine.stats().waiting == 1, "it has not started yet"
        output = run_to_end(engine)[queued]
        assert output.usage.cached_tokens == PREFIX
        stats = engine.cache.stats()
        assert (stats.read_ahead_bytes > 0, stats.read_in_vain_bytes) == (True, 0)
        assert disk.num_reads == COPIES, "nothing is read twice"
        assert_same(output, tiny, [*prefix, 7])
        engine.cache.audit()


def test_what_several_requests_need_is_read_once(tiny: Engine, tmp_path: Path, disk: SlowDisk) -> None:
    prefix = ids(PREFIX, seed=1)
    prompts = [[*prefix, last] for last in (7, 8, 9)]
    with after_restart(tiny, tmp_path, prefix) as engine:
        disk.opened()
        outputs = engine.generate(prompts, PARAMS, progress=False)
        assert [output.usage.cached_tokens for output in outputs] == [PREFIX] * 3
        assert disk.num_reads == COPIES
        for output, prompt in zip(outputs, prompts, strict=True):
            assert_same(output, tiny, prompt)
        assert_nothing_held(engine)


@pytest.mark.parametrize("is_queued", [True, False])
def test_an_aborted_request_leaves_nothing_behind(
    tiny: Engine, tmp_path: Path, disk: SlowDisk, is_queued: bool
) -> None:
    prefix, config = ids(PREFIX, seed=1), EngineConfig(max_num_seqs=1) if is_queued else None
    with after_restart(tiny, tmp_path, prefix, config=config) as engine:
        if is_queued:
            engine.add_request(ids(20), greedy(4))
            until(engine, lambda: engine.stats().running == 1)
        engine.add_request([*prefix, 7], PARAMS, request_id="aborted")
        until(engine, lambda: disk.num_reads == 1 and (is_queued or engine.stats().restoring == 1))
        engine.abort("aborted")
        assert engine.stats().restoring == 0
        engine.cache.audit()
        disk.gate.set()
        run_to_end(engine)
        assert_nothing_held(engine)
        assert disk.num_reads == 1, "the rest is not read"
        again = answer(engine, [*prefix, 7], PARAMS)
        assert again.usage.cached_tokens == PREFIX
        assert_same(again, tiny, [*prefix, 7])


@pytest.mark.parametrize("is_queued", [True, False])
def test_an_engine_is_closed_while_the_disk_reads(
    tiny: Engine, tmp_path: Path, disk: SlowDisk, is_queued: bool
) -> None:
    prefix = ids(PREFIX, seed=1)
    engine = after_restart(tiny, tmp_path, prefix)
    engine.add_request([*prefix, 7], PARAMS)
    if not is_queued:
        until(engine, lambda: engine.stats().restoring == 1)
    engine.close()
    assert disk.num_waited == 0
    assert engine.stats().running == engine.stats().waiting == 0
    with pytest.raises(ClosedError):
        engine.add_request([*prefix, 7], PARAMS)
    disk.gate.set()
    with engine_at(tiny, tmp_path) as engine:
        computing_is_slow(engine)
        assert answer(engine, [*prefix, 7], PARAMS).usage.cached_tokens == PREFIX


def test_a_disk_that_fails_is_a_miss_with_a_reason(tiny: Engine, tmp_path: Path, disk: SlowDisk) -> None:
    prefix = ids(PREFIX, seed=1)
    with after_restart(tiny, tmp_path, prefix) as engine:
        disk.opened().failing = 1.0
        output = answer(engine, [*prefix, 7], PARAMS)
        assert output.usage.cached_tokens == 0
        assert "the disk failed: [Errno 5] Input/output error" in str(output.explain)
        assert engine.cache.stats().tier_failures > 0
        assert_same(output, tiny, [*prefix, 7])
        assert_nothing_held(engine)


def test_a_disk_that_does_not_answer_delays_a_request_as_long_as_computing_takes_and_no_other(
    tiny: Engine, tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = [ids(PREFIX, seed=seed) for seed in range(3)]
    with after_restart(tiny, tmp_path, *prefixes) as engine:
        monkeypatch.setattr("hybrid.cache.restores.MIN_WAIT", 0.1)
        for _ in range(40):
            engine.cache.note_pass(1000, 1.0)
        outputs = engine.generate([[*prefix, 7] for prefix in prefixes], PARAMS, progress=False)
        assert [output.usage.cached_tokens for output in outputs] == [0, 0, 0]
        texts = " ".join(str(output.explain) for output in outputs)
        assert "the disk took longer than computing" in texts or "the disk has not answered yet" in texts
        for output, prefix in zip(outputs, prefixes, strict=True):
            assert_same(output, tiny, [*prefix, 7])
        assert_nothing_held(engine)
        disk.gate.set()


def test_a_request_that_must_give_its_memory_back_while_it_is_read_for_comes_again(
    tiny: Engine, tmp_path: Path, disk: SlowDisk
) -> None:
    """The others need its pages; its copies are read again, or it computes."""
    prefix = ids(PREFIX, seed=1)
    page_bytes, state_bytes = tiny.cache.unit_bytes
    memory = 20 * page_bytes + 16 * state_bytes
    share = 16 * state_bytes / memory
    with after_restart(tiny, tmp_path, prefix, memory=memory, state_share=share) as engine:
        for number in range(3):
            engine.add_request(ids(3 * GRID - 2, seed=20 + number), greedy(3 * GRID))
        until(engine, lambda: engine.stats().running == 3)
        late = engine.add_request([*prefix, 7], PARAMS)
        until(engine, lambda: engine.stats().restoring == 1)
        outputs = until(engine, lambda: engine.stats().finished.get("length", 0) == 3)
        assert engine.stats().retractions > 0
        disk.gate.set()
        outputs |= run_to_end(engine)
        assert all(output.finish_reason == "length" for output in outputs.values())
        assert_same(outputs[late], tiny, [*prefix, 7])
        assert_nothing_held(engine)


def test_what_was_cleared_meanwhile_does_not_stop_a_restore(tiny: Engine, tmp_path: Path, disk: SlowDisk) -> None:
    prefix = ids(PREFIX, seed=1)
    with after_restart(tiny, tmp_path, prefix) as engine:
        late = engine.add_request([*prefix, 7], PARAMS)
        until(engine, lambda: engine.stats().restoring == 1)
        engine.cache.clear()
        disk.gate.set()
        assert_same(run_to_end(engine)[late], tiny, [*prefix, 7])
        assert_nothing_held(engine)


def test_a_lease_whose_copies_are_read_can_only_be_closed(tiny: Engine, tmp_path: Path, disk: SlowDisk) -> None:
    prefix = ids(PREFIX, seed=1)
    with after_restart(tiny, tmp_path, prefix) as engine:
        engine.add_request([*prefix, 7], PARAMS)
        until(engine, lambda: engine.stats().restoring == 1)
        (lease,) = engine.cache.leases
        assert not engine.cache.proceed(lease)
        for call in (
            lambda: engine.cache.advance(lease, PREFIX),
            lambda: engine.cache.reserve(lease, PREFIX),
            lambda: engine.cache.capture(lease, PREFIX),
        ):
            with pytest.raises(OwnershipError, match="waits for copies from disk"):
                call()
        engine.cache.audit()
        disk.gate.set()
        run_to_end(engine)


@pytest.mark.usefixtures("untraced")
def test_a_process_that_is_forked_while_the_disk_reads(tiny: Engine, tmp_path: Path, disk: SlowDisk) -> None:
    """Its copy of the engine has no reader: nothing waits for it, and the answer is computed."""
    prefix = ids(PREFIX, seed=1)
    with after_restart(tiny, tmp_path, prefix) as engine:
        late = engine.add_request([*prefix, 7], PARAMS)
        until(engine, lambda: engine.stats().restoring == 1)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                with pytest.raises(OwnershipError, match="was forked"):
                    engine.step()
                engine.stats()
                engine.cache.stats()
                engine.cache.adopt()
                engine.abort(late)
                lease = engine.cache.open(Key.of(array("i", [*prefix, 7]), ""), PREFIX, PREFIX + 1)
                assert lease is not None and lease.num_hit_tokens == 0
                assert "forked" in str(lease.explanation)
                engine.cache.audit()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        disk.gate.set()
        assert run_to_end(engine)[late].usage.cached_tokens == PREFIX


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_cold_runs_whatever_the_disk_does(
    tiny: Engine, tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr("hybrid.cache.restores.MIN_WAIT", 0.02)
    prefixes = [ids(rng.randrange(2, 7) * GRID, seed=50 + number) for number in range(5)]
    disk.opened()
    with after_restart(tiny, tmp_path, *prefixes, host="1MiB" if seed else None) as engine:
        disk.failing = 0.03
        expected: dict[str, list[int]] = {}
        outputs: dict[str, RequestOutput] = {}
        for number in range(40):
            disk.seconds = rng.choice((0.0, 0.001, 0.01))
            computing_is_slow(engine)
            prompt = [*rng.choice(prefixes), *ids(rng.randrange(1, 20), seed=number)]
            name = engine.add_request(prompt, PARAMS)
            expected[name] = prompt
            if rng.random() < 0.1:
                engine.cache.allocator.evict(engine.cache.tree.evict_all)
            if rng.random() < 0.2:
                engine.abort(name)
            for _ in range(rng.randrange(4)):
                if engine.has_work:
                    outputs.update({output.request_id: output for output in engine.step()})
            engine.cache.audit()
        outputs |= run_to_end(engine)
        assert engine.cache.stats().restored_checkpoints > 0
        for name, prompt in expected.items():
            if outputs[name].finish_reason == "length":
                assert_same(outputs[name], tiny, prompt)
        assert_nothing_held(engine)
