"""Policies: in which order things go, what a policy is told, and what becomes of one that breaks its word.

Trees are written in letters, as in test_tree.py: a page is a letter, two tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from hybrid.cache.config import CacheConfig
from hybrid.errors import ArgumentError
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree.candidates import SAMPLE
from hybrid.tree.node import Checkpoint, Kind
from hybrid.tree.policies import POLICIES, FlopAware, LeastRecentlyUsed, policy_of
from hybrid.tree.policy import Facts, Policy
from hybrid.tree.tree import Tree
from hybrid.units import Prices
from support.caches import AuditedCache, TreeCase, key_of, serve


class Case(TreeCase):
    """A tree in letters under a policy."""

    def __init__(self, policy: Policy, prices: Prices = Prices(10, 100), seed: int = 0) -> None:  # noqa: B008
        super().__init__()
        self.tree = Tree(2, 2, policy, prices, seed=seed)

    def add(self, text: str, kind: str = Kind.BRANCH, priority: int = 0) -> None:
        """Insert a text with a checkpoint at its end."""
        key = self.key(text)
        checkpoint = Checkpoint(next(self._slots), len(key), kind, priority)
        self.tree.insert(key, len(key), [next(self._pages) for _ in text], checkpoint)

    def facts(self, text: str) -> Facts:
        return self.tree.candidates.facts(self.node(text))

    def goes(self) -> str:
        """The letter whose checkpoint goes next; every text of the tree is one letter."""
        owner = {node.slot: chr(node.edge[0]) for _, node in self.tree.nodes() if node.slot is not None}
        slots = self.tree.evict_checkpoints(1).slots
        return owner[slots[0]] if slots else ""

    def loses_pages(self) -> str:
        """The letter that goes next with its page."""
        owner = {node.pages[0]: chr(node.edge[0]) for _, node in self.tree.nodes()}
        pages = self.tree.evict_pages(1).pages
        return owner[pages[0]] if pages else ""


# The order in which things go


@dataclass
class Entry:
    """The model's knowledge of a letter."""

    created: int
    last_used: int
    hits: int = 0
    priority: int = 0
    has_checkpoint: bool = False
    lost: bool = False


ORDERS: dict[str, Callable[[Entry], object]] = {
    "lru": lambda e: e.last_used,
    "lfu": lambda e: (e.hits, e.last_used),
    "fifo": lambda e: e.created,
    "mru": lambda e: -e.last_used,
    "filo": lambda e: -e.created,
    "priority": lambda e: (e.priority, e.last_used),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ORDERS)
def test_the_victims_are_those_of_a_sort(name: str, seed: int) -> None:
    """Prefixes of one page come, get checkpoints, are used and go, and each victim is the first of a sorted list."""
    random, case, model = Random(seed), Case(policy_of(name)), dict[str, Entry]()
    order, num_gone = ORDERS[name], 0
    for tick in range(1, 400):
        letter, action = random.choice("abcdefghijkl"), random.random()
        if action < 0.35:
            priority = random.randint(0, 3)
            case.add(letter, priority=priority)
            entry = model.get(letter)
            if entry is None or not (entry.has_checkpoint or entry.lost):
                entry = model[letter] = Entry(tick, tick, has_checkpoint=True)
            elif entry.lost:  # what it was before it went stays known
                entry.created = entry.last_used = tick
                entry.has_checkpoint, entry.lost = True, False
            entry.priority = max(entry.priority, priority)
        elif action < 0.45:
            case.put(letter)
            model.setdefault(letter, Entry(tick, tick))
        elif action < 0.8:
            case.use(letter)
            if letter in model and model[letter].has_checkpoint:
                model[letter].last_used = tick
                model[letter].hits += 1
        elif action < 0.9:
            candidates = [x for x in model if model[x].has_checkpoint]
            expected = min(candidates, key=lambda x: order(model[x]), default="")  # type: ignore[arg-type, return-value]
            assert case.goes() == expected
            if expected:
                model[expected].has_checkpoint, model[expected].lost = False, True
                num_gone += 1
        else:
            expected = min(model, key=lambda x: order(model[x]), default="")  # type: ignore[arg-type, return-value]
            assert case.loses_pages() == expected
            model.pop(expected, None)
            num_gone += 1
    assert num_gone > 30


