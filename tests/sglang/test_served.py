"""The backend under SGLang's own requests, pools, allocators and release paths: its hits, its books, its victims."""

import json
import os
import random
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from support.sglang_absent import require_sglang

require_sglang()

from sglang.srt.mem_cache.registry import create_tree_cache  # noqa: E402

from hybrid.doctor.installed_sglang import context_of, server_args  # noqa: E402
from hybrid.sglang.values import WORDS  # noqa: E402
from support.sglang_served import Served, Setting  # noqa: E402

Request = tuple[array, int]

SIZES = [(200_000, 20), (200_000, 60), (24_000, 200), (16_000, 40)]
"""Tokens and states: states are short, KV is short, both are."""


def conversations(seed: int, number: int, rewritten: bool = False) -> list[Request]:
    """Requests, input and output, and the length of the input: turns of conversations on a few system prompts.

    Those that are rewritten lose something from their middle now and then.
    """
    rng = random.Random(seed)

    def ids(most: int, least: int = 5) -> list[int]:
        return [rng.randrange(50_000) for _ in range(rng.randrange(least, most))]

    systems, open_ones, requests = [ids(576, 128) for _ in range(6)], [], []
    for _ in range(number):
        if open_ones and rng.random() < 0.6:
            one = rng.choice(open_ones[-12:])
        else:
            open_ones.append(one := [*rng.choice(systems)])
        if rewritten and rng.random() < 0.4:
            start = rng.randrange(len(one))
            del one[start : start + 300]
        one += ids(400)
        length = len(one)
        one += ids(300)
        requests.append((array("q", one), length))
    return requests


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("page_size", "extra_buffer", "part"),
    [(64, True, 1 << 20), (64, True, 256), (1, True, 1 << 20), (1, False, 1 << 20)],
)
def test_with_lru_hits_are_about_those_of_sglangs_rust_core(
    page_size: int, extra_buffer: bool, part: int, sizes: tuple[int, int], rewritten: bool
) -> None:
    """Also where a prompt is computed in parts, and leaves a state after each. Leaves are cut from their ends here,
    and go as a whole there."""
    hits = []
    for backend in ("rust", "hybrid"):
        served = Served(Setting(backend, "lru", *sizes, page_size, extra_buffer))
        requests = conversations(14, 150, rewritten) if rewritten else conversations(1, 150)
        hits.append([served.serve(*request, part) for request in requests])
        assert served.books() == []
        served.cache.sanity_check()
    assert sum(hits[1]) > 0.95 * sum(hits[0]) > 0


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("policy", [None, "lru", "lfu", "priority", "flop_aware"])
def test_whatever_evicts_the_books_balance(policy: str | None, unified: bool) -> None:
    served = Served(Setting(policy=policy, tokens=16_000, states=30, unified=unified))
    for request in conversations(2, 60):
        served.serve(*request)
        assert served.books() == []
    served.cache.sanity_check()


