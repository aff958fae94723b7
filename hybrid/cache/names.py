"""Names of what the tree has: the digest of the prefix at the end of each page, computed once per page.

A run of nodes keeps the names of its pages; a run that is cut or taken over keeps them too (`hybrid.tree.node.Run`), so
that a name takes no longer at the end of a long prefix than near its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybrid.key import NAME_BYTES, TOKEN_BYTES, name_of_namespace, names_after
from hybrid.tree.node import Node, Root, Run


def name_at(node: Node, num_tokens: int) -> bytes:
    """The name of the first `num_tokens` tokens, whole pages, of which the last is of the node's edge."""
    run = node.run
    at = (num_tokens - run.start) // run.page_size * NAME_BYTES
    if at > len(run.names):
        complete(run, num_tokens)
    return bytes(run.names[at - NAME_BYTES : at])


def names_upward(node: Node, num_tokens: int) -> Iterator[bytes]:
    """The names of the pages of the first `num_tokens` tokens, the last first, as far as they are wanted. They end in
    the node's run, or where it begins."""
    while num_tokens:
        if num_tokens == node.run.start:
            above = node.run.nodes[0].parent
            assert above is not None
            node = above
        yield name_at(node, num_tokens)
        num_tokens -= node.run.page_size


def complete(run: Run, num_tokens: int) -> None:
    """Name the pages of a run up to a position, and of the runs above it."""
    todo = []
    while True:
        todo.append((run, num_tokens))
        above = run.nodes[0].parent
        assert above is not None
        if run.names:
            last = bytes(run.names[-NAME_BYTES:])
            break
        if isinstance(above, Root):
            last = name_of_namespace(above.namespace)
            break
        num_tokens, run = run.start, above.run
        if len(run.names) >= (num_tokens - run.start) // run.page_size * NAME_BYTES:
            last = name_at(above, num_tokens)
            break
    for run, end in reversed(todo):
        start = len(run.names) // NAME_BYTES * run.page_size
        ids = run.ids[start * TOKEN_BYTES : (end - run.start) * TOKEN_BYTES]
        run.names += b"".join(names_after(last, ids, run.page_size * TOKEN_BYTES))
        last = bytes(run.names[-NAME_BYTES:])
