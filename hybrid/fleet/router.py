"""Where each request goes: what the replicas have, what it costs at each, and what has been promised."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import repeat
from math import exp

import numpy as np

from hybrid.events.change import Change
from hybrid.fleet.index import Depths, Index
from hybrid.fleet.score import Loads, Weights, costs
from hybrid.fleet.sessions import Session, Sessions

MARKS: list[int] = sorted({step * 2**octave for octave in range(32) for step in range(8, 16)} | {*range(8)})
"""Pages at the ends of which prompts under way are looked for: eight in each octave, so that a long prompt has few."""


SETTLES = 2.0
"""Seconds after which the events of a prompt have come. Until then its session's next prompt finds it at its home."""


class Reservation:
    """A request at the replica that was chosen for it. From then on its work counts there, and what it computes counts
    as about to be there.

    Attributes:
        replica: its number.
        num_tokens: of the prompt.
        promised: tokens that the replica need not compute: it has a checkpoint there.
        expected: the same with what requests before it compute; at least `promised`.
        session: that it belongs to.
        names: of the pages of the prompt.
        marks: those by which others find it while it is under way.
        is_waiting: its prompt is not computed yet.
        has_ended: it does not count any more.
    """

    __slots__ = (
        "expected",
        "has_ended",
        "is_waiting",
        "marks",
        "names",
        "num_tokens",
        "promised",
        "replica",
        "session",
    )

    def __init__(
        self,
        replica: int,
        num_tokens: int,
        promised: int,
        expected: int,
        session: Session,
        names: Sequence[bytes],
        marks: Sequence[bytes],
    ) -> None:
        self.replica: int = replica
        self.num_tokens: int = num_tokens
        self.promised: int = promised
        self.expected: int = expected
        self.session: Session = session
        self.names: Sequence[bytes] = names
        self.marks: Sequence[bytes] = marks
        self.is_waiting: bool = True
        self.has_ended: bool = False


