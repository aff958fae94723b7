"""Names of prefixes (`hybrid.key`) on the paths of a tree, each computed once.

A run of nodes keeps the names that were needed; a run that is cut or taken over keeps them too, so that a name takes
no longer at the end of a long prefix than near its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hybrid.key import NAME_BYTES, TOKEN_BYTES, Key, name_of_namespace, names_after
from hybrid.tree.node import Node, Root, Run

Chain = Callable[[bytes, bytes | bytearray, int, int], Iterator[bytes]]
"""What names prefixes: see `names_after`."""


class Names:
    """Names prefixes on the paths of a tree.

    Args:
        step: tokens from one position that has a name to the next, whole pages.
        chain: names what follows a prefix, as `names_after` does.
    """

    def __init__(self, step: int, chain: Chain = names_after) -> None:
        self.step: int = step
        self._chain = chain

    def after(self, last: bytes, ids: bytes | bytearray, start: int = 0) -> Iterator[bytes]:
        """Name what follows a prefix, at each step.

        Args:
            last: the name of the prefix.
            ids: bytes of token ids.
            start: number of tokens of these that are before what follows.
        """
        return self._chain(last, ids, self.step * TOKEN_BYTES, start * TOKEN_BYTES)

    def at(self, node: Node, num_tokens: int) -> bytes:
        """Name the first `num_tokens` tokens, whole steps, of the path to a node and in its run."""
        while num_tokens <= node.run.start:
            if isinstance(node, Root):
                return name_of_namespace(node.namespace)
            node = node.run.parent
        run = node.run
        self._complete(run, num_tokens)
        end = run.num_names(num_tokens) * NAME_BYTES
        return bytes(run.names[end - NAME_BYTES : end])

    def between(self, node: Node, start: int, end: int, every: int) -> list[bytes]:
        """Name the prefixes at the multiples of `every` tokens, whole steps, that are after `start` and up to `end`,
        two positions of a node's run."""
        run = node.run
        self._complete(run, end)
        first, last = run.num_names(start - start % every + every), run.num_names(end)
        names = bytes(run.names[(first - 1) * NAME_BYTES : last * NAME_BYTES])
        each = every // self.step * NAME_BYTES
        return [names[at : at + NAME_BYTES] for at in range(0, len(names), each)]

    def upward(self, node: Node, num_tokens: int) -> Iterator[bytes]:
        """Name the prefixes at each step of the first `num_tokens` tokens, the last first, as far as they are wanted.
        They end in a node's run, or where it begins."""
        while num_tokens:
            while num_tokens <= node.run.start:
                node = node.run.parent
            yield self.at(node, num_tokens)
            num_tokens -= self.step

    def of(self, key: Key, num_tokens: int, node: Node | None, num_known: int) -> list[bytes]:
        """Name the prefixes at each step of the first `num_tokens` tokens of a key. Those of what the tree has are
        known, or become so.

        Args:
            node: where the tree has the first `num_known` tokens, whole steps; None: it has none.
        """
        parts, end = [], num_known
        while node is not None and end:
            parts.append(self.between(node, node.run.start, end, self.step))
            node, end = node.run.parent, node.run.start
        names = [name for part in reversed(parts) for name in part]
        last = names[-1] if names else name_of_namespace(key.namespace)
        return [*names, *self.after(last, key.ids[: num_tokens * TOKEN_BYTES], num_known)]

    def _complete(self, run: Run, num_tokens: int) -> None:
        """Have a run keep its names up to a position, and the runs above it those up to where it begins."""
        incomplete = []
        while True:
            if len(run.names) < run.num_names(num_tokens) * NAME_BYTES:
                incomplete.append((run, num_tokens))
            elif not incomplete:
                return
            if run.names or not run.start:
                break
            num_tokens, run = run.start, run.parent.run
        for run, end in reversed(incomplete):
            start = (run.start // self.step + len(run.names) // NAME_BYTES) * self.step
            last = bytes(run.names[-NAME_BYTES:]) or self.at(run.nodes[0], start)
            run.names += b"".join(self.after(last, ids_between(run, start, end)))


def ids_as_names(last: bytes, ids: bytes | bytearray, page_bytes: int, start: int) -> Iterator[bytes]:
    """Name prefixes by the ids of their last pages, where these are a hash of all up to there."""
    for at in range(start, len(ids) - page_bytes + 1, page_bytes):
        yield bytes(ids[at : at + page_bytes])


def ids_between(run: Run, start: int, end: int) -> bytes:
    """Return the bytes of the token ids of positions `[start, end)` on the path to a run and in it."""
    parts = []
    while True:
        first = max(start, run.start)
        parts.append(bytes(run.ids[(first - run.start) * TOKEN_BYTES : (end - run.start) * TOKEN_BYTES]))
        if first == start:
            return b"".join(reversed(parts))
        run, end = run.parent.run, first
