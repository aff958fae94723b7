"""vLLM's pool of blocks and its cache of hybrid models, in numbers alone (0.33, `mamba_cache_mode="align"`).

One pool of blocks of one size in bytes, and one queue of those that are free. Layers are in groups; a request holds
blocks of each group. Groups of attention keep a block for each `block_size` tokens; a group of states keeps the block
of the state in use, and states where the prompt's last block begins and where prompts were found to part. A hit ends
where all groups have a block. `bench/doctor.py` compares its hits with those of the real scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from hybrid.units import ceil_div

MAX_BATCHED_TOKENS = 8192
"""Tokens of a step, vLLM's `--max-num-batched-tokens`."""

Hashes = Sequence[Hashable]
"""A hash for each full block of a request, of all tokens up to its end."""


class Holding:
    """Blocks that a request holds.

    Attributes:
        hit, num_pages: blocks of it that were found, and those whose pages alone were.
    """

    __slots__ = ("cached", "computed", "hit", "kept", "num_pages", "num_prompt", "retired", "stops", "tables")

    def __init__(
        self,
        hit: int,
        num_pages: int,
        num_prompt: int,
        block_size: int,
        kept: set[int] | None,
        tables: list[list[int | None]],
    ) -> None:
        self.hit: int = hit
        self.num_pages: int = num_pages
        self.num_prompt: int = num_prompt
        self.tables: list[list[int | None]] = tables
        self.kept: set[int] | None = kept
        self.computed: int = hit * block_size
        self.retired: int = 0
        self.cached: list[int] = [hit] * len(tables)
        junction = num_pages if num_pages > hit else 0
        last = (num_prompt - 1) // block_size
        self.stops: list[int] = sorted({junction * block_size, last * block_size, num_prompt})


