"""Copies are read once for all that want them, first what a request waits for, and nothing that nobody wants."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from hybrid.tiers import reader as reading
from hybrid.tiers.folder import CopyPlace, Span, checksum
from hybrid.tiers.reader import BufferedReading, Reader, Wanted
from hybrid.tiers.tier import Contents, UnavailableError

SIZE = 100


def contents_of(number: int) -> bytes:
    return bytes([number]) * SIZE


def wanted(number: int) -> Wanted:
    name = "page", bytes([number]) * 16
    span = Span(0, SIZE, checksum("origin", name, "", contents_of(number)))
    return Wanted(name, f"file{number}", "origin", CopyPlace(0, span, "", None))


class Gated:
    """A store whose reads wait for a gate.

    Attributes:
        reads: files in the order in which they were read.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.reads: list[int] = []
        self.failing: set[int] = set()

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        number = int(name[4:])
        self.reads.append(number)
        assert self.gate.wait(20)
        if number in self.failing:
            raise OSError(5, "Input/output error")
        buffer[:] = contents_of(number)

    def contains(self, name: str) -> bool:
        raise NotImplementedError

    def put_from(self, name: str, parts: Sequence[Contents]) -> None:
        raise NotImplementedError

    def delete(self, name: str) -> None:
        raise NotImplementedError


def failed(reading: BufferedReading) -> UnavailableError:
    return UnavailableError(str(reading.error[1]) if reading.error is not None else "too late")


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    assert reader.violations() == []
    reader.close()


@pytest.fixture
def store(reader: Reader) -> Iterator[Gated]:
    store = Gated()
    yield store
    store.gate.set()


def test_contents_are_in_the_order_of_the_names_and_what_is_at_hand_is_not_read(reader: Reader, store: Gated) -> None:
    store.gate.set()
    one = reader.begin(store, [wanted(2), b"at hand", wanted(1)], failed)
    assert one.wait(20)
    assert one.take() == [contents_of(2), b"at hand", contents_of(1)]
    assert (store.reads, one.seconds > 0) == ([2, 1], True)
    one.drop()
    one.drop()


def test_what_several_want_is_read_once_and_kept_for_the_last(reader: Reader, store: Gated) -> None:
    one, other = reader.begin_ahead(store, [wanted(1)], failed), reader.begin(store, [wanted(1), wanted(2)], failed)
    one.drop()
    store.gate.set()
    assert other.wait(20)
    late = reader.begin(store, [wanted(2)], failed)
    assert late.is_done, "it is in a buffer"
    other.drop()
    assert late.take() == [contents_of(2)]
    late.drop()
    assert store.reads == [1, 2]
    assert reader.bytes_ahead == SIZE


def test_what_a_request_waits_for_is_read_before_what_is_read_ahead(reader: Reader, store: Gated) -> None:
    ahead = reader.begin_ahead(store, [wanted(number) for number in range(1, 5)], failed)
    until(lambda: store.reads == [1])
    now = reader.begin(store, [wanted(4), wanted(9)], failed)
    assert reader.bytes_before == 2 * SIZE
    store.gate.set()
    assert now.wait(20)
    assert ahead.wait(20)
    assert store.reads == [1, 4, 9, 2, 3]
    assert reader.bytes_before == 0
    now.drop()
    ahead.drop()


def test_what_nobody_wants_any_more_is_not_read(reader: Reader, store: Gated) -> None:
    one = reader.begin(store, [wanted(1), wanted(2)], failed)
    until(lambda: store.reads == [1])
    one.drop()
    store.gate.set()
    other = reader.begin(store, [wanted(3)], failed)
    assert other.wait(20)
    assert store.reads == [1, 3]
    until(lambda: reader.bytes_in_vain == SIZE)
    other.take()
    other.drop()
    assert reader.bytes_in_vain == SIZE


def test_no_more_is_read_ahead_than_buffers_may_hold(
    reader: Reader, store: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_AHEAD_BYTES", 2 * SIZE)
    first = reader.begin_ahead(store, [wanted(1)], failed)
    assert reader.reads_ahead
    second = reader.begin_ahead(store, [wanted(2), wanted(3)], failed)
    assert not reader.reads_ahead
    second.drop()
    assert reader.reads_ahead
    first.drop()


def test_a_read_that_failed_is_tried_again_for_who_comes_later(reader: Reader, store: Gated) -> None:
    store.gate.set()
    store.failing.add(1)
    one = reader.begin(store, [wanted(2), wanted(1)], failed)
    assert one.wait(20)
    with pytest.raises(UnavailableError, match="Input/output error"):
        one.take()
    store.failing.clear()
    other = reader.begin(store, [wanted(1)], failed)
    assert other.wait(20)
    assert other.take() == [contents_of(1)]
    one.drop()
    other.drop()


def test_a_wait_ends_when_its_time_is_over_and_when_the_reader_is_closed(reader: Reader, store: Gated) -> None:
    one = reader.begin(store, [wanted(1), wanted(2)], failed)
    until(lambda: store.reads == [1])
    assert not one.wait(0.01)
    with pytest.raises(UnavailableError, match="too late"):
        one.take()
    late = one.late()
    assert late is not None
    assert (late[0].wanted.file, late[1]) == ("file1", SIZE)
    reader.close()
    store.gate.set()
    assert one.wait(20)
    with pytest.raises(UnavailableError, match="the disk was closed"):
        one.take()
    one.drop()
