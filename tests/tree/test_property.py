"""The tree against a model that knows no tree: dictionaries of whole prefixes, searched from scratch each time.

The order of eviction is the policy's, so the model is told what went, and judges whether it might go and whether it is
enough.
"""

from array import array
from dataclasses import dataclass, field
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from hybrid.errors import LockError, OwnershipError
from hybrid.key import Key
from hybrid.tree.node import Checkpoint, Kind, Lock, Match, Released
from hybrid.tree.policies import POLICIES
from hybrid.tree.tree import Tree

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

Prefix = tuple[str, tuple[int, ...]]
"""A namespace, and all tokens from the start."""


@dataclass(eq=False)
class Held:
    """A lock, and the prefix that it keeps."""

    lock: Lock
    prefix: Prefix
    is_state: bool


@dataclass
class Model:
    """The prefixes that have a page at their end, and those that have a checkpoint."""

    page_size: int
    grid: int
    pages: dict[Prefix, int] = field(default_factory=dict)
    checkpoints: dict[Prefix, int] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    evicted: set[Prefix] = field(default_factory=set)

    def ends(self, prefix: Prefix) -> list[Prefix]:
        """The prefixes of whole pages of a prefix, the shortest first."""
        namespace, ids = prefix
        return [(namespace, ids[:end]) for end in range(self.page_size, len(ids) + 1, self.page_size)]

    def page_hit(self, prefix: Prefix) -> int:
        return max((len(end[1]) for end in self.ends(prefix) if end in self.pages), default=0)

    def usable_hit(self, prefix: Prefix) -> int:
        return max((len(end[1]) for end in self.ends(prefix) if end in self.checkpoints), default=0)

    def branching_len(self, prefix: Prefix) -> int | None:
        hit = self.page_hit(prefix) // self.grid * self.grid
        return hit if hit > self.usable_hit(prefix) else None

    def known(self, prefix: Prefix, page_hit: int) -> int:
        """Return how far beyond its pages a prefix was once known: as long as each multiple of the grid has been
        evicted."""
        known = page_hit
        for end in range(page_hit // self.grid * self.grid + self.grid, len(prefix[1]) + 1, self.grid):
            if (prefix[0], prefix[1][:end]) not in self.evicted:
                break
            known = end
        return known

    def kept_pages(self) -> set[Prefix]:
        return {end for held in self.held for end in self.ends(held.prefix)}

    def kept_checkpoints(self) -> set[Prefix]:
        return {held.prefix for held in self.held if held.is_state}


PAGES = st.lists(st.sampled_from("abc"), min_size=1, max_size=6)
NAMESPACES = st.sampled_from(("", "", "other"))


class TreeMachine(RuleBasedStateMachine):
    """Random use of a tree, each answer compared with the model's."""

    locks = Bundle("locks")

    @initialize(page_size=st.integers(2, 4), pages_per_grid=st.integers(1, 3), policy=st.sampled_from(sorted(POLICIES)))
    def plant(self, page_size: int, pages_per_grid: int, policy: str) -> None:
        self.tree = Tree(page_size, page_size * pages_per_grid, POLICIES[policy]())
        self.model = Model(page_size, page_size * pages_per_grid)
        self.next_page, self.next_slot = count(), count(1)

    def spell(self, pages: list[str]) -> tuple[int, ...]:
        """Three pages, of which a and b differ in their last token only."""
        inner = self.model.page_size - 1
        return tuple(
            token
            for page in pages
            for token in {"a": [1] * inner + [1], "b": [1] * inner + [2], "c": [3] * (inner + 1)}[page]
        )

    @rule(pages=PAGES, namespace=NAMESPACES, more=st.integers(0, 5), state=st.booleans(), spare=st.booleans())
    def insert(self, pages: list[str], namespace: str, more: int, state: bool, spare: bool) -> None:
        prefix = (namespace, self.spell(pages))
        num_tokens, page_size = len(prefix[1]), self.model.page_size
        offered = [next(self.next_page) for _ in pages]
        state = state and num_tokens % self.model.grid == 0
        checkpoint = (
            Checkpoint(next(self.next_slot), num_tokens, Kind.INTERVAL if spare else Kind.BRANCH, is_spare=spare)
            if state
            else None
        )
        existing = self.model.page_hit(prefix)

        inserted = self.tree.insert(Key.of((*prefix[1], *[1] * more), namespace), num_tokens, offered, checkpoint)

        assert inserted.num_existing == existing
        assert inserted.node.end == num_tokens or (existing == num_tokens < inserted.node.end and checkpoint is None)
        assert inserted.adopted == (state and prefix not in self.model.checkpoints)
        for end in self.model.ends(prefix):
            self.model.pages.setdefault(end, offered[len(end[1]) // page_size - 1])
        if checkpoint is not None:
            self.model.checkpoints.setdefault(prefix, checkpoint.slot)

    @rule(pages=PAGES, namespace=NAMESPACES, wrong=st.sampled_from(("pages", "position", "length")))
    def insert_what_does_not_fit(self, pages: list[str], namespace: str, wrong: str) -> None:
        ids = self.spell(pages)
        num_tokens, offered, checkpoint = len(ids), [10**6] * len(pages), None
        if wrong == "pages":
            offered.append(10**6)
        elif wrong == "position":
            checkpoint = Checkpoint(10**6, num_tokens + self.model.grid)
        else:
            num_tokens -= 1
        with pytest.raises(OwnershipError):
            self.tree.insert(Key.of(ids, namespace), num_tokens, offered, checkpoint)

    def compare(self, found: Match, prefix: Prefix) -> None:
        """An answer of the tree with the model's, for the tokens that the limit left."""
        model, page_size = self.model, self.model.page_size
        assert found.num_page_tokens == model.page_hit(prefix)
        assert found.num_tokens == model.usable_hit(prefix)
        assert found.branching_len == model.branching_len(prefix)
        assert (found.deepest is None) == (found.num_page_tokens == 0)
        assert (found.checkpoint is None) == (found.num_tokens == 0)
        expected = [model.pages[end] for end in model.ends(prefix)[: found.num_page_tokens // page_size]]
        assert list(self.tree.pages(found.deepest, found.num_page_tokens)) == expected
        if found.checkpoint is not None:
            assert found.checkpoint.slot == model.checkpoints[(prefix[0], prefix[1][: found.num_tokens])]

    @rule(pages=PAGES, namespace=NAMESPACES, more=st.integers(0, 4), limit=st.integers(0, 30), use=st.booleans())
    def match(self, pages: list[str], namespace: str, more: int, limit: int, use: bool) -> None:
        ids = (*self.spell(pages), *[1] * more)
        found = (self.tree.match if use else self.tree.peek)(Key.of(ids, namespace), limit)
        self.compare(found, (namespace, ids[:limit]))

    @rule(pages=PAGES, namespace=NAMESPACES, more=st.integers(0, 4), limit=st.integers(0, 30))
    def recall(self, pages: list[str], namespace: str, more: int, limit: int) -> None:
        ids = (*self.spell(pages), *[1] * more)
        key, prefix = Key.of(ids, namespace), (namespace, ids[:limit])
        found = self.tree.peek(key, limit)
        past = self.tree.recall(key, found, limit)
        expected = self.model.known(prefix, found.num_page_tokens)
        assert past.num_tokens == expected
        assert all(found.num_tokens < position <= expected for position in past.gone)

    @rule(target=locks, pages=PAGES, namespace=NAMESPACES)
    def lock_pages(self, pages: list[str], namespace: str) -> object:
        prefix = (namespace, self.spell(pages))
        found = self.tree.peek(Key.of(prefix[1], namespace), 10**6)
        if found.deepest is None:
            return multiple()
        kept = self.path(found.deepest)  # the edge may go on beyond the match
        assert kept[1][: found.num_page_tokens] == prefix[1][: found.num_page_tokens]
        return self.hold(Held(self.tree.lock_pages(found.deepest), kept, is_state=False))

    @rule(target=locks, pages=PAGES, namespace=NAMESPACES)
    def lock_state(self, pages: list[str], namespace: str) -> object:
        ids = self.spell(pages)
        found = self.tree.peek(Key.of(ids, namespace), 10**6)
        if found.checkpoint is None:
            return multiple()
        return self.hold(
            Held(self.tree.lock_state(found.checkpoint), (namespace, ids[: found.num_tokens]), is_state=True)
        )

    def hold(self, held: Held) -> Held:
        self.model.held.append(held)
        return held

    @rule(held=consumes(locks))
    def unlock(self, held: Held) -> None:
        self.tree.unlock(held.lock)
        self.model.held.remove(held)
        with pytest.raises(LockError):
            self.tree.unlock(held.lock)

    @rule(wanted=st.integers(0, 8))
    def evict_pages(self, wanted: int) -> None:
        free_to_go = len(self.model.pages.keys() - self.model.kept_pages())
        released = self.tree.evict_pages(wanted)
        assert len(released.pages) >= min(wanted, free_to_go)
        gone = self.take(released)
        for prefix in gone[wanted:]:  # more than asked for goes only as a tombstone that has lost its last child
            assert prefix not in self.model.checkpoints
            assert not any(
                other[0] == prefix[0] and other[1][: len(prefix[1])] == prefix[1] for other in self.model.pages
            )

    @rule(wanted=st.integers(0, 4))
    def evict_checkpoints(self, wanted: int) -> None:
        free_to_go = self.model.checkpoints.keys() - self.model.kept_checkpoints()
        released = self.tree.evict_checkpoints(wanted)
        assert not released.pages
        owner = {slot: prefix for prefix, slot in self.model.checkpoints.items()}
        gone = [owner[slot] for slot in released.slots]
        assert len(gone) == min(wanted, len(free_to_go))
        assert free_to_go.issuperset(gone)
        for prefix in gone:
            del self.model.checkpoints[prefix]

    @rule(wanted=st.integers(1, 4))
    def evict_one(self, wanted: int) -> None:
        """A checkpoint that may go and no page; or pages of one leaf without a checkpoint, and no checkpoint."""
        free_pages = self.model.pages.keys() - self.model.kept_pages()
        free_checkpoints = self.model.checkpoints.keys() - self.model.kept_checkpoints()
        released = self.tree.evict_one(wanted)
        if released.slots:
            assert not released.pages
            (prefix,) = [p for p, slot in self.model.checkpoints.items() if slot == released.slots[0]]
            assert prefix in free_checkpoints
            del self.model.checkpoints[prefix]
        elif released.pages:
            self.take(released)
        else:
            assert not free_checkpoints
            assert not free_pages

    @rule()
    def evict_all(self) -> None:
        released = self.tree.evict_all()
        kept = self.model.kept_checkpoints()
        for prefix in [p for p in self.model.checkpoints if p not in kept]:
            released.slots.remove(self.model.checkpoints.pop(prefix))
        assert released.slots == []
        self.take(released)
        assert self.model.pages.keys() == self.model.kept_pages()

    def take(self, released: Released) -> list[Prefix]:
        """Remove what went: pages that no lock keeps, each with its checkpoint. Returns the prefixes in order."""
        owner = {page: prefix for prefix, page in self.model.pages.items()}
        gone = [owner[page] for page in released.pages]
        assert len(set(gone)) == len(gone)
        assert self.model.kept_pages().isdisjoint(gone)
        for prefix in gone:
            del self.model.pages[prefix]
            if len(prefix[1]) % self.model.grid == 0:
                self.model.evicted.add(prefix)
        lost = [self.model.checkpoints.pop(prefix) for prefix in gone if prefix in self.model.checkpoints]
        assert sorted(released.slots) == sorted(lost)
        return gone

    def path(self, node: object) -> Prefix:
        """The prefix at a node's end."""
        return next(prefix for prefix, other in self.walk() if other is node)

    def walk(self) -> list[tuple[Prefix, object]]:
        paths: dict[int, tuple[int, ...]] = {}
        found: list[tuple[Prefix, object]] = []
        for namespace, node in self.tree.nodes():
            paths[id(node)] = paths.get(id(node.parent), ()) + tuple(array("i", node.edge))
            found.append(((namespace, paths[id(node)]), node))
        return found

    @invariant()
    def every_node_holds_what_the_model_says(self) -> None:
        tree, model = self.tree, self.model
        pages, checkpoints = {}, {}
        for namespace, node in tree.nodes():
            prefix = self.path(node)
            assert node.end == len(prefix[1])
            assert len(node.pages) > 0
            for end, page in zip(model.ends(prefix)[-len(node.pages) :], node.pages, strict=True):
                assert end not in pages
                pages[end] = page
            if node.slot is not None:
                checkpoints[prefix] = node.slot
            assert tree.knows(namespace)
        assert (pages, checkpoints) == (model.pages, model.checkpoints)
        assert tree.check() == []
        assert all(tree.knows(name) == any(p[0] == name for p in pages) for name in ("", "other"))

    @invariant()
    def every_prefix_is_found(self) -> None:
        for namespace, ids in self.model.pages:
            self.compare(self.tree.peek(Key.of(ids, namespace), 10**6), (namespace, ids))

    @invariant()
    def locks_keep_what_the_model_says(self) -> None:
        held = self.model.held
        assert self.tree.locks.num_pages == len(self.model.kept_pages())
        assert sum(node.page_locks for _, node in self.tree.nodes()) == len(held)
        assert sum(node.state_locks for _, node in self.tree.nodes()) == sum(h.is_state for h in held)
        assert self.model.checkpoints.keys() >= self.model.kept_checkpoints()
        assert self.model.pages.keys() >= self.model.kept_pages()


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=100, stateful_step_count=40, database=None)
