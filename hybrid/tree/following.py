"""What follows a prefix in the tree."""

from __future__ import annotations

from array import array
from itertools import islice

from hybrid.key import TOKEN_BYTES, Key
from hybrid.tree.node import Node
from hybrid.tree.tree import Tree

MAX_CHILDREN = 64
"""Of a node with many children the latest are looked at, up to this many."""


def following(tree: Tree, key: Key, limit: int) -> array[int]:
    """The ids that follow all of a key in its namespace, up to `limit`; of several continuations the one that was
    inserted last. Empty: the tree has none. Changes nothing.

    Ids of images are negative, as in keys.
    """
    found = tree.peek(key, len(key))
    at = found.num_page_tokens
    node: Node | None = found.deepest or tree.forest.roots.get(key.namespace)
    rest = key.ids[at * TOKEN_BYTES :]
    if node is None or len(key) - at >= tree.page_size:
        return array("i")
    end = len(rest) + limit * TOKEN_BYTES
    ids = bytearray()
    if at < node.end:
        ids += node.run.ids[(at - node.run.start) * TOKEN_BYTES : (node.end - node.run.start) * TOKEN_BYTES]
        if not ids.startswith(rest):
            return array("i")
    while len(ids) < end:
        missing = rest[len(ids) :]
        children = islice(reversed(node.children.items()), MAX_CHILDREN)
        node = next((child for page, child in children if page.startswith(missing)), None)
        if node is None:
            break
        ids += node.edge
    return array("i", bytes(ids[len(rest) : end]))