def test_flop_aware_keeps_what_saves_more_per_byte() -> None:
    """Two tokens for 110 bytes against twenty for 200."""
    case = Case(policy_of("flop_aware"))
    case.add("bcdefghijk")
    case.add("a")
    assert case.goes() == "a"


def test_flop_aware_lets_go_of_the_older_of_two_that_save_the_same() -> None:
    case = Case(policy_of("flop_aware"))
    for letter in "abc":
        case.add(letter)
    for letter in "cba":
        case.use(letter)
    assert [case.goes() for _ in range(3)] == ["c", "b", "a"]


def test_flop_aware_counts_only_what_the_next_checkpoint_above_does_not_spare() -> None:
    case = Case(policy_of("flop_aware"))
    case.add("abcdefghij")
    case.add("abcdefghijk")
    case.add("xyzuvw")
    released = case.tree.evict_checkpoints(1)
    assert released.slots == [2]  # it saves two tokens for 110 bytes


class Ranked(Policy):
    """A policy of the user's: `rank` is the function given, and what the policy was told is kept."""

    def __init__(self, rank: Callable[[Facts], float]) -> None:
        self._rank = rank
        self.hits: list[int] = []
        self.gone: list[int] = []
        self.num_missed = 0

    def rank(self, facts: Facts) -> float:
        return self._rank(facts)

    def hit(self, facts: Facts) -> None:
        self.hits.append(facts.num_tokens)

    def evicted(self, facts: Facts) -> None:
        self.gone.append(facts.num_tokens)

    def missed(self, *_: object) -> None:
        self.num_missed += 1


def with_policy(policy: object, num_pages: int = 6, num_states: int = 6, seed: int = 0) -> AuditedCache:
    config = CacheConfig(page_size=2, chunk_size=2, eviction=policy, seed=seed)  # type: ignore[arg-type]
    return AuditedCache(CacheMemory.of_indices(num_pages, num_states), config)


def test_a_users_own_object_decides() -> None:
    policy = Ranked(lambda facts: -facts.num_tokens)
    cache = with_policy(policy, num_pages=16, num_states=8)
    for text in ("abc", "x", "efgh"):
        serve(cache, key_of(cache, text))
    cache.evict_checkpoints(2)
    assert policy.gone == [8, 6]
    assert (cache.stats().checkpoints, cache.stats().policy_failure) == (1, None)


class OnlyRank:
    """It could rank, but is not a `Policy`: its hooks would have to be searched for."""

    def rank(self, facts: Facts) -> float:
        return 0.0


@pytest.mark.parametrize("wrong", [object(), 3, None, LeastRecentlyUsed, lambda facts: 1.0, OnlyRank()])
def test_an_object_that_is_not_a_policy_is_refused_and_told_what_is_missing(wrong: object) -> None:
    with pytest.raises(ArgumentError, match=r"an instance of a subclass of hybrid.Policy"):
        with_policy(wrong)


def test_each_name_makes_a_policy_of_its_own() -> None:
    for name in POLICIES:
        assert policy_of(name) is not policy_of(name)
        assert isinstance(policy_of(name), Policy)


@pytest.mark.parametrize(
    "eviction", ["flop_aware:alpha=0.5, attention=0", {"name": "flop_aware", "alpha": 0.5, "attention": 0}]
)
def test_a_policy_takes_options_by_name(eviction: Any) -> None:
    asked = policy_of(eviction)
    assert isinstance(asked, FlopAware)
    assert vars(asked) == vars(FlopAware(alpha=0.5, attention=0.0)) != vars(FlopAware())
    assert vars(policy_of("flop_aware")) == vars(policy_of({"name": "flop_aware"})) == vars(FlopAware())
    assert CacheConfig(eviction=eviction).eviction is eviction


