"""The audit: every invariant of the books, in code, with its reason."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hybrid.errors import AuditError
from hybrid.key import TOKEN_BYTES

if TYPE_CHECKING:
    from hybrid.cache import HybridCache


def audit(cache: HybridCache) -> None:
    """Check tree, pools and leases against each other.

    Raises:
        AuditError: with every violation found, one a line.
    """
    wrong = [*_tree(cache), *_locks(cache), *_pages(cache), *_states(cache)]
    if wrong:
        raise AuditError("the books do not balance:\n" + "\n".join(f"  - {line}" for line in wrong))


def _tree(cache: HybridCache) -> list[str]:
    tree, wrong = cache.tree, []
    pages = checkpoints = 0
    for namespace, node in tree.nodes():
        name = f"node of {namespace!r} ending at {node.end}"
        parent = node.parent
        if parent is None:
            wrong.append(f"{name}: reachable, but has no parent")
            continue
        if len(node.edge) != len(node.pages) * tree.page_size * TOKEN_BYTES or not node.pages:
            wrong.append(f"{name}: an edge of {len(node.edge) // TOKEN_BYTES} tokens owns {len(node.pages)} pages")
        if parent.children.get(node.edge[: tree.page_size * TOKEN_BYTES]) is not node:
            wrong.append(f"{name}: its parent does not find it by its first page")
        if node.end != parent.end + len(node.edge) // TOKEN_BYTES:
            wrong.append(f"{name}: does not end where its edge ends")
        if node.slot is not None and node.end % tree.grid:
            wrong.append(f"{name}: a checkpoint off the grid of {tree.grid}")
        pages += len(node.pages)
        checkpoints += node.slot is not None
    if pages != tree.num_pages:
        wrong.append(f"the tree counts {tree.num_pages} pages and has {pages}")
    if checkpoints != tree.num_checkpoints:
        wrong.append(f"the tree counts {tree.num_checkpoints} checkpoints and has {checkpoints}")
    return wrong


def _locks(cache: HybridCache) -> list[str]:
    """Lock counts are what the leases hold, no more and no less: nothing stays locked after its request."""
    wrong = []
    page_locks: Counter[int] = Counter()
    state_locks: Counter[int] = Counter()
    for lease in cache.leases:
        if lease.page_lock is not None:
            page_locks[id(lease.page_lock.node)] += 1
        if lease.state_lock is not None:
            page_locks[id(lease.state_lock.node)] += 1
            state_locks[id(lease.state_lock.node)] += 1
    for namespace, node in cache.tree.nodes():
        name = f"node of {namespace!r} ending at {node.end}"
        if node.page_locks != page_locks.pop(id(node), 0):
            wrong.append(f"{name}: {node.page_locks} page locks are not those of the leases")
        if node.state_locks != state_locks.pop(id(node), 0):
            wrong.append(f"{name}: {node.state_locks} state locks are not those of the leases")
        if not 0 <= node.state_locks <= node.page_locks:
            wrong.append(f"{name}: {node.state_locks} state locks exceed {node.page_locks} page locks")
        if node.state_locks and node.slot is None:
            wrong.append(f"{name}: a state lock on a tombstone")
    if page_locks or state_locks:
        wrong.append("a lease holds a lock on a node that is not in the tree")
    return wrong


def _pages(cache: HybridCache) -> list[str]:
    owners: list[tuple[int, str]] = [(page, "free") for page in cache.pages.free_indices()]
    for namespace, node in cache.tree.nodes():
        owners += [(page, f"the node of {namespace!r} ending at {node.end}") for page in node.pages]
    wrong = []
    for lease in cache.leases:
        owners += [(page, "a lease") for page in lease.block_table[lease.num_shared :]]
        locked = lease.page_lock.node if lease.page_lock is not None else None
        if lease.block_table[: lease.num_shared] != cache.tree.pages(locked, lease.num_shared * cache.config.page_size):
            wrong.append("a lease maps shared pages that its lock does not keep")
    return wrong + _exactly_one("page", owners, range(cache.pages.reserved, cache.pages.size))


def _states(cache: HybridCache) -> list[str]:
    owners: list[tuple[int, str]] = [(slot, "free") for slot in cache.states.free_indices()]
    for namespace, node in cache.tree.nodes():
        if node.slot is not None:
            owners.append((node.slot, f"the checkpoint of {namespace!r} at {node.end}"))
    wrong = []
    for lease in cache.leases:
        owners += [(slot, "a lease") for slot in lease.private_slots()]
        locked = lease.state_lock.node if lease.state_lock is not None else None
        if locked is not None and locked.slot != lease.read_slot:
            wrong.append(f"a lease reads state slot {lease.read_slot}, which is not the checkpoint that it locks")
    return wrong + _exactly_one("state slot", owners, range(cache.states.reserved, cache.states.size))


def _exactly_one(what: str, owners: list[tuple[int, str]], all_indices: range) -> list[str]:
    """Conservation: each index has exactly one owner."""
    count = Counter(index for index, _ in owners)
    wrong = [f"{what} {index} has no owner: leaked" for index in all_indices if index not in count]
    for index, times in count.items():
        if times > 1 or index not in all_indices:
            wrong.append(f"{what} {index} is owned by " + " and by ".join(owner for i, owner in owners if i == index))
    return wrong
