"""The audit: every invariant of tree, memory, leases and pins, in code, with its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from hybrid.cache.lease import Lease
from hybrid.cache.pins import Pins
from hybrid.cache.tiers import Tiers
from hybrid.errors import AuditError
from hybrid.key import TOKEN_BYTES
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
        *_tree(tree),
        *_locks(tree, leases, pins),
        *_pages(tree, memory, leases),
        *_states(tree, memory, leases),
        *(memory.arena.check() if memory.arena is not None else []),
        *_contents(tree, digests),
        *(tiers.violations() if tiers is not None else []),
    ]
    if wrong:
        raise AuditError("the cache is inconsistent:\n" + "\n".join(f"  - {line}" for line in wrong))


def _tree(tree: Tree) -> list[str]:
    wrong = []
    pages = checkpoints = 0
    for namespace, node in tree.nodes():
        wrong += [f"{_name(namespace, node)}: {line}" for line in _node(tree, node)]
        pages += len(node.pages)
        checkpoints += node.slot is not None
    if pages != tree.num_pages:
        wrong.append(f"the tree counts {tree.num_pages} pages and has {pages}")
    if checkpoints != tree.num_checkpoints:
        wrong.append(f"the tree counts {tree.num_checkpoints} checkpoints and has {checkpoints}")
    if not tree.candidates.are_whole():
        wrong.append("a candidate for eviction is not where its queue looks for it")
    return wrong


def _name(namespace: str, node: Node) -> str:
    return f"node of {namespace!r} ending at {node.end}"


def _node(tree: Tree, node: Node) -> list[str]:
    parent, page_bytes = node.parent, tree.page_size * TOKEN_BYTES
    if parent is None:
        return ["reachable, but has no parent"]
    wrong = []
    if len(node.edge) != len(node.pages) * page_bytes or not node.pages:
        wrong.append(f"an edge of {len(node.edge) // TOKEN_BYTES} tokens owns {len(node.pages)} pages")
    if parent.children.get(node.edge[:page_bytes]) is not node:
        wrong.append("its parent does not find it by its first page")
    if node.end != parent.end + len(node.edge) // TOKEN_BYTES:
        wrong.append("does not end where its edge ends")
    wrong += _run(node, parent)
    if node.slot is not None and node.end % tree.grid:
        wrong.append(f"a checkpoint off the grid of {tree.grid}")
    if tree.overlooks(node):
        wrong.append("may be evicted, and is not a candidate")
    return wrong


def _run(node: Node, parent: Node) -> list[str]:
    """A run holds consecutive nodes, and nothing after its last one; a cut that nothing needs does not stay."""
    run, wrong = node.run, []
    if node not in run.nodes:
        return ["is not a node of its run"]
    position = run.nodes.index(node)
    if (run.nodes[position - 1] is not parent) if position else (run.start != parent.end or node.start != run.start):
        wrong.append("its run does not continue its parent")
    if run.nodes[-1] is node:
        num_tokens = node.end - run.start
        if len(run.ids) != num_tokens * TOKEN_BYTES or len(run.pages) * run.page_size != num_tokens:
            wrong.append(f"its run ends after it, with {len(run.pages)} pages")
        if [other for other in run.nodes if other.slot is not None] != run.stored:
            wrong.append("its run does not list the checkpoints of its nodes")
    if len(node.children) == 1 and node.slot is None and not node.page_locks and not node.lost_checkpoint:
        wrong.append("a tombstone with one child that no lock and no lost checkpoint keeps apart")
    return wrong


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
        if not 0 <= node.state_locks <= node.page_locks:
            wrong.append(f"{name}: {node.state_locks} state locks exceed {node.page_locks} page locks")
        if node.state_locks and node.slot is None:
            wrong.append(f"{name}: a state lock on a tombstone")
    if +page_locks or +state_locks:
        wrong.append("a lease or a pin holds a lock on a node that is not in the tree")
    held = _held_pages(tree)
    if held != tree.locks.num_pages:
        wrong.append(f"the tree counts {tree.locks.num_pages} locked pages and has {held}")
    elif not tree.locks.is_right(node for _, node in tree.nodes()):
        wrong.append("the nodes that are counted as locked, or as above a lock, are others")
    checkpoints = sum(node.state_locks > 0 for _, node in tree.nodes())
    if checkpoints != tree.locks.num_checkpoints:
        wrong.append(f"the tree counts {tree.locks.num_checkpoints} locked checkpoints and has {checkpoints}")
    for pin, lock in pins.locks.items():
        pinned = lock.node
        if pinned is None or pinned.end != pin.num_tokens:
            wrong.append(f"a pin of {pin.num_tokens} tokens does not lock the checkpoint there")
    return wrong


def _held_pages(tree: Tree) -> int:
    """Pages of the nodes that are locked, and of all nodes above them."""
    held: dict[Node, None] = {}
    for _, node in tree.nodes():
        above: Node | None = node if node.page_locks else None
        while above is not None and above not in held:
            held[above] = None
            above = above.parent
    return sum(node.num_pages for node in held)


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
    for namespace, node in tree.nodes():
        if node.slot is not None:
            stored.append((node.slot, f"the checkpoint of {namespace!r} at {node.end}"))
    wrong = []
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
