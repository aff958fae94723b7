"""One budget of memory for pages and states: pieces that hold one kind or the other.

A piece is as large as a state slot, rounded up to whole pages. It is free, or belongs to one kind, and is then divided
into units of that kind: pages, state slots, stored checkpoints. A piece whose last unit is freed is free
again, for any kind. Units of a kind are numbered through all pieces, so that a page has one address for its whole life.

When a kind needs a piece and none is free although enough units of another kind are, those occupy several
pieces: `plan_moves` selects units to move together, so that a piece becomes free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from hybrid.errors import OwnershipError

ALIGNMENT = 64
"""State slots start at multiples of this many bytes."""

MAX_WASTE = 0.03
"""A piece holds several states where one alone would leave more than this part of it empty."""

MAX_STATES = 4
"""But not more states than this: a piece becomes free only when all its states are freed or moved."""

MAX_PASSED_OVER = 64
"""Planning to empty a piece passes over this many pieces with a unit that may not move, and then gives up."""


class PieceLayout(NamedTuple):
    """The division of a piece into units.

    Attributes:
        num_bytes: size of a piece: whole pages.
        pages, states: how many of each a piece holds.
        stored: how many stored checkpoints, when they are stored smaller than states; else 0.
    """

    num_bytes: int
    pages: int
    states: int
    stored: int

    @classmethod
    def of(cls, page_bytes: int, state_bytes: int, stored_bytes: int = 0) -> PieceLayout:
        """Choose a small piece that wastes little whichever kind it holds.

        State slots of a piece are equally far apart, so that all slots are addressed with one stride. Where checkpoints
        are stored smaller, most of what is kept are those: a piece may be up to an eighth larger to hold them well.
        """
        best: tuple[float, PieceLayout] | None = None
        for states in (1, *range(2, MAX_STATES + 1), *(2**n for n in range(3, 40))):
            least = -(-states * state_bytes // page_bytes)
            if states > MAX_STATES and least > 1:
                break
            for pages in range(least, least + least // 8 + 1) if stored_bytes else (least,):
                num_bytes = pages * page_bytes
                if num_bytes % (states * ALIGNMENT) and states > 1:
                    continue
                layout = cls(num_bytes, pages, states, num_bytes // stored_bytes if stored_bytes else 0)
                waste = 1 - states * state_bytes / num_bytes
                if stored_bytes:
                    waste = 1 - layout.stored * stored_bytes / num_bytes + waste / 4
                elif waste <= MAX_WASTE and pages > 1:
                    return layout
                if best is None or waste < best[0] - 1e-9:
                    best = waste, layout
            if stored_bytes and best is not None and best[1].pages > 1:
                break  # one state in a piece: working states cannot be moved together
        assert best is not None
        return best[1]


class Arena:
    """The pieces.

    Args:
        num_pieces: how many there are.
    """

    def __init__(self, num_pieces: int) -> None:
        self.num_pieces = num_pieces
        self.pools: list[ArenaPool] = []
        self.reset()

    def reset(self) -> None:
        """Free all units of all kinds, whatever they were."""
        self._free = list(range(self.num_pieces - 1, -1, -1))  # taken from the lowest
        for pool in self.pools:
            pool.reset()

    @property
    def num_free(self) -> int:
        """Pieces that belong to no kind."""
        return len(self._free)

    def pool(self, per_piece: int, reserved: int, name: str) -> ArenaPool:
        """A kind of unit.

        Args:
            per_piece: units in a piece.
            reserved: the first `reserved` units are never allocated; their pieces stay with this kind.
            name: what the units are, for messages ("page").
        """
        pool = ArenaPool(self, per_piece, reserved, name)
        self.pools.append(pool)
        return pool

    @property
    def next_free(self) -> int | None:
        """The piece that would be taken next; None when none is free."""
        return self._free[-1] if self._free else None

    def take(self) -> int:
        """Take a free piece. There must be one."""
        return self._free.pop()

    def reserve(self, piece: int) -> None:
        """Take this free piece."""
        self._free.remove(piece)

    def give_back(self, piece: int) -> None:
        """Record that a piece is free again."""
        self._free.append(piece)

    def free_pieces(self) -> tuple[int, ...]:
        """List all free pieces."""
        return tuple(self._free)

    def check(self) -> list[str]:
        """Check that each piece is free or belongs to one kind. Returns what is wrong, with what is of the pools."""
        wrong = [line for pool in self.pools for line in pool.check()]
        owners = Counter(chain(self.free_pieces(), *(pool.pieces for pool in self.pools)))
        for piece in sorted({*range(self.num_pieces), *owners}):
            if owners[piece] != 1 or piece >= self.num_pieces:
                named = ["free"] * (piece in self.free_pieces()) + [
                    pool.name for pool in self.pools if piece in pool.pieces
                ]
                wrong.append(f"piece {piece} has {owners[piece]} owners: {', '.join(named) or 'none'}")
        return wrong


class ArenaPool:
    """The units of one kind: the same face as an `IndexPool`."""

    def __init__(self, arena: Arena, per_piece: int, reserved: int, name: str) -> None:
        self.arena = arena
        self.per_piece = per_piece
        self.reserved = reserved
        self.size: int = arena.num_pieces * per_piece
        self.name = name
        self.reset()
        # Units there would be if every piece that other kinds have not reserved were of this kind.
        self.capacity: int = self.num_free

    def reset(self) -> None:
        """Free all units, of an arena whose pieces are all free but those that other kinds have reserved."""
        self._is_free = bytearray(self.size)
        self._free_in: dict[int, list[int]] = {}  # piece of this kind -> its free units
        self._open: dict[int, None] = {}  # pieces with a free unit, in the order in which they are filled
        self._with_free: list[dict[int, None]] = [
            {} for _ in range(self.per_piece + 1)
        ]  # the same, by how many are free
        self._num_free = 0
        for piece in range(-(-self.reserved // self.per_piece)):
            self.arena.reserve(piece)
            first = piece * self.per_piece
            self._add(piece, [unit for unit in range(first, first + self.per_piece) if unit >= self.reserved])

    @property
    def num_free(self) -> int:
        """Units that can be allocated without evicting anything: those of free pieces count for every kind."""
        return self._num_free + self.arena.num_free * self.per_piece

    @property
    def num_loose(self) -> int:
        """Free units in pieces of this kind."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Units that are allocated."""
        return len(self._free_in) * self.per_piece - self._num_free - self.reserved

    @property
    def next_piece(self) -> int | None:
        """The piece that the next unit is allocated in; None when nothing is free."""
        if self._open:
            return next(iter(self._open))
        return self.arena.next_free

    @property
    def pieces(self) -> tuple[int, ...]:
        """The pieces of this kind."""
        return tuple(self._free_in)

    def indices(self) -> Iterable[int]:
        """Yield the units that exist now, except the reserved ones."""
        for piece in self._free_in:
            for unit in range(piece * self.per_piece, (piece + 1) * self.per_piece):
                if unit >= self.reserved:
                    yield unit

    def free_indices(self) -> tuple[int, ...]:
        """List all free units in pieces of this kind."""
        return tuple(unit for units in self._free_in.values() for unit in units)

    def check(self) -> list[str]:
        """Check what is known of free units besides the units themselves. Returns what is wrong."""
        wrong = []
        free = sorted(self.free_indices())
        if self._num_free != len(free):
            wrong.append(f"the arena counts {self._num_free} free units of {self.name} and has {len(free)}")
        num_free = Counter(unit // self.per_piece for unit in free)
        by_number = {piece: number for number, pieces in enumerate(self._with_free) for piece in pieces}
        marked = [unit for unit, is_free in enumerate(self._is_free) if is_free]
        if num_free != by_number or num_free.keys() != self._open.keys() or marked != free:
            wrong.append(f"what the arena knows of the free units of {self.name} is not so")
        for piece, number in num_free.items():
            if number == self.per_piece:
                wrong.append(f"piece {piece} belongs to {self.name}, although nothing in it is in use")
        return wrong

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` units; None, and nothing is taken, when fewer are free."""
        if count > self.num_free:
            return None
        taken: list[int] = []
        while len(taken) < count:
            if not self._open:
                piece = self.arena.take()
                first = piece * self.per_piece
                self._add(piece, list(range(first, first + self.per_piece)))
            piece = next(iter(self._open))
            units = self._free_in[piece]
            part = units[: -(count - len(taken)) - 1 : -1]
            del units[len(units) - len(part) :]
            self._recount(piece, len(units) + len(part))
            taken += part
        for unit in taken:
            self._is_free[unit] = 0
        self._num_free -= count
        return taken

    def free(self, indices: Iterable[int]) -> None:
        """Give units back.

        Raises:
            OwnershipError: one is free already or was never allocated. None of them was freed.
        """
        back = list(indices)
        for unit in back:
            exists = self.reserved <= unit < self.size and unit // self.per_piece in self._free_in
            if not exists or self._is_free[unit]:
                raise OwnershipError(f"{self.name} {unit} is freed, but it is free already or reserved")
        if len(set(back)) != len(back):
            raise OwnershipError(f"a {self.name} is freed twice in one call: {sorted(back)}")
        for unit in reversed(back):
            self._put_back(unit)

    def _put_back(self, unit: int) -> None:
        piece = unit // self.per_piece
        units = self._free_in[piece]
        self._is_free[unit] = 1
        units.append(unit)
        self._num_free += 1
        if len(units) == self.per_piece:
            del self._free_in[piece]
            self._num_free -= self.per_piece
            for other in units:
                self._is_free[other] = 0
            self.arena.give_back(piece)
        self._recount(piece, len(units) - 1)

    def _add(self, piece: int, units: list[int]) -> None:
        self._free_in[piece] = units[::-1]
        self._num_free += len(units)
        for unit in units:
            self._is_free[unit] = 1
        self._recount(piece, 0)

    def _recount(self, piece: int, before: int) -> None:
        """Record that the number of free units of a piece has changed from `before`, or that the piece is free."""
        self._with_free[before].pop(piece, None)
        num_free = len(self._free_in.get(piece, ()))
        if num_free:
            self._with_free[num_free][piece] = None
            self._open[piece] = None
        else:
            self._open.pop(piece, None)

    def plan_moves(self, may_move: Callable[[int], bool]) -> dict[int, int] | None:
        """Plan which units to move where, so that a piece becomes free: those of the emptiest piece that can be
        emptied.

        Changes nothing. None when no piece can be emptied.

        Args:
            may_move: whether a unit in use may be moved.
        """
        passed_over: list[int] = []
        for piece in self._emptiest_first():
            first = piece * self.per_piece
            used = [unit for unit in range(first, first + self.per_piece) if not self._is_free[unit]]
            if len(used) > self._num_free - len(self._free_in[piece]) or len(passed_over) == MAX_PASSED_OVER:
                break  # and the fuller ones cannot be emptied either
            if first < self.reserved or not all(map(may_move, used)):
                passed_over.append(piece)
                continue
            targets = (unit for other in self._fullest_first() if other != piece for unit in self._free_in[other][::-1])
            return dict(zip(used, targets, strict=False))
        for piece in passed_over:  # others are tried next time
            pieces = self._with_free[len(self._free_in[piece])]
            pieces[piece] = pieces.pop(piece)
        return None

    def _emptiest_first(self) -> Iterator[int]:
        """Yield the pieces with a free unit."""
        return chain.from_iterable(reversed(self._with_free))

    def _fullest_first(self) -> Iterator[int]:
        """Yield the pieces with a free unit."""
        return chain.from_iterable(self._with_free)

    def move(self, moves: dict[int, int]) -> None:
        """Record that the contents of units were moved: the old places are free, the new ones are in use."""
        for target in moves.values():
            piece = target // self.per_piece
            self._free_in[piece].remove(target)
            self._recount(piece, len(self._free_in[piece]) + 1)
            self._is_free[target] = 0
        self._num_free -= len(moves)
        for source in moves:
            self._put_back(source)
