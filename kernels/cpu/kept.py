"""Files that are kept from one process to the next: each holds the digest of its content and of what that follows
from."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

SOURCES = Path(__file__).parent
"""The host side of compiled operations."""

DIGEST_BYTES = 32

MAX_WAIT = 120.0
"""Seconds that a process waits for another one to compile what it needs, too."""


@lru_cache
def folder() -> Path | None:
    """Where files are kept: `NUMBA_CACHE_DIR`, if it is set; else beside the sources, or in the user's cache where that
    cannot be written. None, and every process compiles, where the user has no home either."""
    if asked := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(asked)
    beside = SOURCES / "__pycache__"
    if os.access(beside if beside.exists() else SOURCES, os.W_OK):
        return beside
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid" / "code"
    except RuntimeError:
        return None


def read(name: str, origin: bytes, place: Path | None = None) -> bytes | None:
    """The content of a file, in a place or in `folder()`; None: there is none, it is torn, or it has another origin."""
    place = place or folder()
    if place is None:
        return None
    try:
        whole = (place / name).read_bytes()
    except OSError:
        return None
    own, content = whole[:DIGEST_BYTES], whole[DIGEST_BYTES:]
    return content if own == digest(origin, content) else None


def write(name: str, origin: bytes, content: bytes, place: Path | None = None) -> None:
    """Write a file that other processes find whole, or not at all; where it cannot be written, they do without."""
    place = place or folder()
    if place is None:
        return
    own = place / f"{name}.{uuid4().hex}"
    with suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        try:
            own.write_bytes(digest(origin, content) + content)
            own.replace(place / name)
        except BaseException:
            own.unlink(missing_ok=True)
            raise


@contextmanager
def alone() -> Iterator[None]:
    """Let one process at a time write many files, if it does not take longer than `MAX_WAIT`: the others find them."""
    place, handle = folder(), None
    with suppress(OSError):
        if place is not None and fcntl is not None:
            place.mkdir(parents=True, exist_ok=True)
            handle = os.open(place / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        end = time.monotonic() + MAX_WAIT
        while handle is not None and time.monotonic() < end:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield
    finally:
        if handle is not None:
            os.close(handle)


@lru_cache
def sources() -> bytes:
    """The digest of what compiled functions are made of: constants of their modules come from the folders above."""
    folders = SOURCES / "compiled", SOURCES, SOURCES.parent
    names = [folder / name for folder in folders for name in sorted(os.listdir(folder)) if name.endswith(".py")]
    return digest(*(name.read_bytes() for name in names))


def digest(*parts: bytes) -> bytes:
    """Of parts, one after another."""
    found = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        found.update(part)
    return found.digest()


def short(text: str) -> str:
    """A digest as a part of a file's name."""
    return blake2b(text.encode(), digest_size=4).hexdigest()
