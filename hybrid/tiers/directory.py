"""A directory of copies that several processes share: who may use it, and what is left in it by those that ended.

    manifest.sqlite             which copies are where (`Manifest`)
    <token>.lock                locked for as long as the process lives that wrote files of this token
    <token>-<n>.safetensors     segments of that process
    start.lock                  locked while a process looks around

A file that the manifest does not name belongs to a process that lives and will name it, or to none: it is removed then.
No decision depends on the time of day.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid.tiers.manifest import BUSY_SECONDS, FORMAT, DamagedError, Manifest, SegmentRow, VersionError
from hybrid.tiers.store import ForeignError, Store, is_ours
from hybrid.units import format_bytes

MANIFEST = "manifest.sqlite"
FILE = re.compile(r"\.?([0-9a-f]{16})-\d+\.safetensors(?:\.[0-9a-f]{8}\.part)?")
"""Files of segments, those too that are not whole; the group is the token of their process."""

CANNOT_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM)


class CacheDirectory:
    """A directory that this process uses.

    Args:
        path: the directory, which is made if it is not there.
        open_store: makes the store of its files.

    Raises:
        OSError: it cannot be used; ForeignError: it belongs to another user.
        VersionError: it is of a newer version.
        sqlite3.Error: its manifest cannot be read now.

    Attributes:
        store: its files.
        manifest: which copies are where.
        read_only: nothing can be written.
        report: what was found at the start, and what was dropped, a sentence each.
    """

    def __init__(self, path: Path, open_store: Callable[[Path], Store]) -> None:
        self._path = path
        self._token = secrets.token_hex(8)
        self._lock: int | None = None
        self._num_files = 0
        self.report: list[str] = []
        self.read_only: bool = False
        _prepare(path)
        self.store: Store = open_store(path)
        try:
            with self._starting():
                self._lock = _locked(path / f"{self._token}.lock")
        except OSError as error:
            if error.errno not in CANNOT_WRITE or isinstance(error, ForeignError):
                raise
            self.read_only = True
            self.report.append(f"it cannot be written ({error.strerror}): what is there is used, and nothing is added")
        try:
            with self._starting():
                self.manifest: Manifest = self._open_manifest()
                if not self.read_only:
                    self._collect()
        except BaseException:
            self._unlock()
            raise

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """One process at a time looks around."""
        if self.read_only:
            yield
            return
        descriptor = os.open(self._path / "start.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not is_ours(os.fstat(descriptor)):
                raise ForeignError("its start.lock")
            _wait_for_lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _open_manifest(self) -> Manifest:
        path = self._path / MANIFEST
        for name in (MANIFEST, f"{MANIFEST}-journal"):
            _refuse_foreign(self._path / name)
        try:
            return Manifest(path, self.read_only)
        except (DamagedError, VersionError) as error:
            if self.read_only or (isinstance(error, VersionError) and error.found > FORMAT):
                raise
            self.report.append(f"{error}: all of it is dropped")
            path.unlink(missing_ok=True)
            Path(f"{path}-journal").unlink(missing_ok=True)
            return Manifest(path)

    def _collect(self) -> None:
        """Drop what no process will use: files without a row, and rows without a file."""
        dead, living = set(), {self._token}
        for path in self._path.glob("*.lock"):
            token = path.stem
            if token in ("start", self._token):
                continue
            try:
                os.close(_locked(path, make=False))
                dead.add(path)
            except OSError:
                living.add(token)
        rows, known = self.manifest.segments(), self.manifest.segments_of_copies()
        self._drop_rows([row for row in rows if row.id not in known or not self._is_whole(row)])
        named, orphans = {row.file for row in rows}, []
        for entry in os.scandir(self._path):
            match = FILE.fullmatch(entry.name)
            if match is None or match[1] in living or entry.name in named:
                continue
            status = entry.stat(follow_symlinks=False)
            if is_ours(status):
                orphans.append((entry.name, status.st_size))
        for name, _ in orphans:
            (self._path / name).unlink(missing_ok=True)
        for path in dead:
            path.unlink(missing_ok=True)
        if orphans:
            size = format_bytes(sum(size for _, size in orphans))
            self.report.append(f"{len(orphans)} files ({size}) of processes that ended before they were done: removed")

    def _is_whole(self, row: SegmentRow) -> bool:
        """Whether the file of a row is there, ours, and as long as it was."""
        if not isinstance(row.file, str) or not FILE.fullmatch(row.file) or type(row.num_bytes) is not int:
            return False
        try:
            status = os.lstat(self._path / row.file)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and is_ours(status) and status.st_size == row.num_bytes

    def _drop_rows(self, rows: list[SegmentRow]) -> None:
        self.manifest.remove(row.id for row in rows)
        if rows:
            self.report.append(
                f"{len(rows)} files that are missing, cut off, of another user, or without a copy that is known: what "
                "the manifest says of them is dropped"
            )
        for row in rows:
            self.unlink(str(row.file))

    def next_file(self) -> str:
        """A name for a segment of this process."""
        self._num_files += 1
        return f"{self._token}-{self._num_files}.safetensors"

    def unlink(self, file: str) -> None:
        """Remove the file of a segment that the manifest does not name any more. One that cannot be removed now is
        removed by a later process."""
        try:
            if FILE.fullmatch(file) and is_ours(os.lstat(self._path / file)):
                self.store.delete(file)
        except OSError:
            pass

    @property
    def is_current(self) -> bool:
        """Whether its manifest is still the one that was opened."""
        return self.manifest.is_current

    def close(self) -> None:
        """Let others know that this process is done with it."""
        self.manifest.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            (self._path / f"{self._token}.lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def _prepare(path: Path) -> None:
    """Make a directory that only its owner may use.

    Raises:
        ForeignError: it belongs to another user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if not is_ours(status):
        raise ForeignError(f"{path} (uid {status.st_uid})")
    if status.st_mode & 0o077:
        try:
            path.chmod(0o700)
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise


def _refuse_foreign(path: Path) -> None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not is_ours(status) or not stat.S_ISREG(status.st_mode):
        raise ForeignError(str(path))


def _wait_for_lock(descriptor: int) -> None:
    """Lock a file that others lock for a moment.

    Raises:
        TimeoutError: another process has it for longer: it was stopped, or its disk hangs.
    """
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"another process that starts there has not ended that for {BUSY_SECONDS:.0f} s"
                ) from None
            time.sleep(0.01)


def _locked(path: Path, make: bool = True) -> int:
    """Lock a file, for as long as its descriptor is open.

    Raises:
        OSError: another process has locked it.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


RECOVERABLE = (OSError, EOFError, sqlite3.Error, DamagedError, VersionError)
"""What the use of a directory may raise."""
