"""vLLM's scheduler and its cache of hybrid models (0.33)."""

from __future__ import annotations

from hybrid.doctor.engine import MAX_RUNNING, MISS, Hit
from hybrid.doctor.request import LoggedRequest
from hybrid.doctor.sizes import Endless, Memory, Sizes
from hybrid.doctor.vllm_blocks import MAX_BATCHED_TOKENS, Holding, VllmBlocks
from hybrid.errors import MemoryBudgetError
from hybrid.units import format_bytes

FREE_BLOCKS = 1 << 40
"""Blocks of a memory without end."""

EVENTS = 2
"""Tokens of a block of an answer with which something changes in the pool."""


class VllmRunning:
    """A request that runs.

    Attributes:
        holding, hashes: its blocks, and the hashes of those that are full.
        hit: what of its prompt was cached.
    """

    __slots__ = ("hashes", "hit", "holding")

    def __init__(self, holding: Holding, hashes: list[int], size: int) -> None:
        self.holding, self.hashes = holding, hashes
        self.hit = Hit(holding.hit * size, holding.num_pages * size)

    @property
    def computed(self) -> int:
        """Tokens that are computed."""
        return self.holding.computed


class VllmScheduler:
    """vLLM's scheduler with its prefix cache.

    Args:
        sizes: of the model.
        memory: bytes of blocks, or what is endless.
        block_size: tokens of a block; None: the one that vLLM chooses.
        retention: where states are kept. 0: at the prompt's last block and where prompts part; None: at every end of a
            step.
        max_batched_tokens: tokens of a step.
        names_again: as in vLLM 0.32, a state that is found is named once more (`VllmBlocks`).

    Raises:
        MemoryBudgetError: the memory does not hold a block of each group, and a second one.
    """

    mixes = True
    max_running = MAX_RUNNING
    shares_at_once = True

    def __init__(
        self,
        sizes: Sizes,
        memory: Memory,
        *,
        block_size: int | None = None,
        retention: int | None = 0,
        max_batched_tokens: int = MAX_BATCHED_TOKENS,
        names_again: bool = False,
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
            attention,
            states,
            num_blocks,
            self.block_size,
            retention=retention,
            max_batched_tokens=max_batched_tokens,
            names_again=names_again,
        )

    def serve(self, request: LoggedRequest) -> Hit:
        """Serve a request from its prompt to its last token."""
        running = self.begin(request)
        if running is None:
            return MISS
        # Where there is no room beside its own prompt, the answer ends.
        self.advance(running, max(request.num_prompt, request.num_tokens - 1))
        self.end(running)
        return running.hit

    def new_step(self) -> None:
        """A step begins: states that it computes are not found before the next one."""
        self._blocks.new_step()

    def begin(self, request: LoggedRequest, budget: int | None = None) -> VllmRunning | None:
        """Find a request's prompt and hold what is found."""
        hashes = request.blocks(self.block_size, request.num_tokens)
        holding = self._blocks.begin(hashes, request.num_prompt, budget=budget)
        return VllmRunning(holding, hashes, self.block_size) if holding is not None else None

    def end_of_part(self, running: VllmRunning, budget: int) -> int:
        """Where the next step of its prompt ends."""
        return self._blocks.end_of_step(running.holding, running.holding.num_prompt, budget)

    def next_event(self, running: VllmRunning) -> int:
        """The end of a block of its answer, or one of the two tokens after it: a block is named, the next one is taken,
        the state before is given up."""
        past = running.computed % self.block_size
        return running.computed + (1 if past < EVENTS else self.block_size - past)

    def advance(self, running: VllmRunning, end: int) -> bool:
        """Compute a request up to a token."""
        return self._blocks.advance(running.holding, running.hashes, end)

    def end(self, running: VllmRunning) -> None:
        """Give up what a request holds."""
        self._blocks.end(running.holding)
