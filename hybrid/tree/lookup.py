"""The reading half of the tree: what it knows of a key."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import count

from hybrid.key import TOKEN_BYTES, Key, common_prefix
from hybrid.tree.candidates import Candidates
from hybrid.tree.ghosts import Ghosts
from hybrid.tree.node import Match, Node, Past, Root
from hybrid.tree.policy import TURN_END, Policy, Usage
from hybrid.units import Prices


class Lookup:
    """What can be asked of a tree; see `Tree` for its arguments."""

    def __init__(
        self,
        page_size: int,
        grid: int,
        policy: Policy,
        prices: Prices = Prices(),  # noqa: B008 - it is frozen
        max_ghosts: int = 1 << 16,
        seed: int = 0,
    ) -> None:
        assert grid % page_size == 0
        self.page_size = page_size
        self.grid = grid
        self.num_pages = 0
        self.num_checkpoints = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[str, Root] = {}
        self._ticks = count(1)
        self._candidates = Candidates(policy, prices, seed)
        self._ghosts = Ghosts(grid, max_ghosts)

    def match(self, key: Key, limit: int) -> Match:
        """The longest known prefix of the first `limit` tokens. Counts as a use of the checkpoint found, and of nothing
        else."""
        found = self.peek(key, limit)
        self.touch(found)
        return found

    def touch(self, match: Match) -> None:
        """Count a request, and its use of the checkpoint that was found."""
        candidates = self._candidates
        candidates.now += 1
        node = match.checkpoint
        if node is not None:
            candidates.used(node)
            usage = node.usage
            usage.last_used = next(self._ticks)
            usage.used_at = candidates.now
            usage.hits += 1
            candidates.reordered(node)
            candidates.changed(node)  # whoever uses it has locked it, and goes on from it

    def peek(self, key: Key, limit: int) -> Match:
        """As `match`, and counts as nothing."""
        node: Node | None = self._roots.get(key.namespace)
        if node is None:
            return Match(0, 0, None, None, None)
        ids, page_bytes = key.ids, self._page_bytes
        end = min(limit * TOKEN_BYTES, len(ids)) // page_bytes * page_bytes
        starts_with = ids.startswith
        offset = 0
        checkpoint: Node | None = None
        while offset < end:
            child = node.newest
            if child is None or not starts_with(child.edge, offset):
                child = node.children.get(ids[offset : offset + page_bytes])
                if child is None:
                    break
                if not starts_with(child.edge, offset):
                    node = child
                    offset += common_prefix(ids, child.edge, offset, 0, page_bytes, end - offset)
                    break
            node = child
            stop = offset + len(child.edge)
            if stop > end:
                offset = end
                break
            offset = stop
            if child.slot is not None:
                checkpoint = child
        if key.units:
            return self._whole(key, offset // TOKEN_BYTES, node if offset else None, checkpoint)
        num_page_tokens = offset // TOKEN_BYTES
        num_tokens = checkpoint.end if checkpoint is not None else 0
        branching_len = num_page_tokens // self.grid * self.grid
        return Match(
            num_tokens,
            num_page_tokens,
            branching_len if branching_len > num_tokens else None,
            checkpoint,
            node if offset else None,
        )

    def _whole(self, key: Key, num_page_tokens: int, node: Node | None, checkpoint: Node | None) -> Match:
        """A match that ends inside none of the key's units."""
        num_page_tokens = key.whole(num_page_tokens, self.page_size)
        while node is not None and node.parent is not None and node.parent.end >= num_page_tokens:
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

    def recall(self, key: Key, match: Match, limit: int) -> Past:
        """What was once known of the first `limit` tokens of a key, right after the match.

        Tells the policy of every use that the request would have made of a checkpoint that has been evicted.
        """
        known, gone = self._beyond(key, match, limit)
        for usage, num_tokens in gone:
            self._candidates.missed(usage, num_tokens)
        turn = next((usage.turn + 1 for usage, _ in reversed(gone) if usage.kind == TURN_END), None)
        above = match.deepest
        while above is not None:
            if (above.slot is not None or above.lost_checkpoint) and above.end <= match.num_page_tokens:
                if turn is None and above.usage.kind == TURN_END:
                    turn = above.usage.turn + 1
                if above.slot is None and above.end > match.num_tokens:
                    self._candidates.missed(above.usage, above.end)
                    gone.append((above.usage, above.end))
            if turn is not None and above.end <= match.num_tokens:
                break
            above = above.parent
        return Past(known, turn or 0, {num_tokens: usage for usage, num_tokens in gone})

    def was_evicted(self, key: Key, match: Match) -> bool:
        """Whether what follows the page hit was once here, right after the match."""
        end = (match.num_page_tokens // self.grid + 1) * self.grid
        return self._beyond(key, match, end)[0] > match.num_page_tokens

    def _beyond(self, key: Key, match: Match, limit: int) -> tuple[int, list[tuple[Usage, int]]]:
        node = match.deepest
        if node is not None and node.end != match.num_page_tokens:
            return match.num_page_tokens, []  # the match ends inside an edge: what went on from there is there
        return self._ghosts.follow(key, node, match.num_page_tokens, limit)

    def pages(self, node: Node | None, num_tokens: int) -> array[int]:
        """Page ids of the first `num_tokens` tokens on the way from the root to `node`."""
        parts = []
        while node is not None and node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        pages = array("i")
        for part in reversed(parts):
            pages.extend(part)
        del pages[num_tokens // self.page_size :]
        return pages

    def lost_checkpoint(self, match: Match) -> Usage | None:
        """The use of the deepest checkpoint between the usable hit and the page hit that was evicted, or was not worth
        its room (then it was never created: tick 0). None if there was none."""
        node = match.deepest
        while node is not None and node is not match.checkpoint:
            if node.lost_checkpoint and node.end <= match.num_page_tokens:
                return node.usage
            node = node.parent
        return None

    def knows(self, namespace: str) -> bool:
        """Whether anything is kept in the namespace."""
        return namespace in self._roots

    def nodes(self) -> Iterator[tuple[str, Node]]:
        """Every node but the roots, parents first, with its namespace."""
        for namespace, root in self._roots.items():
            stack = list(reversed(root.children.values()))
            while stack:
                node = stack.pop()
                yield namespace, node
                stack.extend(reversed(node.children.values()))
