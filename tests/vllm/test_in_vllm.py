"""The mirror beside vLLM's own manager and pool, on a CPU and without a model. Needs vLLM: `make vllm`."""

import inspect
import random
import re
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from support.vllm_needed import require_vllm

require_vllm()

from prometheus_client import REGISTRY  # noqa: E402
from vllm.config import KVEventsConfig  # noqa: E402
from vllm.distributed.kv_events import BlockRemoved, BlockStored  # noqa: E402
from vllm.v1.core.block_pool import BlockPool  # noqa: E402
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import MambaManager  # noqa: E402

import hybrid.vllm  # noqa: E402
from hybrid.doctor.request import LoggedRequest, Turn  # noqa: E402
from hybrid.errors import UnsupportedModelError  # noqa: E402
from hybrid.vllm.queue import FreeBlocks  # noqa: E402
from hybrid.vllm.report import StatsReporter  # noqa: E402
from hybrid.vllm.scheduler import mirror_of  # noqa: E402
from support.vllm_served import BLOCK, Served, configuration  # noqa: E402

BLOCK_BYTES = BLOCK * 4 * 256 * 2 * 2 * 8

Given = list[tuple[list[int], list[int]]]


def conversations(seed: int, number: int) -> Given:
    """Prompts that continue earlier ones with their answers, or begin as others do."""
    draw = random.Random(seed)
    histories = [[draw.randrange(3, 30_000) for _ in range(draw.randrange(500, 3000))] for _ in range(6)]
    made = []
    for _ in range(number):
        history = draw.choice(histories)
        if draw.random() < 0.4:
            history = history[: draw.randrange(200, len(history))]
        prompt = history + [draw.randrange(3, 30_000) for _ in range(draw.randrange(20, 900))]
        answer = [draw.randrange(3, 30_000) for _ in range(draw.randrange(1, 60))]
        made.append((prompt, answer))
        if len(prompt) < 6000 and draw.random() < 0.5:
            histories[draw.randrange(6)] = prompt + answer
    return made


def sound(served: Served) -> None:
    """Nothing has failed, nothing leaks, the tree is whole."""
    assert served.mirror is not None
    assert served.mirror.failure is None
    assert served.num_leaked == 0
    assert not served.mirror.tree.check()
    assert not served.mirror.tree.locks.num_pages


def test_lru_hits_no_less_than_vllm_and_every_lookup_is_what_the_tree_says() -> None:
    given, hits, shown = conversations(1, 250), [], None
    lru_alone = {"policy": "lru", "anchors": False, "answers": False, "siblings": False, "ghost_branches": False}
    for options in (None, lru_alone, {}):
        served = Served(60 * BLOCK_BYTES, options)
        served.serve(given)
        hits.append(100 * served.hit_tokens / served.prompt_tokens)
        if served.mirror is not None:
            sound(served)
            assert served.mirror.counts.differing == served.mirror.counts.set_apart == 0
            assert served.mirror.counts.hit_tokens == served.hit_tokens
            shown = served.mirror.stats()
    plain, lru, lhd = hits
    assert shown is not None and shown.gained_points is not None
    assert abs(lhd - shown.gained_points - lru) < 3
    assert plain > 15
    assert plain <= lru <= plain + 2


@pytest.mark.parametrize(
    ("width", "num_blocks", "states_within"), [(8, 120, False), (64, 200, False), (16, 40, False), (8, 120, True)]
)
def test_many_at_once_under_a_small_pool(width: int, num_blocks: int, states_within: bool) -> None:
    served = Served(num_blocks * BLOCK_BYTES, {}, at_once=True, chunk=4096, states_within=states_within)
    served.serve(conversations(2, 120), width)
    sound(served)
    assert served.hit_tokens > 0
    assert served.mirror is not None
    counts = served.mirror.counts
    assert counts.differing == 0 < counts.lookups