def test_pages_whose_state_is_not_kept_are_owned_by_the_tree_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request must not take for its own, and free, what the tree has adopted of it."""
    monkeypatch.setattr("hybrid.tree.tree.Tree.admits", lambda *_, **__: False)
    served = Served(Setting(tokens=16_000, states=30))
    for request in conversations(4, 40):
        served.serve(*request)
    req = served.arrive([*range(100_000, 100_800)])
    assert served.start(req)
    assert served.pool.mamba_allocator.schedulable_available_size() == 0
    states = served.cache.tree_core.tree.num_checkpoints
    served.prefill(req)
    assert served.cache.tree_core.tree.num_checkpoints == states, "nothing was refused"
    assert req.kv.cache_protected_len == served.cache.full_protected_size() == 768
    assert served.books([req]) == []
    served.finish(req)
    assert served.books() == []


class Scheduler:
    """Random steps of several requests at once, as a scheduler may take them."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.served = Served(setting)
        self.rng = random.Random(seed)
        self.requests = conversations(seed, 400)
        self.running: list[Any] = []
        self.retracted: list[Any] = []
        self.done = 0

    def step(self) -> None:
        choice = self.rng.random()
        if choice < 0.3 and len(self.running) < 4:
            self.start()
        elif self.running:
            req = self.rng.choice(self.running)
            if req.kv.kv_committed_len < len(req.full_untruncated_fill_ids):
                self.prefill(req)
            else:
                self.advance(req, choice)

    def start(self) -> None:
        if self.retracted and self.rng.random() < 0.5:
            req = self.retracted.pop()
        else:
            ids, length = self.requests.pop()
            req = self.served.arrive(ids[:length])
        for _ in range(self.rng.randrange(3)):  # the queue is looked through: it counts as nothing
            req.init_next_round_input(self.served.cache, cow_mamba=False)
        if self.served.start(req):
            self.running.append(req)

    def prefill(self, req: Any) -> None:
        length, at = len(req.full_untruncated_fill_ids), max(req.prefix_len, req.kv.kv_committed_len)
        part = 256 * self.rng.randrange(1, 4)
        self.served.prefill(req, min(length, (at // 256) * 256 + part))

    def advance(self, req: Any, choice: float) -> None:
        answer = [self.rng.randrange(50_000) for _ in range(self.rng.randrange(1, 400))]
        if choice < 0.55 and self.served.decode(req, answer):
            return
        self.running.remove(req)
        if choice < 0.65 and req.output_ids:
            self.served.retract(req)
            self.retracted.append(req)
        elif choice < 0.72:
            self.served.abort(req)
        else:
            self.served.finish(req)
        self.done += 1

    def drain(self) -> None:
        for req in self.running:
            self.served.abort(req)
        self.running = []


@pytest.mark.parametrize(
    "setting",
    [
        Setting(tokens=12_800, states=24),
        Setting(tokens=12_800, states=24, policy="lru"),
        Setting(tokens=12_800, states=24, page_size=1),
        Setting(tokens=12_800, states=24, page_size=1, extra_buffer=False),
        Setting(tokens=12_800, states=24, unified=True),
        Setting(tokens=12_800, states=24, config={"ghost_branches": True, "admission": False}),
    ],
    ids=["lhd", "lru", "page 1", "no extra buffer", "unified", "ghosts"],
)
def test_several_requests_at_once_leave_no_leak_after_any_step(setting: Setting) -> None:
    """Start, prefill in parts, decode, finish, abort, retract, and evictions in between."""
    scheduler = Scheduler(setting, seed=11)
    for _ in range(500):
        scheduler.step()
        assert scheduler.served.books(scheduler.running) == []
        scheduler.served.cache.sanity_check()
    assert scheduler.done > 60
    scheduler.drain()
    assert scheduler.served.books() == []
    core = scheduler.served.cache.tree_core
    assert (core.full_protected_size(), core.mamba_protected_size()) == (0, 0)
    core.reset()


# Ranks

VICTIMS = """
import json, sys
from support.sglang_absent import imitate
imitate()
from support.sglang_served import Served, Setting
requests, unified = json.load(sys.stdin)
served = Served(Setting(tokens=16_000, states=30, unified=unified))
served.cache.tree_core.clock = None  # as of each of several ranks
log = []
free = served.cache._free
def noted(kind, indices):
    log.append([int(kind), *(at for part in indices for at in part.tolist())])
    free(kind, indices)
served.cache._free = noted
for ids, length in requests:
    log.append(served.serve(ids, length))
print(json.dumps(log))
"""


@pytest.mark.parametrize("unified", [False, True])
def test_two_processes_with_the_same_calls_choose_the_same_victims(unified: bool) -> None:
    """The ranks of a tensor-parallel group must do so: each has its own tree, and nothing reports them to each
    other."""
    root = Path(__file__).parent.parent.parent
    given = json.dumps([[[ids.tolist(), length] for ids, length in conversations(3, 80)], unified])
    logs = []
    for salt in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": f"{root}:{root / 'tests'}"}
        command = [sys.executable, "-W", "ignore", "-c", VICTIMS]
        shown = subprocess.run(command, input=given, capture_output=True, text=True, env=env, check=True)
        logs.append(json.loads(shown.stdout.splitlines()[-1]))
    assert sum(isinstance(entry, list) for entry in logs[0]) > 20
    assert logs[0] == logs[1]


def test_a_clock_is_read_only_where_there_is_one_rank() -> None:
    served = Served(Setting(tokens=16_000, states=30))
    assert served.cache.tree_core.clock is time.monotonic
    several = server_args(64, radix_cache_backend="hybrid", tp_size=2)
    assert create_tree_cache(context_of(several, served.params())).tree_core.clock is None


@pytest.mark.parametrize(
    ("policy", "part", "hits"),
    [(None, 1024, [0, 960, 960]), (None, 256, [0, 960, 960]), ("lru", 1024, [0, 0, 960]), ("lru", 256, [0, 768, 960])],
)
def test_a_prompt_of_whole_pages_hits_when_it_is_asked_again(policy: str | None, part: int, hits: list[int]) -> None:
    """Its last token is computed again: a state after that, where SGLang's own policies have it, is of no use to it."""
    served = Served(Setting(policy=policy))
    prompt = [*range(1024)]
    assert [served.serve([*prompt, *range(5000 + 9 * n, 5009 + 9 * n)], 1024, part) for n in range(3)] == hits
    assert served.books() == []


def test_a_conversation_of_whole_pages_continues_from_a_page_before_its_end() -> None:
    served = Served(Setting())
    for end in (1024, 1280, 1536):
        assert served.serve([*range(end + 10)], end) == (max(0, end - 320) if end > 1024 else 0)
    kinds = {node.end // WORDS: str(node.usage.kind) for _, node in served.cache.tree_core.tree.nodes() if node.slot}
    assert kinds == {960: "prompt_end", 1216: "prompt_end", 1472: "prompt_end"}