@pytest.mark.parametrize(
    ("eviction", "said"),
    [
        ("flop_aware:beta=1", r"flop_aware has no option 'beta'; it has alpha \(1.0\), attention \(1e-05\)"),
        ({"name": "flop_aware", "beta": 1}, r"flop_aware has no option 'beta'; it has alpha \(1.0\), attention"),
        ("lru:alpha=1", "lru has no option 'alpha'; it has no options"),
        ("flop_aware:alpha=much", "alpha of eviction policy flop_aware must be a finite float, got 'much'"),
        ("flop_aware:alpha=nan", "must be a finite float, got 'nan'"),
        ({"name": "flop_aware", "alpha": True}, "must be a finite float, got True"),
        ({"name": "flop_aware", "alpha": None}, "must be a finite float, got None"),
        ("flop_aware:alpha", 'written as "name:option=value,option=value"; got '),
        ("flop_aware:=1", 'written as "name:option=value,option=value"; got '),
        ("best:alpha=1", "no eviction policy is named 'best'; there are: lru, .*lhd"),
        ({"alpha": 1}, 'as a mapping has the "name" of a policy'),
        ({"name": 3}, 'as a mapping has the "name" of a policy'),
    ],
)
def test_an_option_that_there_is_not_is_refused_with_those_that_there_are(eviction: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=f"CacheConfig: .*{said}"):
        CacheConfig(eviction=eviction)


def scrambled(facts: Facts) -> float:
    return facts.created * 7919 % 1009


def test_a_sampled_policy_finds_the_lowest_of_as_many_as_it_samples() -> None:
    case = Case(Ranked(scrambled))
    letters = [chr(ord("A") + index) for index in range(SAMPLE)]
    for letter in letters:
        case.add(letter)
    expected = sorted(letters, key=lambda letter: scrambled(case.facts(letter)))
    assert [case.goes() for _ in letters] == expected


def test_pages_without_a_checkpoint_go_before_a_sampled_policy_is_asked_the_oldest_first() -> None:
    asked = []
    case = Case(Ranked(lambda facts: asked.append(facts.kind) or 0.0))
    for text in ("a*", "x", "b*", "y", "z"):
        case.put(text)
    assert [case.loses_pages() for _ in range(3)] == ["x", "y", "z"]
    assert asked == []
    assert case.loses_pages() in "ab"
    assert "pages" not in asked


def gone(seed: int) -> list[str]:
    case = Case(Ranked(scrambled), seed=seed)
    letters = [chr(ord("A") + index) for index in range(150)]
    for letter in letters:
        case.add(letter)
    return [case.goes() for _ in range(60)]