class VllmBlocks:
    """vLLM's blocks, by their numbers. Evicts what was released first.

    Args:
        num_attention, num_states: groups of layers of both kinds.
        num_blocks: of the pool, without the one that stands for "no block".
        block_size: tokens of a block.
        retention: where states are kept. None: at every end of a step; 0: at the prompt's last block and where prompts
            part; otherwise also at multiples of n tokens.
        max_batched_tokens: tokens of a step.
        names_again: as vLLM 0.32: the step that begins at a prompt's last block names the state there once more,
            so that it is not found before the next step.
    """

    def __init__(
        self,
        num_attention: int,
        num_states: int,
        num_blocks: int,
        block_size: int,
        *,
        retention: int | None = 0,
        max_batched_tokens: int = MAX_BATCHED_TOKENS,
        names_again: bool = False,
    ) -> None:
        self._attention, self._states = num_attention, num_states
        self._size = block_size
        self._retention, self._budget = retention, max_batched_tokens
        self._names_again = names_again
        self._every = retention // block_size if retention else 0
        self._num_new = 0  # blocks that were taken from the memory so far: their number is the next one's name
        self._num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict()  # those that were used, the first to be taken first
        self._hash_of: dict[int, tuple[int, Hashable]] = {}  # of a block: its group, and the hash
        # Of each group: the blocks that have a hash, the first one serves.
        self._blocks_of: tuple[dict[Hashable, list[int]], ...] = tuple({} for _ in range(num_attention + num_states))
        self._references: dict[int, int] = {}
        self._named: set[Hashable] | None = None  # of states of this step; None: all are one

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return len(self._references)

    def new_step(self) -> None:
        """A step of several requests begins: states that it names are not found before the next one."""
        self._named = set()

    def begin(self, hashes: Hashes, num_prompt: int, looks: bool = True, budget: int | None = None) -> Holding | None:
        """Find a request's prompt, and hold what is found.

        Args:
            looks: the request may use what is cached.
            budget: tokens that are left of the step; None: all.

        Returns:
            What it holds; None: the whole prompt has no room, or none of it in this step.
        """
        at_most = (num_prompt - 1) // self._size
        num_pages = self._pages(hashes, at_most) if looks else 0
        hit = self._state(hashes, num_pages)
        if hit and self._named and hashes[hit - 1] in self._named:
            return None
        found = self._found(hashes, hit)
        if not self._fits(found, num_prompt, hit):
            return None
        junction = num_pages if num_pages > hit else 0
        kept = {at_most - 1, junction - 1} if self._retention is not None else None
        holding = Holding(hit, num_pages, num_prompt, self._size, kept, found)
        if budget is not None and self.end_of_step(holding, num_prompt, budget) == holding.computed:
            return None
        free, references = self._free, self._references
        for blocks in found:
            for block in blocks:
                if block in references:
                    references[block] += 1
                elif block is not None:
                    references[block] = 1
                    del free[block]
        return holding

    def advance(self, holding: Holding, hashes: Hashes, end: int) -> bool:
        """Compute a request up to a token, step by step. Returns whether there was room."""
        size = self._size
        while holding.computed < end:
            stop = self.end_of_step(holding, end, self._budget)
            if holding.computed:  # states before the one that the step begins with
                last = (holding.computed - 1) // size
                for mine in holding.tables[self._attention :]:
                    self._release(range(min(last, len(mine)) - 1, holding.retired - 1, -1), mine)
                holding.retired = max(holding.retired, last)
            if not self._extend(holding.tables, ceil_div(stop, size)):
                return False
            for group, mine in enumerate(holding.tables):
                self._name(group, mine, hashes, holding.cached[group], stop // size, holding.kept)
                holding.cached[group] = max(holding.cached[group], stop // size)
            if self._names_again and self._named is not None and self._states:
                last = (holding.num_prompt - 1) // size
                if last and stop // size == last and holding.tables[-1][last - 1] is not None:
                    self._named.add(hashes[last - 1])
            holding.computed = stop
        return True

    def end(self, holding: Holding) -> None:
        """Give up what a request holds. What has a hash can be found until its block is used again."""
        for mine in holding.tables:
            self._release(range(len(mine) - 1, -1, -1), mine)

    def end_of_step(self, holding: Holding, last: int, budget: int) -> int:
        """Where the next step of a request ends: at a block, or where a state is to be kept; in the answer at the next
        block.

        Args:
            last: it ends there, or before.
            budget: tokens that are left of the step; where they are fewer than a block, nothing of a prompt may be
                computed.
        """
        start, num_prompt = holding.computed, holding.num_prompt
        if start >= num_prompt:
            return min((start // self._size + 1) * self._size, last)
        end = min(start + budget, num_prompt, last)
        whole = end // self._size * self._size
        if end < num_prompt and (whole > start or (end < last and self._size <= self._budget)):
            end = max(start, whole)
        return min((stop for stop in holding.stops if start < stop < end), default=end)

    def _pages(self, hashes: Hashes, at_most: int) -> int:
        """Blocks from the beginning on that all groups of attention have."""
        num_pages = at_most
        for group in self._blocks_of[: self._attention]:
            for number in range(num_pages):
                if hashes[number] not in group:
                    num_pages = number
                    break
        return num_pages

    def _state(self, hashes: Hashes, num_pages: int) -> int:
        """The last of these blocks at whose end all groups of states have one."""
        groups = self._blocks_of[self._attention :]
        for number in range(num_pages, 0, -1):
            for group in groups:
                if hashes[number - 1] not in group:
                    break
            else:
                return number
        return 0

    def _found(self, hashes: Hashes, hit: int) -> list[list[int | None]]:
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
        needed = ceil_div(num_prompt, self._size) - hit
        return self._attention * needed + self._states * min(1, needed) <= free

    def _release(self, numbers: range, mine: list[int | None]) -> None:
        """Give up blocks of a request: those with a hash are taken last, those without first."""
        free, references, first = self._free, self._references, []
        for number in numbers:
            block = mine[number]
            if block is None:
                continue
            mine[number] = None
            if references[block] > 1:
                references[block] -= 1
                continue
            del references[block]
            free[block] = None
            if block not in self._hash_of:
                first.append(block)
        for block in reversed(first):
            free.move_to_end(block, last=False)

    def _extend(self, held: list[list[int | None]], num_blocks: int) -> bool:
        """Take blocks for a step: one for each block of attention, one of each group of states."""
        missing = [max(0, num_blocks - len(mine)) for mine in held]
        wanted = sum(missing[: self._attention]) + sum(more > 0 for more in missing[self._attention :])
        if wanted > self._num_blocks - len(self._references):
            return False
        for group, (mine, more) in enumerate(zip(held, missing, strict=True)):
            if more and group >= self._attention:
                mine.extend([None] * (more - 1))
                more = 1
            if more:
                self._take(more, mine)
        return True

    def _take(self, count: int, into: list[int | None]) -> None:
        """Take the blocks that are free and were released first. What they held is lost."""
        free, references, hash_of = self._free, self._references, self._hash_of
        for _ in range(count):
            if self._num_new < self._num_blocks:  # never used ones come first: they were at the front of the queue
                front = next(iter(free), None)
                if front is None or front in hash_of:
                    into.append(self._num_new)
                    references[self._num_new] = 1
                    self._num_new += 1
                    continue
            block, _ = free.popitem(last=False)
            references[block] = 1
            into.append(block)
            named = hash_of.pop(block, None)
            if named is not None:
                group, number = named
                blocks = self._blocks_of[group][number]
                if len(blocks) == 1:
                    del self._blocks_of[group][number]
                else:
                    blocks.remove(block)

    def _name(
        self, group: int, mine: list[int | None], hashes: Hashes, start: int, end: int, kept: set[int] | None
    ) -> None:
        """Name blocks that are full by the hash of all tokens up to their end."""
        is_state, named = group >= self._attention, self._blocks_of[group]
        for number in range(start, end):
            block = mine[number]
            if block is None:
                continue
            is_at_interval = self._every and not (number + 1) % self._every
            if is_state and kept is not None and number not in kept and not is_at_interval:
                continue
            self._hash_of[block] = group, hashes[number]
            if is_state and self._named is not None:
                self._named.add(hashes[number])
            if (blocks := named.get(hashes[number])) is None:
                named[hashes[number]] = [block]
            else:
                blocks.append(block)
