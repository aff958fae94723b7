"""The audit finds what is wrong: one corruption planted for each invariant, in books that are in order otherwise."""

from array import array
from collections.abc import Callable

import pytest

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.lease import Lease
from hybrid.errors import AuditError, HybridError
from hybrid.key import TOKEN_BYTES
from hybrid.memory.memory import CacheMemory, Pool
from hybrid.tree.node import Node, NodeUsage, Run
from support.caches import key_of, serve, start


class Books:
    """Two finished requests that fork, and a running one that has hit the first.

    Pages hold two tokens, the grid is four:

        ab *
          cd *    the request runs on from here: page and state lock, a private page, a front and a captured slot
          ef *
    """

    def __init__(self) -> None:
        self.cache = HybridCache(CacheMemory.of_indices(16, 8), CacheConfig(page_size=2, chunk_size=4))
        for text in ("abcd", "abef"):
            serve(self.cache, key_of(self.cache, text))
        self.lease = start(self.cache, key_of(self.cache, "abcdx"))
        assert self.cache.capture(self.lease, 12) is not None

    def node(self, text: str) -> Node:
        node = self.cache.tree.peek(key_of(self.cache, text), 10**6).deepest
        assert node is not None and node.end == 2 * len(text)
        return node

    def free_page(self) -> int:
        return self.cache.memory.pages.free_indices()[0]

    def free_slot(self) -> int:
        return self.cache.memory.states.free_indices()[0]


@pytest.fixture
def books() -> Books:
    return Books()


def swap_children(books: Books) -> None:
    """The children of ab under each other's first page."""
    children = books.node("ab").children
    (one, first), (two, second) = children.items()
    children[one], children[two] = second, first


def shift_page(books: Books) -> None:
    """A page of ab goes to ef, whose edge stays as it is."""
    books.node("abef").run.pages.append(books.node("ab").run.pages.pop())


def hang_on_nothing(books: Books) -> None:
    books.node("abef").parent = None


def move_end(books: Books) -> None:
    books.node("abef").end += 4


def add_empty_node(books: Books) -> None:
    parent = books.node("abef")
    parent.children[b""] = Node(parent, Run(parent.end, 2, 2, b"", array("i")), parent.end, parent.end, NodeUsage(1, 1))


def take_checkpoint_off_grid(books: Books) -> None:
    """The checkpoint of ef goes to a node that ends after six tokens."""
    tree, end = books.cache.tree, books.node("abef")
    tree.forest.split(books.node("abcd"), 6)
    books.node("abc").slot, end.slot = end.slot, None


def miscount_pages(books: Books) -> None:
    books.cache.tree.forest.num_pages += 1


def miscount_checkpoints(books: Books) -> None:
    books.cache.tree.forest.num_checkpoints -= 1


def forget_page_lock(books: Books) -> None:
    books.node("abef").page_locks += 1


def drop_page_lock(books: Books) -> None:
    books.node("abcd").page_locks -= 1


def forget_state_lock(books: Books) -> None:
    books.node("abef").state_locks += 1
    books.node("abef").page_locks += 1


def exceed_page_locks(books: Books) -> None:
    books.node("abcd").page_locks = 0


def go_negative(books: Books) -> None:
    books.node("abef").state_locks = -1


def lock_a_tombstone(books: Books) -> None:
    node = books.node("abcd")
    assert node.slot is not None
    books.cache.memory.states.free([node.slot])
    node.slot = None
    books.cache.tree.forest.num_checkpoints -= 1


def release_twice(books: Books) -> None:
    """The lease keeps a lock that was released behind its back."""
    assert books.lease.page_lock is not None
    books.cache.tree.unlock(books.lease.page_lock)


def lock_elsewhere(books: Books) -> None:
    books.lease.page_lock = Books().lease.page_lock


def free_also(pool: Pool, index: int) -> None:
    """The pool's list of free indices has one more."""
    free = (*pool.free_indices(), index)
    pool.free_indices = lambda: free  # type: ignore[method-assign]


def leak_page(books: Books) -> None:
    books.cache.memory.pages.allocate(1)


def free_owned_page(books: Books) -> None:
    books.cache.memory.pages.free([books.node("abef").pages[0]])


def free_private_page(books: Books) -> None:
    books.cache.memory.pages.free([books.lease.block_table[-1]])


def free_page_twice(books: Books) -> None:
    free_also(books.cache.memory.pages, books.free_page())


def own_page_twice(books: Books) -> None:
    books.node("abef").run.pages[0] = books.node("ab").run.pages[0]


def own_page_that_is_not_there(books: Books) -> None:
    books.lease.block_table[-1] = 99


def share_private_page(books: Books) -> None:
    other = start(books.cache, key_of(books.cache, "xyz"))
    other.block_table[-1] = books.lease.block_table[-1]


def call_private_page_shared(books: Books) -> None:
    books.lease.num_shared += 1


def map_pages_of_a_sibling(books: Books) -> None:
    books.lease.block_table[2:4] = books.node("abef").pages


def map_pages_without_a_lock(books: Books) -> None:
    lock, books.lease.page_lock = books.lease.page_lock, None
    assert lock is not None
    books.cache.tree.unlock(lock)


def leak_slot(books: Books) -> None:
    books.cache.memory.states.allocate(1)


