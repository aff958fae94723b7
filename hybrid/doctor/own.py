"""Our cache in numbers: its tree, its policies and its placement serve the requests of traffic; memory is bytes.

Pages and states are not numbered and have no places: what this package's arena does against fragmentation is left out.
`tests/doctor/test_own.py` holds the hits to those of a `HybridCache`.
"""

from __future__ import annotations

from array import array

import numpy as np

from hybrid.cache import placement
from hybrid.cache.cache import GHOSTS_PER_PAGE, MIN_GHOSTS, SPARE_SHARE
from hybrid.cache.config import DEFAULT_PLACEMENT
from hybrid.doctor.engine import MAX_RUNNING, MISS, Hit
from hybrid.doctor.request import UNIT, LoggedRequest
from hybrid.doctor.sizes import Endless, Memory, Sizes
from hybrid.errors import MemoryBudgetError
from hybrid.key import TOKEN_BYTES, Key, common_prefix
from hybrid.memory.arena import PieceLayout
from hybrid.memory.memory import smallest_memory
from hybrid.tree.node import Checkpoint, Kind, Match, Node, NodeUsage, PageLock, Released, StateLock
from hybrid.tree.paths import Path
from hybrid.tree.policies import policy_of
from hybrid.tree.policy import Policy
from hybrid.tree.tree import Tree
from hybrid.units import Prices, ceil_div, format_bytes

PAGE = 64
"""Tokens of a page."""

GRID = PAGE // UNIT
"""Hashes of a page, which stand for its tokens. Positions in keys and in the tree are numbers of hashes."""

SLOT = 1
"""What identifies a state in the tree: all are alike."""

ENDLESS = 1 << 60


class OwnRunning:
    """A request that runs.

    Attributes:
        request, key: what it is.
        hit: what of its prompt was cached.
        computed: tokens that are there.
        num_pages, num_shared: pages that it has, and those of them that the tree owns.
        lock, state_lock: on the tree's pages, and on the state that it resumes from.
        captured: states that it takes, by their positions.
        lost: usage of states on its path that were evicted or not admitted, by their positions.
        has_state: it has the state that it works on.
        turn: number of turn ends before it.
        path: what the policy knows it by.
        hashes: of its key, as far as they are known.
    """

    __slots__ = (
        "captured",
        "computed",
        "has_state",
        "hit",
        "key",
        "lock",
        "lost",
        "num_pages",
        "num_shared",
        "path",
        "request",
        "state_lock",
        "turn",
    )

    def __init__(self, request: LoggedRequest, key: Key, found: Match) -> None:
        self.request: LoggedRequest = request
        self.key: Key = key
        self.hit = Hit(found.num_tokens * UNIT, found.num_page_tokens * UNIT)
        self.computed: int = self.hit.num_tokens
        self.num_pages: int = found.num_page_tokens // GRID
        self.num_shared: int = self.num_pages
        self.lock: PageLock | None = None
        self.state_lock: StateLock | None = None
        self.captured: dict[int, Kind | None] = {}  # None: only because memory is free
        self.lost: dict[int, NodeUsage] = {}
        self.has_state: bool = False
        self.turn: int = 0
        self.path: Path | None = None

    @property
    def node(self) -> Node | None:
        """Where the tree's pages of it end."""
        return self.lock.node if self.lock is not None else None


