"""The shared parts of tests of a cache's bookkeeping: trees in letters, caches that audit themselves, a model that only
remembers."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import count
from random import Random
from typing import Any

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.lease import Lease
from hybrid.key import Key
from hybrid.memory.contents import GivenContents
from hybrid.memory.memory import CacheMemory
from hybrid.memory.pool import EMPTY_STATE
from hybrid.tree.node import Checkpoint, Inserted, Kind, Match, Node, Released
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.tree import Tree


def spell(pages: str, page_size: int) -> list[int]:
    """Token ids of pages written as letters: "ab" in pages of two tokens is a a b b."""
    return [ord(letter) for letter in pages for _ in range(page_size)]


class TreeCase:
    """A tree written in letters, one letter a page of two tokens. Pages count from 0 and slots from 1, as they come."""

    def __init__(self, page_size: int = 2, grid: int = 2, max_ghosts: int = 1000) -> None:
        self.tree = Tree(page_size, grid, LeastRecentlyUsed(), max_ghosts=max_ghosts)
        self._pages, self._slots = count(), count(1)

    def key(self, text: str, namespace: str = "", cut: int = 0) -> Key:
        """The key of a text, without its last `cut` tokens."""
        ids = spell(text, self.tree.page_size)
        return Key.of(ids[: len(ids) - cut], namespace)

    def put(self, text: str, namespace: str = "", *, spare: bool = False) -> Inserted:
        """Insert a text; one that ends in "*" brings a checkpoint. Offers a fresh page for each letter."""
        letters = text.removesuffix("*")
        key = self.key(letters, namespace)
        checkpoint = (
            Checkpoint(next(self._slots), len(key), Kind.INTERVAL if spare else Kind.BRANCH, is_spare=spare)
            if text.endswith("*")
            else None
        )
        return self.tree.insert(key, len(key), [next(self._pages) for _ in letters], checkpoint)

    def peek(self, text: str, namespace: str = "", *, limit: int = 10**6, cut: int = 0) -> Match:
        return self.tree.peek(self.key(text, namespace, cut), limit)

    def use(self, text: str) -> Match:
        """Match as a request does, which counts as a use."""
        return self.tree.match(self.key(text), 10**6)

    def node(self, text: str, namespace: str = "") -> Node:
        """The node that ends where the text does."""
        node = self.peek(text, namespace).deepest
        assert node is not None and node.end == len(text) * self.tree.page_size
        return node

    def draw(self, namespace: str = "") -> list[str]:
        """A line for each node, indented below its parent: its letters, "*" for a checkpoint, "o" for a tombstone."""
        lines = []
        for name, node in self.tree.nodes():
            if name == namespace:
                path, above = self._letters(node), node.parent
                depth = 0
                while above is not None and above.parent is not None:
                    path, above, depth = self._letters(above) + path, above.parent, depth + 1
                lines.append((path, "  " * depth + self._letters(node) + (" *" if node.slot is not None else " o")))
        return [line for _, line in sorted(lines)]

    def _letters(self, node: Node) -> str:
        return "".join(map(chr, array("i", node.edge)[:: self.tree.page_size]))


class AuditedCache(HybridCache):
    """A cache that proves its books after every action, one that raised included. Keeps what it evicted, in order."""

    def __init__(self, memory: CacheMemory, config: CacheConfig | None = None, model: str | None = None) -> None:
        super().__init__(memory, config, on_evict=self._note, model=model)
        self.victims: list[tuple[list[int], list[int]]] = []

    def _note(self, released: Released) -> None:
        self.victims.append((list(released.pages), list(released.slots)))

    def evict_pages(self, count: int) -> None:
        """Take what the need of another request would take."""
        self.allocator.evict(self.tree.evict_pages, count)

    def evict_checkpoints(self, count: int) -> None:
        """Take what the need of another request would take."""
        self.allocator.evict(self.tree.evict_checkpoints, count)


def _audited(action: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(action)
    def audited(cache: HybridCache, *args: Any) -> Any:
        try:
            return action(cache, *args)
        finally:
            cache.audit()

    return audited


for _name in [
    "open",
    "begin",
    "proceed",
    "reserve",
    "capture",
    "capture_spare",
    "take_back",
    "swap",
    "advance",
    "commit",
    "donate_states",
    "close",
    "clear",
]:
    setattr(AuditedCache, _name, _audited(getattr(HybridCache, _name)))
for _name in ("evict_pages", "evict_checkpoints"):
    setattr(AuditedCache, _name, _audited(getattr(AuditedCache, _name)))


def audited_cache(num_pages: int, num_states: int, page_size: int = 2, chunk_size: int = 2) -> AuditedCache:
    """A cache on indices that audits itself."""
    config = CacheConfig(page_size=page_size, chunk_size=chunk_size, eviction="lru")
    return AuditedCache(CacheMemory.of_indices(num_pages, num_states), config)


def key_of(cache: HybridCache, text: str, namespace: str = "", extra: int = 0) -> Key:
    """The key of a text of pages, and of `extra` more tokens that fill no page."""
    return Key.of(spell(text, cache.config.page_size) + [ord("~")] * extra, namespace)


def start(cache: HybridCache, key: Key) -> Lease:
    """Open a lease with pages for its whole prompt; nothing is computed yet."""
    lease = cache.open(key, len(key) - 1, len(key))
    assert lease is not None
    cache.record(lease.explanation)
    return lease


def prefill(cache: HybridCache, key: Key) -> Lease:
    """Compute a prompt in one pass, with checkpoints at its branching point and its last boundary, and commit it."""
    lease, grid = start(cache, key), cache.config.grid
    for position in sorted({lease.branching_len or 0, len(key) // grid * grid}):
        if position > lease.front_tokens:
            cache.capture(lease, position)
    cache.advance(lease, len(key))
    cache.commit(lease, key, len(key) // cache.config.page_size * cache.config.page_size)
    return lease


def serve(cache: HybridCache, key: Key) -> Lease:
    """A whole request; the lease comes back closed."""
    lease = prefill(cache, key)
    cache.close(lease)
    return lease


def release(cache: HybridCache) -> None:
    """Close what is open and forget the rest; then everything is free."""
    for lease in list(cache.leases):
        cache.close(lease)
    cache.clear()
    stats = cache.stats()
    assert (stats.pages_free, stats.states_free) == (stats.pages_total, stats.states_total)
    assert list(cache.tree.nodes()) == []


Content = tuple[str, tuple[int, ...]]


class Contents:
    """The contents of the units of a memory, and the mover and store of them.

    Args:
        checkpoint_bytes: of a stored checkpoint.

    Attributes:
        fails: every move raises.
        fails_at: which call that reads or writes contents raises; 0: none.
        calls: those so far.
        seen: contents that were read, by the number that stands for them.
    """

    def __init__(self, checkpoint_bytes: int = 0) -> None:
        self.checkpoint_bytes = checkpoint_bytes
        self.fails = False
        self.fails_at = 0
        self.calls = 0
        self.seen: list[Content | None] = []
        self.pages: dict[int, Content] = {}
        self.states: dict[int, Content] = {}
        self.stored: dict[int, Content] = {}

    def _move(self, contents: dict[int, Content], moves: dict[int, int]) -> None:
        if self.fails:
            raise MemoryError("planted")
        assert not moves.keys() & set(moves.values())
        moved = {new: contents[old] for old, new in moves.items() if old in contents}
        for place in (*moves, *moves.values()):
            contents.pop(place, None)
        contents.update(moved)

    def move_pages(self, moves: dict[int, int]) -> None:
        self._move(self.pages, moves)

    def move_states(self, moves: dict[int, int]) -> None:
        self._move(self.states, moves)

    def move_stored(self, moves: dict[int, int]) -> None:
        self._move(self.stored, moves)

    # To be read and written: contents are named by a number of 4 bytes.

    def page_layout(self) -> str:
        return "what a test says"

    checkpoint_layout = page_layout

    def _named(self, content: Content | None) -> bytes:
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError("planted")
        self.seen.append(content)
        return (len(self.seen) - 1).to_bytes(4, "little")

    def _of(self, name: bytes | bytearray | memoryview) -> Content | None:
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError("planted")
        return self.seen[int.from_bytes(name, "little")]

    def read_page(self, page: int) -> bytes:
        return self._named(self.pages.get(page))

    def read_checkpoint(self, slot: int) -> bytes:
        return self._named((self.stored if self.checkpoint_bytes else self.states).get(slot))

    def write_page(self, page: int, contents: bytes | bytearray | memoryview) -> None:
        self._put(self.pages, page, self._of(contents))

    def write_checkpoint(self, slot: int, contents: bytes | bytearray | memoryview) -> None:
        self._put(self.stored if self.checkpoint_bytes else self.states, slot, self._of(contents))

    @staticmethod
    def _put(where: dict[int, Content], place: int, content: Content | None) -> None:
        where.pop(place, None)
        if content is not None:
            where[place] = content

    def store(self, slot: int, place: int) -> None:
        if slot in self.states:
            self.stored[place] = self.states[slot]

    def restore(self, place: int, slot: int) -> None:
        if place in self.stored:
            self.states[slot] = self.stored[place]


class Memory:
    """The tokens that pages and slots would hold, and their namespace. Refuses what a pass may not read or write."""

    def __init__(self, cache: HybridCache) -> None:
        self.cache = cache
        contents = contents_of(cache) if isinstance(cache.memory.contents, GivenContents) else Contents()
        self.pages, self.states = contents.pages, contents.states
        self._stored = contents.stored if cache.memory.stores_smaller else None

    @property
    def checkpoints(self) -> dict[int, Content]:
        """The contents of the checkpoints of the tree."""
        return self.states if self._stored is None else self._stored

    def forward(self, lease: Lease, key: Key, end: int, target: int) -> None:
        """A pass up to token `end`: reads the lease's state and pages, writes pages, checkpoints and target slot."""
        begin, page_size = lease.front_tokens, self.cache.config.page_size
        ids, private = tuple(array("i", key.ids)), lease.private_slots()
        if begin == 0:
            assert lease.read_slot == EMPTY_STATE
        else:
            assert self.states[lease.read_slot] == (key.namespace, ids[:begin])
        assert target in private
        for index, page in enumerate(lease.block_table[: -(-end // page_size)]):
            first, after = index * page_size, (index + 1) * page_size
            if index < lease.num_shared:
                assert self.pages[page] == (key.namespace, ids[:after])
                continue
            if first < begin:
                assert self.pages[page] == (key.namespace, ids[: min(begin, after)])
            self.pages[page] = (key.namespace, ids[: min(end, after)])
        for slot, position, *_ in lease.captured:
            if begin < position <= end:
                assert slot in private
                self.states[slot] = (key.namespace, ids[:position])
        self.states[target] = (key.namespace, ids[:end])

    def check(self) -> None:
        """Every page and every checkpoint of the tree holds what its place in the tree claims."""
        page_size = self.cache.config.page_size
        paths: dict[int, tuple[int, ...]] = {}
        for namespace, node in self.cache.tree.nodes():
            path = paths[id(node)] = paths.get(id(node.parent), ()) + tuple(array("i", node.edge))
            begin = node.end - len(node.pages) * page_size
            for index, page in enumerate(node.pages):
                assert self.pages[page] == (namespace, path[: begin + (index + 1) * page_size])
            if node.slot is not None:
                assert self.checkpoints[node.slot] == (namespace, path)


@dataclass(eq=False, slots=True)
class Running:
    """A request under way: what it will be in the end, and how much of that was the prompt."""

    key: Key
    num_prompt: int
    lease: Lease


class RandomWorkload:
    """Requests that arrive, prefill, decode, finish, are aborted and retracted, in an order drawn from a seed.

    Does what an engine does when memory cannot be allocated: it waits, continues with less, or retracts.

    Args:
        has_faults: allocations that should succeed are made to fail.
    """

    def __init__(self, cache: HybridCache, seed: int, has_faults: bool = False) -> None:
        self.has_faults = has_faults
        self.cache, self.random = cache, Random(seed)
        self.memory = Memory(cache)
        self.running: list[Running] = []
        self.num_finished = 0

    def run(self, num_actions: int) -> None:
        for _ in range(num_actions):
            self.act()

    def act(self) -> None:
        """One action, and the proof that nothing is where it should not be."""
        if not self.running or self.random.random() < 0.2:
            self.arrive()
        else:
            request = self.random.choice(self.running)
            if request.lease.front_tokens == len(request.key):
                self.finish(request)
            elif self.random.random() < 0.03:
                self.end(request)
            elif self.random.random() < 0.05:
                self.fork(request)
            else:
                self.step(request)
        if self.random.random() < 0.005:
            self.cache.clear()
        self.memory.check()

    def arrive(self) -> None:
        random, page_size = self.random, self.cache.config.page_size
        text = "".join(random.choice("aaab") for _ in range(random.randint(1, 8)))
        ids = spell(text, page_size) + [ord("~")] * random.randint(0, page_size)
        key = Key.of(ids, random.choice(("", "", "other")))
        num_prompt = random.randint(1, len(ids))
        prompt = Key.of(ids[:num_prompt], key.namespace)
        before = self._evicted()
        lease = self.cache.open(prompt, num_prompt - 1, random.randint(0, num_prompt))
        if lease is not None:
            self.running.append(Running(key, num_prompt, lease))
        else:
            assert self.has_faults or self._evicted() == before, "an open that fails evicts nothing"

    def _evicted(self) -> tuple[int, int]:
        stats = self.cache.stats()
        return stats.evicted_pages, stats.evicted_checkpoints

    def step(self, request: Running) -> None:
        cache, lease, grid = self.cache, request.lease, self.cache.config.grid
        begin = lease.front_tokens
        end = begin + 1
        if begin < request.num_prompt:
            end = min(request.num_prompt, (begin // grid + self.random.randint(1, 3)) * grid)
        before = self._evicted()
        if not cache.reserve(lease, end):
            assert self.has_faults or self._evicted() == before, "a reservation that fails evicts nothing"
            return self.end(request)
        for position in range(begin // grid * grid + grid, end + 1, grid):
            if position == lease.branching_len or self.random.random() < 0.3:
                cache.capture(lease, position)
            elif self.random.random() < 0.3:
                cache.capture_spare(lease, position)
        swap = begin > 0 and begin % grid == 0 and lease.read_slot == lease.front and cache.take_back(lease)
        target = lease.back if swap else lease.front
        assert target is not None
        self.memory.forward(lease, request.key, end, target)
        if swap:
            cache.swap(lease)
        cache.advance(lease, end)
        if self.random.random() < 0.7:
            cache.commit(lease, request.key, end // cache.config.page_size * cache.config.page_size)

    def fork(self, request: Running) -> None:
        """Another answer to the tokens up to now, if there is memory for a copy of their state."""
        before, own, memory = self._evicted(), request.lease, self.memory
        lease = self.cache.fork(own)
        self.cache.audit()
        if lease is not None:
            if isinstance(
                self.cache.memory.contents, GivenContents
            ):  # what it moves is not where it was; here it is copied
                memory.states[own.front] = memory.states[lease.front]
                memory.pages |= {
                    a: memory.pages[b] for a, b in zip(own.private_pages, lease.private_pages, strict=False)
                }
            else:
                memory.states[lease.front] = memory.states[own.front]
                memory.pages |= {
                    b: memory.pages[a] for a, b in zip(own.private_pages, lease.private_pages, strict=False)
                }
            begun = max(lease.front_tokens, request.num_prompt)
            ids = [*array("i", request.key.ids)[:begun], *spell("b" * self.random.randint(1, 3), 2)]
            self.running.append(Running(Key.of(ids, request.key.namespace), begun, lease))
        else:
            assert self.has_faults or self._evicted() == before, "a fork that fails evicts nothing"

    def finish(self, request: Running) -> None:
        """The end of a request whose text a stop string may have cut."""
        cache, page_size = self.cache, self.cache.config.page_size
        limit = self.random.randint(1, len(request.key)) if self.random.random() < 0.3 else len(request.key)
        cache.donate_states(request.lease, limit)
        cache.commit(request.lease, request.key, limit // page_size * page_size)
        self.num_finished += 1
        self.end(request)

    def end(self, request: Running) -> None:
        self.running.remove(request)
        self.cache.close(request.lease)


def contents_of(cache: HybridCache) -> Contents:
    """The contents of a cache whose memory has some."""
    assert isinstance(cache.memory.contents, GivenContents) and isinstance(cache.memory.contents.mover, Contents)
    return cache.memory.contents.mover


def compute(cache: HybridCache, text: str, namespace: str = "") -> Key:
    """A request that computes its text, with a checkpoint at its end."""
    key, memory = key_of(cache, text, namespace, extra=1), Memory(cache)
    lease = cache.open(key, len(key) - 1, len(key))
    assert lease is not None
    if len(key) - 1 > lease.front_tokens:
        cache.capture(lease, len(key) - 1)
    memory.forward(lease, key, len(key), lease.front)
    cache.advance(lease, len(key))
    cache.commit(lease, key, len(key) - 1)
    cache.close(lease)
    memory.check()
    return key


def evict(cache: AuditedCache) -> None:
    """Everything leaves the device."""
    cache.evict_checkpoints(1000)
    cache.evict_pages(1000)
