"""The plugin for vLLM on a small imitation of the manager and the pool that it wraps: no vLLM is needed."""

import logging
import random
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from hybrid.errors import ArgumentError, UnsupportedModelError, VersionError
from hybrid.mirror import pins, visits
from hybrid.tree.guard import Guard
from hybrid.tree.node import Kind, Released
from hybrid.vllm import installed, mirror, plugin, stats
from hybrid.vllm.mirror import Mirror
from hybrid.vllm.options import VllmOptions, refuse_unsupported
from hybrid.vllm.queue import FreeBlocks
from support.vllm_imitated import Block, Manager, PlainQueue, Request, Service

ROOT = Path(__file__).parent.parent.parent


def mirrored(
    num_blocks: int,
    num_pages: int = 1,
    num_states: int = 3,
    waiting: Callable[[], Iterable[Request]] = tuple,
    **options: Any,
) -> tuple[Manager, Mirror]:
    """A manager and the mirror that was put beside it."""
    manager = Manager(num_blocks, num_pages=num_pages, num_states=num_states)
    return manager, Mirror(manager, manager.pages, manager.states, PlainQueue, VllmOptions(**options), waiting)


def check(manager: Manager, mirror: Mirror) -> None:
    """Compare the tree with the pool: it owns cached blocks, each once, and all that are free and cached are known."""
    assert mirror.failure is None, mirror.failure
    assert not mirror.tree.check()
    owned = [page for _, node in mirror.tree.nodes() for part in node.pages.parts for page in part]
    owned += [node.slot for _, node in mirror.tree.nodes() if node.slot is not None]
    ids = [block.block_id for blocks in owned for block in blocks]
    assert len(set(ids)) == len(ids)
    assert all(block.block_hash is not None for blocks in owned for block in blocks)
    free = manager.block_pool.free_block_queue.get_all_free_blocks()
    assert sorted(block.block_id for block in free) == [
        block.block_id for block in manager.block_pool.blocks if not block.ref_cnt and not block.is_null
    ]
    assert len(free) == manager.num_free


def prompts(seed: int, number: int) -> list[list[int]]:
    """Prompts of which many share a beginning."""
    draw = random.Random(seed)
    shared = [[draw.randrange(90) for _ in range(draw.randrange(8, 40))] for _ in range(5)]
    return [
        draw.choice(shared)[: draw.randrange(4, 40)] + [draw.randrange(90) for _ in range(draw.randrange(1, 24))]
        for _ in range(number)
    ]


# What the mirror does


@pytest.mark.parametrize("policy", ["lru", "lhd"])
@pytest.mark.parametrize(("num_pages", "num_states"), [(1, 3), (2, 1)])
def test_every_lookup_of_vllm_is_what_the_tree_says_and_nothing_leaks(
    policy: str, num_pages: int, num_states: int
) -> None:
    manager, beside = mirrored(80, num_pages, num_states, policy=policy)
    service, draw, running = Service(manager), random.Random(3), list[Request]()
    waiting: list[Request] = []
    for prompt in prompts(1, 400):
        request = service.request(prompt, salt="a" * (draw.random() < 0.2))
        waiting.append(request)
        if draw.random() < 0.8 and service.start(waiting[0]) is not None:
            running.append(waiting.pop(0))
        for one in [*running]:
            if draw.random() < 0.3 and not service.answer(one, [draw.randrange(90)]):
                running.remove(one)
                manager.free(one)  # preempted: it waits again
                waiting.append(one)
            elif draw.random() < 0.2:
                running.remove(one)
                service.end(one)
        if len(waiting) > 3:
            service.end(waiting.pop())  # aborted
        if draw.random() < 0.2:
            check(manager, beside)
    for one in [*running, *waiting]:
        service.end(one)
    check(manager, beside)
    assert manager.num_free == 79
    assert not beside.tree.locks.num_pages
    assert beside.counts.lookups > 200
    assert beside.counts.differing == 0
    assert beside.counts.set_apart < 40
    assert beside.counts.hit_tokens > 0
    assert beside.counts.evicted_pages > 100