def test_the_same_seed_evicts_the_same_victims_and_another_need_not() -> None:
    assert gone(1) == gone(1)
    assert len({tuple(gone(seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize("seed", range(3))
def test_a_sampled_policy_evicts_among_the_lowest(seed: int) -> None:
    """The best of 48 of 150: all but never one of the upper half."""
    case = Case(Ranked(scrambled), seed=seed)
    letters = [chr(ord("A") + index) for index in range(150)]
    for letter in letters:
        case.add(letter)
    ranks = sorted(scrambled(case.facts(letter)) for letter in letters)
    for _ in range(20):
        before = {chr(node.edge[0]): scrambled(case.facts(chr(node.edge[0]))) for _, node in case.tree.nodes()}
        assert before[case.goes()] < ranks[75]


@pytest.mark.parametrize("order", [None, "any"])
@pytest.mark.parametrize("evict", ["evict_pages", "evict_one"])
def test_candidates_that_have_gone_are_forgotten(evict: str, order: str | None) -> None:
    """`evict_pages` never asks for a checkpoint, `evict_one` never for a leaf that has one."""
    policy = Ranked(scrambled)
    if order is not None:
        policy.order = order  # type: ignore[attr-defined]
    tree = Case(policy).tree
    for number in range(3000):
        tree.insert(Key.of([number, number]), 2, [number], Checkpoint(number, 2))
        while tree.num_pages > 10:
            getattr(tree, evict)(1)
    nodes = {id(node) for _, node in tree.nodes()}
    assert len(nodes) == 10
    assert max(tree.candidates.num_entries) < 1100


# What a policy may know


def test_facts_of_a_small_tree() -> None:
    """
    ab o                     ef * has been used twice, the second time by the last request but one
      cd *  turn end
      ef *  branch, priority 3
    """
    case = Case(policy_of("lru"))
    case.add("abcd", Kind.TURN_END)  # tick 1
    case.add("abef", Kind.BRANCH, priority=3)  # tick 2, which splits
    case.use("abef")  # tick 3
    case.use("abef")  # tick 4
    case.use("abcd")  # tick 5
    assert case.draw() == ["ab o", "  cd *", "  ef *"]
    top, left, right = case.facts("ab"), case.facts("abcd"), case.facts("abef")
    assert [facts.kind for facts in (top, left, right)] == ["pages", "turn_end", "branch"]
    assert [facts.age for facts in (top, left, right)] == [3, 0, 1]
    assert [facts.hits for facts in (top, left, right)] == [0, 1, 2]
    assert [facts.priority for facts in (top, left, right)] == [0, 0, 3]
    assert [facts.created for facts in (top, left, right)] == [1, 1, 2]
    assert [facts.last_used for facts in (top, left, right)] == [1, 5, 4]
    assert [facts.num_tokens for facts in (top, left, right)] == [4, 8, 8]
    assert [facts.tokens_saved for facts in (top, left, right)] == [0, 8, 8]
    assert [facts.bytes_freed for facts in (top, left, right)] == [0, 120, 120]
    assert [facts.has_below for facts in (top, left, right)] == [True, False, False]
    assert "kind='turn_end', age=0, hits=1, num_tokens=8, tokens_saved=8, bytes_freed=120" in repr(left)


def test_a_checkpoint_saves_the_tokens_since_the_next_one_above() -> None:
    case = Case(policy_of("lru"))
    for text in ("ab*", "abcy", "abcde*", "abcdef*"):
        case.put(text)
    assert [case.facts(text).tokens_saved for text in ("ab", "abc", "abcde", "abcdef")] == [4, 0, 6, 2]


def test_bytes_are_those_that_nothing_else_needs() -> None:
    case = Case(policy_of("lru"))
    for text in ("ab", "abc*", "abx*"):
        case.put(text)
    assert case.facts("abc").bytes_freed == 110  # ab goes on to x
    case.tree.evict_checkpoints(1)
    case.tree.evict_pages(1)  # c is gone
    assert case.draw() == ["abx *"]
    assert case.facts("abx").bytes_freed == 130
    lock = case.tree.lock_pages(case.node("abx"), 4)
    assert case.facts("abx").bytes_freed == 110
    case.tree.lock_pages(case.node("abx"))
    assert case.facts("abx").bytes_freed == 100
    case.tree.unlock(lock)
    case.put("abxy")
    assert (case.facts("abx").bytes_freed, case.facts("abx").has_below) == (100, True)
    assert (case.facts("abxy").bytes_freed, case.facts("abxy").kind) == (10, "pages")


def test_a_second_checkpoint_at_a_place_raises_its_priority_and_never_lowers_it() -> None:
    case = Case(policy_of("priority"))
    for priority in (1, 5, 2):
        case.add("a", priority=priority)
    case.add("b", priority=4)
    assert case.facts("a").priority == 5
    assert [case.goes(), case.goes()] == ["b", "a"]


def test_hooks_are_told_before_a_use_is_counted_and_before_a_checkpoint_goes() -> None:
    policy = Ranked(lambda facts: facts.last_used)
    seen: list[tuple[int, int]] = []
    policy.hit = lambda facts: seen.append((facts.hits, facts.age))  # type: ignore[method-assign]
    case = Case(policy)
    case.add("a")
    for letter in "xaxa":
        case.use(letter)
    assert seen == [(0, 2), (1, 2)]  # the request that uses it has come
    assert case.facts("a").hits == 2
    case.goes()
    assert policy.gone == [2]


def test_a_checkpoint_worth_as_much_as_what_would_be_evicted_for_it_is_admitted() -> None:
    """And one that is worth less is not."""
    worth = {"stored": 1.0, "new": 1.0}
    case = Case(Ranked(lambda facts: worth["stored" if facts.is_live else "new"]))
    case.add("ab")
    usage = case.tree.new_usage(Kind.BRANCH, 0)
    assert case.tree.admits(usage, 2, 0, only_its_own=False, tails_help=False)
    worth["new"] = 0.999
    assert not case.tree.admits(usage, 2, 0, only_its_own=False, tails_help=False)
