"""The free blocks of vLLM's pool, in the order in which they are to be used again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

Block = Any
"""vLLM's `KVCacheBlock`."""


class FreeBlocks:
    """Stands in for vLLM's `FreeKVCacheBlockQueue`: blocks without a hash are used first, then those whose content the
    tree does not have, then what the tree values least.

    Nothing here but `evict` can fail, and at every moment each free block is in one of the three places at least.

    Args:
        blocks: the free blocks, in vLLM's order.
        owned: ids of the blocks that the tree owns; read, never changed.
        evict: makes the tree let go of up to n blocks, which it reports by `let_go`. Returns whether it did.
        fail: is called when `evict` has raised, with the error and the blocks that were taken out of here already. It
            puts vLLM's own queue in place of this one, and returns that.

    Attributes:
        num_free_blocks: how many there are; vLLM reads it.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        owned: Set[int],
        evict: Callable[[int], bool],
        fail: Callable[[Exception, list[Block]], Any],
    ) -> None:
        self._empty: dict[int, Block] = {block.block_id: block for block in reversed([*blocks])}
        self._unowned: dict[int, Block] = {}
        self._cached: dict[int, Block] = {}
        self._owned = owned
        self._evict = evict
        self._fail = fail
        self.num_free_blocks: int = len(self._empty)

    @property
    def has_spare(self) -> bool:
        """Whether a block is free that the tree does not have."""
        return bool(self._empty or self._unowned)

    def append(self, block: Block) -> None:
        """Add a block that has just become free, with its content."""
        self.append_n([block])

    def append_n(self, blocks: list[Block]) -> None:
        """Add blocks that have just become free, with their content."""
        for block in blocks:
            place = self._cached if block.block_id in self._owned else self._unowned
            place[block.block_id] = block
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: list[Block]) -> None:
        """Add blocks without content, the first to be used first."""
        for block in reversed(blocks):
            self._empty[block.block_id] = block
        self.num_free_blocks += len(blocks)

    def let_go(self, block: Block) -> None:
        """Tell that the tree does not have a block any more. If it is free, it can be used."""
        if block.block_id in self._cached:
            self._empty[block.block_id] = block
            del self._cached[block.block_id]

    def remove(self, block: Block) -> None:
        """Take out a block that is used again with its content.

        Raises:
            RuntimeError: it is not free.
        """
        for place in (self._cached, self._unowned, self._empty):
            if place.pop(block.block_id, None) is not None:
                self.num_free_blocks -= 1
                return
        raise RuntimeError(f"remove() called on a block that is not free: {block}")

    def popleft(self) -> Block:
        """Take out the block that is to be used next."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        """Take out the blocks that are to be used next.

        Raises:
            ValueError: there are not as many.
        """
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks were asked for, and {self.num_free_blocks} are free")
        taken: list[Block] = []
        try:
            while len(taken) < n:
                if self._empty:
                    taken.append(self._empty.popitem()[1])
                elif self._unowned:
                    taken.append(self._unowned.pop(next(iter(self._unowned))))
                elif not self._evict(n - len(taken)):
                    raise RuntimeError(f"{len(self._cached)} free blocks are in the tree, which lets go of none")
        except Exception as error:
            own: list[Block] = self._fail(error, taken).popleft_n(n)
            return own
        self.num_free_blocks -= n
        return taken

    def clear_content(self) -> None:
        """Tell that no block has a content any more."""
        self._empty = {block.block_id: block for block in reversed(self.get_all_free_blocks())}
        self._unowned, self._cached = {}, {}

    def get_all_free_blocks(self) -> list[Block]:
        """All free blocks, those first that are to be used next; in the tree, those first that were freed first."""
        places = {**dict(reversed(self._empty.items())), **self._unowned, **self._cached}
        return [*places.values()]

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """The free blocks after one of them, or all, as `get_all_free_blocks` has them."""
        blocks = self.get_all_free_blocks()
        start = blocks.index(cursor) + 1 if cursor is not None else 0
        return iter(blocks[start:])
