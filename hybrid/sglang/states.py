"""SGLang's component of linear-attention states, with admission: which states are worth keeping."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.components.mamba import MambaComponent

from hybrid.sglang.keys import WORDS, key_of_ids
from hybrid.sglang.visits import Arrival, Expected
from hybrid.tree.node import Kind


class StateComponent(MambaComponent):
    """As SGLang's, but a state is offered to the tree only if it is worth more than what would be evicted for it.

    The pages up to it are inserted all the same: they show where later requests branch. A request that has ended gives
    a slot of its own, for which nothing is evicted: such a state is kept until memory is needed.
    """

    def prepare_for_caching_req(
        self, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool
    ) -> int | None:
        """The length up to which a request is inserted, and its state there in the parameters of the insert, if it is
        kept."""
        position = self._position(req, token_ids_len, is_finished)
        if position:
            core = self.tree_core
            arrival, is_admitted = self.admit(req, position, self._kind(req, position, is_finished), is_finished)
            below = core.node_by_id(req.last_node) if req.lock is not None else None
            key = core.visits.key(req.rid, req.full_untruncated_fill_ids)
            core.visits.expect(Expected(insert_params, arrival, below, key))
            if not is_admitted:
                return position
        length: int | None = super().prepare_for_caching_req(req, insert_params, token_ids_len, is_finished)
        return length

    def cleanup_after_caching_req(
        self, req: Any, is_finished: bool, insert_result: Any = None, insert_params: Any = None
    ) -> None:
        """As SGLang's; a request that has ended is forgotten."""
        if is_finished:
            self.tree_core.visits.leave(req.rid)
        super().cleanup_after_caching_req(req, is_finished, insert_result, insert_params)

    def _position(self, req: Any, token_ids_len: int, is_finished: bool) -> int | None:
        """Where the state is that would be offered; None: there is none, or only SGLang can tell."""
        if not self.cache.enable_mamba_extra_buffer:
            replayed = self.cache.req_to_token_pool.mamba_pool.replayssm_write_pos
            return token_ids_len if replayed is None or not is_finished else None
        if not is_finished:
            return req.kv.mamba_last_track_seqlen
        checkpoint = self._select_finished_checkpoint(req, token_ids_len)
        return checkpoint[0] if checkpoint is not None else None

    def _kind(self, req: Any, position: int, is_finished: bool) -> Kind:
        """Why the state of a request at a position is there."""
        prompt = len(req.origin_input_ids)
        if position == req.mamba_branching_seqlen:
            return Kind.BRANCH
        if is_finished or position > prompt:
            return Kind.TURN_END
        return Kind.PROMPT_END if position > prompt - self.mamba_checkpoint_grid else Kind.INTERVAL

    def admit(self, req: Any, position: int, kind: Kind, is_finished: bool) -> tuple[Arrival, bool]:
        """What the state of a request at a position is, and whether it is worth more than one that is evicted for
        it. Where none has to be, every state is."""
        core, pool = self.tree_core, self.cache.req_to_token_pool
        end = position // core.page_size * core.page_size * WORDS
        arrival = core.visits.describe(req.rid, end, kind)
        if is_finished or not core.is_choosy or pool.mamba_allocator.schedulable_available_size() > 0:
            return arrival, True
        ids = req.full_untruncated_fill_ids
        key = core.visits.key(req.rid, ids)
        if key is None or len(key) < end:
            key = key_of_ids(ids, position, core.page_size, req.extra_key, req.cache_salt)
        tree = core.tree
        found = tree.peek(key, end)
        usage = arrival.past or tree.new_usage(kind, arrival.turn, key.namespace)
        is_elastic = self.cache.token_to_kv_pool_allocator.mamba_full_cache_donor() is not None
        is_admitted = found.num_tokens < end and tree.admits(
            usage, end, found.num_tokens, found.num_page_tokens < end, is_elastic
        )
        return arrival if is_admitted else arrival._replace(past=usage), is_admitted
