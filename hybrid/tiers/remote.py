"""Stores elsewhere: a Redis or Valkey server, and object stores through obstore. Each is a `Store` with four verbs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hybrid.errors import ArgumentError, HybridError
from hybrid.tiers.store import DirectoryStore, Store, checked
from hybrid.tiers.tier import Contents

CHUNK_BYTES = 8 * 2**20
"""Contents are sent in pieces of up to this size."""

TIMEOUT_SECONDS = 10.0

PART_SECONDS = 600
"""Seconds after which the parts sent by a process that ended before it was done are forgotten."""


def open_store(url: str, prefix: str = "hybrid:") -> Store:
    """The store at a URL: a server at redis://, rediss:// or unix://, a folder (a path or file://, which is made), or
    what obstore reaches, such as s3://, gs:// and az://.

    Args:
        prefix: of the keys in a server.

    Raises:
        ArgumentError: there is no such store, or the package for it is missing.
    """
    scheme, is_url, rest = url.partition("://")
    if not is_url or scheme == "file":
        folder = Path(rest if is_url else url)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return DirectoryStore(folder)
    if scheme in ("redis", "rediss", "unix"):
        return RedisStore(url, prefix)
    try:
        import obstore.store
    except ImportError as error:
        raise ArgumentError(f"{url!r:.100} needs the package obstore: pip install obstore") from error
    try:
        return ObjectStore(obstore.store.from_url(url))
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise ArgumentError(f"{url!r:.100} is no store: {error!s:.200}") from error


class RedisStore:
    """A Redis or Valkey server, with a key for each name. Needs the extra `redis`. Contents have up to 512 MB, the
    largest value of such a server.

    Args:
        url: of the server, such as "redis://localhost:6379/0" or "unix:///run/redis.sock".
        prefix: of the keys.
        timeout: seconds that a call waits for the server.

    Raises:
        ArgumentError: the package redis is missing, or the URL is not one.
    """

    def __init__(self, url: str, prefix: str = "hybrid:", timeout: float = TIMEOUT_SECONDS) -> None:
        try:
            import redis
        except ImportError as error:
            raise ArgumentError("RedisStore needs the package redis: pip install redis") from error
        try:
            self._client: Any = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
        except ValueError as error:
            raise ArgumentError(f"RedisStore: {error}; got {url!r:.100}") from error
        self._error: type[Exception] = redis.RedisError
        self._prefix = prefix

    def contains(self, name: str) -> bool:
        """See `Store.contains`."""
        with self._failing():
            return bool(self._client.exists(self._key(name)))

    def put_from(self, name: str, parts: Sequence[Contents]) -> None:
        """See `Store.put_from`. As safe as the server is configured to make them."""
        key, part = self._key(name), f"{self._prefix}part:{secrets.token_hex(8)}"
        with self._failing():
            try:
                self._client.set(part, b"", ex=PART_SECONDS)
                for chunk in _chunks(parts):
                    self._client.append(part, chunk)
                pipeline = self._client.pipeline(transaction=True)
                pipeline.persist(part)
                pipeline.rename(part, key)
                pipeline.execute()
            except BaseException:
                self._client.delete(part)
                raise

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        """See `Store.get_into`."""
        key, at = self._key(name), 0
        with self._failing():
            while at < len(buffer):
                last = start + min(at + CHUNK_BYTES, len(buffer)) - 1
                chunk = self._client.getrange(key, start + at, last)
                if len(chunk) != last + 1 - start - at:
                    break
                buffer[at : at + len(chunk)] = chunk
                at += len(chunk)
            if at < len(buffer) or not len(buffer):
                _refuse_short(name, self.contains(name), at == len(buffer))

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        with self._failing():
            self._client.delete(self._key(name))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _key(self, name: str) -> str:
        return self._prefix + checked(name)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise ConnectionError(f"the server failed: {error!s:.200}") from error
        except (HybridError, OSError, EOFError):
            raise
        except Exception as error:  # the client raises many kinds for answers that are none
            raise ConnectionError(f"the server does not answer as Redis does: {error!r:.200}") from error


class ObjectStore:
    """An object store of obstore: S3, GCS, Azure, a folder, memory. Needs the extra `obstore`.

    Args:
        store: of obstore, such as `obstore.store.from_url("s3://bucket/folder")`.

    Raises:
        ArgumentError: the package obstore is missing.
    """

    def __init__(self, store: Any) -> None:
        try:
            import obstore
        except ImportError as error:
            raise ArgumentError("ObjectStore needs the package obstore: pip install obstore") from error
        self._obstore: Any = obstore
        self._store = store

    def contains(self, name: str) -> bool:
        """See `Store.contains`."""
        with self._failing():
            try:
                self._obstore.head(self._store, checked(name))
            except FileNotFoundError:
                return False
            return True

    def put_from(self, name: str, parts: Sequence[Contents]) -> None:
        """See `Store.put_from`. Large contents are sent in several parts, and are there when all of them are."""
        with self._failing():
            self._obstore.put(self._store, checked(name), _chunks(parts))

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        """See `Store.get_into`."""
        if not len(buffer):
            return _refuse_short(name, self.contains(name), True)
        with self._failing():
            size = self._obstore.head(self._store, checked(name))["size"]
            if start + len(buffer) > size:
                _refuse_short(name, True, False)
            data = memoryview(self._obstore.get_range(self._store, name, start=start, length=len(buffer)))
            if len(data) != len(buffer):
                _refuse_short(name, True, False)
            buffer[:] = data

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        with self._failing(), suppress(FileNotFoundError):
            self._obstore.delete(self._store, checked(name))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except self._obstore.exceptions.BaseError as error:
            if isinstance(error, OSError):
                raise
            raise ConnectionError(f"the store failed: {error!s:.200}") from error


def _chunks(parts: Sequence[Contents]) -> Iterator[bytes]:
    """Contents in pieces that can be sent."""
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            yield bytes(view[start : start + CHUNK_BYTES])


def _refuse_short(name: str, is_there: bool, is_whole: bool) -> None:
    if not is_there:
        raise FileNotFoundError(f"there is nothing named {name}")
    if not is_whole:
        raise EOFError(f"{name} is cut off")
