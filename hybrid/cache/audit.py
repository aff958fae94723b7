"""The audit: every invariant of tree, memory, leases and pins, in code, with its reason. The tree checks itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from hybrid.cache.lease import Lease
from hybrid.cache.pins import Pins
from hybrid.cache.tiers import Tiers
from hybrid.errors import AuditError
from hybrid.memory.digests import Digests
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Node, StateLock
from hybrid.tree.tree import Tree


def audit(
    tree: Tree,
    memory: CacheMemory,
    leases: Collection[Lease],
    pins: Pins,
    digests: Digests | None = None,
    tiers: Tiers | None = None,
) -> None:
    """Check tree, memory, leases and pins against each other.

    Args:
        digests: read all that the tree owns, and compare; None: contents are not read.
        tiers: copies in host memory and on disk; None: there are none.

    Raises:
        AuditError: with every violation found, one a line.
    """
    wrong = [
        *tree.check(),
        *_locks(tree, leases, pins),
        *_pages(tree, memory, leases),
        *_states(tree, memory, leases),
        *(memory.arena.check() if memory.arena is not None else []),
        *_contents(tree, digests),
        *(tiers.violations() if tiers is not None else []),
    ]
    if wrong:
        raise AuditError("the cache is inconsistent:\n" + "\n".join(f"  - {line}" for line in wrong))


def _name(namespace: str, node: Node) -> str:
    return f"node of {namespace!r} ending at {node.end}"


def _locks(tree: Tree, leases: Collection[Lease], pins: Pins) -> list[str]:
    """Lock counts are what leases and pins hold, no more and no less: nothing stays locked after its request."""
    wrong = []
    page_locks: Counter[int] = Counter()
    state_locks: Counter[int] = Counter()
    for lock in [*(lock for lease in leases for lock in lease.locks), *pins.locks.values()]:
        page_locks[id(lock.node)] += 1
        state_locks[id(lock.node)] += isinstance(lock, StateLock)
    for namespace, node in tree.nodes():
        name = _name(namespace, node)
        if node.page_locks != page_locks.pop(id(node), 0):
            wrong.append(f"{name}: {node.page_locks} page locks are not those of the leases and pins")
        if node.state_locks != state_locks.pop(id(node), 0):
            wrong.append(f"{name}: {node.state_locks} state locks are not those of the leases and pins")
        if node.state_locks and node.slot is None:
            wrong.append(f"{name}: a state lock on a tombstone")
    if +page_locks or +state_locks:
        wrong.append("a lease or a pin holds a lock on a node that is not in the tree")
    for pin, lock in pins.locks.items():
        pinned = lock.node
        if pinned is None or pinned.end != pin.num_tokens:
            wrong.append(f"a pin of {pin.num_tokens} tokens does not lock the checkpoint there")
    return wrong


def _pages(tree: Tree, memory: CacheMemory, leases: Collection[Lease]) -> list[str]:
    owners: list[tuple[int, str]] = [(page, "free") for page in memory.pages.free_indices()]
    for namespace, node in tree.nodes():
        owners += [(page, f"the node of {namespace!r} ending at {node.end}") for page in node.pages]
    wrong = []
    for lease in leases:
        owners += [(page, "a lease") for page in lease.private_pages]
        locked = lease.page_lock.node if lease.page_lock is not None else None
        if locked is not None and locked.end != lease.num_shared * tree.page_size:
            wrong.append(f"a lease shares {lease.num_shared} pages, and locks those of {locked.end} tokens")
        if lease.block_table[: lease.num_shared] != tree.pages(locked, lease.num_shared * tree.page_size):
            wrong.append("a lease maps shared pages that its lock does not protect")
    return wrong + _exactly_one("page", owners, memory.pages.indices())


def _states(tree: Tree, memory: CacheMemory, leases: Collection[Lease]) -> list[str]:
    states: list[tuple[int, str]] = [(slot, "free") for slot in memory.states.free_indices()]
    stored = [(place, "free") for place in memory.checkpoints.free_indices()] if memory.stores_smaller else states
    wrong = []
    for namespace, node in tree.nodes():
        if node.slot is not None:
            stored.append((node.slot, f"the checkpoint of {namespace!r} at {node.end}"))
            if node.end % tree.grid:
                wrong.append(f"{_name(namespace, node)}: a checkpoint off the grid of {tree.grid}")
    for lease in leases:
        states += [(slot, "a lease") for slot in lease.private_slots()]
        locked = lease.state_lock.node if lease.state_lock is not None else None
        if locked is not None and locked.slot != lease.read_slot:
            wrong.append(f"a lease reads state slot {lease.read_slot}, which is not the checkpoint that it locks")
    wrong += _exactly_one("state slot", states, memory.states.indices())
    if memory.stores_smaller:
        wrong += _exactly_one("stored checkpoint", stored, memory.checkpoints.indices())
    return wrong


def _contents(tree: Tree, digests: Digests | None) -> list[str]:
    """Read what the tree owns, which is never written: it holds what it held when it was committed."""
    wrong: list[str] = []
    if digests is None:
        return wrong
    for namespace, node in tree.nodes():
        name = _name(namespace, node)
        wrong += [f"{name}: page {page} was changed" for page in node.pages if not digests.is_page_intact(page)]
        if node.slot is not None and not digests.is_checkpoint_intact(node.slot):
            wrong.append(f"{name}: its checkpoint in slot {node.slot} was changed")
    return wrong


def _exactly_one(what: str, owners: list[tuple[int, str]], existing: Iterable[int]) -> list[str]:
    """Conservation: each index has exactly one owner."""
    all_indices = set(existing)
    count = Counter(index for index, _ in owners)
    wrong = [f"{what} {index} has no owner: leaked" for index in sorted(all_indices) if index not in count]
    for index, times in count.items():
        if times > 1 or index not in all_indices:
            wrong.append(f"{what} {index} is owned by " + " and by ".join(owner for i, owner in owners if i == index))
    return wrong
