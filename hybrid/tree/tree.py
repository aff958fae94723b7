"""The radix tree: which pages hold which tokens, and where a state was kept.

One tree tracks two resources that live and die separately. A node owns the pages of its edge, and may own a
*checkpoint*: the slot of the state after exactly the tokens from the root to the node's end. A node without one is a
*tombstone*.

Invariants (`Tree.check` states them in code):

* Edges are whole pages; `0 < len(edge)`; a child is found by the bytes of the first page of its edge.
* Only leaves are evicted. A lock on a node's pages therefore protects every page above it too, and is only a count.
* The checkpoint of any node may be evicted. `page_locks >= state_locks`.
* A tombstone that loses its last child is evicted with it, unless it is locked (the cascade).

The tree knows integers only: tokens, page ids, slots, counts; or values of the caller's own in place of page ids and
slots, which it does not look into (`hybrid.tree.values`). It allocates and frees nothing: it returns what it evicts.
`match` changes nothing but recency, `peek` changes nothing at all, only `insert` and `lock_match` split.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from typing import Any
from weakref import WeakValueDictionary

from hybrid.errors import OwnershipError
from hybrid.key import NAME_BYTES, TOKEN_BYTES, Key
from hybrid.tree.candidates import Candidates
from hybrid.tree.forest import Forest, descend
from hybrid.tree.ghosts import Ghosts
from hybrid.tree.guard import Guard
from hybrid.tree.locks import Locks
from hybrid.tree.names import Names
from hybrid.tree.node import (
    NO_MATCH,
    NO_TENANT,
    Checkpoint,
    EvictedCheckpoint,
    Inserted,
    Kind,
    Lock,
    Match,
    Node,
    NodeUsage,
    PageLock,
    PrefixHistory,
    Released,
    Root,
    StateLock,
    Tenant,
)
from hybrid.tree.paths import ENDS, Path
from hybrid.tree.policy import Policy
from hybrid.tree.shares import Shares
from hybrid.tree.values import Leaving, PageValues, Watcher, page_ids
from hybrid.units import Prices, ceil_div

MAX_RECENT = 2048
"""Evicted checkpoints that are remembered for pictures."""

STATES_OF_REQUEST = 5
"""States that a request may need beside its anchors: the two that it works on, and those at a branch and at the ends of
its prompt and its answer."""

MAX_CHILDREN = 64
"""Maximum number of children of a node, the latest, that are looked at for what follows a key."""


class Tree:
    """A radix tree over token ids, in pages, with checkpoints of state.

    Args:
        page_size: tokens per page.
        grid: branching points and ghosts are at multiples of this many tokens, itself a multiple of `page_size`. A
            checkpoint may be at the end of any page.
        policy: ranks leaves and checkpoints for eviction.
        prices: bytes of a page and of a checkpoint, for policies that use them.
        max_ghosts: maximum number of evicted prefixes to remember, in blocks of the grid.
        seed: seed of the random samples of candidates.
        priority_cap: steps of priority that count in comparison with checkpoints of other tenants.
        page_values: makes a container of values of pages (`hybrid.tree.values`).
        leaving: sees what is about to be evicted; None: nothing does.
        names: names prefixes; None: those that end with a page, as `hybrid.key` does.

    Attributes:
        locks: what is protected from eviction, and how much.
        names: those of its prefixes.
        ghosts: what is remembered about evicted prefixes.
        forest: the nodes.
        candidates: what can be evicted, in the order of the policy.
        tenants: by their names, those of which a checkpoint, stored or remembered, is known.
        lock_pages, lock_state, pin, unlock: those of `locks`.
        guard: compares the policy with LRU, and has LRU take over; None where the policy does not ask for it.
        watcher: sees what is inserted, and what is about to be evicted; None: nothing does.

    One thread owns a tree.
    """

    def __init__(
        self,
        page_size: int,
        grid: int,
        policy: Policy,
        prices: Prices = Prices(),  # noqa: B008 - it is frozen
        max_ghosts: int = 1 << 16,
        seed: int = 0,
        priority_cap: int = 0,
        page_values: Callable[..., PageValues] = page_ids,
        leaving: Leaving | None = None,
        names: Names | None = None,
    ) -> None:
        assert grid % page_size == 0
        self._page_values = page_values
        self._leaving = leaving
        self._prices = prices
        self._spacing = prices.anchor_spacing * page_size // grid * grid  # of anchors
        self.page_size = page_size
        self.grid = grid
        self.names: Names = names or Names(page_size)
        self.ghosts: Ghosts = Ghosts(self.names, grid, max_ghosts)
        self.candidates: Candidates = Candidates(policy, prices, seed, priority_cap)
        if self.candidates.rhythm is not None:
            self.candidates.rhythm.shortest = self._spacing
        self._page_bytes = page_size * TOKEN_BYTES
        self._ticks = count(1)
        self.tenants: WeakValueDictionary[str, Tenant] = WeakValueDictionary()
        self._latest_tenant: tuple[str | None, Tenant] = None, NO_TENANT
        self._tenant_numbers = count(1)
        self.forest: Forest = Forest(page_size, self.names.step, page_values)
        self.locks: Locks = Locks(self.forest, self.candidates)
        self.lock_pages: Callable[..., PageLock] = self.locks.lock_pages
        self.lock_state: Callable[[Node], StateLock] = self.locks.lock_state
        self.pin: Callable[[Node], StateLock] = self.locks.pin
        self.unlock: Callable[[Lock], None] = self.locks.unlock
        self.guard: Guard | None = Guard(page_size, prices) if policy.guarded else None
        self.watcher: Watcher | None = None
        self._recent: deque[tuple[int, int, Kind, int, int, int, int]] = deque(maxlen=MAX_RECENT)

    @property
    def num_pages(self) -> int:
        """Number of pages that the tree owns."""
        return self.forest.num_pages

    @property
    def num_checkpoints(self) -> int:
        """Number of checkpoints that the tree owns."""
        return self.forest.num_checkpoints

    def anchor_spacing(self, num_tokens: int) -> int:
        """Tokens between two anchors of a prompt, a multiple of the grid; 0 where it has none, since they would not fit
        into the memory beside its pages and its other states."""
        prices, num_pages = self._prices, ceil_div(num_tokens, self.page_size)
        if not self._spacing:
            return 0
        num_states = num_tokens // self._spacing + STATES_OF_REQUEST
        return self._spacing if num_pages * prices.page + num_states * prices.checkpoint <= prices.memory else 0

    @property
    def policy_failure(self) -> str | None:
        """Why the policy was dismissed; None while it is in use."""
        return self.candidates.failure

    def knows(self, namespace: str) -> bool:
        """Return whether anything is cached in the namespace."""
        return namespace in self.forest.roots

    def nodes(self) -> Iterator[tuple[str, Node]]:
        """Every node except the roots, parents first, with its namespace."""
        return self.forest.nodes()

    def check(self) -> list[str]:
        """Every invariant that does not hold, one a line; none when the tree is well. Changes nothing."""
        wrong: list[str] = []
        nodes: list[Node] = []
        for namespace, node in self.nodes():
            nodes.append(node)
            wrong += [f"node of {namespace!r} ending at {node.end}: {line}" for line in self._check_node(node)]
        held: set[Node] = set()  # the nodes that are locked, and all above them
        for node in nodes:
            above: Node | None = node if node.page_locks else None
            while above is not None and above not in held:
                held.add(above)
                above = above.parent
        num_held = sum(node.num_pages for node in held)
        protected = [node for node in nodes if node.state_locks > 0 and node.slot is not None]
        counts = {
            "pages": (self.num_pages, sum(node.num_pages for node in nodes)),
            "checkpoints": (self.num_checkpoints, sum(node.slot is not None for node in nodes)),
            "locked pages": (self.locks.num_pages, num_held),
            "locked checkpoints": (self.locks.num_checkpoints, len(protected)),
        }
        for what, (counted, there) in counts.items():
            if counted != there:
                wrong.append(f"the tree counts {counted} {what} and has {there}")
        if self.locks.num_pages == num_held and not self.locks.check(nodes):
            wrong.append("the nodes that are counted as locked, or as above a lock, are others")
        pages, checkpoints = Counter[Tenant](), Counter[Tenant]()
        for node in nodes:
            pages[node.owner] += node.num_pages
            checkpoints[node.owner] += node.slot is not None
        for tenant in {*pages, *self.tenants.values()}:
            owned = tenant.num_pages, tenant.num_checkpoints
            if owned != (pages[tenant], checkpoints[tenant]):
                has = f"{pages[tenant]} and {checkpoints[tenant]}"
                wrong.append(f"tenant {tenant.number} counts {owned[0]} pages and {owned[1]} checkpoints, has {has}")
        if not self.candidates.are_whole():
            wrong.append("a candidate for eviction is not where its queue looks for it")
        return wrong

    def _check_node(self, node: Node) -> Iterator[str]:
        """Check a node, its edge and its run, which holds consecutive nodes and nothing after its last one."""
        parent, run = node.parent, node.run
        if parent is None:
            yield "reachable, but has no parent"
            return
        edge, pages = node.edge, node.pages
        if len(edge) != len(pages) * self._page_bytes or not len(pages):
            yield f"an edge of {len(edge) // TOKEN_BYTES} tokens owns {len(pages)} pages"
        if parent.children.get(edge[: self._page_bytes]) is not node:
            yield "its parent does not find it by its first page"
        if node.end != parent.end + len(edge) // TOKEN_BYTES:
            yield "does not end where its edge ends"
        if node not in run.nodes:
            yield "is not a node of its run"
            return
        place = run.nodes.index(node)
        if (run.nodes[place - 1] is not parent) if place else (run.start != parent.end or node.start != run.start):
            yield "its run does not continue its parent"
        if any(after not in node.children.values() for after in run.nodes[place + 1 : place + 2]):
            yield "the node after it in its run is not its child"
        if run.nodes[-1] is node:
            num_tokens = node.end - run.start
            if len(run.ids) != num_tokens * TOKEN_BYTES or len(run.pages) * run.page_size != num_tokens:
                yield f"its run ends after it, with {len(run.pages)} pages"
            if [other for other in run.nodes if other.slot is not None] != run.stored:
                yield "its run does not list the checkpoints of its nodes"
            if len(run.names) > run.num_names(node.end) * NAME_BYTES:
                yield "its run has names of more than its ids"
            above = run.parent.run
            if run.names and len(above.names) < above.num_names(run.start) * NAME_BYTES:
                yield "its run has names, and the run above it lacks some"
        is_needless = len(node.children) == 1 and node.slot is None and not node.page_locks and not node.lost_checkpoint
        if is_needless:
            yield "a tombstone with one child that no lock and no lost checkpoint keeps apart"
        if not 0 <= node.state_locks <= node.page_locks:
            yield f"{node.state_locks} state locks exceed {node.page_locks} page locks"
        if self.candidates.is_missing(node):
            yield "may be evicted, and is not a candidate"

    def limit(self, shares: Mapping[str, float], num_pages: int, num_checkpoints: int, are_apart: bool) -> None:
        """Evict from tenants first that have more than their share of the memory.

        Args:
            shares: parts of the memory, by the names of tenants. Others have no limit.
            num_pages, num_checkpoints: how many of one kind alone the memory would hold.
            are_apart: pages and checkpoints have memories of their own.
        """
        own = {self._tenant(name): share for name, share in shares.items()}
        self.candidates.limit(Shares(own, num_pages, num_checkpoints, are_apart), self.nodes())

    def held(self, name: str) -> float:
        """The part of the memory that a tenant has which has a share: of the scarcer kind where there are two. From any
        thread."""
        tenant = self.tenants.get(name)
        return self.candidates.shares.held(tenant) if tenant is not None else 0.0

    # Matching

    def match(self, key: Key, limit: int) -> Match:
        """The longest cached prefix of the first `limit` tokens. Counts as a use of the checkpoint found, and of
        nothing else."""
        found = self.peek(key, limit)
        self.candidates.requested(found.checkpoint, self._ticks)
        return found

    def use_clock(self, clock: Callable[[], float] | None) -> None:
        """Have a policy that learns when paths are continued know the time, in seconds; None: it does not."""
        self.candidates.clock = clock

    def touch(self, match: Match) -> None:
        """Count a request, and its use of the checkpoint that was found."""
        self.candidates.requested(match.checkpoint, self._ticks)

    def peek(self, key: Key, limit: int) -> Match:
        """The same as `match` without counting it as a use: changes nothing."""
        root = self.forest.roots.get(key.namespace)
        if root is None:
            return NO_MATCH
        ids, page_bytes = key.ids, self._page_bytes
        end = limit * TOKEN_BYTES
        if end > len(ids):
            end = len(ids)
        node, offset = descend(ids, root, end - end % page_bytes, page_bytes)
        if not offset:
            return NO_MATCH
        num_page_tokens = offset // TOKEN_BYTES
        checkpoint = node if node.slot is not None and node.end <= num_page_tokens else node.checkpoint_above()
        if key.units:
            return self._whole(key, num_page_tokens, node, checkpoint)
        num_tokens = checkpoint.end if checkpoint is not None else 0
        on_grid = num_page_tokens - num_page_tokens % self.grid
        branching_len = on_grid if on_grid > num_tokens else None
        return Match(num_tokens, num_page_tokens, branching_len, checkpoint, node)

    def _whole(self, key: Key, num_page_tokens: int, node: Node, checkpoint: Node | None) -> Match:
        """A match that ends inside none of the key's units."""
        num_page_tokens = key.whole(num_page_tokens, self.page_size)
        while node.parent is not None and node.parent.end >= num_page_tokens:
            node = node.parent
        while checkpoint is not None and (checkpoint.slot is None or key.whole(checkpoint.end, 1) != checkpoint.end):
            checkpoint = checkpoint.parent
        num_tokens = checkpoint.end if checkpoint is not None else 0
        branching_len = key.whole(num_page_tokens, self.grid)
        return Match(
            num_tokens,
            num_page_tokens,
            branching_len if branching_len > num_tokens else None,
            checkpoint,
            node if num_page_tokens else None,
        )

    def recall(self, key: Key, match: Match, limit: int) -> PrefixHistory:
        """Tell how much of the first `limit` tokens of a key the tree has had, right after the match. Changes
        nothing."""
        page_hit = match.num_page_tokens
        following = (page_hit // self.grid + 1) * self.grid
        known, evicted = self.ghosts.follow(key, match.deepest, page_hit, max(limit, following))
        was_evicted = known > page_hit
        if known > limit:
            known, evicted = page_hit, []
        gone = {num_tokens: usage for usage, num_tokens in evicted}
        nearest = evicted[-1][0] if evicted else None  # of the deepest checkpoint that is or was on the way
        node = match.deepest
        while node is not None and node is not match.checkpoint:
            if (node.slot is not None or node.lost_checkpoint) and node.end <= page_hit:
                nearest = nearest or node.usage
                if node.slot is None:
                    gone[node.end] = node.usage
            node = node.parent
        if nearest is None and match.checkpoint is not None:
            nearest = match.checkpoint.usage
        turn = 0 if nearest is None else nearest.turn + (nearest.kind is Kind.TURN_END)
        return PrefixHistory(known, was_evicted, turn, gone, nearest)

    def report_misses(self, match: Match, past: PrefixHistory, limit: int) -> Path | None:
        """Report to the policy every use that a request would have made of a checkpoint that was evicted, once its
        match was counted.

        Returns:
            What a policy knows the request by that learns when paths are continued; None if times are not known.
        """
        if self.guard is not None:
            evicted = [(usage, end) for end, usage in past.gone.items() if end > match.num_page_tokens]
            if self.guard.requested(self.candidates.now, match, evicted, limit):
                self.candidates.rank_by_lru(self.guard.is_on, self.nodes())
        for num_tokens, usage in past.gone.items():
            self.candidates.missed(usage, num_tokens)
        nearest, rhythm = past.nearest, self.candidates.rhythm
        if rhythm is None or self.candidates.clock is None:
            return None
        return rhythm.began(nearest.path if nearest is not None and nearest.kind in ENDS else None)

    def ended(self, path: Path | None, num_answered: int) -> None:
        """A request has ended, with an answer of `num_answered` tokens.

        Args:
            path: as `report_misses` gave it.
        """
        if path is not None and self.candidates.rhythm is not None:
            self.candidates.rhythm.ended(path, num_answered)

    def pages(self, node: Node | None, num_tokens: int) -> PageValues:
        """Values of the pages of the first `num_tokens` tokens on the path from the root to `node`."""
        if node is None or not num_tokens:
            return self._page_values()
        page_size, run, parts = self.page_size, node.run, []
        end = min(num_tokens, node.end)
        while True:
            if end > run.start:
                parts.append(run.pages[: (end - run.start) // page_size])
            if not run.start:
                break
            run, end = run.parent.run, min(end, run.start)
        pages = parts.pop()
        for part in reversed(parts):
            pages.extend(part)
        return pages

    def exchange_pages(self, node: Node, num_tokens: int, values: list[Any]) -> list[Any]:
        """Put other values in place of those of the pages from `num_tokens` on, as many, on the path to `node`: their
        owner has the same content elsewhere. For opaque pages that were inserted as lists.

        Returns:
            The values that were there, in order.
        """
        page_size, run, before = self.page_size, node.run, list[Any]()
        end = num_tokens + len(values) * page_size
        while end > num_tokens:
            start = max(num_tokens, run.start)
            if end > start:
                at = (start - num_tokens) // page_size
                before[:0] = run.pages.exchange((start - run.start) // page_size, values[at:])
                values, end = values[:at], start
            if run.start:
                run = run.parent.run
        return before

    def following(self, key: Key, limit: int) -> array[int]:
        """The ids that follow all of a key in its namespace, up to `limit`; of several continuations the one that was
        inserted last. Empty: there are none. Changes nothing.

        Ids of images are negative, as in keys.
        """
        found = self.peek(key, len(key))
        at = found.num_page_tokens
        node: Node | None = found.deepest or self.forest.roots.get(key.namespace)
        rest = key.ids[at * TOKEN_BYTES :]
        if node is None or len(rest) >= self._page_bytes:
            return array("i")
        end, run = len(rest) + limit * TOKEN_BYTES, node.run
        ids = bytearray(run.ids[(at - run.start) * TOKEN_BYTES : (node.end - run.start) * TOKEN_BYTES])
        if ids and not ids.startswith(rest):
            return array("i")
        while len(ids) < end:
            missing = rest[len(ids) :]
            children = islice(reversed(node.children.items()), MAX_CHILDREN)
            node = next((child for page, child in children if page.startswith(missing)), None)
            if node is None:
                break
            ids += node.edge
        return array("i", bytes(ids[len(rest) : end]))

    # Inserting

    def insert(
        self,
        key: Key,
        num_tokens: int,
        pages: PageValues,
        checkpoint: Checkpoint | None = None,
        below: Node | None = None,
        past: NodeUsage | None = None,
        tenant: str | None = None,
        path: Path | None = None,
    ) -> Inserted:
        """Enter the first `num_tokens` tokens of a key: pages `[0, num_tokens)`, and the checkpoint at their end.

        The tree keeps its own page where it has one, and becomes the owner of the pages of `[num_existing,
        num_tokens)`. It refuses a second checkpoint at the same place (`adopted` is False). Splits at most one node;
        the checkpoint, the children and the locks of a split node stay with its lower half.

        Args:
            pages: values of the pages of `[0, num_tokens)` in order.
            below: a node on the key's path that the caller keeps locked: the search starts there.
            past: usage of a checkpoint that was there before, or (without `checkpoint`) was not admitted.
            tenant: name of who inserts it, whose new pages are; None: that of the checkpoint, or the namespace.
            path: of its request, as `recall` gave it.

        Raises:
            OwnershipError: the lengths of key, pages and checkpoint disagree. Nothing was changed.
        """
        self._refuse_mismatch(key, num_tokens, pages, checkpoint)
        end, forest, now = num_tokens * TOKEN_BYTES, self.forest, self.candidates.now
        tick = next(self._ticks)
        root = forest.roots.get(key.namespace)
        if root is None:
            root = Root(key.namespace, NodeUsage(tick, tick, 0, Kind.PAGES, now))
        start = below if below is not None and below.end <= num_tokens else root
        node, offset = descend(key.ids, start, end, self._page_bytes)
        num_existing, is_new = offset // TOKEN_BYTES, offset < end
        if not is_new and checkpoint is None and past is None:
            return Inserted(node, num_existing, False)
        usage = NodeUsage(tick, tick, 0, Kind.PAGES if checkpoint is None else checkpoint.kind, now)
        lower = node if num_existing < node.end else None
        name = tenant or (checkpoint.tenant if checkpoint is not None else None) or key.namespace
        latest, sender = self._latest_tenant  # most often it is the same again
        if latest != name:
            sender = self._tenant(name)
        try:
            if lower is not None:
                node = forest.split(lower, num_existing)
            if is_new:
                own_pages = pages[offset // self._page_bytes :]
                node = self._grow(node, key.ids[offset:end], own_pages, usage, below, sender)
                forest.roots[key.namespace] = root
            adopted = checkpoint is not None and node.slot is None
            if checkpoint is not None:
                if adopted:
                    self._adopt(node, checkpoint, usage, past or (node.usage if node.lost_checkpoint else None))
                if adopted and node.owner is not sender:
                    forest.count_for(node, sender)
                if adopted or node.usage.tenant is sender:
                    node.usage.stored_for(sender, checkpoint.priority)
            elif past is not None and node.slot is None and not node.lost_checkpoint:
                self._note_lost(node, past)
        except BaseException:
            if lower is not None and lower.parent is not None:
                forest.join(lower.parent)
            raise
        if path is not None and (adopted or past is not None):
            node.usage.path = path
        self.candidates.enter(node, adopted or is_new or past is not None)
        if self.watcher is not None and (is_new or adopted):
            self.watcher.inserted(node, num_existing, adopted)
        return Inserted(node, num_existing, adopted)

    def _grow(
        self,
        node: Node,
        ids: bytes,
        pages: PageValues,
        usage: NodeUsage,
        below: Node | None,
        sender: Tenant,
    ) -> Node:
        """Add ids and pages after a node: to its edge, if nothing needs a cut there, or as a new child."""
        if node.children:
            grown = self.forest.add_leaf(node, ids, pages, usage, sender)
            self.candidates.not_kept(node)  # several paths continue from it
        elif (
            node.slot is None
            and node.parent is not None
            and not node.lost_checkpoint
            and node.page_locks == (node is below)  # no lock but the caller's own
        ):
            self.forest.extend(node, ids, pages, usage)
            grown = node
        else:
            grown = self.forest.add_leaf(node, ids, pages, usage, sender)
            if self.candidates.follows_changes:
                self.candidates.changed(node)
        return grown

    def _adopt(self, node: Node, checkpoint: Checkpoint, usage: NodeUsage, former: NodeUsage | None) -> None:
        """Make a node the owner of a checkpoint; what is known of its `former` usage is kept."""
        tick, now = usage.created, usage.used_at
        if former is None:
            usage.turn = checkpoint.turn
        else:
            usage = former
            usage.created, usage.used_at = tick, now
        usage.last_used = 0 if checkpoint.is_spare else tick
        usage.stored_at = now
        if usage.shadow is None and (shadow := node.usage.shadow) is not None:  # one usage has it
            usage.shadow, shadow.usage, node.usage.shadow = shadow, usage, None
        node.usage = usage
        self.forest.put_checkpoint(node, checkpoint.slot)
        if self._spacing:
            self.candidates.came_between(node)
        if node.state_locks:
            self.locks.checkpoint_came(node)
        if self.candidates.reports_entries:
            self.candidates.entered(node)
        if self.guard is not None:
            self.guard.stored(node)

    def _note_lost(self, node: Node, past: NodeUsage) -> None:
        """A node has lost a checkpoint, or one was not admitted there."""
        node.usage, node.lost_checkpoint = past, True
        self.candidates.entered(node)
        if self.guard is not None:
            self.guard.lost(node)

    def expect(self, node: Node, num_requests: int) -> None:
        """Note that a checkpoint is to be used next when that many more requests have come. What is evicted of its path
        first, from the end on, leaves this to what is the end then."""
        node.usage.expected_at = self.candidates.now + max(1, num_requests)
        self.candidates.lowered(node)

    def release(self, node: Node, tenant: str | None = None) -> None:
        """Evict a path before all that was used, from its end on, as far as nothing else continues from it: its client
        does not need it any more. What is used again until then stays.

        Args:
            tenant: whose nodes alone these are; None: anyone's.
        """
        owner, below = self.tenants.get(tenant) if tenant is not None else node.owner, None
        while (
            node.parent is not None and node.owner is owner and [*node.children.values()] == ([below] if below else [])
        ):
            usage = node.usage
            usage.last_used = usage.expected_at = 0
            self.candidates.lowered(node)
            below, node = node, node.parent

    def new_usage(self, kind: Kind, turn: int, path: Path | None = None) -> NodeUsage:
        """The usage of a checkpoint that is not stored yet."""
        return NodeUsage(0, 1, 0, kind, self.candidates.now, turn=turn, path=path)

    def stored_for(self, usage: NodeUsage, tenant: str, priority: int) -> None:
        """A request of a tenant would store a checkpoint of this usage, with a priority."""
        usage.stored_for(self._tenant(tenant), priority)

    def _tenant(self, name: str) -> Tenant:
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = Tenant(next(self._tenant_numbers))
        self._latest_tenant = name, found
        return found

    def admits(self, usage: NodeUsage, num_tokens: int, above: int, only_its_own: bool, tails_help: bool) -> bool:
        """Return whether a checkpoint that is not stored yet is worth more than what would be evicted for it.

        Args:
            above: number of tokens of the nearest checkpoint above it.
            only_its_own: nothing else needs the pages since then.
            tails_help: pages without a checkpoint can be evicted instead.
        """
        self.candidates.install_fallback(self.nodes())
        num_pages = (num_tokens - above) // self.page_size if only_its_own else 0
        admitted = self.candidates.admits(usage, num_tokens, num_tokens - above, num_pages, tails_help)
        if not admitted and self.guard is not None:
            self.guard.refused(usage)
        return admitted

    def relabel(self, node: Node, old: Kind, new: Kind) -> None:
        """Change the kind of a node's checkpoint, stored or lost, from `old` to `new`."""
        if (node.slot is not None or node.lost_checkpoint) and node.usage.kind == old:
            node.usage.kind = new
            self.candidates.relabeled(node)

    def _refuse_mismatch(self, key: Key, num_tokens: int, pages: PageValues, checkpoint: Checkpoint | None) -> None:
        if (
            num_tokens <= 0
            or num_tokens * TOKEN_BYTES > len(key.ids)
            or num_tokens % self.page_size
            or len(pages) * self.page_size != num_tokens
        ):
            raise OwnershipError(
                f"insert: {num_tokens} tokens of a key of {len(key)} and {len(pages)} pages of "
                f"{self.page_size} do not belong together"
            )
        if checkpoint is not None and checkpoint.num_tokens != num_tokens:
            raise OwnershipError(
                f"insert: a state captured after {checkpoint.num_tokens} tokens is offered for {num_tokens}"
            )

    # Locks

    def lock_match(self, match: Match) -> PageLock:
        """Protect the pages of a match that has some. An edge in which it ends is split there, so that what follows can
        be evicted."""
        assert match.deepest is not None
        return self.lock_pages(match.deepest, match.num_page_tokens)

    # Evicting. What has been evicted is in `released` at every moment, also when something raises in between.

    def evict_pages(self, num_pages: int, released: Released | None = None) -> Released:
        """Evict at least `num_pages` pages if possible: leaves in the order of the policy, each from its tail.

        A leaf that is cut loses its checkpoint. A leaf that is removed takes the childless tombstones above it along.

        Args:
            released: receives what is evicted, at every moment; None: a new one.
        """
        released = Released(self._page_values()) if released is None else released
        end = len(released.pages) + num_pages
        while len(released.pages) < end and (leaf := self._next(self.candidates.next_leaf)) is not None:
            self._evict(leaf, end - len(released.pages), released)
        return released

    def evict_checkpoints(self, num_checkpoints: int, released: Released | None = None) -> Released:
        """Evict `num_checkpoints` checkpoints if possible, in the order of the policy. Their pages stay."""
        released = Released(self._page_values()) if released is None else released
        for _ in range(num_checkpoints):
            if (node := self._next(self.candidates.next_checkpoint)) is None:
                break
            self._evict(node, 0, released)
        return released

    def evict_one(self, num_pages: int, released: Released | None = None) -> Released:
        """Evict the candidate with the lowest rank: a checkpoint, or up to `num_pages` pages from the tail of a leaf
        that has none. Evicts nothing when everything is locked."""
        released = Released(self._page_values()) if released is None else released
        node = self._next(self.candidates.next_of_all)
        if node is not None:
            self._evict(node, 0 if node.slot is not None else num_pages, released)
        return released

    def evict_all(self, released: Released | None = None) -> Released:
        """Evict everything that no lock protects."""
        released = self.evict_checkpoints(self.num_checkpoints, released)
        return self.evict_pages(self.num_pages, released)

    def nodes_beyond(self, key: Key, num_tokens: int, num_kept: int) -> list[Node]:
        """The nodes with what a key has between `num_kept` and `num_tokens` tokens, and all that continue from there,
        parents first."""
        found = self.peek(key, num_tokens)
        top = found.deepest
        if top is None or found.num_page_tokens <= num_kept:
            return []
        while top.start > num_kept and top.parent is not None:
            top = top.parent
        nodes = [top]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes

    def evict_nodes(self, nodes: list[Node], num_kept: int, released: Released | None = None) -> Released:
        """Evict what `nodes_beyond` has returned, but for the first `num_kept` tokens. What a lock protects stays."""
        released = Released(self._page_values()) if released is None else released
        for node in reversed(nodes):
            if node.parent is None:  # it went with another
                continue
            if node.children or node.page_locks:
                self.evict_checkpoint(node, released)
            else:
                self._evict(node, (node.end - max(node.start, num_kept)) // self.page_size, released)
        return released

    def evict_checkpoint(self, node: Node, released: Released | None = None) -> Released:
        """Evict the checkpoint of a node, if it has one that no lock protects."""
        released = Released(self._page_values()) if released is None else released
        if node.parent is not None and node.slot is not None and not node.state_locks:
            self._evict(node, 0, released)
        return released

    @property
    def recently_evicted(self) -> list[EvictedCheckpoint]:
        """The checkpoints that were evicted most recently, oldest first."""
        return [EvictedCheckpoint._make(one) for one in self._recent]

    def _next(self, find: Callable[[], Node | None]) -> Node | None:
        if self.candidates.failure is not None:
            self.candidates.install_fallback(self.forest.nodes())
        return find()

    def _evict(self, node: Node, num_pages: int, released: Released) -> None:
        """Take `num_pages` pages from the tail of a leaf that was removed from the candidates; 0: its checkpoint."""
        try:
            if num_pages == 0:
                if node.slot is not None:
                    self._drop_checkpoint(node, released)
                if node.children:
                    if self.candidates.follows_changes:
                        self.candidates.reweigh_below(node)
                    self.forest.join(node)
                else:
                    self.candidates.enter(node, renewed=True)  # its pages may still be evicted
            elif num_pages < (own_pages := node.num_pages):
                if node.slot is not None:
                    self._drop_checkpoint(node, released)
                self._remember(node, own_pages - num_pages)
                self.forest.cut(node, num_pages, released.pages)
                self.candidates.enter(node, renewed=True)
            else:
                self._remove(node, released)
        except BaseException:
            self.candidates.enter(node)
            raise
        if self.guard is not None:
            self.guard.evicted(self.forest.num_pages, self.forest.num_checkpoints)

    def _remove(self, leaf: Node, released: Released) -> None:
        node, used_at, last_used, expected_at, path = leaf, 0, 0, 0, None
        while True:
            if node.usage.used_at >= used_at:
                path = node.usage.path or path
            if self._spacing:
                used_at, last_used = max(used_at, node.usage.used_at), max(last_used, node.usage.last_used)
                expected_at = max(expected_at, node.usage.expected_at)
            if node.slot is not None:
                self._drop_checkpoint(node, released)
            self._remember(node, 0)
            parent = self.forest.remove(node, released.pages)
            if parent.children:
                if len(parent.children) == 1:
                    if self.candidates.follows_changes:
                        self.candidates.reweigh_below(parent)
                    self.forest.join(parent)
                return
            above = parent.usage
            if parent.slot is not None and above.last_used and 0 < self._spacing <= parent.end:
                # It is the end of a long path now, which is as recent as it was before.
                above.used_at, above.last_used = max(above.used_at, used_at), max(above.last_used, last_used)
                above.expected_at, above.path = expected_at, path or above.path
                self.candidates.renewed(parent)
            if self.candidates.follows_changes:
                self.candidates.changed(parent)
            if parent.parent is None:  # the root
                return
            if parent.slot is not None or parent.page_locks:
                self.candidates.enter(parent)
                return
            node = parent

    def _remember(self, node: Node, num_kept: int) -> None:
        if self._leaving is not None:
            self._leaving.pages(node, num_kept)
        if self.watcher is not None:
            self.watcher.pages(node, num_kept)
        if self.ghosts.limit:
            try:
                self.ghosts.remember(node, num_kept * self.forest.page_size)
            except Exception:
                return  # eviction continues without this ghost

    def _drop_checkpoint(self, node: Node, released: Released) -> None:
        assert not node.state_locks
        if self._leaving is not None:
            self._leaving.checkpoint(node)
        if self.watcher is not None:
            self.watcher.checkpoint(node)
        candidates, usage = self.candidates, node.usage
        if candidates.reports_evictions:
            candidates.evicting(node)
        released.slots.append(node.slot)
        self._recent.append(
            (node.start, node.end, usage.kind, usage.hits, usage.stored_at, usage.used_at, candidates.now)
        )
        self.forest.drop_checkpoint(node)
