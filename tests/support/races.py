"""The accesses to memory by the programs of a launch, and what of them a GPU may do in another order.

Every access is kept as it was made: addresses, lanes, program, and when. A program's time goes up at each of its
barriers. Programs know of each other through atomics only, as vector clocks: an atomic that releases hands on what its
program did before its last barrier (one thread executes the atomic; only a barrier says that the others are done), and
one that acquires takes over what was released there. Two accesses to the same bytes, at least one a store, are

* a RACE where two programs made them and neither knows of the other;
* UNFENCED where one program made them in different lanes without a barrier in between: lanes are different threads.

A tile's lane is a place in a tile of its shape. Bytes that no argument of the launch holds are out of BOUNDS; those
accesses are not made.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

RACE, UNFENCED, BOUNDS = "RACE", "UNFENCED", "BOUNDS"
LOAD, STORE, ATOMIC = range(3)
KINDS = ("loads", "stores", "updates")

Site = tuple[str, int]
"""File and line."""

Clock = dict[int, int]
"""For each program, its time up to which another knows what it did."""


class Finding(NamedTuple):
    """Something that a GPU may do differently.

    Attributes:
        kind: RACE, UNFENCED or BOUNDS.
        kernel: the name of the kernel.
        sites: where the accesses are made.
        text: for the reader.
    """

    kind: str
    kernel: str
    sites: tuple[Site, ...]
    text: str


@dataclass
class Program:
    """A program of a launch, up to where it is.

    Attributes:
        index: among the programs of the launch.
        grid: its place in the grid.
        time: barriers so far.
        clock: what it knows of others; replaced, never changed.
    """

    index: int
    grid: tuple[int, int, int]
    time: int = 0
    clock: Clock = field(default_factory=dict)


class Access(NamedTuple):
    """Some bytes that a program touched at once.

    Attributes:
        addresses: `[n]` of the elements.
        lanes: `[n]` places in the tile; None: all, in order.
        values: `[n]` what was stored; None: not a store.
        size: bytes of an element.
        low, high: of all bytes touched: [low, high).
        time: as of a program's; atomics are executed by one thread and count as before the last barrier.
    """

    kind: int
    addresses: NDArray[Any]
    lanes: NDArray[Any] | None
    values: NDArray[Any] | None
    size: int
    low: int
    high: int
    shape: tuple[int, ...]
    program: Program
    time: int
    clock: Clock
    site: Site

    def __str__(self) -> str:
        return f"program {self.program.grid} {KINDS[self.kind]} at {self.site[0]}:{self.site[1]}"

    def knows(self, other: "Access") -> bool:
        """Tell whether the other was made before this one on any GPU."""
        return self.clock.get(other.program.index, -1) > other.time


class Memory:
    """The bytes that the arguments of a launch hold.

    Attributes:
        low, high: of the storage that the tensors share.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        storage = tensors[0].untyped_storage()
        self.low = storage.data_ptr()
        self.high = self.low + storage.nbytes()
        self._tensors = tensors
        self._held: NDArray[Any] | None = None
        self._dense = []
        for tensor in tensors:
            if tensor.is_contiguous():
                self._dense.append((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()))

    def holds_all(self, low: int, high: int) -> bool:
        """Tell whether an argument without gaps holds [low, high)."""
        return any(start <= low and high <= end for start, end in self._dense)

    def holds(self, addresses: NDArray[Any], size: int) -> NDArray[Any]:
        """Return which elements of this size an argument holds."""
        if self._held is None:
            self._held = np.zeros(self.high - self.low, bool)
            for tensor in self._tensors:
                item = tensor.element_size()
                view = np.lib.stride_tricks.as_strided(
                    self._held[tensor.data_ptr() - self.low :],
                    (*tensor.shape, item),
                    (*(stride * item for stride in tensor.stride()), 1),
                )
                view[...] = True
        inside = (addresses >= self.low) & (addresses <= self.high - size)
        held: NDArray[Any] = inside.copy()
        at = (addresses[inside] - np.uint64(self.low)).astype(np.int64)
        held[inside] = self._held[at] & self._held[at + size - 1]
        return held


