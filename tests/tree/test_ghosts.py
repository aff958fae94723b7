"""Ghosts: a prefix that has gone is known on the second sight, and a policy hears of hits that it made impossible."""

from itertools import count
from random import Random

import pytest

from hybrid.cache.config import CacheConfig
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree.names import Names
from hybrid.tree.node import Checkpoint, Kind, Released
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.policy import Facts, Policy
from hybrid.tree.tree import Tree
from support.caches import AuditedCache, TreeCase, audited_cache, key_of, serve, start
from support.prefixes import noted_in

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

# The second sight


@pytest.fixture
def cache() -> AuditedCache:
    return audited_cache(num_pages=16, num_states=8)


def test_a_prefix_is_recognised_although_its_pages_have_gone(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abc"))
    cache.evict_pages(3)
    serve(cache, key_of(cache, "x"))
    lease = start(cache, key_of(cache, "abcd"))
    assert (lease.explanation.page_hit, lease.num_hit_tokens, lease.branching_len) == (0, 0, 6)
    assert "were evicted" in lease.explanation.reason


def test_where_a_request_leaves_what_was_known_is_its_branching_point(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    cache.clear()
    assert start(cache, key_of(cache, "abxy")).branching_len == 4


def test_a_first_sight_has_no_branching_point(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    cache.clear()
    assert start(cache, key_of(cache, "xyz")).branching_len is None
    assert start(cache, key_of(cache, "abcd", "other")).branching_len is None


def test_what_was_known_goes_on_from_the_pages_that_are_left(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcdef"))
    cache.evict_pages(3)
    lease = start(cache, key_of(cache, "abcdexy"))
    assert (lease.explanation.page_hit, lease.branching_len) == (6, 10)


def test_a_branching_point_among_ghosts_lies_on_the_grid_and_leaves_a_token_to_compute() -> None:
    cache = audited_cache(num_pages=16, num_states=8, page_size=2, chunk_size=4)
    serve(cache, key_of(cache, "abcde"))
    cache.clear()
    for text, branching_len in (("abcdxy", 8), ("abcxyz", 4), ("abcd", 4), ("abx", 4), ("axy", None)):
        lease = start(cache, key_of(cache, text))
        assert lease.branching_len == branching_len
        cache.close(lease)


def test_nothing_is_recalled_beyond_a_deeper_checkpoint_that_is_there(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "abcd"))
    cache.clear()
    serve(cache, key_of(cache, "abcd"))
    lease = start(cache, key_of(cache, "abcdx"))
    assert (lease.num_hit_tokens, lease.branching_len) == (8, None)


# What a policy hears


class Listener(Policy):
    """The least recently used goes; misses are written down."""

    order = "rising"

    def __init__(self) -> None:
        self.missed_at: list[int] = []
        self.hits_before: list[int] = []

    def rank(self, facts: Facts) -> float:
        return facts.last_used

    def missed(self, facts: Facts) -> None:
        self.missed_at.append(facts.num_tokens)
        self.hits_before.append(facts.hits)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def heard(listener: Listener) -> AuditedCache:
    return AuditedCache(CacheMemory.of_indices(24, 8), CacheConfig(page_size=2, chunk_size=2, eviction=listener))


def test_a_miss_is_told_where_the_pages_are_left(heard: AuditedCache, listener: Listener) -> None:
    serve(heard, key_of(heard, "ab"))
    heard.evict_checkpoints(1)
    start(heard, key_of(heard, "abc"))
    assert listener.missed_at == [4]


def test_a_miss_is_told_where_the_pages_have_gone_too(heard: AuditedCache, listener: Listener) -> None:
    serve(heard, key_of(heard, "ab"))
    heard.evict_pages(2)
    start(heard, key_of(heard, "abc"))
    assert listener.missed_at == [4]


def test_a_miss_counts_as_a_use_so_that_the_next_is_told_with_it(heard: AuditedCache, listener: Listener) -> None:
    serve(heard, key_of(heard, "ab"))
    serve(heard, key_of(heard, "abx"))
    heard.clear()
    for _ in range(3):
        heard.close(start(heard, key_of(heard, "aby")))
    assert listener.missed_at == [4, 4, 4]
    assert listener.hits_before == [1, 2, 3]
    assert heard.stats().policy_failure is None


def test_no_miss_is_told_of_what_would_not_have_served(heard: AuditedCache, listener: Listener) -> None:
    serve(heard, key_of(heard, "abcd"))
    heard.clear()
    start(heard, key_of(heard, "abc"))  # its checkpoint lay beyond
    start(heard, key_of(heard, "xyz"))
    start(heard, key_of(heard, "abcd"))  # the last token is always computed
    assert listener.missed_at == []


def test_no_miss_is_told_where_a_deeper_checkpoint_serves(heard: AuditedCache, listener: Listener) -> None:
    serve(heard, key_of(heard, "ab"))
    serve(heard, key_of(heard, "abcd"))
    heard.evict_checkpoints(1)
    lease = start(heard, key_of(heard, "abcdx"))
    assert (lease.num_hit_tokens, listener.missed_at) == (8, [])


def test_a_request_that_could_not_be_opened_tells_nothing(heard: AuditedCache, listener: Listener) -> None:
    serve(heard, key_of(heard, "ab"))
    heard.clear()
    assert heard.open(key_of(heard, "ab" * 20), 79, 80) is None
    assert listener.missed_at == []


# How many there are


def test_ghosts_are_bounded_and_the_newest_are_kept() -> None:
    case = TreeCase(max_ghosts=10)
    for index in range(100):
        text = "abcd"[index % 4] + chr(ord("A") + index)
        case.put(text)
        case.tree.evict_pages(2)
        assert len(case.tree.ghosts) <= 10
    newest, oldest = case.key("d" + chr(ord("A") + 99)), case.key("aA")
    assert case.tree.recall(newest, case.tree.peek(newest, 4), 4).was_evicted
    assert case.tree.ghosts.follow(newest, None, 0, 4)[0] == 4
    assert case.tree.ghosts.follow(oldest, None, 0, 4)[0] < 4


def test_without_ghosts_nothing_is_remembered() -> None:
    case = TreeCase(max_ghosts=0)
    case.put("abcd")
    case.tree.evict_pages(4)
    assert len(case.tree.ghosts) == 0
    key = case.key("abcd")
    assert not case.tree.recall(key, case.tree.peek(key, 4), 4).was_evicted


def test_a_cache_bounds_its_ghosts() -> None:
    cache = audited_cache(num_pages=8, num_states=4)
    bound = cache.tree.ghosts.limit
    for index in range(bound // 4):
        cache.tree.insert(Key.of([index] * 16), 16, list(range(8)))
        cache.tree.evict_pages(8)
    assert bound / 2 <= len(cache.tree.ghosts) <= bound + 8


# Against a set of all prefixes that have gone

Prefix = tuple[str, tuple[int, ...]]


class Life:
    """A random life of a tree, beside the set of all prefixes on the grid whose last page has gone."""

    def __init__(self, seed: int, page_size: int, grid: int, step: int) -> None:
        self.random = Random(seed)
        self.page_size, self.grid = page_size, grid
        self.tree = Tree(page_size, grid, LeastRecentlyUsed(), max_ghosts=10**6, names=Names(step))
        self.pages: dict[int, Prefix] = {}
        self.gone: set[Prefix] = set()
        self._page, self._slot = count(), count(1)

    def draw(self) -> Prefix:
        """Tokens that share much with others: pages of one token, mostly the same one."""
        random, ids = self.random, list[int]()
        for _ in range(random.randint(1, 10)):
            ids += [random.choice((1, 1, 1, 2))] * self.page_size
        return random.choice(("", "", "other")), tuple(ids)

    def insert(self) -> None:
        namespace, ids = self.draw()
        offered = [next(self._page) for _ in range(len(ids) // self.page_size)]
        checkpoint = None
        if len(ids) % self.grid == 0 and self.random.random() < 0.7:
            checkpoint = Checkpoint(next(self._slot), len(ids))
        inserted = self.tree.insert(Key.of(ids, namespace), len(ids), offered, checkpoint)
        for index in range(inserted.num_existing // self.page_size, len(offered)):
            self.pages[offered[index]] = (namespace, ids[: (index + 1) * self.page_size])

    def take(self, released: Released) -> None:
        for page in released.pages:
            prefix = self.pages.pop(page)
            if len(prefix[1]) % self.grid == 0:
                self.gone.add(prefix)

    def known(self, namespace: str, ids: tuple[int, ...], begin: int, limit: int) -> int:
        """Return how far the prefixes after `begin` tokens were once there, one multiple of the grid after the
        other."""
        end = (begin // self.grid + 1) * self.grid
        while end <= min(limit, len(ids)) and (namespace, ids[:end]) in self.gone:
            begin, end = end, end + self.grid
        return begin

    def compare(self) -> bool:
        """Ask for a random prefix; whether ghosts had anything to say."""
        namespace, ids = self.draw()
        ids += (1,) * self.random.randint(0, 2 * self.grid)
        key, limit = Key.of(ids, namespace), self.random.randint(1, len(ids))
        match = self.tree.peek(key, limit)
        node, num_pages = match.deepest, match.num_page_tokens
        expected = self.known(namespace, ids, num_pages, limit)
        assert self.tree.ghosts.follow(key, node, num_pages, limit)[0] == expected
        past = self.tree.recall(key, match, limit)
        assert past.num_tokens == expected
        return expected > num_pages


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("page_size", "grid", "step"), [(1, 1, 1), (1, 4, 1), (1, 4, 4), (2, 4, 2), (2, 2, 2), (4, 8, 8)]
)
def test_ghosts_know_what_a_set_of_all_prefixes_that_have_gone_knows(
    page_size: int, grid: int, step: int, seed: int
) -> None:
    life, told = Life(seed, page_size, grid, step), 0
    for _ in range(400):
        action = life.random.random()
        if action < 0.35:
            life.insert()
        elif action < 0.5:
            life.take(life.tree.evict_pages(life.random.randint(1, 6)))
        elif action < 0.6:
            life.take(life.tree.evict_checkpoints(life.random.randint(1, 2)))
        elif action < 0.62:
            life.take(life.tree.evict_all())
        else:
            told += life.compare()
    assert told > 10


@pytest.mark.parametrize("num_evicted", [0, 2, 4])
def test_the_turn_of_a_request_is_counted_from_the_deepest_turn_end_on_its_path(num_evicted: int) -> None:
    tree = Tree(2, 2, LeastRecentlyUsed())
    key = Key.of([1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    kinds = {2: (Kind.TURN_END, 0), 4: (Kind.TURN_END, 1), 6: (Kind.PROMPT_END, 2), 8: (Kind.PROMPT_END, 2)}
    for slot, (end, (kind, turn)) in enumerate(kinds.items()):
        tree.insert(key, end, list(range(end // 2)), Checkpoint(slot, end, kind, turn=turn))
    tree.evict_checkpoints(num_evicted)
    match = tree.peek(key, len(key))
    past = tree.recall(key, match, len(key))
    assert past.turn == 2
    assert sorted(past.gone) == [end for end in kinds if end > match.num_tokens]


def test_a_request_below_checkpoints_that_end_no_turn_has_the_turn_of_the_deepest() -> None:
    """The deepest has counted the turn ends before it; the path above is not looked at."""
    tree = Tree(2, 2, LeastRecentlyUsed())
    key = Key.of([1, 1, 2, 2, 3, 3, 4, 4])
    tree.insert(key, 2, [0], Checkpoint(0, 2, Kind.TURN_END, turn=4))
    tree.insert(key, 4, [0, 1], Checkpoint(1, 4, Kind.BRANCH, turn=5))
    tree.insert(key, 6, [0, 1, 2])
    assert tree.recall(key, tree.peek(key, 7), 7).turn == 5
    assert tree.recall(key, tree.peek(key, 3), 3).turn == 5
    assert tree.recall(Key.of([9]), tree.peek(Key.of([9]), 1), 1).turn == 0


@pytest.fixture
def named() -> list[bytes]:
    """The names that were computed in the tree of `counting`, in order."""
    return []


@pytest.fixture
def counting(named: list[bytes]) -> Tree:
    return Tree(2, 2, LeastRecentlyUsed(), names=Names(2, noted_in(named)))


def test_a_lookup_names_what_ghosts_know_and_one_block_more(counting: Tree, named: list[bytes]) -> None:
    """What is new in a prompt is named once, when it is evicted."""
    tree, key = counting, Key.of(range(200))
    tree.insert(key, 100, [*range(50)])
    assert tree.recall(key, tree.peek(key, 200), 200).num_tokens == 100
    assert named == []  # there are no ghosts
    tree.evict_pages(20)
    assert len(named) == 50
    named.clear()
    assert tree.recall(key, tree.peek(key, 200), 200).num_tokens == 100
    assert len(named) == 21
    named.clear()
    other = Key.of([*range(60), 7, *range(100)])
    assert tree.recall(other, tree.peek(other, 160), 160).num_tokens == 60
    assert len(named) == 1


def test_a_branch_evicted_page_by_page_is_named_once(counting: Tree, named: list[bytes]) -> None:
    tree, shared = counting, [*range(20)]
    other = tree.insert(Key.of([*shared, *range(500, 600)]), 120, [*range(60)])
    tree.lock_pages(other.node)
    tree.insert(Key.of([*shared, *range(100, 200)]), 120, [*range(60)])
    for _ in range(20):
        tree.evict_pages(1)
    assert len(named) == 60
    key = Key.of([*shared, *range(100, 200), 7])
    found = tree.peek(key, 121)
    assert found.num_page_tokens == 80
    assert tree.recall(key, found, 121).num_tokens == 120
    assert tree.num_pages == 90
