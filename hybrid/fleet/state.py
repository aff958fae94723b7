"""What one front knows of the replicas, and has promised: between Ray's router, which chooses, and the engine in front,
which sees what comes. Both are in one process, each in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybrid.events.sockets import Follower
from hybrid.events.wire import Message
from hybrid.fleet.index import Stored
from hybrid.fleet.router import Reservation, Router
from hybrid.fleet.score import Weights

log: logging.Logger = logging.getLogger(__name__)

BROKEN = 3
"""Promises of a replica that are broken one after the other before it is read anew; when that happens as often, none of
its events is believed any more."""


HOLD_SECONDS = 60.0
"""Seconds for which a request that waits keeps what was promised to it from eviction, at most."""


class Route(NamedTuple):
    """What the choice of a replica needs of a request. It does not leave the process.

    Attributes:
        number: of the request, in this front.
        names: the digests of its pages.
        num_tokens: of its prompt.
        session: its id; None: it has none.
    """

    number: int
    names: Sequence[bytes]
    num_tokens: int
    session: str | None


class Promise(NamedTuple):
    """The part of the choice that a replica gets.

    Attributes:
        number: of the request, in the front that sent it.
        num_tokens: of the prompt that it need not compute.
        stored: a longer prefix of it that is in the store of the fleet; None: there is none.
    """

    number: int
    num_tokens: int
    stored: Stored | None = None


@dataclass(eq=False)
class Member:
    """A replica, as the front sees it.

    Attributes:
        number: in the router.
        name: of the replica, unique.
        follower: of its events; None: it sends none.
        sent: requests.
        asked_tokens, hit_tokens: of their prompts, and those of them that it did not compute.
        promised_tokens, broken_tokens: that were promised, and those of them that it computed.
        misjudged_tokens: that were hit and not expected (`Reservation.expected`), or expected and not hit.
        num_broken: promises that were broken, one after the other.
        num_reads: how often it was read anew for that.
        is_believed: its events count.
    """

    number: int
    name: str
    follower: Follower | None = None
    sent: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    promised_tokens: int = 0
    broken_tokens: int = 0
    misjudged_tokens: int = 0
    num_broken: int = 0
    num_reads: int = 0
    is_believed: bool = True
    stats: dict[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """What is shown of it."""
        follower = self.follower
        shown = {"replica": self.name, "sent": self.sent, "is_believed": self.is_believed, "num_reads": self.num_reads}
        events = {"events": follower.number, "gaps": follower.num_gaps} if follower is not None else {}
        tokens = ("asked", "hit", "promised", "broken", "misjudged")
        return shown | events | {f"{name}_tokens": getattr(self, f"{name}_tokens") for name in tokens}


class FleetState:
    """The replicas of one front, what they have, and what was promised. Any thread may use it.

    Args:
        page_size: tokens per page.
        weights: of the score.
        has_gaps: see `Index`.

    Attributes:
        members: the replicas by their names.
    """

    def __init__(self, page_size: int, weights: Weights, has_gaps: bool = False) -> None:
        self.members: dict[str, Member] = {}
        self._router = Router(page_size, weights, has_gaps)
        self._lock = threading.Lock()
        self._routes: dict[int, Route] = {}
        self._reservations: dict[int, Reservation] = {}
        self._by_number: dict[int, Member] = {}

    # Replicas

    def add(self, name: str) -> Member:
        """A replica has come."""
        with self._lock:
            number = next(at for at in range(len(self._by_number) + 1) if at not in self._by_number)
            member = self.members[name] = self._by_number[number] = Member(number, name)
            self._router.add(number)
            return member

    def remove(self, name: str) -> Member:
        """A replica has gone."""
        with self._lock:
            member = self.members.pop(name)
            del self._by_number[member.number]
            self._router.remove(member.number)
            return member

    def apply(self, member: Member, message: Message) -> None:
        """A replica has sent changes."""
        with self._lock:
            if self._by_number.get(member.number) is not member or not member.is_believed:
                return
            if message.is_snapshot:
                self._router.index.forget(member.number)
            self._router.apply(member.number, message.changes)

    # Requests

    def begin(self, route: Route) -> None:
        """A request is about to be sent; `end` must follow."""
        with self._lock:
            self._routes[route.number] = route

    def choose(self, number: int, names: Sequence[str]) -> tuple[str, Promise] | None:
        """The replica for a request, among some. One that was chosen before is kept, while it is among them. None: the
        request has ended."""
        with self._lock:
            route = self._routes.get(number)
            if route is None:
                return None
            among = [self.members[name].number for name in names if name in self.members]
            before = self._reservations.get(number)
            if before is not None and before.replica in among and not before.has_ended:
                chosen = before
            else:
                if before is not None:
                    self._router.ended(before)
                everyone = len(among) == len(self.members)
                allowed = None if everyone else among
                chosen = self._router.choose(route.names, route.num_tokens, time.monotonic(), route.session, allowed)
                self._reservations[number] = chosen
            stored = self._router.index.deepest_stored(route.names)
            if stored is not None and stored.num_tokens <= chosen.promised:
                stored = None
            return self._by_number[chosen.replica].name, Promise(number, chosen.promised, stored)

    def sent_again(self, number: int) -> None:
        """The replica of a request failed: it is about to be sent to another one."""
        with self._lock:
            before = self._reservations.pop(number, None)
            if before is not None:
                self._router.ended(before)

    def computed(self, number: int, num_hit: int) -> None:
        """The prompt of a request is computed, and `num_hit` of its tokens were not."""
        with self._lock:
            reservation = self._reservations.get(number)
            if reservation is None or not reservation.is_waiting:
                return
            self._router.computed(reservation)
            member = self._by_number.get(reservation.replica)
            if member is None:
                return
            member.sent += 1
            member.asked_tokens += reservation.num_tokens
            member.hit_tokens += num_hit
            member.misjudged_tokens += abs(reservation.expected - num_hit)
            member.promised_tokens += reservation.promised
            missing = max(0, reservation.promised - num_hit)
            member.broken_tokens += missing
            if not missing:
                member.num_broken = 0 if reservation.promised else member.num_broken
                return
            member.num_broken += 1
            if member.num_broken < BROKEN:
                return
            self._router.index.forget(member.number)
            member.num_broken, member.num_reads = 0, member.num_reads + 1
            if member.num_reads >= BROKEN:
                member.is_believed = False
                log.warning("replica %s does not have what it says; its events count no more", member.name)
        if member.is_believed and member.follower is not None:
            member.follower.start_anew()

    def end(self, number: int, num_answer: int) -> None:
        """A request has ended, in whatever way. Another call does nothing."""
        with self._lock:
            self._routes.pop(number, None)
            reservation = self._reservations.pop(number, None)
            if reservation is not None:
                self._router.ended(reservation, num_answer)


STATES: dict[str, FleetState] = {}
"""The state of the front in this process, by the name of its fleet."""
