"""Ray Serve's router of requests to replicas, which chooses as `hybrid.fleet.router` does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from ray.serve.request_router import RequestRouter

from hybrid.events.sockets import Follower
from hybrid.fleet import state as shared  # as a module: Ray may send this class by its contents


class FleetRouter(RequestRouter):
    """Chooses replicas for the front of its process. In other processes, which have none, and for calls that are no
    requests of a front, all replicas are alike."""

    queue_len_response_deadline_s = 2.0  # one that is busy for a moment is not to lose its sessions

    def initialize_state(self, fleet: str, events_key: str | None) -> None:
        """Take the arguments of the deployment's `request_router_kwargs`."""
        self._fleet = fleet
        self._events_key = events_key
        self._closing: set[asyncio.Task[None]] = set()

    def update_replicas(self, replicas: list[Any]) -> None:
        """Follow the events of replicas that have come, and forget those that have gone."""
        super().update_replicas(replicas)
        self._follow(replicas)

    def _state_of(self, replicas: Sequence[Any]) -> shared.FleetState | None:
        """What is known of the replicas; None: nothing is, here."""
        return shared.STATES.get(self._fleet)

    def _follow(self, replicas: Sequence[Any]) -> None:
        state = self._state_of(replicas)
        if state is None:
            return
        there = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in [name for name in state.members if name not in there]:
            follower = state.remove(name).follower
            if follower is not None:
                task = asyncio.get_running_loop().create_task(follower.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        for name, replica in there.items():
            member = state.members.get(name) or state.add(name)
            address = replica.replica_metadata.get("events")
            if member.follower is None and address:
                member.follower = Follower(address, self._events_key, partial(state.apply, member))
            if replica.routing_stats:
                member.stats = replica.routing_stats

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any | None = None
    ) -> list[list[Any]]:
        """One rank with one replica, which is binding; all of them for what is no request of a front."""
        state = self._state_of(candidate_replicas)
        given = pending_request.kwargs.get("promise") if pending_request is not None else None
        if state is None or pending_request is None or not isinstance(given, shared.Promise):
            return [candidate_replicas]
        chosen = self._choose(state, given.number, candidate_replicas)
        if chosen is None:
            return [candidate_replicas]
        replica, pending_request.kwargs["promise"] = chosen
        return [[replica]]

    def _choose(
        self, state: shared.FleetState, number: int, candidates: list[Any]
    ) -> tuple[Any, shared.Promise] | None:
        """The replica for a request of the state, and what is promised; None: the request has ended."""
        self._follow([*self.curr_replicas.values()] or candidates)
        by_name = {replica.replica_id.unique_id: replica for replica in candidates}
        chosen = state.choose(number, [*by_name])
        return None if chosen is None else (by_name[chosen[0]], chosen[1])
