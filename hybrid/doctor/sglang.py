"""A model of SGLang's cache of hybrid models (0.5.23, its unified radix cache, pages of 64 tokens, states in an extra
buffer), and of what its scheduler asks of it.

Two pools: pages, and slots of states. A radix tree whose edges are pages; a node may have a state at its end. A prompt
hits up to the deepest matched node with a state. States that a request computes are those at the last page of each part
of its prefill, or where prompts were found to part, and at multiples of 256 tokens of its answer. Pages are evicted by
leaves, states by themselves, each the least recently used first. `bench/doctor.py` compares its hits with those of
SGLang's own.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Any

from hybrid.doctor.engine import MAX_RUNNING, MISS, Hit
from hybrid.doctor.radix import Radix, RadixNode
from hybrid.doctor.request import LoggedRequest
from hybrid.doctor.sizes import Endless, Memory, Sizes
from hybrid.errors import MemoryBudgetError
from hybrid.units import ceil_div, format_bytes

PAGE = 64
"""Tokens of a page, and between two positions at which a prefill can leave a state."""

TRACK = 256
"""Tokens between two states that are kept of an answer, SGLang's `--mamba-track-interval`."""

STATE_RATIO = 0.9
"""Memory of states over that of pages, SGLang's `--mamba-full-memory-ratio`."""

PART = 8192
"""Tokens of a prefill that are computed at a time, SGLang's `--chunked-prefill-size`."""

SLOTS = 3
"""States that a request holds: the one in use, and two that track it."""

SLOTS_PER_RUNNING = 5
"""States for which SGLang lets one request run: those that it holds, that it has found, and that it leaves."""

ENDLESS = 1 << 60


class SglangNode(RadixNode):
    """A node of SGLang's tree.

    Attributes:
        has_state: there is a state at its end.
        used: when its pages were used last.
        locks, state_locks: requests that hold its pages, and its state.
    """

    __slots__ = ("has_state", "locks", "state_locks", "used")

    def __init__(self, parent: SglangNode | None, hashes: array[int], used: float) -> None:
        super().__init__(parent, hashes)
        self.used: float = used
        self.has_state: bool = False
        self.locks: int = 0
        self.state_locks: int = 0


class SglangRunning:
    """A request that runs.

    Attributes:
        request, hashes: what it is, and the hashes of its pages.
        hit: what of its prompt was cached.
        computed: tokens that are there.
        found: the node up to which the tree has its pages, locked.
        branch: where prompts were found to part, in pages; 0: nowhere.
        held: pages of its own.
        own: pages of the tree that it uses.
    """

    __slots__ = ("branch", "computed", "found", "hashes", "held", "hit", "own", "request")

    def __init__(
        self, request: LoggedRequest, hashes: array[int], hit: Hit, found: SglangNode, branch: int, held: int
    ) -> None:
        self.request: LoggedRequest = request
        self.hashes: array[int] = hashes
        self.hit: Hit = hit
        self.found: SglangNode = found
        self.branch: int = branch
        self.held: int = held
        self.computed: int = hit.num_tokens
        self.own: int = hit.num_tokens // PAGE


