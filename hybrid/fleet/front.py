"""The front of a fleet: the application of `hybrid serve`, whose engine sends each request to a replica."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count
from typing import Any

import orjson
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from starlette.routing import Route as Path

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.stats import CacheStats
from hybrid.engine.adapters import Adapters
from hybrid.engine.build import LoadedModel, generation_defaults
from hybrid.engine.config import EngineConfig
from hybrid.engine.engine import Engine
from hybrid.engine.output import Accepted, Outputs, RequestOutput
from hybrid.engine.request import Request
from hybrid.engine.request_builder import RequestBuilder, params_of_each
from hybrid.engine.sampling_params import SamplingParams
from hybrid.engine.stats import EngineStats, Histogram
from hybrid.errors import RequestError
from hybrid.fleet.settings import FleetSettings
from hybrid.fleet.state import STATES, FleetState, Promise, Route
from hybrid.key import TOKEN_BYTES, joined_names, names_of
from hybrid.memory.memory import CacheMemory
from hybrid.models.engine_model import EngineModel
from hybrid.models.loading import open_checkpoint
from hybrid.models.vision import vision_tower
from hybrid.prompts.answer_parser import tools_of
from hybrid.prompts.encode import Prompt, as_prompts, load_tokenizer
from hybrid.serve.inbox import OutputCallback
from hybrid.server.app import Endpoint, make_app
from hybrid.server.call import Call, Receive, Scope, Send
from hybrid.server.errors import HttpError
from hybrid.server.service import Server
from hybrid.server.tenants import Tenants

SESSION: ContextVar[str | None] = ContextVar("session", default=None)
"""The id of the session that a call names: the header `x-session-id`, or else `prompt_cache_key` of its body."""

MAX_TRIES = 3
"""Replicas that a request is sent to, one after the other, while nothing of its answer was sent to the client."""

GONE = (ActorDiedError, ActorUnavailableError, RayActorError)
"""Exceptions of replicas that have ended."""


@dataclass(frozen=True)
class _Caches:
    """The caches of the replicas, as the server sees them."""

    stats: Callable[[], CacheStats]
    config: CacheConfig


class Encoder:
    """What a front needs of an engine: it makes requests of prompts, and has no weights.

    Args:
        settings: of the fleet.

    Attributes:
        config: as that of each replica.
        tokenizer, default_params, model, loaded: of the checkpoint; of the model there is the configuration alone.
        adapters: their names and digests alone.
        cache: counts of the replicas' caches.
    """

    cache: _Caches

    def __init__(self, settings: FleetSettings) -> None:
        checkpoint = open_checkpoint(settings.model)
        self.config: EngineConfig = settings.engine
        self.tokenizer: Any = load_tokenizer(checkpoint.path)
        end_tokens, default_params = generation_defaults(checkpoint.path, checkpoint.config, self.tokenizer)
        self.default_params: SamplingParams = default_params
        self.model: Any = EngineModel(checkpoint.config)
        device = torch.device("cpu")
        self.loaded = LoadedModel(
            model=self.model,
            device=device,
            tokenizer=self.tokenizer,
            image_encoder=vision_tower(checkpoint, torch.float32, device),
            end_tokens=end_tokens,
            default_params=self.default_params,
            name=settings.model,
        )
        longest = self.config.max_model_len or checkpoint.config.max_position_embeddings
        page_size, chunk_size = settings.cache.page_size, settings.cache.chunk_size
        memory = CacheMemory.of_indices(longest // page_size + 2, 2)  # what a replica has, it knows itself
        self._sizes = HybridCache(memory, CacheConfig(page_size=page_size, chunk_size=chunk_size))
        self.adapters = Adapters(self.model, None, list, lambda: None)
        for name, path in settings.adapters.items():
            self.adapters.declare(name, path)
        self._builder = RequestBuilder(
            self.loaded, self._sizes, self.adapters, self.config.max_model_len, self.config.prompt_templates
        )

    def prepare(self, prompt: Prompt, params: SamplingParams | None, namespace: str, request_id: str) -> Request:
        """As `Engine.prepare`; whether a replica has the memory for it, the replica says."""
        return self._builder.request(request_id, prompt, params, namespace, Outputs())


COUNTS = tuple(own.name for own in fields(EngineStats) if own.type in ("int", "float"))
"""The counts of an engine that add up."""

EMPTY = Histogram((1.0,), (0, 0), 0.0)


def _sum(histograms: list[Histogram]) -> Histogram:
    """All durations of several histograms with the same bounds."""
    if not histograms:
        return EMPTY
    counts = tuple(map(sum, zip(*(own.counts for own in histograms), strict=True)))
    return Histogram(tuple(histograms[0].bounds), counts, sum(own.total for own in histograms))


class FleetStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, from the replica that runs it: an `OutputStream` for the server.

    While nothing of the answer has come, a replica that ends has the request sent to another one.

    Attributes:
        accepted: what the replica said when it took the request.
    """

    def __init__(
        self, fleet: FleetEngine, route: Route, ids: list[int], prompt: Prompt, params: SamplingParams, namespace: str
    ) -> None:
        self._fleet = fleet
        self._route = route
        self._prompt_ids = ids
        self._namespace = namespace
        self._prompt = prompt
        self._params = params
        self._responses: Any = None
        self._latest: RequestOutput | None = None
        self._has_ended = False
        self.accepted: Accepted | None = None

    async def submit(self) -> None:
        """Send it, and wait until a replica has taken it.

        Raises:
            HybridError: it cannot be run, or there is no room.
            RequestError: all replicas that it was sent to have ended.
        """
        self._fleet.state.begin(self._route)
        for _ in range(MAX_TRIES):
            promise = Promise(self._route.number, 0)
            try:
                self._responses = self._fleet.streaming.remote(
                    promise=promise, prompt=self._prompt, params=self._params, namespace=self._namespace
                )
                first = await anext(self._responses)
            except GONE:
                self._fleet.state.sent_again(self._route.number)
                continue
            if isinstance(first, Exception):
                raise first
            self.accepted = first
            return
        raise _gone()

    def __aiter__(self) -> FleetStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            RequestError: its replica has ended, and a part of the answer was given already.
        """
        while True:
            if self._has_ended:
                raise StopAsyncIteration
            try:
                output = await anext(self._responses)
            except StopAsyncIteration:
                self._end()
                raise
            except GONE:
                if self._latest is not None:
                    self._end()
                    raise _gone() from None
                self._fleet.state.sent_again(self._route.number)
                await self.submit()
                continue
            except asyncio.CancelledError:
                self.abort()
                raise
            if self._latest is None:
                self._fleet.state.computed(self._route.number, output.usage.cached_tokens)
            self._latest = replace(output, prompt_token_ids=self._prompt_ids)
            if output.finish_reason is not None:
                self._end()
            return self._latest

    async def pass_on(self, function: OutputCallback) -> RequestOutput | None:
        """Wait for the last output, and have a function take all others, as `OutputStream.pass_on` does."""
        async for output in self:
            if output.finish_reason is not None:
                return output
            if (waiting := function(output)) is not None:
                await waiting
        return None

    def abort(self) -> None:
        """End the request, if it has not ended."""
        if not self._has_ended:
            if self._responses is not None:
                self._responses.cancel()
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        num_answer = self._latest.usage.completion_tokens if self._latest is not None else 0
        self._fleet.state.end(self._route.number, num_answer)


def _gone() -> RequestError:
    return RequestError("the replica that ran this request has ended; send it again")


class FleetEngine:
    """The replicas of a fleet, as the server sees them: an `AsyncEngine` whose requests run elsewhere.

    Args:
        handle: of Ray Serve, to the deployment of the replicas.
        settings: of the fleet.

    Attributes:
        streaming: the handle of their method `stream`.
        engine: makes requests of prompts.
        state: what the replicas have, and what was promised.
    """

    def __init__(self, handle: Any, settings: FleetSettings) -> None:
        self.handle = handle
        self.engine = Encoder(settings)
        self.engine.cache = _Caches(self.cache_stats, settings.cache)
        self.state = FleetState(settings.cache.page_size, settings.weights)
        STATES[settings.name] = self.state
        # Ray makes the router of a handle with its first options: it is to know the replicas before the first request
        self.streaming: Any = handle.options(stream=True, method_name="stream")
        self._page_bytes = settings.cache.page_size * TOKEN_BYTES
        self._numbers = count(1)
        self.is_running: bool = True
        self.has_ended: bool = False

    async def submit_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: str = "",
    ) -> list[FleetStream]:
        """As `AsyncEngine.submit_all`.

        Raises:
            HybridError: one of them cannot be run. None is then.
        """
        many = as_prompts(prompts)
        each = params_of_each(params, len(many))
        session = SESSION.get()
        streams = [await self._stream(*one, namespace, session) for one in zip(many, each, strict=True)]
        try:
            await asyncio.gather(*(stream.submit() for stream in streams))
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return streams

    async def _stream(
        self, prompt: Prompt, params: SamplingParams | None, namespace: str, session: str | None
    ) -> FleetStream:
        number = next(self._numbers)
        own = params or self.engine.default_params
        request = await asyncio.to_thread(self.engine.prepare, prompt, own, namespace, f"front-{number}")
        key = request.key()
        names = await asyncio.to_thread(
            names_of, key.ids[: (len(key) - 1) * TOKEN_BYTES], key.namespace, self._page_bytes
        )
        if session is not None:
            session = joined_names(namespace, session)
        ids, sent = [*request.ids[: request.prompt_len]], prompt
        if request.media is None and not request.breakpoints:  # then the ids say all, but for the tools
            sent = ids
            if not own.tools and (tools := tools_of(prompt)):
                own = replace(own, tools=tuple(tools))
        return FleetStream(self, Route(number, names, len(key), session), ids, sent, own, namespace)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Run a function with the engine of one of the replicas."""
        return await self.handle.call.remote(function)

    def stats(self) -> EngineStats:
        """What the engines of the replicas counted, together; they say it once a second."""
        found = Counter[str]()
        finished = Counter[str]()
        histograms: dict[str, list[Histogram]] = {"time_to_first_token": [], "time_between_tokens": []}
        for each in self._found:
            engine = each["engine"]
            finished.update(engine["finished"])
            found.update({name: value for name, value in engine.items() if isinstance(value, int | float)})
            for name, own in histograms.items():
                own.append(Histogram(**engine[name]))
        counts: dict[str, Any] = {name: found[name] for name in COUNTS}
        added: dict[str, Any] = {name: _sum(own) for name, own in histograms.items()}
        return EngineStats(finished=dict(finished), speculation={}, **counts, **added)

    def cache_stats(self) -> CacheStats:
        """What their caches counted, together; pages and checkpoints of all have one size."""
        found = CacheStats()
        for each in self._found:
            for name, value in each["cache"].items():
                if name in ("page_bytes", "checkpoint_bytes"):
                    setattr(found, name, value)
                elif isinstance(value, int):
                    setattr(found, name, getattr(found, name) + value)
        return found

    @property
    def _found(self) -> list[dict[str, Any]]:
        return [found for member in [*self.state.members.values()] if (found := member.stats)]