class Router:
    """Chooses a replica for each request: home and memory, and what it can resume there.

    A session has a home, the replica of its last request. A new one goes where the cost is least, and what lives at a
    replica beyond its share costs, too, as does what it was given lately. A checkpoint counts whole, and pages after it
    in part. Queues count beyond a patience: as long as computing takes what a replica has. One thread uses a router.

    Args:
        page_size: tokens per page.
        weights: of the score.
        has_gaps: see `Index`.

    Attributes:
        index: what the replicas have.
    """

    def __init__(self, page_size: int, weights: Weights | None = None, has_gaps: bool = False) -> None:
        self.index = Index(page_size, has_gaps)
        self._weights = weights or Weights()
        self._sessions = Sessions(self._weights.idle)
        self._replicas: set[int] = set()
        self._queued: Depths = np.zeros(self.index.width)
        self._live: Depths = np.zeros(self.index.width)
        self._lately: Depths = np.zeros(self.index.width)
        self._now = 0.0
        self._absent: Depths = np.full(self.index.width, np.inf)
        self._leading: dict[bytes, Reservation] = {}  # the latest prompt under way that has the page

    @property
    def replicas(self) -> frozenset[int]:
        """The numbers of the replicas."""
        return frozenset(self._replicas)

    def add(self, replica: int) -> None:
        """Send requests to a replica, of which nothing is known."""
        self.index.reserve(replica)
        more = self.index.width - len(self._queued)
        if more:
            self._queued = np.append(self._queued, np.zeros(more))
            self._live = np.append(self._live, np.zeros(more))
            self._lately = np.append(self._lately, np.zeros(more))
            self._absent = np.append(self._absent, np.full(more, np.inf))
        if self._replicas:  # one that has just come is not given everything
            self._lately[replica] = self._lately.sum() / len(self._replicas)
        self._replicas.add(replica)
        self._absent[replica] = 0.0

    def remove(self, replica: int) -> None:
        """Send no request to a replica any more, and forget what it has."""
        self._replicas.discard(replica)
        self.index.forget(replica)
        self._queued[replica] = self._live[replica] = self._lately[replica] = 0.0
        self._absent[replica] = np.inf

    def apply(self, replica: int, changes: Iterable[Change]) -> None:
        """Learn what a replica took and gave up. Of one that was removed nothing is learned."""
        if replica in self._replicas:
            self.index.apply(replica, changes)

    def choose(
        self,
        names: Sequence[bytes],
        num_tokens: int,
        now: float,
        session: str | None = None,
        among: Iterable[int] | None = None,
    ) -> Reservation:
        """Choose a replica for a request, and reserve its place there: `ended` must follow.

        Args:
            names: the digests at the ends of the whole pages of its prompt, without its last token, which is always
                computed.
            num_tokens: of the prompt.
            now: seconds, of any clock.
            session: its id; None: the deepest known prefix of its prompt that others do not share stands for it.
            among: replicas that can take it; None: all.

        Raises:
            LookupError: there is no replica.
        """
        if not self._replicas:
            raise LookupError("there is no replica")
        for gone in self._sessions.expire(now):
            self._move(gone, None, 0.0)
        if now > self._now:
            self._lately *= exp((self._now - now) / self._weights.lately)
            self._now = now
        found = self.index.find(names)
        own, size = self._sessions.find(names, session), self.index.page_size
        marks = [names[at] for at in MARKS[: bisect_right(MARKS, len(names) - 1)]]
        leader, num_led = self._leader(names, marks)
        led, known = num_led * size, found.checkpoints
        if leader is not None:
            found.pages[leader.replica] = max(found.pages[leader.replica], led)
            if leader.session is not own:  # a fan-out stays together; a session has its home
                found = found._replace(checkpoints=known.copy())
                found.checkpoints[leader.replica] = max(known[leader.replica], led)
        if own.latest is not None and now < own.used + SETTLES:
            replica, others = own.latest
            pages = range(min(len(names), len(others)))
            num_shared = bisect_left(pages, True, key=lambda at: names[at] != others[at])
            found.pages[replica] = max(found.pages[replica], num_shared * size)
        home = own.home if own.home in self._replicas else None
        loads = Loads(len(self._replicas), self._queued, self._live, self._lately)
        cost = costs(self._weights, num_tokens, found, loads, home)
        cost += self._absent
        if among is not None:
            allowed = [*among]
            best = min(allowed, key=lambda replica: (cost[replica], self._live[replica] + self._queued[replica]))
        else:
            best = int(cost.argmin())
            ties = np.flatnonzero(cost == cost[best])
            if len(ties) > 1:
                best = int(ties[(self._live + self._queued)[ties].argmin()])
        promised = expected = int(known[best])
        if leader is not None and leader.replica == best:
            expected = max(promised, led)
        reservation = Reservation(best, num_tokens, promised, expected, own, names, marks)
        self._queued[best] += num_tokens - expected
        self._lately[best] += num_tokens - expected
        if own.home is None:
            own.shared = max(float(found.pages[best]), expected)
        self._move(own, best, max(own.own, num_tokens - own.shared))
        own.under_way += 1
        own.latest = best, names
        self._sessions.use(own, now)
        self._leading.update(zip(marks, repeat(reservation)))
        return reservation

    def _leader(self, names: Sequence[bytes], marks: Sequence[bytes]) -> tuple[Reservation | None, int]:
        """The prompt under way that shares most marks with another, and how many pages it shares."""
        leading = self._leading
        if not leading or not marks or marks[0] not in leading:
            return None, 0
        num_marks = bisect_left(marks, True, key=lambda name: name not in leading)
        leader = leading[marks[num_marks - 1]]
        others, most = leader.names, min(len(names), len(leader.names), MARKS[num_marks])
        pages = range(MARKS[num_marks - 1] + 1, most)
        return leader, pages.start + bisect_left(pages, True, key=lambda at: names[at] != others[at])

    def _move(self, session: Session, home: int | None, own: float) -> None:
        """Count the tokens of a session at its home."""
        if session.home in self._replicas:
            assert session.home is not None
            self._live[session.home] = max(0.0, self._live[session.home] - session.own)
        session.home, session.own = home, own
        if home is not None:
            self._live[home] += own

    def computed(self, reservation: Reservation) -> None:
        """The prompt of a request is computed: its first token came."""
        if not reservation.is_waiting:
            return
        reservation.is_waiting = False
        work = reservation.num_tokens - reservation.expected
        replica, leading = reservation.replica, self._leading
        if replica in self._replicas:
            self._queued[replica] = max(0.0, self._queued[replica] - work)
        for name in reservation.marks:
            if leading.get(name) is reservation:
                del leading[name]

    def ended(self, reservation: Reservation, num_answer: int = 0) -> None:
        """A request has ended, in whatever way. Another call does nothing.

        Args:
            num_answer: tokens of its answer.
        """
        if reservation.has_ended:
            return
        self.computed(reservation)
        reservation.has_ended = True
        session = reservation.session
        session.under_way -= 1
        session.own += num_answer
        if session.home in self._replicas:
            self._live[session.home] += num_answer