def sessions(number: int, turns: int) -> list[LoggedRequest]:
    """Turns of long sessions, a few of each after one another."""
    draw, lengths, made = random.Random(11), [4000] * number, list[LoggedRequest]()
    while len(made) < turns:
        session = draw.randrange(number)
        for _ in range(draw.randrange(1, 5)):
            prompt = lengths[session] = lengths[session] + draw.randrange(300, 2500)
            hashes = array("Q", [session << 40 | unit for unit in range(1, prompt // 16 + 9)])
            made.append(LoggedRequest(hashes, prompt, prompt + 100, turn=Turn(session, session)))
            lengths[session] += 100
            if lengths[session] > 45_000:
                lengths[session] = 4000
    return made


@pytest.mark.parametrize(("width", "least"), [(1, 3.0), (3, -0.5)])
def test_long_sessions_hit_more_than_under_vllm_and_no_less_several_at_once(width: int, least: float) -> None:
    hits, given = [], sessions(6, 150)
    for options in (None, {}):
        served = Served(240 * BLOCK_BYTES, options)
        served.serve_sessions(given, width)
        hits.append(100 * served.hit_tokens / served.prompt_tokens)
    sound(served)
    assert served.mirror is not None
    assert served.mirror.counts.evicted["anchor"] > 0
    assert hits[1] > hits[0] + least


def test_aborted_requests_leave_nothing_behind() -> None:
    served, draw = Served(100 * BLOCK_BYTES, {}, at_once=True, chunk=2048), random.Random(4)
    running = []
    for prompt, answer in conversations(3, 60):
        running.append(served.add(prompt, answer))
        for _ in range(3):
            served.step()
        if draw.random() < 0.4:
            served.abort(running.pop(draw.randrange(len(running))))
        running = [request for request in running if not request.is_finished()]
    for request in running:
        served.abort(request)
    while served.step():
        pass
    sound(served)


def test_priorities_parts_of_prompts_and_events_are_vllms() -> None:
    def settings(config: SimpleNamespace) -> None:
        config.scheduler_config.policy = "priority"
        config.scheduler_config.max_num_partial_prefills = 4
        config.scheduler_config.long_prefill_token_threshold = 2 * BLOCK
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")

    served, draw = Served(60 * BLOCK_BYTES, {}, at_once=True, chunk=4096, settings=settings), random.Random(10)
    events: list[Any] = []
    served.scheduler.kv_event_publisher.publish = lambda batch: events.extend(batch.events)
    running = []
    for prompt, answer in conversations(9, 80):
        running.append(served.add(prompt, answer, priority=draw.randrange(3)))
        served.step()
    while served.step():
        pass
    sound(served)
    assert all(request.is_finished() for request in running)
    assert sum(request.num_preemptions for request in running)
    stored = sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))
    removed = sum(len(event.block_hashes) for event in events if isinstance(event, BlockRemoved))
    cached = sum(block.block_hash is not None for block in served.scheduler.kv_cache_manager.block_pool.blocks)
    assert stored - removed == cached > 0
    assert removed > 100


def test_what_a_step_takes_and_evicts_is_published_before_it_is_computed() -> None:
    def settings(config: SimpleNamespace) -> None:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")

    served = Served(60 * BLOCK_BYTES, {}, at_once=True, chunk=4096, settings=settings)
    scheduler, known, removed, wrong = served.scheduler, 0, 0, []

    def publish(batch: Any) -> None:
        nonlocal known, removed
        for event in batch.events:
            known += len(event.block_hashes) * (1 if isinstance(event, BlockStored) else -1)
            removed += isinstance(event, BlockRemoved)

    def look(schedule: Any = scheduler.schedule) -> Any:
        planned = schedule()
        cached = sum(block.block_hash is not None for block in scheduler.kv_cache_manager.block_pool.blocks)
        wrong.extend([cached - known] if cached != known else [])
        return planned

    scheduler.kv_event_publisher.publish = publish
    scheduler.schedule = look
    served.serve(conversations(11, 60), 4)
    sound(served)
    assert removed > 50
    assert not wrong


def test_a_request_that_waits_keeps_what_was_cached_of_it_when_it_came() -> None:
    hits = []
    for options in (None, {"hybrid_hold": 60.0}):
        draw = random.Random(12)
        first, second, long = ([draw.randrange(3, 30_000) for _ in range(n * BLOCK + 9)] for n in (4, 4, 16))
        served = Served(24 * BLOCK_BYTES, {"policy": "lru", "answers": False}, at_once=True, chunk=4096)
        served.serve([(first, [7]), (second, [7])])
        served.add(long, [7])
        stats = served.add(first, [7], options=options).prefill_stats
        while served.step():
            pass
        sound(served)
        hits.append(stats.num_cached_tokens)
    assert hits[0] < hits[1] == 4 * BLOCK


def test_each_rank_of_data_parallel_serving_has_a_mirror_of_its_own() -> None:
    given = conversations(11, 60)

    def rank_of(size: int, rank: int) -> Served:
        def settings(config: SimpleNamespace) -> None:
            config.parallel_config.data_parallel_size = size
            config.parallel_config.data_parallel_rank = config.parallel_config.data_parallel_index = rank

        return Served(60 * BLOCK_BYTES, {}, at_once=True, chunk=4096, settings=settings)

    alone = rank_of(1, 0)
    alone.serve(given[::2], 6)
    ranks = [rank_of(2, rank) for rank in range(2)]
    # One has requests only while the other has: a rank without any is asked for a pass all the same, a dummy batch.
    requests = [ranks[1].add(*one) for one in given[1::2]]
    while ranks[1].step():
        assert not ranks[0].step()
    assert all(request.is_finished() for request in requests)
    ranks[0].serve(given[::2], 6)
    assert not ranks[1].step()
    for served in (alone, *ranks):
        sound(served)
        assert served.mirror is not None
        assert served.mirror.counts.differing == 0 < served.mirror.counts.hit_tokens
    assert ranks[0].hit_tokens == alone.hit_tokens
    lookups = [served.mirror.counts.lookups for served in ranks if served.mirror is not None]
    assert lookups == [30, 30]


def test_an_error_leaves_vllm_with_its_own_queue(caplog: pytest.LogCaptureFixture) -> None:
    served = Served(60 * BLOCK_BYTES, {}, at_once=True)
    mirror, given = served.mirror, conversations(5, 60)
    assert mirror is not None
    served.serve(given[:30], 4)

    def broken(*args: Any) -> Any:
        raise ZeroDivisionError

    mirror.tree.evict_one = broken  # type: ignore[method-assign]
    served.serve(given[30:], 4)
    assert isinstance(mirror.failure, ZeroDivisionError)
    pool = served.scheduler.kv_cache_manager.block_pool
    assert type(pool.free_block_queue) is FreeKVCacheBlockQueue
    assert served.num_leaked == 0
    assert len(pool.free_block_queue.get_all_free_blocks()) == served.num_blocks - 1
    before = served.hit_tokens
    served.serve(given[30:], 4)
    assert served.hit_tokens > before


def test_statistics_are_shown_in_the_log_and_as_metrics() -> None:
    served, lines = Served(60 * BLOCK_BYTES, {}), list[str]()
    mirror = served.mirror
    assert mirror is not None
    report = StatsReporter(mirror.stats, lambda text, *given: lines.append(text % given), "served", 3, 0.0)
    for one in conversations(6, 80):
        served.serve([one])
        report.tick(is_idle=True)
    shown = mirror.stats()

    def value(name: str, **more: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"model_name": "served", "engine": "3", **more})

    assert value("hybrid_hit_tokens_total") == shown.hit_tokens > 0
    assert shown.lru_hit_tokens is not None
    assert value("hybrid_lru_lead_tokens") == shown.lru_hit_tokens - shown.hit_tokens
    assert value("hybrid_lru_is_on") == 0
    assert value("hybrid_states") == shown.states
    assert value("hybrid_failed") == value("hybrid_dismissed") == 0
    for kind, number in shown.evicted.items():
        assert value("hybrid_evicted_states_total", kind=kind) == number
    assert len(lines) == 80
    assert f"{shown.lookups} requests" in lines[-1]
    assert re.search(r"hybrid: [\d.]+ % of prompts hit, [+-][\d.]+ points over LRU", lines[-1])
    mirror.failure = ZeroDivisionError("planted")
    report.tick(is_idle=True)
    assert value("hybrid_failed") == 1
    assert "off since ZeroDivisionError('planted')" in mirror.stats().line()


