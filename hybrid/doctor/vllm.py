"""vLLM's scheduler and its cache of hybrid models (0.33), for one request at a time."""

from __future__ import annotations

from hybrid.doctor.engine import MISS, Hit
from hybrid.doctor.request import LoggedRequest
from hybrid.doctor.sizes import Endless, Memory, Sizes
from hybrid.errors import MemoryBudgetError
from hybrid.mirror.vllm_blocks import MAX_BATCHED_TOKENS, VllmBlocks
from hybrid.units import format_bytes

FREE_BLOCKS = 1 << 40
"""Blocks of a memory without end."""


class VllmScheduler:
    """vLLM's scheduler with its prefix cache, for one request at a time.

    Args:
        sizes: of the model.
        memory: bytes of blocks, or what is endless.
        block_size: tokens of a block; None: the one that vLLM chooses.
        retention: where states are kept. 0: at the prompt's last block and where prompts part; None: at every end of a
            step.
        max_batched_tokens: tokens of a step.

    Raises:
        MemoryBudgetError: the memory does not hold a block of each group, and a second one.
    """

    def __init__(
        self,
        sizes: Sizes,
        memory: Memory,
        *,
        block_size: int | None = None,
        retention: int | None = 0,
        max_batched_tokens: int = MAX_BATCHED_TOKENS,
    ) -> None:
        self.block_size = block_size or sizes.vllm_block_size
        attention, states, block_bytes = sizes.vllm_groups(self.block_size)
        # One block stands for "no block".
        num_blocks = FREE_BLOCKS if isinstance(memory, Endless) else memory // block_bytes - 1
        needed = 2 * (attention + states)
        if num_blocks < needed:
            raise MemoryBudgetError(
                f"vLLM's blocks are {format_bytes(block_bytes)} for this model ({self.block_size} tokens), and "
                f"{num_blocks + 1} of them fit; give at least {format_bytes((needed + 1) * block_bytes)}"
            )
        self._blocks = VllmBlocks(
            attention, states, num_blocks, self.block_size, retention=retention, max_batched_tokens=max_batched_tokens
        )

    def serve(self, request: LoggedRequest) -> Hit:
        """Serve a request from its prompt to its last token."""
        size = self.block_size
        hashes = request.blocks(size, request.num_tokens)
        holding = self._blocks.begin(hashes, request.num_prompt)
        if holding is None:
            return MISS
        # Where there is no room beside its own prompt, the answer ends.
        self._blocks.advance(holding, hashes, max(request.num_prompt, request.num_tokens - 1))
        self._blocks.end(holding)
        return Hit(holding.hit * size, holding.num_pages * size)