def free_front(books: Books) -> None:
    books.cache.memory.states.free([books.lease.front])


def free_slot_twice(books: Books) -> None:
    free_also(books.cache.memory.states, books.free_slot())


def own_slot_twice(books: Books) -> None:
    books.node("abef").slot = books.lease.front


def own_captured_slot_twice(books: Books) -> None:
    books.lease.back = books.lease.captured[0].slot


def own_empty_state(books: Books) -> None:
    books.node("abef").slot = 0


def read_another_slot(books: Books) -> None:
    books.lease.read_slot = books.lease.front


def lose_lease(books: Books) -> None:
    books.cache.leases.clear()


CORRUPTIONS: list[tuple[Callable[[Books], None], str]] = [
    (hang_on_nothing, r"node of '' ending at 8: reachable, but has no parent"),
    (shift_page, r"node of '' ending at 8: its run ends after it, with 3 pages"),
    (shift_page, r"node of '' ending at 8: an edge of 4 tokens owns 1 pages"),
    (add_empty_node, r"node of '' ending at 8: an edge of 0 tokens owns 0 pages"),
    (swap_children, r"its parent does not find it by its first page"),
    (move_end, r"node of '' ending at 12: does not end where its edge ends"),
    (take_checkpoint_off_grid, r"node of '' ending at 6: a checkpoint off the grid of 4"),
    (miscount_pages, r"the tree counts 7 pages and has 6"),
    (miscount_checkpoints, r"the tree counts 2 checkpoints and has 3"),
    (forget_page_lock, r"node of '' ending at 8: 1 page locks are not those of the leases"),
    (drop_page_lock, r"node of '' ending at 8: 1 page locks are not those of the leases"),
    (forget_state_lock, r"node of '' ending at 8: 1 state locks are not those of the leases"),
    (exceed_page_locks, r"node of '' ending at 8: 1 state locks exceed 0 page locks"),
    (go_negative, r"node of '' ending at 8: -1 state locks exceed 0 page locks"),
    (lock_a_tombstone, r"node of '' ending at 8: a state lock on a tombstone"),
    (release_twice, r"a lease or a pin holds a lock on a node that is not in the tree"),
    (lock_elsewhere, r"a lease or a pin holds a lock on a node that is not in the tree"),
    (leak_page, r"page \d+ has no owner: leaked"),
    (free_owned_page, r"page \d+ is owned by free and by the node of '' ending at 8"),
    (free_private_page, r"page \d+ is owned by free and by a lease"),
    (free_page_twice, r"page \d+ is owned by free and by free"),
    (own_page_twice, r"page \d+ is owned by the node of '' ending at 4 and by the node of '' ending at 8"),
    (own_page_that_is_not_there, r"page 99 is owned by a lease"),
    (share_private_page, r"page \d+ is owned by a lease and by a lease"),
    (call_private_page_shared, r"a lease maps shared pages that its lock does not protect"),
    (map_pages_of_a_sibling, r"a lease maps shared pages that its lock does not protect"),
    (map_pages_without_a_lock, r"a lease maps shared pages that its lock does not protect"),
    (leak_slot, r"state slot \d+ has no owner: leaked"),
    (free_front, r"state slot \d+ is owned by free and by a lease"),
    (free_slot_twice, r"state slot \d+ is owned by free and by free"),
    (own_slot_twice, r"state slot \d+ is owned by the checkpoint of '' at 8 and by a lease"),
    (own_captured_slot_twice, r"state slot \d+ is owned by a lease and by a lease"),
    (own_empty_state, r"state slot 0 is owned by the checkpoint of '' at 8"),
    (read_another_slot, r"a lease reads state slot \d+, which is not the checkpoint that it locks"),
    (lose_lease, r"page \d+ has no owner: leaked"),
]


def test_books_in_order_pass(books: Books) -> None:
    books.cache.audit()
    books.cache.close(books.lease)
    books.cache.audit()


@pytest.mark.parametrize(("corrupt", "line"), CORRUPTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_corruption_is_named(books: Books, corrupt: Callable[[Books], None], line: str) -> None:
    corrupt(books)
    with pytest.raises(AuditError, match=line):
        books.cache.audit()


def test_every_violation_is_named_on_a_line_of_its_own(books: Books) -> None:
    miscount_pages(books)
    leak_slot(books)
    forget_page_lock(books)
    with pytest.raises(AuditError) as raised:
        books.cache.audit()
    assert len(str(raised.value).splitlines()) == 5  # the forgotten lock is missed where it was, and in the count
    assert isinstance(raised.value, HybridError)


def test_the_audit_changes_nothing(books: Books) -> None:
    def everything(lease: Lease) -> tuple[object, ...]:
        nodes = [
            (id(n), n.edge, list(n.pages), n.slot, n.page_locks, n.usage.last_used) for _, n in books.cache.tree.nodes()
        ]
        return (
            nodes,
            books.cache.stats(),
            list(lease.block_table),
            lease.captured,
            books.cache.memory.pages.free_indices(),
        )

    before = everything(books.lease)
    books.cache.audit()
    assert everything(books.lease) == before


def test_a_token_has_the_bytes_that_edges_are_counted_in(books: Books) -> None:
    assert len(books.node("ab").edge) == 4 * TOKEN_BYTES