def test_the_scheduler_is_vllms_and_refuses_what_it_cannot() -> None:
    assert issubclass(hybrid.vllm.Scheduler, AsyncScheduler)
    served = Served(60 * BLOCK_BYTES, None)
    config = configuration(60, 8192, 64, {})
    config.speculative_config = object()
    with pytest.raises(UnsupportedModelError, match="speculative decoding"):
        mirror_of(served.scheduler.kv_cache_manager, config, tuple)


PARAMETERS = {
    KVCacheManager.get_computed_blocks: ["self", "request"],
    KVCacheManager.allocate_slots: ["self", "request", "num_new_tokens"],
    KVCacheManager.free: ["self", "request"],
    KVCacheManager.pop_blocks_for_free: ["self", "request"],
    KVCacheManager.reset_prefix_cache: ["self"],
    KVCacheManager.prefix_cache_lookup_enabled: ["self", "request"],
    KVCacheCoordinator.cache_blocks: ["self", "request", "num_computed_tokens"],
    MambaManager.cache_blocks: ["self", "request", "num_tokens", "retention_interval", "replay_boundaries"],
    BlockPool._maybe_evict_cached_block: ["self", "block"],
}
"""What is wrapped or called of vLLM, and its first parameters."""


@pytest.mark.parametrize("method", PARAMETERS, ids=lambda method: method.__qualname__)
def test_what_is_wrapped_has_the_parameters_that_are_known(method: Any) -> None:
    known = PARAMETERS[method]
    assert [*inspect.signature(method).parameters][: len(known)] == known


def test_the_queue_has_every_method_of_vllms() -> None:
    theirs = {name for name in vars(FreeKVCacheBlockQueue) if not name.startswith("_")}
    assert theirs <= {name for name in dir(FreeBlocks) if not name.startswith("_")}


def test_vllms_own_envelope_of_hints_and_its_session_reach_the_tree() -> None:
    kv_hints = pytest.importorskip("vllm.v1.kv_hints", reason="this vLLM has no hints")

    def envelope(name: str, **payload: Any) -> Any:
        action = kv_hints.KvHintAction("a", name, "1.0", payload)
        return kv_hints.KvHintsEnvelope("0.1", "m", [action])

    served = Served(40 * BLOCK_BYTES, {})
    retain = envelope("kv.retain", scope=None, directives=[{"start": 0, "end": None, "priority": 80, "duration": 60.0}])
    served.add([5] * (2 * BLOCK + 9), [7], session_id="s", kv_hints=retain)
    while served.step():
        pass
    assert served.mirror is not None
    assert (len(served.mirror.pins), len(served.mirror.sessions)) == (1, 1)
    served.add([5] * (2 * BLOCK + 9), [7], session_id="s", kv_hints=envelope("hybrid.end_session"))
    while served.step():
        pass
    assert (len(served.mirror.pins), len(served.mirror.sessions)) == (0, 0)
    assert all(node.usage.last_used == 0 for _, node in served.mirror.tree.nodes())
    sound(served)
