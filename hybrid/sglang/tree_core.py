"""This project's tree behind SGLang's interface of a tree core.

SGLang's allocators own all indices. The tree is given index tensors, keeps them on their device, and returns them when
it lets go of them; it frees nothing and copies nothing to the host. What SGLang asks of a tree core for features that
are refused when the cache is built is refused here too, by name.
"""

from __future__ import annotations

from abc import update_abstractmethods
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefResult, IncLockRefResult, InsertResult, MatchResult
from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import InsertStepResult, UnifiedTreeCoreInterface
from sglang.srt.runtime_context import get_exec, mamba_checkpoint_grid

from hybrid.mirror.page_parts import PageParts
from hybrid.mirror.visits import Visits, dfs_weight_order
from hybrid.sglang.handles import Handles
from hybrid.sglang.options import CLASSIC, Options, policy_named, refuse_unsupported
from hybrid.sglang.values import WORDS, FreedIndices, IndexPages, between, joined, key_of, prices_of
from hybrid.tree.names import Names
from hybrid.tree.node import Checkpoint, Kind, Match, Node, Released
from hybrid.tree.sessions import Sessions
from hybrid.tree.tree import Tree

FULL, STATE = ComponentType.FULL, ComponentType.MAMBA


MAX_GHOSTS = 1 << 16
"""Prefixes that are remembered after their eviction, in blocks of the grid, where something learns from them."""


class NoEvents:
    """The recorder of KV events of a tree that records none."""

    enabled: bool = False

    def record_all_cleared(self) -> None:
        """Nothing is recorded."""

    def take(self) -> list[Any]:
        """The events since the last call: none."""
        return []


class Evicted(NamedTuple):
    """Memory that was evicted: the caller frees it.

    Attributes:
        indices: of KV, each `[tokens]`.
        num_tokens: of all of them.
        slots: of states, each `[1]`.
    """

    indices: list[torch.Tensor]
    num_tokens: int
    slots: list[torch.Tensor]


