"""The audit finds what is wrong in one budget: pieces, stored checkpoints, pins, candidates. One corruption each."""

from collections.abc import Callable

import pytest

from hybrid.cache.audit import audit
from hybrid.cache.pins import Pins
from hybrid.errors import AuditError
from hybrid.memory.arena import Arena, ArenaPool
from hybrid.tree.node import Kind, Node
from support.caches import AuditedCache, key_of, prefill, start
from support.elastic import ONE, elastic


class Books:
    """A conversation whose checkpoint is stored smaller and pinned, a branch of it, and a request that runs."""

    def __init__(self) -> None:
        self.cache: AuditedCache = elastic(10, ONE, stored_bytes=64)
        for text in ("abcd", "abxy", "efgh"):
            lease = prefill(self.cache, key_of(self.cache, text))
            self.cache.donate_states(lease, 8)
            self.cache.commit(lease, key_of(self.cache, text), 8)
            self.cache.close(lease)
        pin = self.cache.pin(key_of(self.cache, "abcd"))
        assert pin is not None
        self.pin, self.pins = pin, self.cache.pins
        self.lease = start(self.cache, key_of(self.cache, "efghi"))
        assert self.cache.capture(self.lease, 10, Kind.TURN_END) is not None

    def node(self, text: str) -> Node:
        node = self.cache.tree.peek(key_of(self.cache, text), 10**6).deepest
        assert node is not None
        return node

    @property
    def arena(self) -> Arena:
        assert self.cache.memory.arena is not None
        return self.cache.memory.arena

    def pool(self, name: str) -> ArenaPool:
        return next(pool for pool in self.arena.pools if pool.name == name)

    def free_pieces(self, pieces: tuple[int, ...]) -> None:
        """Have the arena name these pieces as free."""
        self.arena.free_pieces = lambda: pieces  # type: ignore[method-assign]

    def audit(self) -> None:
        audit(self.cache.tree, self.cache.memory, self.cache.leases, self.pins)


def lose_a_piece(books: Books) -> None:
    books.free_pieces(books.arena.free_pieces()[:-1])


def free_a_piece_in_use(books: Books) -> None:
    books.free_pieces((*books.arena.free_pieces(), books.pool("page").pieces[0]))


def miscount_loose_units(books: Books) -> None:
    free = books.pool("page").free_indices()[1:]
    books.pool("page").free_indices = lambda: free  # type: ignore[method-assign]


def keep_an_unused_piece(books: Books) -> None:
    pool = books.pool("page")
    units = tuple(range(pool.pieces[0] * pool.per_piece, (pool.pieces[0] + 1) * pool.per_piece))
    pool.free_indices = lambda: units  # type: ignore[method-assign]


def leak_a_record(books: Books) -> None:
    assert books.pool("stored checkpoint").allocate(1) is not None


def own_a_record_twice(books: Books) -> None:
    books.node("abcd").slot = books.node("abxy").slot


def pin_another_length(books: Books) -> None:
    books.pin.num_tokens = 6


def forget_a_pin(books: Books) -> None:
    books.pins = Pins(books.cache.tree, books.cache.memory, books.cache.allocator)


def forget_a_stored_checkpoint(books: Books) -> None:
    books.node("abcd").run.stored.clear()


def take_a_node_from_its_run(books: Books) -> None:
    node = books.node("abcd")
    node.run.nodes.remove(node)


def keep_a_cut_that_nothing_needs(books: Books) -> None:
    books.cache.tree.forest.split(books.node("efgh"), 4)


def overlook_a_candidate(books: Books) -> None:
    checkpoints = books.cache.tree.candidates._others.checkpoints
    checkpoints.pop(checkpoints.peek()[1])  # type: ignore[index]


CORRUPTIONS = [
    (lose_a_piece, r"piece \d+ has 0 owners: none"),
    (free_a_piece_in_use, r"piece \d+ has 2 owners: free, page"),
    (miscount_loose_units, r"the arena counts \d+ free units of page and has \d+"),
    (keep_an_unused_piece, r"piece \d+ belongs to page, although nothing in it is in use"),
    (leak_a_record, r"stored checkpoint \d+ has no owner: leaked"),
    (own_a_record_twice, r"stored checkpoint \d+ is owned by the checkpoint of '' at 8 and by the checkpoint of ''"),
    (pin_another_length, r"a pin of 6 tokens does not lock the checkpoint there"),
    (forget_a_pin, r"1 page locks are not those of the leases and pins"),
    (forget_a_stored_checkpoint, r"its run does not list the checkpoints of its nodes"),
    (take_a_node_from_its_run, r"is not a node of its run"),
    (keep_a_cut_that_nothing_needs, r"a tombstone with one child that no lock and no lost checkpoint keeps apart"),
    (overlook_a_candidate, r"may be evicted, and is not a candidate"),
]


@pytest.mark.parametrize(("corrupt", "line"), CORRUPTIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_corruption_is_named(corrupt: Callable[[Books], None], line: str) -> None:
    books = Books()
    books.audit()
    corrupt(books)
    with pytest.raises(AuditError, match=line):
        books.audit()