App = Callable[[Scope, Receive, Send], Awaitable[None]]


def with_sessions(app: App) -> App:
    """An application whose calls know the session that they name (`SESSION`)."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        named = dict(scope["headers"]).get(b"x-session-id")
        SESSION.set(_short(named.decode("latin-1")) if named else None)
        parts: list[bytes] = []

        async def read() -> Any:
            message = await receive()
            if not named and message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    SESSION.set(_key_of(b"".join(parts)))
                    parts.clear()
            return message

        return await app(scope, read, send)

    return answer


def _key_of(body: bytes) -> str | None:
    """The `prompt_cache_key` of a body; None: it has none."""
    if b'"prompt_cache_key"' not in body:
        return None
    try:
        key = orjson.loads(body).get("prompt_cache_key")
    except (ValueError, AttributeError):
        return None  # the server says what is wrong with it
    return _short(key) if isinstance(key, str) and key else None


def _short(session: str) -> str:
    """An id, or its digest where it is long."""
    return session if len(session) <= 64 else hashlib.blake2b(session.encode(), digest_size=16).hexdigest()


async def fleet(engine: FleetEngine, server: Server, call: Call) -> None:
    """Answer `GET /fleet`: the replicas, and what was promised of each and not kept."""
    if not call.tenant.sees_all:
        raise HttpError(403, "the replicas are shown to those who see all tenants")
    await call.respond({"replicas": [member.as_json() for member in [*engine.state.members.values()]]})


class Front:
    """The deployment in front of the replicas.

    Args:
        replicas: the handle of their deployment.
        settings: of the fleet.
    """

    def __init__(self, replicas: Any, settings: FleetSettings) -> None:
        self._engine = FleetEngine(replicas, settings)
        tenants = Tenants(settings.keys, settings.hosts)
        self._server = Server(self._engine, settings.name, tenants, settings.limits)  # type: ignore[arg-type]

    def __serve_build_asgi_app__(self) -> App:
        """The application of `hybrid serve`, with a path of the fleet's own."""
        app = make_app(self._server)
        answers = Endpoint(self._server, partial(fleet, self._engine), methods=("GET", "HEAD"))
        app.routes.append(Path("/fleet", answers))
        return with_sessions(app)