def test_a_state_that_is_not_kept_is_not_found_although_vllm_gives_it_its_hash_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, beside = mirrored(16)
    service = Service(manager)
    service.serve([*range(100, 117)])
    monkeypatch.setattr(FreeBlocks, "has_spare", False)
    monkeypatch.setattr(beside.visits, "admit", lambda key, end, origin, **given: (origin, False))
    assert service.serve([*range(13)], [20, 21]) == 0
    assert beside.counts.refused == {"prompt_end": 1}
    assert service.serve([*range(13)]) == 0
    assert beside.counts.differing == 0
    check(manager, beside)


def test_a_state_is_not_evicted_while_its_request_holds_it() -> None:
    manager, beside = mirrored(40)
    service = Service(manager)
    request, other = service.request([*range(13)]), service.request([*range(14)])
    assert (service.start(request), service.start(other)) == (0, 12)
    held = [group.req_to_blocks["1"][2] for group in manager.states]
    service.answer(other, [20])
    while beside.evict(1):
        pass
    assert beside.tree.num_checkpoints == 1
    assert all(block.block_hash is not None for block in held)
    service.answer(request, [20])  # gives the state back that its last step began with
    assert beside.evict(1)
    assert beside.tree.num_checkpoints == 0
    assert all(block.block_hash is None for block in held)
    for one in (request, other):
        service.end(one)
    check(manager, beside)


def test_lru_hits_no_less_than_the_plain_queue() -> None:
    hits = {}
    for name in ("plain", "lru"):
        manager = Manager(60)
        if name == "lru":
            options = VllmOptions(policy="lru", ghost_branches=False, anchors=False)
            Mirror(manager, manager.pages, manager.states, PlainQueue, options)
        service = Service(manager)
        hits[name] = sum(service.serve(prompt) or 0 for prompt in prompts(2, 500))
    assert hits["plain"] > 1000
    assert hits["lru"] >= 0.98 * hits["plain"]


def test_the_learned_policy_hits_more_than_lru_where_few_prompts_come_again() -> None:
    draw = random.Random(5)
    hot = [[draw.randrange(90) for _ in range(40)] for _ in range(4)]
    mixed = [
        draw.choice(hot) + [draw.randrange(90) for _ in range(5)]
        if number % 3 == 0
        else [draw.randrange(90) for _ in range(draw.randrange(16, 60))]
        for number in range(450)
    ]
    hits = []
    for policy in ("lru", "lhd"):
        manager, beside = mirrored(64, policy=policy)
        service = Service(manager)
        hits.append(sum(service.serve(prompt) or 0 for prompt in mixed))
        check(manager, beside)
    assert hits[1] > 1.2 * hits[0]


@pytest.mark.parametrize(("answers", "hit"), [(True, 20), (False, 8)])
def test_the_state_at_the_last_block_of_an_answer_is_kept(answers: bool, hit: int) -> None:
    manager, beside = mirrored(64, answers=answers)
    service, prompt = Service(manager), [*range(10)]
    assert service.serve(prompt, [*range(10, 21)]) == 0
    assert service.serve([*range(23)]) == hit
    kinds = {node.end: node.usage.kind for _, node in beside.tree.nodes() if node.slot is not None}
    assert kinds.get(5 * mirror.WORDS) is (Kind.TURN_END if answers else Kind.BRANCH)
    assert kinds[2 * mirror.WORDS] is Kind.PROMPT_END


def test_salts_share_nothing() -> None:
    manager, beside = mirrored(64)
    service = Service(manager)
    service.serve([*range(12)], salt="a")
    assert service.serve([*range(12)], salt="b") == 0
    assert service.serve([*range(12)], salt="a") == 8
    check(manager, beside)


