"""The router for replicas of vLLM, on plain Ray Serve and on Ray Serve LLM: by what each can resume."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

from hybrid.events.vllm import namespace_of
from hybrid.fleet import state as shared
from hybrid.fleet.ray_router import FleetRouter
from hybrid.fleet.score import Weights
from hybrid.key import TOKEN_BYTES, names_of

log: logging.Logger = logging.getLogger(__name__)


class VllmRouter(FleetRouter):
    """Chooses among replicas of vLLM whose class is a `hybrid.fleet.vllm_replica.Publishes`. It is where their handle
    is: each process that has one knows its own queues alone.

    A prompt is `prompt_token_ids` of a call's keywords, or `prompt` or `messages` of its first argument, which are
    encoded here. Calls with neither, and prompts that cannot be encoded, go anywhere.

    Attributes:
        state: what the replicas have, and what was promised; None: none of them has said how long its pages are.
        under_way: the numbers of calls by their ids in Ray.
    """

    def initialize_state(
        self, tokenizer: str | None = None, events_key: str | None = None, weights: Weights | None = None
    ) -> None:
        """Take the arguments of the deployment's `request_router_kwargs`.

        Args:
            tokenizer: folder or hub id of the model, for calls that bring text or messages.
            events_key: that the replicas have, too, where they are on several machines.
            weights: of the score.
        """
        super().initialize_state("", events_key)
        self._weights = weights or Weights()
        self._folder = tokenizer
        self._tokenizer: Any = None
        self.state: shared.FleetState | None = None
        self._page_size = 0
        self._count = count(1)
        self.under_way: dict[str, int] = {}

    def _state_of(self, replicas: Sequence[Any]) -> shared.FleetState | None:
        if self.state is None:
            sizes = [size for replica in replicas if (size := replica.replica_metadata.get("page_size"))]
            if sizes:
                self._page_size = sizes[0]
                self.state = shared.FleetState(self._page_size, self._weights, has_gaps=True)
        return self.state

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any | None = None
    ) -> list[list[Any]]:
        """One rank with one replica, which is binding; all of them for what has no prompt."""
        state = self._state_of(candidate_replicas)
        if state is None or pending_request is None:
            return [candidate_replicas]
        request_id = pending_request.metadata.internal_request_id
        if request_id not in self.under_way:  # one that was refused by its replica comes again
            ids = await self._ids_of(pending_request)
            if ids is None or len(ids) == 0:
                return [candidate_replicas]
            names = await asyncio.to_thread(
                names_of, ids[:-1].tobytes(), _namespace(pending_request), self._page_size * TOKEN_BYTES
            )
            number = self.under_way[request_id] = next(self._count)
            state.begin(shared.Route(number, names, len(ids), _session(pending_request)))
            pending_request.future.add_done_callback(partial(self._end_if_cancelled, request_id))
        chosen = self._choose(state, self.under_way[request_id], candidate_replicas)
        if chosen is None:
            return [candidate_replicas]
        replica, promise = chosen
        if "promise" in pending_request.kwargs:
            pending_request.kwargs["promise"] = promise
        return [[replica]]

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """A request has ended, in whatever way."""
        super().on_request_completed(replica_id, internal_request_id)
        self._end(internal_request_id)

    def _end_if_cancelled(self, request_id: str, chosen: asyncio.Future[Any]) -> None:
        if chosen.cancelled():  # it is sent to no replica
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        number = self.under_way.pop(request_id, None)
        if number is not None and self.state is not None:
            self.state.end(number, 0)

    async def _ids_of(self, request: Any) -> array[int] | None:
        """The token ids of a request's prompt; None: it has none that is known."""
        ids = request.kwargs.get("prompt_token_ids")
        given: Any = request.args[0] if request.args else None
        if ids is None and isinstance(getattr(given, "prompt", None), list):
            ids = given.prompt
        try:
            if ids is None and given is not None and self._folder is not None:
                ids = await asyncio.to_thread(self._encoded, given)
            return None if ids is None else array("i", ids)
        except Exception as error:  # a request that cannot be encoded here is for the replica to refuse
            log.debug("a prompt is not encoded: %r", error)
            return None

    def _encoded(self, given: Any) -> list[int] | None:
        """The ids of a request in the form of OpenAI's."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._folder)
        messages, prompt = getattr(given, "messages", None), getattr(given, "prompt", None)
        if messages is not None:
            tools = getattr(given, "tools", None)
            more = getattr(given, "chat_template_kwargs", None) or {}
            found = self._tokenizer.apply_chat_template(
                [_plain(message) for message in messages],
                tools=[_plain(tool) for tool in tools] if tools else None,
                add_generation_prompt=getattr(given, "add_generation_prompt", True),
                tokenize=True,
                return_dict=False,
                **more,
            )
            return [*found]
        return [*self._tokenizer.encode(prompt)] if isinstance(prompt, str) else None


def _plain(part: Any) -> Any:
    return part.model_dump(exclude_none=True) if hasattr(part, "model_dump") else part


def _namespace(request: Any) -> str:
    """As `VllmReader` has it: of the adapter, and the salt."""
    adapter = request.metadata.multiplexed_model_id
    salt = getattr(request.args[0], "cache_salt", None) if request.args else request.kwargs.get("cache_salt")
    return namespace_of(adapter or "", *((salt,) if salt else ()))


def _session(request: Any) -> str | None:
    """The session that a request names."""
    given = request.args[0] if request.args else None
    return getattr(given, "prompt_cache_key", None) or request.kwargs.get("session")
