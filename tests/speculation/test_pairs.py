"""A drafter of the EAGLE kind in an engine, whose own cache has keys of pairs of tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from hybrid import CacheConfig, CacheMemory, Drafter, Engine, HybridCache, Key, SamplingParams, SpeculationConfig
from hybrid.cache.lease import Lease
from hybrid.key import PAIRS
from hybrid.memory.pool import EMPTY_STATE
from hybrid.speculation.drafter import History
from support.engines import GRID, answer, assert_nothing_held, engine_on, greedy, ids

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

Numbers = NDArray[np.float64]

VOCAB, WIDTH = 1024, 32

_rng = np.random.default_rng(0)
EMBEDDING: Numbers = _rng.standard_normal((VOCAB, WIDTH))
MIXER: Numbers = _rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5

DEPTH = 6
"""Tokens of a chain of drafts."""


def feature(before: Numbers, token: int) -> Numbers:
    """Return what the model would hand to the drafter after a token: it depends on all tokens up to this one."""
    return np.asarray(np.tanh(before @ MIXER + EMBEDDING[token]))


def row(own: Numbers, token: int, after: int) -> Numbers:
    """Key and value of a position: of its feature, its token, and the token after it."""
    return np.concatenate([EMBEDDING[token] + 0.1 * own, EMBEDDING[after] + 0.1 * own])


def attend(rows: Numbers, token: int) -> Numbers:
    """Scores of the tokens after one: those that came after it before."""
    scores = rows[:, :WIDTH] @ EMBEDDING[token]
    weights = np.exp(scores - scores.max())
    return np.asarray(EMBEDDING @ (weights @ rows[:, WIDTH:] / weights.sum()))


def draft(rows: Numbers, state: Numbers, last: int, limit: int) -> tuple[list[int], list[int]]:
    """A chain of drafts, and alternatives for its first token, from the rows before the last token."""
    order = np.argsort(-attend(rows, last), kind="stable").tolist()
    tokens, parents = order[:3], [-1, -1, -1]
    while len(tokens) < min(limit, DEPTH):
        after = tokens[0] if len(tokens) == 3 else tokens[-1]
        state = feature(state, last)
        rows = np.vstack([rows, row(state, last, after)])
        last = after
        parents.append(0 if len(tokens) == 3 else len(tokens) - 1)
        tokens.append(int(attend(rows, last).argmax()))
    return tokens[:limit], parents[:limit]


def naive(tokens: Sequence[int]) -> tuple[Numbers, Numbers]:
    """The rows of all pairs of a sequence, `[tokens - 1, 2 * WIDTH]`, and the feature before each of its positions,
    `[tokens, WIDTH]`, without a cache."""
    states, rows = [np.zeros(WIDTH)], []
    for token, after in pairwise(tokens):
        states.append(feature(states[-1], token))
        rows.append(row(states[-1], token, after))
    return np.array(rows).reshape(-1, 2 * WIDTH), np.array(states)


class Eagle(Drafter):
    """Keeps its rows and features in a cache of its own, in which requests share them.

    Args:
        pages, states: sizes of the cache.

    Attributes:
        hits: tokens of each lease that did not have to be computed, and those of its pages that are shared.
        proposals: number of drafts that were compared with those of `naive`.
    """

    def __init__(self, pages: int, states: int) -> None:
        config = CacheConfig(page_size=GRID, chunk_size=GRID, eviction="lru")
        self.cache = HybridCache(CacheMemory.of_indices(pages, states), config)
        self.rows: Numbers = np.full((pages * GRID, 2 * WIDTH), np.nan)
        self.states: Numbers = np.full((states + 1, WIDTH), np.nan)
        self.states[EMPTY_STATE] = 0.0
        self.hits: list[tuple[int, int]] = []
        self.proposals: int = 0
        self._leases: dict[History, Lease] = {}

    def propose(self, history: History, limit: int) -> tuple[list[int], list[int]]:
        """Return what its one layer of attention gives after the pairs of a history."""
        key, tokens = Key.of_pairs(history[:], history.namespace), history[:].tolist()
        lease = self._leases.get(history)
        if lease is None:
            lease = self.cache.open_whole(key)
            if lease is None:
                return [], []
            self._leases[history] = lease
            self.hits.append((lease.num_hit_tokens, lease.num_shared * GRID))
        if not self.cache.reserve(lease, len(key)):
            return [], []
        self._compute(lease, tokens)
        self.cache.commit(lease, key, len(key) // GRID * GRID)
        self.cache.audit()
        slots = [self._slot(lease, at) for at in range(len(key))]
        drafts = draft(self.rows[slots], self.states[lease.front], tokens[-1], limit)
        rows, features = naive(tokens)
        assert (self.rows[slots] == rows).all()
        assert drafts == draft(rows, features[-1], tokens[-1], limit)
        self.proposals += 1
        return drafts

    def end(self, history: History) -> None:
        lease = self._leases.pop(history, None)
        if lease is not None:
            self.cache.close(lease)

    def check(self) -> None:
        """All that the cache holds is what a naive computation of its tokens gives."""
        paths: dict[int, list[int]] = {}
        for namespace, node in self.cache.tree.nodes():
            assert namespace.startswith(PAIRS)
            first = int(namespace.removeprefix(PAIRS).split(" ")[0])
            path = paths[id(node)] = paths.get(id(node.parent), [first]) + list(array("i", node.edge))
            rows, states = naive(path)
            begin = node.end - len(node.pages) * GRID
            held = [page * GRID + at for page in node.pages for at in range(GRID)]
            assert (self.rows[held] == rows[begin : node.end]).all()
            if node.slot is not None:
                assert (self.states[node.slot] == states[node.end]).all()

    def _slot(self, lease: Lease, position: int) -> int:
        return lease.block_table[position // GRID] * GRID + position % GRID

    def _compute(self, lease: Lease, tokens: list[int]) -> None:
        """A pass over the pairs that are not computed: what is shared is not written."""
        begin, end = lease.front_tokens, len(tokens) - 1
        places = {at: self.cache.capture(lease, at) for at in range(begin // GRID * GRID + GRID, end + 1, GRID)}
        state = self.states[lease.read_slot]
        for at in range(begin, end):
            state = feature(state, tokens[at])
            if at >= lease.num_shared * GRID:
                self.rows[self._slot(lease, at)] = row(state, tokens[at], tokens[at + 1])
            checkpoint = places.get(at + 1)
            if checkpoint is not None:
                self.states[checkpoint.slot] = state
        self.states[lease.front] = state
        self.cache.advance(lease, end)


SHARED = (15, 16, 17, 32, 33, 40)
"""Tokens that prompts have in common: the pair of the last of them and the next one differs."""


def requests() -> list[tuple[list[int], str]]:
    """Prompts with their namespaces: hits, partial hits and branches, at the ends of pages and inside them."""
    text = ids(12) * 5
    found = [(text, ""), (text, ""), ([*text, *ids(30, 1)], ""), (text, "other"), (ids(40, 2), "")]
    for shared in SHARED:
        found += [([*text[:shared], *ids(25, 3 + branch)], "") for branch in range(2)]
    return [*found, (text[1:], ""), ([text[0]], ""), (text[:2], "other")]


@pytest.mark.parametrize(
    ("params", "pages", "states"), [(greedy(20), 300, 80), (greedy(20, temperature=0.7, seed=4), 24, 9)]
)  # the second cache evicts
def test_a_drafter_with_a_cache_of_pairs_drafts_after_hits_what_it_drafts_cold(
    tiny: Engine, params: SamplingParams, pages: int, states: int
) -> None:
    eagle = Eagle(pages, states)
    settings = CacheConfig(page_size=GRID, chunk_size=GRID)
    config = SpeculationConfig(drafters=(eagle,), adaptive=False, max_drafts=7)
    engine, plain = tiny.with_cache(settings, size=(128, 32), speculation=config), engine_on(tiny)
    outputs = []
    for prompt, namespace in requests():
        expected = answer(plain, prompt, params, namespace=namespace)
        outputs.append(answer(engine, prompt, params, namespace=namespace))
        assert outputs[-1].token_ids == expected.token_ids
    eagle.check()
    turns = [[*output.prompt_token_ids, *output.token_ids, *ids(9, 5)] for output in outputs[:6]]
    expected_turns = plain.generate(turns, params, progress=False)
    together = engine.generate(turns, params, progress=False)
    assert [output.token_ids for output in together] == [output.token_ids for output in expected_turns]
    eagle.check()
    own = engine.stats().speculation["Eagle"]
    assert own.refused == 0
    assert eagle.proposals > 150
    assert own.accepted_tokens > 20
    tokens = [hit for hit, _ in eagle.hits]
    assert len(set(tokens)) > 3
    if pages == 300:  # n tokens in common are n - 1 pairs
        first = [num_page_tokens for _, num_page_tokens in eagle.hits[5 : 5 + 2 * len(SHARED) : 2]]
        assert first == [(shared - 1) // GRID * GRID for shared in SHARED]
        assert eagle.hits[1] == (48, 48)
    assert_nothing_held(engine)
    stats = eagle.cache.stats()
    assert (stats.pages_private, stats.states_private) == (0, 0)
    assert (stats.evicted_pages > 0) == (pages < 300)