class OwnCache:
    """Our cache.

    Args:
        sizes: of the model.
        memory: bytes of pages and states, or what is endless.
        eviction: the policy, as in `CacheConfig`.

    Attributes:
        tree: of what is cached.

    Raises:
        MemoryBudgetError: the memory does not hold a page and the states of one request.
    """

    mixes = True
    max_running = MAX_RUNNING
    shares_at_once = False

    def __init__(self, sizes: Sizes, memory: Memory, *, eviction: str | Policy = "lhd") -> None:
        page_bytes, state_bytes = PAGE * sizes.token_bytes, sizes.state_bytes or 64
        if isinstance(memory, Endless):
            self._page = self._state = 0
            self._total = ENDLESS
            prices, num_pages = Prices(), 2 * memory.num_tokens // PAGE
        else:
            layout = PieceLayout.of(page_bytes, state_bytes)
            needed = smallest_memory(1, page_bytes, state_bytes, None) - layout.num_bytes
            if memory < needed:
                raise MemoryBudgetError(
                    f"this package has no room for one request of this model in {format_bytes(memory)}: give at least "
                    f"{format_bytes(needed)}"
                )
            self._page, self._state = layout.num_bytes // layout.pages, layout.num_bytes // layout.states
            self._total = memory // layout.num_bytes * layout.num_bytes + (layout.states - 1) * self._state
            prices, num_pages = Prices(self._page, self._state, self._total), self._total // self._page
        ghosts = max(MIN_GHOSTS, GHOSTS_PER_PAGE * num_pages)
        self.tree = Tree(GRID, GRID, policy_of(eviction), prices, max_ghosts=ghosts)
        self._free = self._total
        self._pages = array("i")  # as many as the longest request has: what they are does not count
        self._prompts: list[OwnRunning] = []  # requests whose prompts are not computed yet

    def serve(self, request: LoggedRequest) -> Hit:
        """Serve a request from its prompt to its last token."""
        running = self.begin(request)
        if running is None:
            return MISS
        self.advance(running, request.num_prompt)
        self.advance(running, max(request.num_prompt, request.num_tokens - 1))
        self.end(running)
        return running.hit

    def new_step(self) -> None:
        """A step begins."""

    def begin(self, request: LoggedRequest, budget: int | None = None) -> OwnRunning | None:
        """Open a request, and take room for the states of its prompt. It waits for one that is about to compute more
        of its prompt than is there."""
        ids = np.frombuffer(request.hashes, np.uint64).astype(np.uint32)  # the lower half of each
        key, num_input = Key(ids.tobytes(), request.namespace), ceil_div(request.num_prompt, UNIT)
        found = self.tree.peek(key, num_input - 1)
        if budget is not None and (budget < PAGE or self._wait(key, num_input, found.num_tokens)):
            return None
        running = OwnRunning(request, key, found)
        if not self._open(running, found, num_input):
            self._close(running)
            return None
        self._prompts.append(running)
        return running

    def end_of_part(self, running: OwnRunning, budget: int) -> int:
        """Where the next part of its prompt ends: at a page, or at its end."""
        start, num_prompt = running.computed, running.request.num_prompt
        return num_prompt if num_prompt - start <= budget else (start + budget) // PAGE * PAGE

    def next_event(self, running: OwnRunning) -> int:
        """The token with which its answer takes a page more."""
        return running.computed // PAGE * PAGE + PAGE

    def advance(self, running: OwnRunning, end: int) -> bool:
        """Compute a part of a prompt, which the tree then has, or tokens of an answer."""
        request = running.request
        if end > request.num_prompt:
            missing = end // PAGE + 1 - running.num_pages
            if missing > 0 and not self._give_pages(running, missing):
                return False
        elif end > running.computed or end == request.num_prompt:
            if running.state_lock is not None:
                self.tree.unlock(running.state_lock)
                running.state_lock = None
            self._commit(running, ceil_div(end, UNIT) // GRID * GRID)
        running.computed = end
        if end >= request.num_prompt and running in self._prompts:
            self._prompts.remove(running)
        return True

    def end(self, running: OwnRunning) -> None:
        """Close a request; the tree keeps an answer that has ended, and the state at its end."""
        request = running.request
        if running.computed >= max(request.num_prompt, request.num_tokens - 1):
            whole = request.num_tokens // UNIT // GRID * GRID
            if whole > ceil_div(request.num_prompt, UNIT):
                self._capture(running, whole, Kind.TURN_END)
            self._commit(running, whole)
            boundary, node = len(running.key) // GRID * GRID, running.node
            while node is not None and node.end > boundary:
                node = node.parent
            if node is not None and node.end == boundary:
                self.tree.relabel(node, Kind.PROMPT_END, Kind.TURN_END)
            self.tree.ended(running.path, request.num_tokens - request.num_prompt)
        elif running in self._prompts:
            self._prompts.remove(running)
        self._close(running)

    def check(self) -> list[str]:
        """Check that what is in use is what the tree owns, while no request runs. Returns what is wrong."""
        tree, wrong = self.tree, self.tree.check()
        in_use = self._total - self._free
        owned = self._page * tree.num_pages + self._state * tree.num_checkpoints
        if in_use != owned:
            wrong.append(f"{in_use} bytes are in use, and the tree owns {owned}")
        return wrong

    # A request

    def _wait(self, key: Key, num_input: int, usable: int) -> bool:
        """Return whether a request waits for one that runs, which leaves a state where they part."""
        for other in self._prompts:
            if other.key.namespace != key.namespace:
                continue
            most = min(num_input - 1, ceil_div(other.request.num_prompt, UNIT)) * TOKEN_BYTES
            shared = common_prefix(key.ids, other.key.ids, 0, 0, GRID * TOKEN_BYTES, most) // TOKEN_BYTES
            if shared > usable and other.computed < shared * UNIT:
                if shared not in other.captured:
                    self._capture(other, shared, Kind.BRANCH)
                return True
        return False

    def _open(self, running: OwnRunning, found: Match, num_input: int) -> bool:
        """Lock what is found, and take pages for the rest of a prompt and room for its states. False: there is none."""
        tree, key = self.tree, running.key
        if found.deepest is not None:
            running.lock = tree.lock_match(found)
            found = found._replace(deepest=running.lock.node)
        if found.checkpoint is not None:
            running.state_lock = tree.lock_state(found.checkpoint)
        missing = ceil_div(num_input, GRID) - running.num_pages
        if not (self._can_have(self._state + missing * self._page) and self._make_room(self._state)):
            return False
        self._free -= self._state
        running.has_state = True
        if not self._give_pages(running, missing):
            return False
        seconds = running.request.time
        tree.use_clock(None if seconds is None else lambda: seconds)
        tree.touch(found)
        past = tree.recall(key, found, num_input - 1)
        running.turn, running.lost = past.turn, past.gone
        running.path = tree.report_misses(found, past, num_input - 1)
        known = past.num_tokens // GRID * GRID
        branch = known if known > max(found.num_tokens, found.branching_len or 0) else found.branching_len
        wanted = placement.of_prompt(
            DEFAULT_PLACEMENT,
            num_input,
            GRID,
            branching_len=branch,
            shared=(),
            declared=(),
            is_replay=False,
            hit=found.num_tokens,
            spacing=tree.anchor_spacing(num_input),
        )
        for position, kind in wanted.items():
            if position > found.num_tokens:
                self._capture(running, position, kind)
        for position in placement.spare(found.num_tokens, num_input, GRID, self._free / self._total):
            if position not in wanted and not self._capture_spare(running, position):
                break
        return True

    def _close(self, running: OwnRunning) -> None:
        """Give back all that a request holds."""
        for lock in (running.lock, running.state_lock):
            if lock is not None:
                self.tree.unlock(lock)
        num_states = len(running.captured) + running.has_state
        self._free += self._page * (running.num_pages - running.num_shared) + self._state * num_states

    def _capture(self, running: OwnRunning, position: int, kind: Kind) -> bool:
        """Take room for a state, if it is worth more than what is evicted for it, and the tree has none there."""
        if self._is_there(running, position):
            return False
        if kind is not Kind.ANCHOR and self._free < self._state and not self._is_admitted(running, position, kind):
            return False
        if not self._make_room(self._state):
            return False
        self._free -= self._state
        running.captured[position] = kind
        return True

    def _capture_spare(self, running: OwnRunning, position: int) -> bool:
        """Take room for a state while much memory is free. False: it is not."""
        if self._free / self._total <= SPARE_SHARE or self._is_there(running, position):
            return False
        self._free -= self._state
        running.captured[position] = None
        return True

    def _is_there(self, running: OwnRunning, position: int) -> bool:
        """Return whether the tree has a state there."""
        node = running.node
        if position > len(running.key) or (node is not None and node.end < position and not node.children):
            return False
        return self.tree.peek(running.key, position).num_tokens == position

    def _is_admitted(self, running: OwnRunning, position: int, kind: Kind) -> bool:
        """Ask the policy; what it does not admit is remembered with the request."""
        usage = running.lost.setdefault(position, self.tree.new_usage(kind, running.turn, running.path))
        self.tree.stored_for(usage, running.key.namespace, 0)
        node = running.node
        if node is not None and node.slot is None:
            node = node.checkpoint_above()
        while node is not None and node.end >= position:
            node = node.checkpoint_above()
        above = max((other for other in running.captured if other < position), default=0)
        above = max(above, node.end if node is not None else 0)
        return self.tree.admits(usage, position, above, kind is Kind.TURN_END, True)

    def _commit(self, running: OwnRunning, end: int) -> None:
        """Give the tree all pages up to a position, and the states that are captured there. Nothing is evicted
        meanwhile, so that only where it ends is locked."""
        node = running.node
        for position in sorted({*running.captured, *running.lost}):
            if 0 < position <= end:
                node = self._insert(running, position, node)
        if end > running.num_shared * GRID:
            node = self._insert(running, end, node)
        old, shared = running.lock, running.num_shared * GRID
        if node is not None and (old is None or old.node is not node or node.end > shared):
            running.lock = self.tree.lock_pages(node, shared)
            if old is not None:
                self.tree.unlock(old)

    def _insert(self, running: OwnRunning, end: int, below: Node | None) -> Node | None:
        """Give the tree pages up to a position, with the state there, if there is one.

        Args:
            below: where the pages of it end that the tree has.

        Returns:
            Where they end now.
        """
        tree, num_pages = self.tree, end // GRID
        checkpoint = None
        if end in running.captured:
            kind = running.captured.pop(end)
            checkpoint = Checkpoint(SLOT, end, kind or Kind.INTERVAL, 0, running.turn, kind is None)
        inserted = tree.insert(
            running.key,
            end,
            self._some(num_pages),
            checkpoint,
            below,
            running.lost.pop(end, None),
            path=running.path,
        )
        if checkpoint is not None and not inserted.adopted:
            self._free += self._state
        existing = inserted.num_existing // GRID
        if existing > running.num_shared:  # the tree has had these: the request's own are given back
            self._free += self._page * (existing - running.num_shared)
            running.num_shared = existing
        if num_pages < running.num_shared:
            return below
        running.num_shared = num_pages
        return inserted.node

    def _some(self, count: int) -> array[int]:
        """As many pages."""
        if count > len(self._pages):
            self._pages = array("i", bytes(8 * count))
        return self._pages[:count]

    # Memory

    def _give_pages(self, running: OwnRunning, count: int) -> bool:
        """Take pages for a request. False: there is no room."""
        if not self._make_room(count * self._page):
            return False
        self._free -= count * self._page
        running.num_pages += count
        return True

    def _can_have(self, num_bytes: int) -> bool:
        """Return whether that many bytes are free if all is evicted that can be."""
        tree, locks = self.tree, self.tree.locks
        pages, states = tree.num_pages - locks.num_pages, tree.num_checkpoints - locks.num_checkpoints
        return self._free + pages * self._page + states * self._state >= num_bytes

    def _make_room(self, num_bytes: int) -> bool:
        """Have that many bytes free: what is worth least is evicted. False, and nothing is, where all of it would not
        do."""
        if self._free >= num_bytes:
            return True
        if not self._can_have(num_bytes):
            return False
        while self._free < num_bytes:
            released = Released()
            self.tree.evict_one(ceil_div(num_bytes - self._free, self._page), released)
            if not released.pages and not released.slots:
                return False
            self._free += self._page * len(released.pages) + self._state * len(released.slots)
        return True
