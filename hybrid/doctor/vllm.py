"""A model of vLLM's scheduler and of its cache of hybrid models (0.33, `mamba_cache_mode="align"`).

One pool of blocks of one size in bytes, and one queue of those that are free. Layers are in groups; a request holds
blocks of each group. Groups of attention keep a block for each `block_size` tokens; a group of states keeps the block
of the state in use, and states where the prompt's last block begins and where prompts were found to part. A hit ends
where all groups have a block. `bench/doctor.py` compares its hits with those of the real scheduler.
"""

from __future__ import annotations

from collections import OrderedDict

from hybrid.doctor.engine import MISS, Hit
from hybrid.doctor.request import LoggedRequest
from hybrid.doctor.sizes import Endless, Memory, Sizes
from hybrid.errors import MemoryBudgetError
from hybrid.units import ceil_div, format_bytes

MAX_BATCHED_TOKENS = 8192
"""Tokens of a step, vLLM's `--max-num-batched-tokens`."""

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
        self._attention, self._states, block_bytes = sizes.vllm_groups(self.block_size)
        # One block stands for "no block".
        num_blocks = FREE_BLOCKS if isinstance(memory, Endless) else memory // block_bytes - 1
        needed = 2 * (self._attention + self._states)
        if num_blocks < needed:
            raise MemoryBudgetError(
                f"vLLM's blocks are {format_bytes(block_bytes)} for this model ({self.block_size} tokens), and "
                f"{num_blocks + 1} of them fit; give at least {format_bytes((needed + 1) * block_bytes)}"
            )
        self._retention, self._budget = retention, max_batched_tokens
        self._num_new = 0  # blocks that were taken from the memory so far: their number is the next one's name
        self._num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict()  # those that were used, the first to be taken first
        self._hash_of: dict[int, tuple[int, int]] = {}  # of a block: its group, and the hash
        # Of each group: the blocks that have a hash, the first one serves.
        self._blocks_of: tuple[dict[int, list[int]], ...] = tuple({} for _ in range(self._attention + self._states))
        self._references: dict[int, int] = {}

    def serve(self, request: LoggedRequest) -> Hit:
        """Serve a request from its prompt to its last token."""
        size, num_prompt = self.block_size, request.num_prompt
        hashes = request.blocks(size, request.num_tokens)
        at_most = (num_prompt - 1) // size
        num_pages = self._pages(hashes, at_most)
        hit = self._state(hashes, num_pages)
        junction = num_pages if num_pages > hit else 0
        found = self._found(hashes, hit)
        if not self._fits(found, num_prompt, hit):
            return MISS
        held: list[list[int | None]] = [[] for _ in self._blocks_of]
        for blocks, mine in zip(found, held, strict=True):
            for block in blocks:
                if block is not None:
                    self._hold(block)
            mine.extend(blocks)
        kept = {at_most - 1, junction - 1} if self._retention == 0 else None
        computed, retired, cached = hit * size, 0, [hit] * len(held)
        stops = sorted({junction * size, at_most * size, num_prompt})
        while computed < request.num_tokens - 1 or computed < num_prompt:
            end = self._end_of_step(computed, num_prompt, request.num_tokens - 1, stops)
            if computed:  # states before the one that the step begins with
                last = (computed - 1) // size
                for mine in held[self._attention :]:
                    self._release(range(min(last, len(mine)) - 1, retired - 1, -1), mine)
                retired = max(retired, last)
            if not self._extend(held, ceil_div(end, size)):
                break  # the answer does not fit beside its own prompt
            for group, mine in enumerate(held):
                self._name(group, mine, hashes, cached[group], end // size, kept)
                cached[group] = max(cached[group], end // size)
            computed = end
        for mine in held:
            self._release(range(len(mine) - 1, -1, -1), mine)
        return Hit(hit * size, num_pages * size)

    def _end_of_step(self, start: int, num_prompt: int, last: int, stops: list[int]) -> int:
        """Where the step that begins at a token ends: at a block, or where a state is to be kept; in the answer at the
        next block."""
        if start >= num_prompt:
            return min((start // self.block_size + 1) * self.block_size, last)
        end = min(start + self._budget, num_prompt)
        if end < num_prompt and end // self.block_size * self.block_size > start:
            end = end // self.block_size * self.block_size
        return min((stop for stop in stops if start < stop < end), default=end)

    def _pages(self, hashes: list[int], at_most: int) -> int:
        """Blocks from the beginning on that all groups of attention have."""
        groups = self._blocks_of[: self._attention]
        for number in range(at_most):
            if not all(hashes[number] in group for group in groups):
                return number
        return at_most

    def _state(self, hashes: list[int], num_pages: int) -> int:
        """The last of these blocks at whose end all groups of states have one."""
        groups = self._blocks_of[self._attention :]
        for number in range(num_pages, 0, -1):
            if all(hashes[number - 1] in group for group in groups):
                return number
        return 0

    def _found(self, hashes: list[int], hit: int) -> list[list[int | None]]:
        """The blocks of a hit, by group."""
        found: list[list[int | None]] = [
            [group[number][0] for number in hashes[:hit]] for group in self._blocks_of[: self._attention]
        ]
        for group in self._blocks_of[self._attention :]:
            found.append([None] * (hit - 1) + [group[hashes[hit - 1]][0]] if hit else [])
        return found

    def _fits(self, found: list[list[int | None]], num_prompt: int, hit: int) -> bool:
        """Return whether the whole prompt has room."""
        taken = {block for blocks in found for block in blocks if block is not None}
        free = self._num_blocks - len(self._references) - sum(block not in self._references for block in taken)
        needed = ceil_div(num_prompt, self.block_size) - hit
        return self._attention * needed + self._states * min(1, needed) <= free

    def _hold(self, block: int) -> None:
        self._free.pop(block, None)
        self._references[block] = self._references.get(block, 0) + 1

    def _release(self, numbers: range, mine: list[int | None]) -> None:
        """Give up blocks of a request: those with a hash are taken last, those without first."""
        first = []
        for number in numbers:
            block, mine[number] = mine[number], None
            if block is None:
                continue
            self._references[block] -= 1
            if self._references[block]:
                continue
            del self._references[block]
            self._free[block] = None
            if block not in self._hash_of:
                first.append(block)
        for block in reversed(first):
            self._free.move_to_end(block, last=False)

    def _extend(self, held: list[list[int | None]], num_blocks: int) -> bool:
        """Take blocks for a step: one for each block of attention, one of each group of states."""
        missing = [num_blocks - len(mine) for mine in held]
        wanted = sum(
            more if group < self._attention else min(more, 1) for group, more in enumerate(missing) if more > 0
        )
        if wanted > self._num_blocks - len(self._references):
            return False
        for group, mine in enumerate(held):
            if missing[group] <= 0:
                continue
            if group >= self._attention:
                mine.extend([None] * (missing[group] - 1))
            while len(mine) < num_blocks:
                mine.append(self._take())
        return True

    def _take(self) -> int:
        """The block that is free and was released first. What it held is lost."""
        if self._num_new < self._num_blocks:  # never used ones come first: they were at the front of the queue
            front = next(iter(self._free), None)
            if front is None or front in self._hash_of:
                block = self._num_new
                self._num_new += 1
                self._references[block] = 1
                return block
        block, _ = self._free.popitem(last=False)
        self._references[block] = 1
        named = self._hash_of.pop(block, None)
        if named is not None:
            group, number = named
            blocks = self._blocks_of[group][number]
            blocks.remove(block)
            if not blocks:
                del self._blocks_of[group][number]
        return block

    def _name(
        self, group: int, mine: list[int | None], hashes: list[int], start: int, end: int, kept: set[int] | None
    ) -> None:
        """Name blocks that are full by the hash of all tokens up to their end."""
        is_state = group >= self._attention
        for number in range(start, end):
            block = mine[number]
            if block is None or (is_state and kept is not None and number not in kept):
                continue
            self._hash_of[block] = group, hashes[number]
            self._blocks_of[group].setdefault(hashes[number], []).append(block)
