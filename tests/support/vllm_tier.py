"""vLLM's manager of its CPU tier, and requests that find, load and store chunks in it as its connector has them do.

Needs vLLM, 0.31 or later."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from support.vllm_served import BLOCK

STATES = 1, 2, 3
"""Groups of layers with states; 0 is that of attention."""


class Tier:
    """A CPU tier with nothing on the device before it.

    Args:
        num_chunks: its size.
        policy: "lru", "arc", or "LearnedCachePolicy".
    """

    def __init__(self, num_chunks: int, policy: str) -> None:
        module = "hybrid.vllm.tier" if policy == "LearnedCachePolicy" else None
        self.manager = CPUOffloadingManager(num_chunks, policy, module)
        self.num_chunks = num_chunks
        self.prompt_tokens = self.hit_tokens = self._number = 0

    @property
    def policy(self) -> Any:
        """The policy of the manager, which keeps it to itself."""
        return vars(self.manager)["_policy"]

    def serve(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Serve a request. Returns how many tokens of it were found."""
        self._number += 1
        context, names = ReqContext(str(self._number)), self._names([*prompt, *answer])
        for group in (0, *STATES):
            for place, name in enumerate(names):
                context.set_offload_key_position(make_offload_key(name, group), (place + 1) * BLOCK)
        self.manager.on_new_request(context)
        last = (len(prompt) - 1) // BLOCK
        num_pages = 0
        while num_pages < last and self._has(names[num_pages], (0,), context):
            num_pages += 1
        hit = num_pages
        while hit and not self._has(names[hit - 1], STATES, context):
            hit -= 1
        if hit:
            keys = [make_offload_key(name, 0) for name in names[:hit]]
            keys += [make_offload_key(names[hit - 1], group) for group in STATES]
            self.manager.prepare_load(keys, context)
            self.manager.complete_load(keys, context)
        self._store([(name, 0) for name in names[hit : len(prompt) // BLOCK]], context)
        for place in sorted({num_pages, last} - {0, hit}):
            self._store([(names[place - 1], group) for group in STATES], context)
        self._store([(name, 0) for name in names[len(prompt) // BLOCK :]], context)
        self.manager.on_request_finished(context)
        self.prompt_tokens += len(prompt)
        self.hit_tokens += hit * BLOCK
        return hit * BLOCK

    def _names(self, ids: Sequence[int]) -> list[bytes]:
        names, before = [], b""
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            before = hashlib.sha256(before + str(ids[start : start + BLOCK]).encode()).digest()
            names.append(before)
        return names

    def _has(self, name: bytes, groups: tuple[int, ...], context: ReqContext) -> bool:
        return all(self.manager.lookup(make_offload_key(name, group), context) is LookupResult.HIT for group in groups)

    def _store(self, chunks: Sequence[tuple[bytes, int]], context: ReqContext) -> None:
        keys = [make_offload_key(name, group) for name, group in chunks]
        prepared = self.manager.prepare_store(keys, context)
        if prepared is not None and prepared.keys_to_store:
            self.manager.complete_store(prepared.keys_to_store, context)
