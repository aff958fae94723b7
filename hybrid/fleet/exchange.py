"""Prefixes in a store that replicas of all machines share: what one has computed, another fetches instead."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial

from hybrid.engine.engine import Engine
from hybrid.errors import CacheFileError, HybridError
from hybrid.events.change import CHECKPOINT, STORE, Change
from hybrid.events.feed import Feed
from hybrid.fleet.index import Stored
from hybrid.key import TOKEN_BYTES, names_of
from hybrid.serve.async_engine import AsyncEngine
from hybrid.tiers.archive import Archive, read_archive
from hybrid.tiers.cost import Cost, MeasuredTime
from hybrid.tiers.store import Store

log: logging.Logger = logging.getLogger(__name__)

GROWTH = 1.5
"""Length of a prompt that is stored, over that of the part of it that is stored already, at least: all that is written
of a conversation is then three times as much as its last prompt, at most."""

MAX_WRITES = 4
"""Prompts that are written at once; more are not stored."""

ASSUMED_COMPUTING = 1e-3
"""Seconds per token, until it was measured."""

ASSUMED_LATENCY, ASSUMED_PER_BYTE = 5e-3, 1e-9
"""Seconds of a fetch, and of each of its bytes, until they were measured."""


class Exchange:
    """What one replica stores, and fetches. For one event loop.

    A prefix is one archive, by the digest of its tokens and its namespace. It is read through the checks of files from
    elsewhere, whole or not at all; where fetching would take longer than computing, or anything fails, the replica
    computes. That it is there is in the replica's events.

    Args:
        engine: of the replica.
        store: that all replicas reach.
        feed: of the engine's cache.
        page_size: tokens per page.

    Attributes:
        num_stored, num_fetched, num_failed: prefixes.
        fetching: what a fetch takes.
    """

    def __init__(self, engine: AsyncEngine, store: Store, feed: Feed, page_size: int) -> None:
        self.num_stored: int = 0
        self.num_fetched: int = 0
        self.num_failed: int = 0
        self._engine, self._store, self._feed = engine, store, feed
        self._page_bytes = page_size * TOKEN_BYTES
        self._own: dict[bytes, Stored] = {}  # that it has stored, for snapshots
        self._computing = MeasuredTime(ASSUMED_COMPUTING)
        self.fetching = Cost(ASSUMED_LATENCY, ASSUMED_PER_BYTE)
        self._writes: set[asyncio.Task[None]] = set()

    def births(self) -> list[Change]:
        """What this replica has stored, as changes."""
        return [_change(True, one) for one in self._own.values()]

    def note(self, num_computed: int, seconds: float) -> None:
        """Learn how long a prompt took, and how many of its tokens were computed."""
        self._computing.note(num_computed, seconds)

    async def fetch(self, prompt: list[int], adapter: str | None, namespace: str, stored: Stored) -> Stored | None:
        """Bring a prefix of a prompt into the cache, if that is faster than computing it. Returns it; None: it is no
        longer stored."""
        try:
            known = await self._engine.call(partial(_usable, prompt, adapter, namespace))
            gain = stored.num_tokens - known
            if gain <= 0:
                return stored
            if gain * self._computing.value < self.fetching.seconds(stored.num_bytes):
                self.fetching.fade()
                return stored
            start = time.monotonic()
            archive = await asyncio.to_thread(self._read, stored)
            await self._engine.call(lambda own: own.load(archive))
            self.fetching.note(stored.num_bytes, time.monotonic() - start)
            self.num_fetched += 1
            return stored
        except HybridError as error:
            self.num_failed += 1
            log.warning("a prefix of %d tokens is not fetched: %s", stored.num_tokens, error)
            if not isinstance(error, CacheFileError):
                return stored
            with suppress(OSError, HybridError):  # of a store that cannot be reached nothing is said
                await asyncio.to_thread(self._store.delete, stored.name.hex())
                self._own.pop(stored.name, None)
                await self._announce(False, stored)
            return None

    def keep(self, prompt: list[int], adapter: str | None, namespace: str, before: Stored | None) -> None:
        """Store what is cached of a prompt, in the background.

        Args:
            before: the longest part of it that is stored; None: there is none.
        """
        if len(self._writes) >= MAX_WRITES:
            return
        task = asyncio.create_task(self._keep(prompt, adapter, namespace, before))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _keep(self, prompt: list[int], adapter: str | None, namespace: str, before: Stored | None) -> None:
        try:
            known = await self._engine.call(partial(_usable, prompt, adapter, namespace))
            if not known or (before is not None and known < GROWTH * before.num_tokens):
                return
            dump = partial(Engine.dump, prompts=[prompt], namespace=namespace, adapter=adapter, only="deepest")
            stored = await asyncio.to_thread(self._put, await self._engine.call(dump))
            if stored.name not in self._own:
                self._own[stored.name] = stored
                self.num_stored += 1
                await self._announce(True, stored)
        except (HybridError, OSError) as error:
            log.warning("a prompt of %d tokens is not stored: %s", len(prompt), error)

    def _read(self, stored: Stored) -> Archive:
        """Read an archive.

        Raises:
            CacheFileError: it is none, or one of another prefix.
            HybridError: the store cannot be read.
        """
        archive = read_archive(stored.name.hex(), self._store)
        if self._deepest(archive) != (stored.name, stored.num_tokens):
            raise CacheFileError(f"{stored.name.hex()} is not what its name says")
        return archive

    def _put(self, content: bytes) -> Stored:
        """Store an archive by the digest of its deepest checkpoint."""
        name, num_tokens = self._deepest(read_archive(content))
        if not self._store.contains(name.hex()):
            self._store.put_from(name.hex(), [content])
        return Stored(name, num_tokens, len(content))

    def _deepest(self, archive: Archive) -> tuple[bytes, int]:
        """The digest and the tokens of the prefix at the deepest checkpoint of an archive; none: it has none."""
        ends = [(node.end, index) for index, node in enumerate(archive.nodes) if node.kind is not None]
        if not ends:
            return b"", 0
        end, index = max(ends)
        return names_of(archive.ids_of(archive.path(index)), archive.nodes[index].namespace, self._page_bytes)[-1], end

    async def _announce(self, born: bool, stored: Stored) -> None:
        await self._engine.call(lambda own: self._feed.add(_change(born, stored)))

    async def close(self) -> None:
        """Wait until all is written."""
        await asyncio.gather(*self._writes, return_exceptions=True)


def _usable(prompt: list[int], adapter: str | None, namespace: str, engine: Engine) -> int:
    """Tokens of a prompt that need not be computed."""
    return engine.explain(prompt, namespace=namespace, adapter=adapter).usable_hit


def _change(born: bool, stored: Stored) -> Change:
    return Change(born, CHECKPOINT, stored.name, stored.num_tokens, STORE, stored.num_bytes)