class SglangSteps:
    """How SGLang's scheduler divides requests into steps: prompts first, in parts that end at pages."""

    mixes: bool = False
    shares_at_once: bool = False
    part: int = PART
    max_running: int = MAX_RUNNING

    def new_step(self) -> None:
        """A step begins."""

    def end_of_part(self, running: Any, budget: int) -> int:
        """Where the next part of its prompt ends: of a part that is cut, at a page."""
        start, num_prompt = running.computed, running.request.num_prompt
        budget = min(budget, self.part)
        return int(num_prompt if num_prompt - start <= budget else start + budget // PAGE * PAGE)

    def next_event(self, running: Any) -> int:
        """The token with which its answer takes a page more."""
        return int(running.computed // PAGE * PAGE + PAGE)


def pools_of(sizes: Sizes, memory: int, state_ratio: float = STATE_RATIO) -> tuple[int, int]:
    """The slots of states and the pages of SGLang's two pools.

    Raises:
        MemoryBudgetError: the memory does not hold the states of one request, or two pages.
    """
    has_states = sizes.state_bytes > 0
    of_states = memory * state_ratio / (1 + state_ratio) if has_states else 0.0
    slots = int(of_states / sizes.state_bytes) if has_states else ENDLESS
    pages = int((memory - of_states) / sizes.token_bytes) // PAGE
    if slots <= SLOTS or pages < 2:
        needed = (SLOTS + 1) * sizes.state_bytes * (1 + state_ratio) / state_ratio
        raise MemoryBudgetError(
            f"SGLang has room for {slots} states and {pages} pages in {format_bytes(memory)}; a request needs {SLOTS} "
            f"and one that stays: give at least {format_bytes(int(needed) + 1 + 4 * PAGE * sizes.token_bytes)}"
        )
    return slots, pages


def running_of(slots: int) -> int:
    """Requests that run at a time, at most, with a number of slots of states."""
    return max(1, min(MAX_RUNNING, slots // SLOTS_PER_RUNNING))


class SglangScheduler(SglangSteps):
    """SGLang's cache.

    Args:
        sizes: of the model.
        memory: bytes of pages and states together, or what is endless.
        part: tokens of a prefill that are computed at a time.
        state_ratio: memory of states over that of pages.

    Raises:
        MemoryBudgetError: the memory does not hold the states of one request, or two pages.
    """

    def __init__(self, sizes: Sizes, memory: Memory, *, part: int = PART, state_ratio: float = STATE_RATIO) -> None:
        self.part, self._has_states = part, sizes.state_bytes > 0
        if isinstance(memory, Endless):
            self._free_pages = self._free_slots = ENDLESS
        else:
            self._free_slots, self._free_pages = pools_of(sizes, memory, state_ratio)
            self.max_running = running_of(self._free_slots)
        self._clock = 0
        self._tree = Radix(SglangNode(None, array("Q"), 0.0))
        self._states: OrderedDict[SglangNode, None] = OrderedDict()  # nodes with a state, the least recently used first
        self._leaves: list[tuple[float, int, SglangNode]] = []  # leaves by their last use; entries may be out of date
        self._pushed = 0

    def serve(self, request: LoggedRequest) -> Hit:
        """Serve a request from its prompt to its last token."""
        running = self.begin(request)
        if running is None:
            return MISS
        while running.computed < request.num_prompt:
            self.advance(running, self.end_of_part(running, self.part))
        self.advance(running, max(request.num_prompt, request.num_tokens - 1))
        self.end(running)
        return running.hit

    def begin(self, request: LoggedRequest, budget: int | None = None) -> SglangRunning | None:
        """Find a request's prompt, lock what is found, and take pages for the rest of it and slots for its states."""
        num_prompt = request.num_prompt
        if budget is not None and budget < PAGE:
            return None
        hashes = array("Q", request.blocks(PAGE, request.num_tokens))
        found, hit, num_pages = self._match(hashes, (num_prompt - 1) // PAGE)
        needed = SLOTS if self._has_states else 0
        self._lock(found)
        held = ceil_div(num_prompt, PAGE) - hit
        if not self._give_slots(needed):
            self._unlock(found)
            return None
        self._free_slots -= needed
        if not self._give_pages(held):
            self._unlock(found)
            self._free_slots += needed
            return None
        self._free_pages -= held
        branch = num_pages if num_pages > hit else 0
        return SglangRunning(request, hashes, Hit(hit * PAGE, num_pages * PAGE), found, branch, held)

    def advance(self, running: SglangRunning, end: int) -> bool:
        """Compute a part of a prompt, which the tree then has, or tokens of an answer."""
        start, num_prompt = running.computed, running.request.num_prompt
        if end <= num_prompt:
            if start < end:
                self._checkpoint(running, start, end)
        else:
            there = max(start + 1, num_prompt) if start > num_prompt else num_prompt
            more = ceil_div(end + 1, PAGE) - ceil_div(there, PAGE)
            if not self._give_pages(more):
                return False
            self._free_pages -= more
            running.held += more
        running.computed = end
        return True

    def end(self, running: SglangRunning) -> None:
        """Give up what a request holds; of an answer that has ended the tree keeps what has a state at its end."""
        num_prompt, num_tokens = running.request.num_prompt, running.request.num_tokens
        if running.computed >= max(num_prompt, num_tokens - 1):
            step = TRACK if self._has_states else PAGE
            last = num_tokens // step * step // PAGE
            if last * PAGE > num_prompt:
                there, _, is_new = self._insert(running.hashes, last)
                self._free_pages += max(0, there - running.own)
                running.held -= last - running.own
                self._free_slots -= self._has_states and is_new
        self._free_pages += running.held
        self._free_slots += SLOTS if self._has_states else 0
        self._unlock(running.found)

    def _checkpoint(self, running: SglangRunning, start: int, end: int) -> None:
        """Give the tree the pages of a part of a prompt, and the state that it leaves."""
        position = end // PAGE
        if start // PAGE < running.branch < position + (end % PAGE == 0):
            position = running.branch
        if end - start < PAGE or not self._give_slots(1 if self._has_states else 0):
            return
        self._free_slots -= self._has_states
        there, node, is_new = self._insert(running.hashes, position)
        self._free_pages += max(0, there - running.own)  # pages that the tree has already are given back
        running.held -= position - running.own
        running.own = position
        if not is_new:
            self._free_slots += self._has_states
        self._unlock(running.found)
        self._lock(node)
        running.found = node

    # The tree

    def _now(self) -> int:
        self._clock += 1
        return self._clock

    def _match(self, hashes: array[int], limit: int) -> tuple[SglangNode, int, int]:
        """Find the longest prefix that is cached.

        Returns:
            The node of the last state, the pages up to it, and the pages that are cached.
        """
        best, at, hit = self._tree.root, 0, 0
        while (found := self._tree.next(hashes, at, limit)) is not None:
            node, same = found
            at += same
            if same < len(node.hashes):
                node = self._split(node, same)
            if node.has_state or not self._has_states:
                best, hit = node, at
        if best.has_state:
            self._states.move_to_end(best)
        used: float = self._now()
        above: SglangNode | None = best
        while above is not None and above is not self._tree.root:
            self._use(above, used)
            used -= 1e-5
            above = above.parent
        return best, hit, at

    def _insert(self, hashes: array[int], end: int) -> tuple[int, SglangNode, bool]:
        """Enter the pages up to one, and the state at its end.

        Returns:
            Pages that were there, the node of the last, and whether its state is a new one.
        """
        node, there = self._tree.root, 0
        while (found := self._tree.next(hashes, there, end)) is not None:
            node, same = found
            self._use(node, self._now())
            if same < len(node.hashes):
                node = self._split(node, same)
            there += same
        if there < end:
            node = SglangNode(node, hashes[there:end], self._now())
            self._tree.add(node)
            self._offer(node)
        is_new = not node.has_state
        if self._has_states:
            node.has_state = True
            self._states[node] = None
            self._states.move_to_end(node)
            if there == end:
                self._use(node, self._now())
        return there, node, is_new

    def _split(self, node: SglangNode, size: int) -> SglangNode:
        """Cut a node in two. Returns the upper one, which has no state."""
        upper = SglangNode(node.parent, node.hashes[:size], self._now())
        upper.locks = node.locks
        self._tree.cut(node, upper)
        self._use(node, self._now())
        return upper

    # What is used and what is evicted

    def _use(self, node: SglangNode, used: float) -> None:
        node.used = used
        self._offer(node)

    def _offer(self, node: SglangNode) -> None:
        """Enter a node among the leaves that may be evicted, if it is one."""
        if node.num_children or node.locks or node.state_locks or node.parent is None:
            return
        self._pushed += 1
        heappush(self._leaves, (node.used, self._pushed, node))
        if len(self._leaves) > 64 + 4 * len(self._tree):
            self._leaves = [entry for entry in self._leaves if self._is_leaf(entry)]
            heapify(self._leaves)

    def _is_leaf(self, entry: tuple[float, int, SglangNode]) -> bool:
        used, _, node = entry
        is_free = not (node.num_children or node.locks or node.state_locks) and node.parent is not None
        return is_free and used == node.used

    def _lock(self, node: SglangNode) -> None:
        node.state_locks += 1
        above: SglangNode | None = node
        while above is not None:
            above.locks += 1
            above = above.parent

    def _unlock(self, node: SglangNode) -> None:
        node.state_locks -= 1
        above: SglangNode | None = node
        while above is not None:
            above.locks -= 1
            if not above.locks:
                self._offer(above)
            above = above.parent

    def _give_slots(self, count: int) -> bool:
        """Evict states until `count` slots are free: a leaf goes with its pages, of another node the state alone."""
        while self._free_slots < count:
            node = next((node for node in self._states if not node.state_locks), None)
            if node is None:
                return False
            if node.num_children or node.locks:
                self._drop_state(node)
            else:
                self._drop(node)
        return True

    def _give_pages(self, count: int) -> bool:
        """Evict leaves until `count` pages are free."""
        while self._free_pages < count:
            if not self._leaves:
                return False
            entry = heappop(self._leaves)
            if self._is_leaf(entry):
                self._drop(entry[2])
        return True

    def _drop_state(self, node: SglangNode) -> None:
        del self._states[node]
        node.has_state = False
        self._free_slots += 1

    def _drop(self, node: SglangNode) -> None:
        """Evict a leaf: its pages, and its state."""
        if node.has_state:
            self._drop_state(node)
        self._free_pages += len(node.hashes)
        self._offer(self._tree.remove(node))