class Memories:
    """The memory of all arguments of a launch."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self._all = [Memory(group) for group in by_storage.values()]

    def missing(self, addresses: NDArray[Any], low: int, high: int, size: int) -> NDArray[Any] | None:
        """Return which elements no argument holds; None: there are none."""
        for memory in self._all:
            if memory.low <= low and high <= memory.high:
                if memory.holds_all(low, high):
                    return None
                missing = ~memory.holds(addresses, size)
                return missing if missing.any() else None
        missing = np.ones(addresses.shape, bool)
        for memory in self._all:
            missing &= ~memory.holds(addresses, size)
        return missing if missing.any() else None


class Launch:
    """The accesses of a launch.

    Args:
        kernel: its name.
        tensors: its arguments.
    """

    def __init__(self, kernel: str, tensors: Iterable[Tensor]) -> None:
        self.kernel = kernel
        self.out_of_bounds: list[Finding] = []
        self._memories = Memories(tensors)
        self._loads: list[Access] = []
        self._stores: list[Access] = []
        self._released: dict[int, Clock] = {}

    def access(
        self,
        program: Program,
        kind: int,
        site: Site,
        addresses: NDArray[Any],
        mask: NDArray[Any] | None,
        size: int,
        values: NDArray[Any] | None = None,
    ) -> NDArray[Any] | None:
        """Note an access.

        Args:
            addresses: of a whole tile.
            mask: its lanes that take part; None: all.
            size: bytes of an element.
            values: what is stored.

        Returns:
            the lanes that may take part, those that are out of bounds left out; None: all.
        """
        shape = tuple(length for length in addresses.shape if length > 1)
        flat, lanes = addresses.reshape(-1), None
        if mask is not None:
            lanes = np.flatnonzero(mask)
            if len(lanes) == flat.size:
                mask = lanes = None
            else:
                flat = flat[lanes]
        if flat.size == 0:
            return mask
        low, high = int(flat.min()), int(flat.max()) + size
        missing = self._memories.missing(flat, low, high, size)
        if missing is not None:
            text = (
                f"program {program.grid} {KINDS[kind]} {int(missing.sum())} of {flat.size} elements outside of all "
                f"arguments at {site[0]}:{site[1]}"
            )
            self.out_of_bounds.append(Finding(BOUNDS, self.kernel, (site,), text))
            lanes = (np.arange(flat.size) if lanes is None else lanes)[~missing]
            allowed = np.zeros(addresses.size, bool)
            allowed[lanes] = True
            return self.access(program, kind, site, addresses, allowed.reshape(addresses.shape), size, values)
        if values is not None:
            values = values.reshape(-1) if lanes is None else values.reshape(-1)[lanes]
        time = program.time - 1 if kind == ATOMIC else program.time
        (self._loads if kind == LOAD else self._stores).append(
            Access(kind, flat, lanes, values, size, low, high, shape, program, time, program.clock, site)
        )
        return mask

    def synchronise(self, program: Program, addresses: NDArray[Any], acquires: bool, releases: bool) -> None:
        """An atomic that was made, as an acquisition, a release or both, at these addresses."""
        known = dict(program.clock)
        for address in addresses.reshape(-1).tolist():
            if acquires:
                _join(known, self._released.get(address, {}))
        if acquires:
            program.clock = known
        for address in addresses.reshape(-1).tolist():
            if releases:
                released = self._released.setdefault(address, {})
                _join(released, known)
                _join(released, {program.index: program.time})

    def findings(self) -> Iterator[Finding]:
        """Yield what was found, once per pair of places in the code."""
        found: dict[tuple[str, frozenset[Site]], Finding] = {}
        for finding in self.out_of_bounds:
            found.setdefault((finding.kind, frozenset(finding.sites)), finding)
        if self._stores:
            for kind, one, other, address in _conflicts(self._loads, self._stores):
                text = f"{one}; {other}: byte {address:#x}, "
                text += "and nothing orders them" if kind == RACE else "in different lanes without a barrier"
                sites = frozenset((one.site, other.site))
                found.setdefault((kind, sites), Finding(kind, self.kernel, (one.site, other.site), text))
        yield from found.values()


def _join(clock: Clock, other: Clock) -> None:
    for program, time in other.items():
        clock[program] = max(clock.get(program, -1), time)


class _Cells(NamedTuple):
    """Bytes, or larger units, that accesses touched, one row per lane and unit.

    Attributes:
        cell: which unit.
        access: index of the access.
        lane: place in the tile.
    """

    cell: NDArray[Any]
    access: NDArray[Any]
    lane: NDArray[Any]

    def __getitem__(self, rows: Any) -> "_Cells":  # type: ignore[override]
        return _Cells(self.cell[rows], self.access[rows], self.lane[rows])


def _cells(accesses: Sequence[Access], first: int, base: int, unit: int) -> _Cells:
    """The units of some accesses, which are numbered from `first` on."""
    cells, numbers, lanes = [], [], []
    for number, access in enumerate(accesses, first):
        cell = (access.addresses.astype(np.int64) - base) // unit
        lane = np.arange(cell.size) if access.lanes is None else access.lanes
        if access.size > unit:
            more = access.size // unit
            cell = (cell[:, None] + np.arange(more)).reshape(-1)
            lane = lane.repeat(more)
        cells.append(cell)
        lanes.append(lane)
        numbers.append(np.full(cell.size, number))
    if not cells:
        return _Cells(*(np.zeros(0, np.int64) for _ in range(3)))
    return _Cells(*(np.concatenate(parts) for parts in (cells, numbers, lanes)))


def _conflicts(loads: Sequence[Access], stores: Sequence[Access]) -> Iterator[tuple[str, Access, Access, int]]:
    """(kind, access, access, address) for places that hold a conflict; each pair of places at least once."""
    for low, high, group, near in _groups(loads, stores):
        accesses = [*group, *near]
        unit = min(access.size for access in accesses)
        low -= low % unit
        written = _cells(group, 0, low, unit)
        inside = _cells(near, len(group), low, unit)
        inside = inside[(inside.cell >= 0) & (inside.cell < -(-(high - low) // unit))]
        everything = _suspects(accesses, written, inside, -(-(high - low) // unit))
        if everything is not None:
            yield from _exact(accesses, everything, low, unit)


NEAR = 1 << 16
"""Bytes between two stores up to which they are looked at together."""


def _groups(loads: Sequence[Access], stores: Sequence[Access]) -> Iterator[tuple[int, int, list[Access], list[Access]]]:
    """(low, high, stores between them, loads that reach in), such that no store lies in two groups."""
    groups: list[tuple[int, int, list[Access], list[Access]]] = []
    for access in sorted(stores, key=lambda access: access.low):
        if groups and access.low < groups[-1][1] + NEAR:
            low, high, group, near = groups[-1]
            group.append(access)
            groups[-1] = (low, max(high, access.high), group, near)
        else:
            groups.append((access.low, access.high, [access], []))
    lows, highs = [group[0] for group in groups], [group[1] for group in groups]
    for access in loads:
        for index in range(bisect_right(highs, access.low), bisect_left(lows, access.high)):
            groups[index][3].append(access)
    yield from groups


def _suspects(accesses: Sequence[Access], written: _Cells, read: _Cells, count: int) -> _Cells | None:
    """All that is known of units that may hold a conflict; None: there are none. What is left out is sure to hold none:
    one lane of one moment wrote the unit, and no other program and no other lane of that moment read it."""
    shapes: dict[tuple[int, ...], int] = {}
    programs = np.array([access.program.index for access in accesses])
    times = np.array([access.time for access in accesses])
    tiles = np.array([shapes.setdefault(access.shape, len(shapes)) for access in accesses])
    writer = np.zeros(count, np.int64)  # rows of `written` from 1 on
    writer[written.cell] = np.arange(1, len(written.cell) + 1)
    suspect = np.zeros(count, bool)
    for rows, stored in ((written, True), (read, False)):
        by = writer[rows.cell]
        touched, by = rows[by > 0], by[by > 0] - 1
        store = written.access[by]
        same_time = times[touched.access] == times[store]
        same_lane = (touched.lane == written.lane[by]) & (tiles[touched.access] == tiles[store])
        conflict = (programs[touched.access] != programs[store]) | (same_time & ~same_lane)
        if stored:
            conflict |= ~same_time  # a store that a later one hides may be in conflict with a load
        suspect[touched.cell[conflict]] = True
    if not suspect.any():
        return None
    parts = (written[suspect[written.cell]], read[suspect[read.cell]])
    return _Cells(*(np.concatenate(pair) for pair in zip(*parts, strict=True)))


def _exact(accesses: Sequence[Access], rows: _Cells, base: int, unit: int) -> Iterator[tuple[str, Access, Access, int]]:
    order = np.lexsort((rows.access, rows.cell))
    rows = rows[order]
    starts = np.flatnonzero(np.diff(rows.cell, prepend=rows.cell[0] - 1))
    ends = np.append(starts[1:], len(rows.cell))
    seen: set[bytes] = set()
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        numbers, lanes = rows.access[start:end], rows.lane[start:end]
        same = (lanes[:, None] == lanes[None, :]) if end - start < 64 else lanes
        signature = numbers.tobytes() + same.tobytes()
        if signature in seen:
            continue
        seen.add(signature)
        address = base + int(rows.cell[start]) * unit
        for kind, one, other in _pairs(accesses, numbers.tolist(), lanes.tolist(), address):
            yield kind, one, other, address


def _pairs(
    accesses: Sequence[Access], numbers: Sequence[int], lanes: Sequence[int], address: int
) -> Iterator[tuple[str, Access, Access]]:
    """Conflicts of the accesses to one unit."""
    for at, (number, lane) in enumerate(zip(numbers, lanes, strict=True)):
        one = accesses[number]
        for number_of_other, other_lane in zip(numbers[at + 1 :], lanes[at + 1 :], strict=True):
            other = accesses[number_of_other]
            if one.kind == other.kind and one.kind in (LOAD, ATOMIC):
                continue
            if one.program is not other.program:
                if not one.knows(other) and not other.knows(one):
                    yield RACE, one, other
                continue
            lanes_differ = one.time == other.time and (lane, one.shape) != (other_lane, other.shape)
            if lanes_differ and (one is not other or _differ(one, address)):
                yield UNFENCED, one, other


def _differ(store: Access, address: int) -> bool:
    """Tell whether the lanes of a store have different numbers for one place."""
    assert store.values is not None
    there = (store.addresses <= address) & (address < store.addresses + store.size)
    values = store.values[there].view(np.dtype(f"V{store.values.itemsize}"))
    return len({value.tobytes() for value in values}) > 1