def test_a_branch_that_was_evicted_gets_a_state_again_if_asked_for() -> None:
    made = []
    for ghosts in (False, True):
        manager, beside = mirrored(40, ghost_branches=ghosts)
        service, shared = Service(manager), [*range(20)]
        service.serve([*shared, 70, 71, 72, 73, 74])
        for number in range(10):
            service.serve([200 + 40 * number + at for at in range(40)])
        service.serve([*shared, 80, 81, 82, 83, 84])
        made.append([node.end // mirror.WORDS for _, node in beside.tree.nodes() if node.usage.kind is Kind.BRANCH])
    assert made == [[], [5]]


def let_go(beside: Mirror, released: Released) -> None:
    """Free what was evicted behind the mirror's back."""
    beside.let_go(chain.from_iterable(chain(chain.from_iterable(released.pages.parts), released.slots)))


def test_a_state_is_made_where_pages_continue_before_one_where_they_did() -> None:
    manager, beside = mirrored(64)
    service, shared = Service(manager), [*range(20)]
    service.serve([*shared, 70, 71, 72, 73, 74])
    let_go(beside, beside.tree.evict_checkpoints(9))
    let_go(beside, beside.tree.evict_pages(4))
    service.serve([*shared, 80, 81, 82, 83, 84])
    kinds = {node.end // mirror.WORDS: node.usage.kind for _, node in beside.tree.nodes()}
    assert kinds == {2: Kind.BRANCH, 6: Kind.PROMPT_END}
    check(manager, beside)


@pytest.mark.parametrize(("anchors", "hit"), [(True, 120), (False, 0)])
def test_a_long_prompt_is_trimmed_to_an_anchor_which_costs_no_pass(anchors: bool, hit: int) -> None:
    manager, beside = mirrored(120, anchors=anchors)
    service, prompt = Service(manager), [*range(240)]
    request = service.request(prompt)
    allocate, ends = manager.allocate_slots, list[int]()
    manager.allocate_slots = lambda request, end, computed: ends.append(end) or allocate(request, end, computed)
    service.start(request)
    service.end(request)
    assert ends == [*range(24, 217, 24), 236, 240]
    while beside.tree.num_checkpoints > anchors:
        assert beside.evict(1)
    assert service.serve(prompt) == hit
    check(manager, beside)


def test_blocks_that_are_computed_again_take_the_place_of_those_that_the_tree_had() -> None:
    manager, beside = mirrored(64)
    service, prompt = Service(manager), [*range(40)]
    service.serve(prompt)
    let_go(beside, beside.tree.evict_checkpoints(9))
    first, second = service.request(prompt), service.request(prompt)
    assert service.start(first) == 0
    owned = [page for _, node in beside.tree.nodes() for part in node.pages.parts for page in part]
    assert [page[0] for page in owned] == manager.pages[0].req_to_blocks["2"]
    assert all(block.ref_cnt for (block,) in owned)
    let_go(beside, beside.tree.evict_checkpoints(9))
    assert service.start(second) == 36  # the state that the first one holds is locked
    for one in (first, second):
        service.end(one)
    check(manager, beside)


def test_a_state_is_made_where_those_that_wait_part() -> None:
    hits, waiting, shared = [], list[Request](), [*range(60, 77)]
    for siblings in (False, True):
        manager, beside = mirrored(200, waiting=lambda: waiting, siblings=siblings)
        service = Service(manager)
        for number in range(5):
            tail = [100 * number + at for at in range(100, 111)]
            waiting.append(service.request(shared[: 9 if number == 4 else 17] + tail))
        found = []
        while waiting:
            found.append(service.start(waiting[0]))
            service.end(waiting.pop(0))
        hits.append(found)
        check(manager, beside)
    assert hits == [[0, 0, 16, 16, 0], [0, 16, 16, 16, 0]]


def test_reset_forgets_the_tree() -> None:
    manager, beside = mirrored(64)
    service = Service(manager)
    service.serve([*range(12)])
    assert manager.reset_prefix_cache()
    check(manager, beside)
    assert beside.tree.num_pages == 0
    assert service.serve([*range(12)]) == 0
    assert service.serve([*range(12)]) == 8


def test_a_reset_that_vllm_refuses_changes_nothing() -> None:
    manager, beside = mirrored(64)
    service = Service(manager)
    request = service.request([*range(12)])
    service.start(request)
    assert not manager.reset_prefix_cache()
    assert beside.tree.num_pages == 3
    service.end(request)
    check(manager, beside)


# Pins and priorities


def flooded(**options: Any) -> tuple[Service, Mirror, list[int | None]]:
    """Serve a prompt, then many others, then the prompt again, three times over. Returns what was hit."""
    manager, beside = mirrored(48)
    service, hits = Service(manager), []
    for flood in range(3):
        hits.append(service.serve([*range(13)], **options))
        for number in range(12):
            service.serve([100 + 400 * flood + 20 * number + at for at in range(20)])
    check(manager, beside)
    return service, beside, hits


def test_a_pin_outlasts_what_would_evict_it_and_ends_by_its_key() -> None:
    assert flooded()[2][1] == 0
    service, beside, hits = flooded(hybrid_pin=600, hybrid_key="chat")
    assert hits[1:] == [12, 12]
    assert beside.stats().pins == 1
    service.serve([*range(500, 510)], hybrid_pin=0, hybrid_key="chat")
    assert beside.stats().pins == 0


def test_a_pin_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, beside = mirrored(48)
    service, now = Service(manager), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    service.serve([*range(13)], hybrid_pin=30)
    service.serve([*range(40, 53)], hybrid_pin=90)
    assert len(beside.pins) == 2
    now[0] = 31.0
    service.serve([*range(20, 30)])
    assert len(beside.pins) == 1
    assert beside.tree.locks.num_pinned_checkpoints == 1


def test_pins_give_way_before_a_request_has_no_room() -> None:
    manager, beside = mirrored(24)
    service = Service(manager)
    for number in range(4):
        service.serve([50 * number + at for at in range(9)], hybrid_pin=600)
    assert service.serve([1000 + at for at in range(60)]) == 0
    check(manager, beside)
    assert beside.stats().pins < 4
    assert beside.stats().ended_pins > 0


def hinted(request: Request, session: str, *actions: tuple[str, dict[str, Any]]) -> Request:
    """A request with vLLM's envelope of hints, and a session."""
    made = [SimpleNamespace(action_type=name, action_version="1.0", payload=payload) for name, payload in actions]
    request.session_id, request.kv_hints = session, SimpleNamespace(protocol_version="0.1", actions=made)
    return request


def test_a_session_that_has_ended_in_vllm_is_evicted_first() -> None:
    for ends, kept in (((), 0), ((("hybrid.end_session", {}),), 12)):
        manager, beside = mirrored(48, policy="lru")
        service = Service(manager)
        service.serve([*range(13)])  # used least recently
        for number in range(6):
            request = hinted(service.request([100 + 20 * number + at for at in range(13)]), f"s{number}", *ends)
            service.start(request)
            service.end(request)
        assert service.serve([900 + at for at in range(20)]) == 0
        check(manager, beside)
        assert service.serve([*range(13)]) == kept


def test_what_vllms_hints_retain_is_pinned_under_the_name_of_its_session(caplog: pytest.LogCaptureFixture) -> None:
    manager, beside = mirrored(48)
    service = Service(manager)
    retain = "kv.retain", {"scope": None, "directives": [{"start": 0, "end": None, "priority": 80, "duration": 600.0}]}
    for prompt in ([*range(9)], [*range(13)]):
        request = hinted(service.request(prompt), "s", retain, ("kv.fetch", {}))
        service.start(request)
        service.end(request)
    assert beside.stats().pins == 1
    for number in range(12):
        service.serve([100 + 20 * number + at for at in range(20)])
    assert service.serve([*range(13)]) == 12
    assert "kv.fetch" in caplog.text
    service.serve([*range(13)], hybrid_pin=0, hybrid_key="/s")
    assert beside.stats().pins == 0


def test_what_is_cached_of_a_request_is_kept_while_it_waits_where_it_asks_for_that() -> None:
    for options, kept in (({}, 0), ({"hybrid_hold": 60}, 12)):
        manager, beside = mirrored(48)
        service = Service(manager)
        service.serve([*range(13)])
        waits = service.request([*range(13)], **options)
        beside.came(waits)
        for number in range(12):
            service.serve([100 + 20 * number + at for at in range(20)])
        assert service.start(waits) == kept
        assert not len(beside.holds)
        assert not beside.tree.locks.num_pinned_checkpoints
        service.end(waits)
        check(manager, beside)


def test_a_request_that_ends_while_it_waits_and_one_that_waits_too_long_keep_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    manager, beside = mirrored(48)
    service = Service(manager)
    service.serve([*range(13)])
    first, second = (service.request([*range(13)], hybrid_hold=30) for _ in range(2))
    beside.came(first)
    beside.came(second)
    assert len(beside.holds) == 2
    service.end(first)
    assert len(beside.holds) == 1
    now[0] = 31.0
    beside.came(service.request([*range(40, 53)]))
    assert not len(beside.holds)


def test_half_of_the_blocks_is_kept_for_those_that_wait_and_gives_way_before_a_request_has_no_room() -> None:
    manager, beside = mirrored(40)
    service = Service(manager)
    for number in range(6):
        service.serve([50 * number + at for at in range(13)])
        beside.came(service.request([50 * number + at for at in range(13)], hybrid_hold=60))
    locks = beside.tree.locks
    assert 0 < locks.num_pinned_pages + 3 * locks.num_pinned_checkpoints <= 0.5 * 40 + 3
    assert service.serve([1000 + at for at in range(110)]) == 0
    assert beside.stats().ended_pins > 0
    check(manager, beside)


def test_states_of_a_high_priority_stay_longer() -> None:
    kept = []
    for priority in (0, 8):
        manager, beside = mirrored(64)
        service = Service(manager)
        for round in range(6):
            service.serve([*range(13)], hybrid_priority=priority)
            for number in range(14):
                service.serve([100 + 400 * round + 20 * number + at for at in range(20)])
        kept.append(beside.stats().hit_tokens)
    assert kept[1] > kept[0]


def test_wrong_options_of_a_request_are_warned_of_and_it_is_served(caplog: pytest.LogCaptureFixture) -> None:
    manager, beside = mirrored(48)
    service = Service(manager)
    for options, said in (
        ({"hybrid_pin": -1}, "hybrid_pin must be seconds from 0 to 604800, got -1"),
        ({"hybrid_pin": True}, "hybrid_pin must be seconds"),
        ({"hybrid_hold": "long"}, "hybrid_hold must be seconds from 0 to 604800"),
        ({"hybrid_key": 3, "hybrid_pin": 5}, "hybrid_key must be a text, got 3"),
        ({"hybrid_priority": 99}, "hybrid_priority must be 0 to 16, got 99"),
        ({"hybrid_pim": 5}, "hybrid_pim.*not known; known are hybrid_pin, hybrid_key, hybrid_priority, hybrid_hold,"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="vllm.hybrid"):
            assert service.serve([*range(13)], **options) is not None
        assert re.search(said, caplog.text)
    assert beside.stats().bad_options == 6
    assert beside.stats().pins == 0
    service.serve([*range(13)], kv_transfer_params={})
    assert beside.stats().bad_options == 6


# What is shown


def test_the_gain_over_lru_is_shown_as_lru_finds() -> None:
    hits = []
    for policy in ("lru", "lhd"):
        manager, beside = mirrored(60, policy=policy, ghost_branches=False)
        service = Service(manager)
        hits.append(sum(service.serve(prompt) or 0 for prompt in prompts(2, 500)))
        shown = beside.stats()
        if policy == "lru":
            assert shown.gained_points is shown.lru_hit_tokens is None
            assert "over LRU" not in shown.line()
    assert shown.lru_hit_tokens is not None
    assert 0.5 * hits[0] < shown.lru_hit_tokens < shown.hit_tokens
    assert shown.hit_tokens == hits[1] > hits[0]
    assert shown.gained_points == pytest.approx(100 * (hits[1] - shown.lru_hit_tokens) / shown.prompt_tokens)


def test_lru_that_has_taken_over_is_shown_and_no_state_is_made_for_what_was_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, beside = mirrored(40)
    service, shared = Service(manager), [*range(20)]
    service.serve([*shared, 70, 71, 72, 73, 74])
    for number in range(10):
        service.serve([200 + 40 * number + at for at in range(40)])
    assert beside.tree.guard is not None
    assert "taken over" not in beside.stats().line()
    monkeypatch.setattr(Guard, "requested", lambda *given: False)
    beside.tree.guard.is_on = True
    service.serve([*shared, 80, 81, 82, 83, 84])
    assert not [node for _, node in beside.tree.nodes() if node.usage.kind is Kind.BRANCH]
    assert beside.stats().lru_is_on
    assert "LRU was ahead and has taken over" in beside.stats().line()


# Failing open


class Raises:
    """Raises in one line of the mirror, when it is about to run for the first time."""

    def __init__(self, line: tuple[str, int] | None) -> None:
        self.line = line
        self.seen: set[tuple[str, int]] = set()
        self.has_raised = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code.co_filename not in FILES or code.co_name in UNGUARDED:
            return None
        if event == "line":
            line = code.co_filename, frame.f_lineno
            self.seen.add(line)
            if line == self.line and not self.has_raised:
                self.has_raised = True
                sys.settrace(None)
                raise ZeroDivisionError(f"raised at {line}")
        return self


FILES = {module.__file__ for module in (mirror, stats, pins, visits)}

UNGUARDED = {
    "_get_computed_blocks", "_allocate_slots", "_cache_blocks", "_cache_states", "_free", "_reset_prefix_cache",
    "came", "_fail", "<lambda>",
}  # fmt: skip
"""What calls vLLM's own methods, and catches what all the others raise."""


def some_work(line: tuple[str, int] | None, policy: str = "lhd") -> tuple[Raises, Manager, Mirror]:
    """Serve requests of which three run at a time, in too few blocks, while a line raises."""
    waiting = list[Request]()
    manager, beside = mirrored(44, policy=policy, waiting=lambda: waiting)
    service, raises = Service(manager), Raises(line)
    for number, prompt in enumerate(prompts(7, 24)):
        options = {0: {"hybrid_pin": 60}, 1: {"hybrid_pin": -1}, 2: {"hybrid_pin": 0}, 3: {"hybrid_hold": 60}}
        waiting.append(service.request(prompt, **options.get(number % 5, {})))
    before = sys.gettrace()
    sys.settrace(raises)
    try:
        running: list[Request] = []
        for number, request in enumerate([*waiting]):
            if number == 18:
                while running:
                    service.end(running.pop())
                assert manager.reset_prefix_cache()
            beside.came(request)
            while service.start(request) is None:
                service.end(running.pop(0))
            waiting.remove(request)
            running.append(request)
            for one in [*running]:
                if not service.answer(one, [1, 2, 3, 4, 5]):
                    running.remove(one)
                    service.end(one)
            if len(running) > 2:
                service.end(running.pop(0))
        while running:
            service.end(running.pop())
    finally:
        sys.settrace(before)
    return raises, manager, beside


def test_whatever_line_raises_vllm_goes_on_by_lru_and_nothing_leaks(caplog: pytest.LogCaptureFixture) -> None:
    lines = sorted(some_work(None)[0].seen)
    assert len(lines) > 280
    assert {file for file, _ in lines} == FILES
    for line in lines:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="vllm.hybrid"):
            raises, manager, beside = some_work(line)
        assert raises.has_raised, line
        assert isinstance(beside.failure, ZeroDivisionError), line
        assert len([one for one in caplog.records if "an error in the mirror" in one.message]) == 1, line
        assert type(manager.block_pool.free_block_queue) is PlainQueue, line
        assert manager.num_free == 43, line
        assert all(not block.ref_cnt for block in manager.block_pool.blocks), line
        assert not [name for name in vars(manager) if name in ("allocate_slots", "free")], line
        service = Service(manager)
        assert service.serve([*range(100, 117)]) == 0, line
        assert service.serve([*range(100, 117)]) == 16, line


def test_a_failing_queue_gives_the_blocks_that_were_asked_for() -> None:
    def evict(n: int) -> bool:
        raise ZeroDivisionError

    def fail(error: Exception, taken: list[Block]) -> PlainQueue:
        return PlainQueue([*taken, *queue.get_all_free_blocks()])

    blocks = [Block(number) for number in range(6)]
    queue = FreeBlocks(blocks, {4, 5}, evict, fail)
    assert queue.popleft_n(4) == blocks[:4]
    taken = queue.popleft_n(2)
    queue.append_n(taken)
    queue.prepend_n([blocks[1]])
    assert queue.popleft_n(2) == [blocks[1], blocks[4]]


# The queue of free blocks


def test_blocks_without_content_are_used_first_then_those_that_the_tree_has_not() -> None:
    blocks = [Block(number) for number in range(6)]
    queue = FreeBlocks(blocks, {4}, lambda n: False, lambda error, taken: None)
    assert queue.popleft_n(6) == blocks
    queue.append_n([blocks[4], blocks[3]])
    queue.prepend_n([blocks[1], blocks[2]])
    assert queue.get_all_free_blocks() == [blocks[1], blocks[2], blocks[3], blocks[4]]
    assert [*queue.iter_blocks_after(blocks[2])] == [blocks[3], blocks[4]]
    assert queue.num_free_blocks == 4
    queue.remove(blocks[2])
    assert queue.popleft_n(2) == [blocks[1], blocks[3]]
    assert not queue.has_spare
    queue.let_go(blocks[4])
    assert queue.has_spare
    assert queue.popleft() is blocks[4]
    with pytest.raises(RuntimeError, match="not free"):
        queue.remove(blocks[4])
    with pytest.raises(ValueError, match="1 blocks were asked for, and 0 are free"):
        queue.popleft()


# Options, refusals, versions


def test_options_come_from_the_additional_config() -> None:
    assert VllmOptions.of(None) == VllmOptions.of({}) == VllmOptions()
    assert VllmOptions.of({"hybrid": {"policy": "lru", "seed": 3}}) == VllmOptions(policy="lru", seed=3)
    assert VllmOptions.of({"hybrid": {"policy": "flop_aware:alpha=0.5"}}).policy == "flop_aware:alpha=0.5"
    with pytest.raises(ArgumentError, match="no eviction policy is named 'slru'; there are: lru, "):
        VllmOptions.of({"hybrid": {"policy": "slru"}})
    with pytest.raises(ArgumentError, match=r"--additional-config: hybrid: .*lru has no option 'alpha'"):
        VllmOptions.of({"hybrid": {"policy": "lru:alpha=1"}})
    with pytest.raises(ArgumentError, match="has no option 'polcy'; it has: admission, ghost_branches, anchors, "):
        VllmOptions.of({"hybrid": {"polcy": "lru"}})
    with pytest.raises(ArgumentError, match="seed must be of type int, got True"):
        VllmOptions.of({"hybrid": {"seed": True}})
    with pytest.raises(ArgumentError, match="must be an object"):
        VllmOptions.of({"hybrid": "lhd"})


def config(**changes: Any) -> SimpleNamespace:
    plain = {
        "cache_config": SimpleNamespace(mamba_cache_mode="align"),
        "speculative_config": None,
        "kv_transfer_config": None,
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    }
    return SimpleNamespace(**{**plain, **changes})


def test_what_is_not_supported_is_named_all_at_once() -> None:
    refuse_unsupported(config(), 1, 3, [], {528})
    parallel = SimpleNamespace(decode_context_parallel_size=2, prefill_context_parallel_size=2)
    asked = config(
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        speculative_config=object(),
        kv_transfer_config=object(),
        parallel_config=parallel,
    )
    with pytest.raises(UnsupportedModelError) as caught:
        refuse_unsupported(asked, 1, 3, ["SlidingWindowSpec"], {528, 16})
    assert str(caught.value).count("; nor ") == 6
    for remedy in (
        "--mamba-cache-mode align",
        "SlidingWindowSpec",
        "--prefix-match-unit",
        "--speculative-config",
        "--decode-context-parallel-size 1",
        "--prefill-context-parallel-size 1",
        "--kv-transfer-config",
    ):
        assert remedy in str(caught.value)
    with pytest.raises(UnsupportedModelError, match="without linear-attention states"):
        refuse_unsupported(config(), 1, 0, [], {16})
    with pytest.raises(UnsupportedModelError, match="without full attention"):
        refuse_unsupported(config(), 0, 2, [], {16})


def test_another_version_is_refused_unless_it_is_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(installed.UNTESTED, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))  # one that does not say its version
    for known in ("0.30.0", "0.32.1", "0.33.0+cpu"):
        monkeypatch.setattr(installed, "version", lambda name, known=known: known)
        installed.refuse_unknown_version()
    monkeypatch.setattr(installed, "version", lambda name: "0.41.0")
    with pytest.raises(VersionError, match=r"vLLM 0\.41\.0 is installed.*HYBRID_VLLM_UNTESTED=1 to try it"):
        installed.refuse_unknown_version()
    plugin.register()  # never raises
    monkeypatch.setenv(installed.UNTESTED, "1")
    installed.refuse_unknown_version()


def test_without_vllm_the_version_is_an_error_and_the_plugin_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise installed.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(installed, "version", version)
    with pytest.raises(VersionError, match="vLLM is not installed"):
        installed.refuse_unknown_version()
    plugin.register()


def test_the_plugin_imports_neither_torch_nor_the_tree_nor_vllm() -> None:
    code = """
import sys
import hybrid.vllm.plugin
hybrid.vllm.plugin.register()
print([name for name in ("torch", "numpy", "vllm", "hybrid.tree", "hybrid.engine", "hybrid.vllm.mirror")
       if name in sys.modules])
"""
    command = [sys.executable, "-W", "error", "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert shown == "[]\n"


def test_the_entry_point_names_the_function() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert points["vllm.general_plugins"] == {"hybrid": "hybrid.vllm.plugin:register"}
    assert callable(plugin.register)