class HybridTreeCore(UnifiedTreeCoreInterface):
    """A tree of this project as a tree core of SGLang.

    Args:
        params: SGLang's `CacheInitParams`.
        components: SGLang's components; theirs is what follows from the tree, such as copying a matched state.

    Attributes:
        tree: the tree. Its positions are `WORDS` times those of SGLang.
        visits: what is known of requests that have come.
        page_size: tokens per page.
        clock: seconds; None: times are not known.
        places_anchors: long prompts keep states along their way.
        is_choosy: states are admitted only if they are worth more than what would be evicted for them.
    """

    def __init__(self, params: Any, components: dict[Any, Any]) -> None:
        refuse_unsupported(None, params, get_exec().mamba.mamba_max_states_per_path)
        self.page_size: int = params.page_size
        self.is_eagle: bool = False
        self.enable_hicache: bool = False
        self.enable_storage: bool = False
        self.enable_external_cache_linker: bool = False
        self.write_through_threshold: int = 256
        self.is_write_back: bool = False
        self.has_swa_host_pool: bool = False
        self.is_host_memory_buffer_only: bool = False
        self.kv_events: NoEvents = NoEvents()
        self.device: torch.device = torch.device(params.token_to_kv_pool_allocator.device)
        self.options: Options = Options.of(params.eviction_policy_config)
        self._policy_name: str = params.eviction_policy.lower()
        self._is_classic = self._policy_name in CLASSIC
        self.is_choosy: bool = self.options.admission and not self._is_classic
        self.places_anchors: bool = self.options.anchors and not self._is_classic
        self._prices = prices_of(params, self.places_anchors)
        self._grid: int = mamba_checkpoint_grid(self.page_size)
        self.clock: Callable[[], float] | None = None
        self._handles_from = count(1)
        self.reset()

    def reset(self) -> None:
        """Forget everything. Handles of nodes are not given out again."""
        self.tree: Tree = Tree(
            self.page_size * WORDS,
            self._grid * WORDS,
            policy_named(self._policy_name),
            self._prices,
            max_ghosts=MAX_GHOSTS if self._is_classic <= self.options.ghost_branches else 0,
            seed=self.options.seed,
            page_values=PageParts.of,
            names=Names(self._grid * WORDS),
        )
        self._handles = Handles(self.tree.locks, self._handles_from)
        self._inserted: tuple[Any, int, int] | None = None
        self._path: tuple[int, torch.Tensor] | None = None  # of the node that was inserted last: all indices
        self.visits: Visits = Visits(self.tree, learns=not self._is_classic)
        self.sessions: Sessions = Sessions(self.tree)
        root = self._handles.root
        self._empty = MatchResult(0, root, root, root, cache_actions=[])

    # Matching

    def match_prefix(self, params: Any) -> Any:
        """The longest cached prefix. Counts as a use of the state found, once per request: SGLang looks for a request
        many times while it waits.

        SGLang 0.5.22 looks for the key that it has just inserted, to learn which node owns the request's pages now.
        That is the inserted node, with or without a state: with a node above it the request would take pages that the
        tree owns for its own, and free them.
        """
        inserted, self._inserted = self._inserted, None
        if inserted is not None and inserted[0] is params.key and params.req is not None and not params.cow_mamba:
            _, handle, length = inserted
            return MatchResult(length, handle, handle, handle, cache_actions=[])
        key = key_of(params.key, self.page_size)
        if not key.ids:
            return self._empty
        limit = len(key)
        if params.req is None:
            found, branching_len = self.tree.match(key, limit), None
        elif params.cow_mamba:
            self.visits.keep_key(params.req.rid, params.key.token_ids, key)
            is_new = params.req.rid not in self.visits
            seconds = self.clock() if self.clock is not None else None
            found, known = self.visits.match(params.req.rid, key, limit, seconds)
            if self.places_anchors and is_new:
                self.visits.place_anchors(params.req.rid, found.num_tokens, limit)
            branching_len = known if self.options.ghost_branches else self._last_place(params.req, found)
        else:
            found, branching_len = self.tree.peek(key, limit), None
        return self._result(found, branching_len)

    def _last_place(self, req: Any, found: Match) -> int | None:
        """Where a prompt of whole pages leaves its last state, if it has no branching point: a page before its end. The
        same prompt is not found any further, since its last token is computed again. None: where SGLang places it."""
        num_tokens = len(req.full_untruncated_fill_ids)
        place = (num_tokens - self._grid) * WORDS
        if self._is_classic or num_tokens % self._grid or found.branching_len is not None or place <= found.num_tokens:
            return None
        return place

    def _result(self, found: Match, known: int | None) -> Any:
        handle = self._handles.of(found.checkpoint)
        branching_len = max(found.branching_len or 0, known or 0)
        return MatchResult(
            found.num_tokens // WORDS,
            handle,
            handle,
            handle,
            mamba_branching_seqlen=branching_len // WORDS or None,
            full_kv_hit_length=found.num_page_tokens // WORDS,
            cache_actions=[],
        )

    @property
    def empty_match_result(self) -> Any:
        """The match of a key that has nothing in common with the tree."""
        return self._empty

    def match_full_device_prefix(self, key: Any) -> tuple[int, int, int]:
        """Tokens of a key whose pages are cached, the node of the last, and the tokens up to that node's end."""
        found = self.tree.peek(own := key_of(key, self.page_size), len(own))
        end = found.deepest.end if found.deepest is not None else 0
        return found.num_page_tokens // WORDS, self._handles.of(found.deepest), end // WORDS

    def collect_full_device_indices(self, from_node_id: int, until_node_id: int) -> torch.Tensor:
        """The indices from the end of one node to the end of another below it, `[tokens]`: to be read only."""
        node, until = self._handles.node(from_node_id), self._handles.node(until_node_id)
        if self._path is not None and node is not None and until is None:
            handle, indices = self._path
            if handle == from_node_id and indices.numel() * WORDS == node.end:
                return indices
        return between(until.end if until is not None else 0, node, self.device)

    # Inserting

    def begin_insert(self, params: Any) -> Any:
        """Enter the pages and the state of a request; returns what the caller frees of what the tree has already."""
        length = len(params.key) // self.page_size * self.page_size
        num_tokens = length * WORDS
        if not length:
            root = self._handles.root
            return InsertStepResult(
                actions=[], result=InsertResult(prefix_len=0, mamba_exist=True, last_device_node=root)
            )
        expected = self.visits.take_expected(params)
        key = expected.key if expected is not None else None
        if key is None or len(key) < num_tokens:
            key = key_of(params.key, self.page_size)
        below = expected.below if expected is not None else None
        arrival = expected.arrival if expected is not None else self.visits.arrival(key)
        value = params.value
        if value is None:
            value = torch.arange(length, dtype=torch.int64, device=self.device)
        slot, past = params.mamba_value, arrival.past
        checkpoint = None
        if slot is not None:
            checkpoint = Checkpoint(
                slot, num_tokens, arrival.kind, params.priority or 0, arrival.turn, arrival.kind is Kind.INTERVAL
            )
        elif past is None:
            past = self.tree.new_usage(arrival.kind, arrival.turn, arrival.path)
        value = value if value.numel() == length else value[:length]
        pages = IndexPages(value, self.page_size)
        inserted = self.tree.insert(key, num_tokens, pages, checkpoint, below, past, path=arrival.path)
        existing = inserted.num_existing // WORDS
        duplicated = range(params.prev_prefix_len, existing)
        handle = self._handles.of(inserted.node)
        self._inserted = params.key, handle, length
        # What is before `prev_prefix_len` is the tree's already: if nothing after it is, these are all its indices.
        self._path = (handle, value) if not duplicated and inserted.node.end == num_tokens else None
        result = InsertResult(
            prefix_len=existing,
            last_device_node=handle,
            mamba_exist=not inserted.adopted,
            adopted_ranges={FULL: [(existing, length)]} if params.track_adopted_ranges and existing < length else None,
        )
        actions = [FreeDeviceKV([value[duplicated.start : duplicated.stop]])] if duplicated else []
        return InsertStepResult(actions=actions, result=result)

    def has_ongoing_insert(self) -> bool:
        """Return whether an insert waits to be continued: never, they are one step."""
        return False

    def end_insert(self) -> list[Any]:
        """End a broken insert: it leaves nothing to do."""
        return []

    # Locks

    def inc_lock_ref(self, node_id: int, skip_lock_components: Sequence[Any] = ()) -> Any:
        """Protect the pages up to a node and its state, but for the components that are skipped."""
        skipped = tuple(skip_lock_components)
        self._handles.lock(node_id, pages=FULL not in skipped, state=STATE not in skipped)
        return IncLockRefResult(node_id=node_id, skipped_lock_components=skipped)

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> Any:
        """Release what a receipt says was locked."""
        assert params.node_id == node_id, f"the receipt of node {params.node_id} was given for node {node_id}"
        skipped = params.skipped_lock_components
        self._handles.unlock(node_id, pages=FULL not in skipped, state=STATE not in skipped)
        return DecLockRefResult()

    def inc_full_pin(self, node_id: int) -> None:
        """Protect the pages up to a node."""
        self._handles.lock(node_id, state=False)

    def dec_full_pin(self, node_id: int) -> None:
        """Release what `inc_full_pin` has locked."""
        self._handles.unlock(node_id, state=False)

    # Evicting

    def evict_pages(self, num_tokens: int) -> Evicted:
        """Evict the pages of at least `num_tokens` tokens, if possible."""
        released = self._bag()
        self.tree.evict_pages(-(-num_tokens // self.page_size), released)
        return self._evicted(released)

    def evict_states(self, number: int) -> Evicted:
        """Evict states, if possible."""
        released = self._bag()
        self.tree.evict_checkpoints(number, released)
        return self._evicted(released)

    def evict_least(self, num_tokens: int) -> Evicted:
        """Evict what is worth least: a state, or up to `num_tokens` tokens of pages that no state needs."""
        released = self._bag()
        self.tree.evict_one(max(1, -(-num_tokens // self.page_size)), released)
        return self._evicted(released)

    def _bag(self) -> Released:
        return Released(FreedIndices())

    def _evicted(self, released: Released) -> Evicted:
        pages = released.pages
        return Evicted(pages.tensors, self._tokens(len(pages)), released.slots)

    # Sizes, in tokens of KV and in states

    def full_evictable_size(self) -> int:
        return self._tokens(self.tree.num_pages - self.tree.locks.num_pages)

    def full_protected_size(self) -> int:
        return self._tokens(self.tree.locks.num_pages)

    def mamba_evictable_size(self) -> int:
        return self.tree.num_checkpoints - self.tree.locks.num_checkpoints

    def mamba_protected_size(self) -> int:
        return self.tree.locks.num_checkpoints

    evictable_size = full_evictable_size
    protected_size = full_protected_size

    def swa_evictable_size(self) -> int:
        return 0

    swa_protected_size = swa_evictable_size

    def component_evictable_size(self, component_type: Any) -> int:
        """The size of one component, 0 for those that this tree has not."""
        return {FULL: self.full_evictable_size, STATE: self.mamba_evictable_size}.get(
            component_type, self.swa_evictable_size
        )()

    def component_protected_size(self, component_type: Any) -> int:
        """The size of one component, 0 for those that this tree has not."""
        return {FULL: self.full_protected_size, STATE: self.mamba_protected_size}.get(
            component_type, self.swa_protected_size
        )()

    def total_size(self) -> tuple[int, int]:
        """Tokens and states in the tree."""
        return self._tokens(self.tree.num_pages), self.tree.num_checkpoints

    def _tokens(self, num_pages: int) -> int:
        return num_pages * self.page_size

    # Nodes

    def node_by_id(self, node_id: int) -> Node | None:
        """The node of this project's tree; None for the empty prefix."""
        return self._handles.node(node_id)

    def root_node_handle(self, extra_key: str | None = None) -> int:
        """The handle of the empty prefix: one for all namespaces, which a key names."""
        return self._handles.root

    def is_root(self, node_id: int) -> bool:
        return node_id == self._handles.root

    def is_backuped(self, node_id: int) -> bool:
        """Return whether a node has a copy in host memory: none has."""
        return False

    def is_full_device_evicted(self, node_id: int) -> bool:
        """Return whether a node has no pages: a node that there is has them."""
        return False

    def component_has_host_value_only(self, node_id: int, component_type: Any) -> bool:
        """Return whether what a node had is in host memory: never."""
        return False

    def get_component_device_value(self, node_id: int, component_type: Any) -> torch.Tensor | None:
        """The indices of a node's edge, `[tokens]`, or the slot of its state, `[1]`; None if it has none."""
        node = self._handles.node(node_id)
        if node is None:
            return None
        if component_type == STATE:
            slot: torch.Tensor | None = node.slot
            return slot
        return between(node.start, node, self.device) if component_type == FULL else None

    def dfs_weight_order(self, node_ids: Sequence[int]) -> list[int]:
        """The order of requests in which those that share most come first and one after the other."""
        return dfs_weight_order([self._handles.node(node_id) for node_id in node_ids])

    def all_values_flatten(self) -> torch.Tensor:
        """All indices in the tree, `[tokens]`."""
        return joined([between(node.start, node, self.device) for _, node in self.tree.nodes()], self.device)

    def all_mamba_values_flatten(self) -> torch.Tensor:
        """All slots of states in the tree, `[states]`."""
        return joined([node.slot for _, node in self.tree.nodes() if node.slot is not None], self.device)

    # Checks

    def sanity_check(self, ongoing_write_through: Sequence[Any], ongoing_load_back: Sequence[Any]) -> None:
        """Compare what the tree counts with its nodes.

        Raises:
            AssertionError: they differ, or something would never be evicted.
        """
        assert not ongoing_write_through and not ongoing_load_back
        wrong = self.tree.check()
        assert not wrong, "\n".join(wrong)
        indices, slots = self.all_values_flatten(), self.all_mamba_values_flatten()
        assert len(indices.unique()) == len(indices) == self.total_size()[0], "an index is in the tree twice"
        assert len(slots.unique()) == len(slots), "a state is in the tree twice"

    def pretty_print(self) -> None:
        """Print the nodes."""
        for namespace, node in self.tree.nodes():
            state = "state" if node.slot is not None else "no state"
            locks = f"{node.page_locks} page locks, {node.state_locks} state locks"
            print(f"{namespace!r} [{node.start // WORDS}, {node.end // WORDS}) {state}, {locks}")


def refuse_unknown(core: type) -> None:
    """Give a class of tree cores every method that SGLang's interface asks for and the class has not: one that raises
    NotImplementedError when it is called."""
    for name in sorted(core.__abstractmethods__):  # type: ignore[attr-defined]

        def refused(self: Any, *args: Any, _name: str = name, **kwargs: Any) -> Any:
            raise NotImplementedError(f"--radix-cache-backend hybrid does not support the tree core's {_name}")

        refused.__name__ = name
        setattr(core, name, refused)
    update_abstractmethods(core)


refuse_unknown(HybridTreeCore)
