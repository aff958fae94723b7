"""The contents of the units of a memory: what moves, reads, writes and packs them. Bookkeeping knows no more of them
than this. They are tensors of this library (`hybrid.memory.tensors`), what a caller keeps, or none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from hybrid.errors import ArgumentError
from hybrid.memory.copies import Contents, Downloads, Uploads

CAN_MOVE = "move_pages", "move_states"
CAN_READ = "read_page", "read_checkpoint"
CAN_WRITE = "page_layout", "checkpoint_layout", "write_page", "write_checkpoint"
CAN_CHECK = ("are_finite",)
CAN_STORE = "store", "restore", "move_stored"
"""Methods of `UnitContents` that the mover and the store of a caller have together, or lack."""


class WorkerRun(Protocol):
    """A pass that was given to other threads of a CPU."""

    def end(self) -> None:
        """Wait until it has ended, and take part in it. Whether it failed is known to who reads its results."""
        ...

    def wait(self) -> None:
        """`end`, and raise what it failed with."""
        ...


class InFlight:
    """The passes that other threads of a CPU compute on a memory, one after another, while the host schedules the next
    step; the latest is known.

    A GPU does in order what it is given. Threads of a CPU do not: what reads or writes contents of pages and state
    slots outside of a pass waits for the pass under way first (`wait_for_pass`).
    """

    def __init__(self) -> None:
        self._latest: WorkerRun | None = None

    @property
    def is_under_way(self) -> bool:
        """Tell whether a pass was begun that nothing has waited for here."""
        return self._latest is not None

    def begin_pass(self, latest: WorkerRun) -> None:
        """Record that a pass was given to other threads. When it ends, those before it have."""
        self._latest = latest

    def wait_for_pass(self) -> None:
        """Wait for what is under way."""
        if self._latest is not None:
            self._latest.end()
            self._latest = None


class Mover(Protocol):
    """Moves the contents of pages and state slots, when an elastic memory moves units together.

    One that has more methods of `hybrid.memory.contents.UnitContents` can do more: `read_page` and `read_checkpoint`
    have contents verified; with `write_page`, `write_checkpoint`, `page_layout` and `checkpoint_layout` they are copied
    to tiers and files, too; with `page_bytes`, `checkpoint_bytes` and `are_finite` they are checked on the way back.
    """

    def move_pages(self, moves: dict[int, int]) -> None:
        """Copy each page (key) to its new place (value). No place is both."""
        ...

    def move_states(self, moves: dict[int, int]) -> None:
        """Copy each state slot (key) to its new place (value). No place is both."""
        ...


class UnitContents:
    """The contents of the pages, state slots and checkpoints of a memory; of this class itself, those of a memory that
    has none: nothing is moved or stored, and reading and writing are refused.

    The place of a checkpoint is a state slot, or the place of one that is stored smaller.

    Attributes:
        can_read: contents can be read.
        can_write: they can be read and written.
        num_bytes: bytes of the contents of a page and of a checkpoint; None: not known, and all contents are believed.
        uploads: contents on their way into the memory.
        downloads: contents on their way from it to the host.
        in_flight: what other threads compute on them.
    """

    def __init__(self) -> None:
        self.can_read: bool = False
        self.can_write: bool = False
        self.num_bytes: tuple[int, int] | None = None
        self.uploads: Uploads = Uploads()
        self.downloads: Downloads = Downloads()
        self.in_flight: InFlight = InFlight()

    def move_pages(self, moves: dict[int, int]) -> None:
        """Copy each page (key) to its new place (value). No place is both."""

    def move_states(self, moves: dict[int, int]) -> None:
        """Copy each state slot (key) to its new place (value). No place is both."""

    def move_stored(self, moves: dict[int, int]) -> None:
        """Copy each stored checkpoint (key) to its new place (value). No place is both."""

    def store(self, slot: int, place: int) -> None:
        """Write the state of a slot to the place of a stored checkpoint."""

    def restore(self, place: int, slot: int) -> None:
        """Write a stored checkpoint into a state slot."""

    def check_writable(self) -> None:
        """Raise ArgumentError where contents cannot be read and written."""
        if not self.can_write:
            raise _no_contents()

    def page_layout(self) -> str:
        """Describe what a page holds, as a text. Contents go from one memory to another where these texts are equal."""
        raise _no_contents()

    def checkpoint_layout(self) -> str:
        """Describe what a checkpoint holds, likewise."""
        raise _no_contents()

    def read_page(self, page: int) -> Contents:
        """Read the bytes of a page."""
        raise _no_contents()

    def read_checkpoint(self, place: int) -> Contents:
        """Read the bytes of a checkpoint."""
        raise _no_contents()

    def fetch_page(self, page: int) -> Contents:
        """Read a page that is about to be freed. Of tensors on a GPU it is on its way afterwards (`downloads`)."""
        return self.read_page(page)

    def fetch_checkpoint(self, place: int) -> Contents:
        """Read a checkpoint, likewise."""
        return self.read_checkpoint(place)

    def write_page(self, page: int, contents: Contents) -> None:
        """Write what `read_page` has read, into another page of this memory or of one like it."""
        raise _no_contents()

    def write_checkpoint(self, place: int, contents: Contents) -> None:
        """Write what `read_checkpoint` has read, likewise."""
        raise _no_contents()

    def write(self, pages: Sequence[int], contents: Sequence[Contents], place: int, checkpoint: Contents) -> None:
        """Write all of a boundary. In tensors on a GPU it is on its way afterwards (`uploads`). When this raises, the
        pages and the place hold anything.

        Args:
            pages, contents: pages that no one reads, and what they are to hold.
            place, checkpoint: likewise of a checkpoint, as it is stored.
        """
        for page, held in zip(pages, contents, strict=True):
            self.write_page(page, held)
        self.write_checkpoint(place, checkpoint)

    def are_finite(self, pages: Iterable[Contents], checkpoint: Contents | None) -> bool:
        """Tell whether no number in contents is NaN or infinity (None: there is no checkpoint). Where many are so large
        that their sum is, they count as such, too: a model does not compute them."""
        return True


class GivenContents(UnitContents):
    """The contents that a caller keeps: the methods of a mover and a store, and where they lack some, those of a memory
    without contents.

    Args:
        mover: moves them, and may read, write and check them; None: it lacks all.
        store: stores checkpoints smaller; None: none are.

    Attributes:
        mover: as given.
    """

    def __init__(self, mover: Any, store: Any) -> None:
        super().__init__()
        self.mover: Any = mover
        self.can_read = has(mover, CAN_READ)
        self.can_write = self.can_read and has(mover, CAN_WRITE)
        is_checked = self.can_read and has(mover, ("page_bytes", "checkpoint_bytes", *CAN_CHECK))
        if is_checked:
            self.num_bytes = mover.page_bytes, mover.checkpoint_bytes
        taken = (
            (mover, CAN_MOVE, mover is not None),
            (mover, CAN_READ, self.can_read),
            (mover, CAN_WRITE, self.can_write),
            (mover, CAN_CHECK, is_checked),
            (store, CAN_STORE, store is not None),
        )
        for keeper, names, has_them in taken:
            for name in names if has_them else ():
                setattr(self, name, getattr(keeper, name))


def has(thing: object, names: Iterable[str]) -> bool:
    """Tell whether a thing has all of these methods and attributes."""
    return all(hasattr(thing, name) for name in names)


def _no_contents() -> ArgumentError:
    return ArgumentError(
        "this memory has no contents that can be saved or loaded: it needs tensors, or a mover that has read_page, "
        "write_page, read_checkpoint, write_checkpoint, page_layout and checkpoint_layout too"
    )
