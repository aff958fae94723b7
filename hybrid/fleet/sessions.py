"""Sessions: requests that continue one another, by their ids, or by what their prompts share with no other."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import repeat

CONTINUES = 0.75
"""A prompt without an id continues a session if it begins with this part of the session's last prompt."""

MAX_NAMES = 1 << 21
"""Digests of prompts that are kept to recognise sessions by; when there are more, those that sessions share go."""


class Session:
    """A session.

    Attributes:
        home: the replica of its last request; None: it had none.
        own: tokens of it that no other session shares.
        shared: tokens of its first prompt that its replica had already.
        used: when it had its last request.
        under_way: requests that have not ended.
        num_pages: of its last prompt.
        names: digests by which it is recognised.
        key: by which it is found; None: by its names.
        latest: the replica of its last request, and the names of its pages; None: it had none.
    """

    __slots__ = ("home", "key", "latest", "names", "num_pages", "own", "shared", "under_way", "used")

    def __init__(self, key: str | None) -> None:
        self.key: str | None = key
        self.home: int | None = None
        self.own: float = 0.0
        self.shared: float = 0.0
        self.used: float = 0.0
        self.under_way: int = 0
        self.num_pages: int = 0
        self.names: list[bytes] = []
        self.latest: tuple[int, Sequence[bytes]] | None = None


SHARED = Session(None)
"""In place of a session: several have had this digest."""


class Sessions:
    """The sessions of a fleet that are not idle.

    Args:
        idle: seconds after which a session without a request is forgotten.
    """

    def __init__(self, idle: float) -> None:
        self._idle = idle
        self._by_key: dict[str, Session] = {}
        self._by_name: dict[bytes, Session] = {}
        self._waiting: list[tuple[float, int, Session]] = []  # by the time at which they were used
        self._count = 0

    def find(self, names: Sequence[bytes], key: str | None) -> Session:
        """The session of a request, which may be a new one.

        Args:
            names: of the pages of its prompt.
            key: the id of its session; None: it has none.
        """
        if key is not None:
            found = self._by_key.get(key)
            if found is None:
                found = self._by_key[key] = Session(key)
            return found
        own = self._by_name
        num_known = bisect_left(names, True, key=lambda name: name not in own)
        before = own[names[num_known - 1]] if num_known else SHARED
        if before is not SHARED:
            if not before.under_way and num_known >= CONTINUES * before.num_pages:
                self._name(before, names, num_known)
                return before
            own.update(zip(names[:num_known], repeat(SHARED)))
        session = Session(None)
        self._name(session, names, num_known)
        return session

    def _name(self, session: Session, names: Sequence[bytes], num_known: int) -> None:
        fresh = names[num_known:]
        self._by_name.update(zip(fresh, repeat(session)))
        session.names += fresh
        session.num_pages = len(names)
        if len(self._by_name) > MAX_NAMES:
            self._by_name = {name: one for name, one in self._by_name.items() if one is not SHARED}

    def use(self, session: Session, now: float) -> None:
        """A session has a request."""
        session.used = now
        self._count += 1
        heappush(self._waiting, (now, self._count, session))

    def expire(self, now: float) -> list[Session]:
        """Forget the sessions that have been idle for too long, and return them."""
        gone = []
        while self._waiting and self._waiting[0][0] < now - self._idle:
            used, _, session = heappop(self._waiting)
            if session.used != used:
                continue
            if session.under_way:
                self.use(session, now)
                continue
            if session.key is not None:
                self._by_key.pop(session.key, None)
            for name in session.names:
                if self._by_name.get(name) is session:
                    del self._by_name[name]
            gone.append(session)
        return gone
