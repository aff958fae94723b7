"""Stores: named contents, by four verbs; and the one in a local directory."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from hybrid.checks import shown
from hybrid.errors import ArgumentError
from hybrid.tiers.tier import Contents

MAX_PARTS = 512
"""Parts of contents that are written by one call."""

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
"""Names that every store can hold."""

PART = ".part"
"""Ending of the names of files that are not whole yet."""


@runtime_checkable
class Store(Protocol):
    """Named contents. Each call raises an `OSError` where it fails, and may be made from any thread."""

    def contains(self, name: str) -> bool:
        """Tell whether there are contents of that name."""
        ...

    def put_from(self, name: str, parts: Sequence[Contents]) -> None:
        """Store contents, given in parts, whole or not at all; those of that name are replaced. They are as safe as the
        store can make them when this returns."""
        ...

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes of contents from `start` on.

        Raises:
            FileNotFoundError: there are none of that name.
            EOFError: they end before.
        """
        ...

    def delete(self, name: str) -> None:
        """Forget contents, if they are there."""
        ...


class ForeignError(PermissionError):
    """A file or directory belongs to another user."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.EPERM, f"{what} belongs to another user, or is not a plain file")


def checked(name: str) -> str:
    """A name that every store can hold.

    Raises:
        ArgumentError: it is another.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name) or name.endswith(PART):
        raise ArgumentError(f"a name in a store must match {NAME.pattern}, and not end in {PART!r}; got {name!r:.200}")
    return name


def checked_store(store: object) -> Store:
    """A store.

    Raises:
        ArgumentError: it lacks one of the four verbs.
    """
    if not isinstance(store, Store):
        raise ArgumentError(
            "store must have the methods contains, put_from, get_into and delete, as "
            f"hybrid.tiers.store.DirectoryStore(path) has; got {shown(store)}"
        )
    return store


def is_ours(status: os.stat_result) -> bool:
    """Tell whether a file or directory belongs to the user of this process."""
    return status.st_uid == os.geteuid()


class DirectoryStore:
    """A directory with a file for each name: a `Store`.

    Only its owner may read a file. A file of another user, or a link, is refused, and never followed. Files are read,
    not mapped: where a mapped file is cut off, or its disk fails, a signal ends the process.

    Args:
        path: the directory, which must be there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def contains(self, name: str) -> bool:
        """See `Store.contains`."""
        try:
            return is_ours(os.lstat(self.path / checked(name)))
        except FileNotFoundError:
            return False

    def put_from(self, name: str, parts: Sequence[Contents]) -> None:
        """See `Store.put_from`. The file and its name are on the disk when this returns."""
        part = self.path / f".{checked(name)}.{secrets.token_hex(4)}{PART}"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write(descriptor, parts)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(part, self.path / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_directory(self.path)

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        """See `Store.get_into`."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no pipe is waited for
        descriptor = os.open(self.path / checked(name), flags)
        try:
            status = os.fstat(descriptor)
            if not is_ours(status) or not stat.S_ISREG(status.st_mode):
                raise ForeignError(name)
            while buffer:
                count = os.preadv(descriptor, [buffer], start)
                if not count:
                    raise EOFError(f"{name} is cut off")
                buffer, start = buffer[count:], start + count
        finally:
            os.close(descriptor)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        (self.path / checked(name)).unlink(missing_ok=True)


def _write(descriptor: int, parts: Sequence[Contents]) -> None:
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        count = os.writev(descriptor, left[:MAX_PARTS])
        at = 0
        while count:
            if count < len(left[at]):
                left[at] = left[at][count:]
                break
            count -= len(left[at])
            at += 1
        del left[:at]


def sync_directory(path: Path) -> None:
    """Have the names of a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
