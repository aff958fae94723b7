"""One replica of a fleet: an engine in an actor of Ray, whose cache others follow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

import torch

from hybrid.cache.pins import Pin
from hybrid.engine.engine import Engine
from hybrid.engine.output import Accepted, RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import HybridError
from hybrid.events.feed import FeedSnapshot
from hybrid.events.sockets import Publisher, new_address
from hybrid.fleet.exchange import Exchange
from hybrid.fleet.settings import FleetSettings
from hybrid.fleet.state import HOLD_SECONDS, Promise
from hybrid.prompts.encode import Prompt
from hybrid.serve.async_engine import AsyncEngine
from hybrid.tiers.remote import open_store


class Replica:
    """A replica.

    Args:
        settings: of the fleet.
    """

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self._engine: AsyncEngine | None = None
        self._publisher: Publisher | None = None
        self._exchange: Exchange | None = None

    async def _begin(self) -> AsyncEngine:
        settings = self._settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        engine = await asyncio.to_thread(
            AsyncEngine.from_pretrained,
            settings.model,
            cache=settings.cache,
            config=settings.engine,
            when_full="refuse",
            **settings.model_arguments,
        )
        for name, path in settings.adapters.items():
            await engine.call(partial(_load, name, path))
        feed = await engine.call(lambda own: own.cache.subscribe())
        exchange: Exchange | None = None
        if settings.store is not None:
            store = await asyncio.to_thread(open_store, settings.store, f"hybrid:{settings.name}:")
            exchange = self._exchange = Exchange(engine, store, feed, settings.cache.page_size)

        async def snapshot() -> FeedSnapshot:
            taken = await engine.call(lambda own: feed.snapshot())
            return taken if exchange is None else taken._replace(changes=taken.changes + exchange.births())

        if settings.events is not None:
            self._publisher = Publisher(feed, snapshot, new_address(settings.events))
        else:
            import ray

            address = f"tcp://{ray.util.get_node_ip_address()}:*"
            self._publisher = Publisher(feed, snapshot, address, settings.events_key)
        self._engine = engine
        return engine

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Where its events are, for routers."""
        if self._engine is None:
            await self._begin()
        assert self._publisher is not None
        return {"events": self._publisher.address}

    def record_routing_stats(self) -> dict[str, Any]:
        """The counts of its engine and of its cache, for the front's metrics."""
        if self._engine is None:
            return {}
        engine = asdict(self._engine.stats())
        return {"engine": engine | {"speculation": {}}, "cache": asdict(self._engine.engine.cache.stats())}

    async def check_health(self) -> None:
        """Raise when it is to be replaced."""
        if self._engine is not None and self._engine.has_ended:
            raise RuntimeError("the engine has ended")

    async def stream(
        self, promise: Promise, prompt: Prompt, params: SamplingParams, namespace: str
    ) -> AsyncIterator[Accepted | RequestOutput | HybridError]:
        """Run a request: that it was accepted, and then its outputs, without the prompt's tokens; or why not.

        Args:
            promise: what the router counted on.
            prompt, params, namespace: as for `AsyncEngine.submit`.
        """
        engine = self._engine or await self._begin()
        exchange, ids = self._exchange, _ids_of(prompt)
        stored = promise.stored
        if exchange is not None and ids is not None and stored is not None:
            stored = await exchange.fetch(ids, params.adapter, namespace, stored)
        hold: asyncio.Task[Pin | None] | None = None
        if promise.num_tokens and isinstance(prompt, list):  # until it has its memory, others may want it
            hold = asyncio.create_task(engine.call(partial(_hold, prompt, params, namespace)))
        start = time.monotonic()
        try:
            stream = await engine.submit(prompt, params, namespace=namespace)
        except HybridError as error:
            await _release(engine, hold)
            yield error
            return
        try:
            assert stream.accepted is not None
            yield stream.accepted
            async for output in stream:
                if exchange is not None and start:
                    exchange.note(output.usage.prompt_tokens - output.usage.cached_tokens, time.monotonic() - start)
                    start = 0.0
                yield replace(output, prompt_token_ids=[])
                if hold is not None:
                    await _release(engine, hold)
                    hold = None
        finally:
            stream.abort()
            await _release(engine, hold)
            if exchange is not None and ids is not None:
                exchange.keep(ids, params.adapter, namespace, stored)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Run a function with the engine."""
        engine = self._engine or await self._begin()
        return await engine.call(function)

    async def __del__(self) -> None:
        """End: what is worth it is written to disk."""
        if self._exchange is not None:
            await self._exchange.close()
        if self._publisher is not None:
            await self._publisher.close()
        if self._engine is not None:
            await self._engine.close()


def _ids_of(prompt: Prompt) -> list[int] | None:
    """The token ids of a prompt; None: it has more than these."""
    is_ids = isinstance(prompt, list) and all(isinstance(one, int) for one in prompt[:1])
    return cast(list[int], prompt) if is_ids else None


def _load(name: str, path: str, engine: Engine) -> None:
    engine.adapters.load(name, path)


def _hold(prompt: Prompt, params: SamplingParams, namespace: str, engine: Engine) -> Pin | None:
    """Keep what is cached of a prompt; None: nothing is, or half of the memory is kept already."""
    try:
        return engine.pin(prompt, HOLD_SECONDS, namespace=namespace, adapter=params.adapter)
    except HybridError:
        return None


async def _release(engine: AsyncEngine, hold: asyncio.Task[Pin | None] | None) -> None:
    if hold is None:
        return
    with suppress(HybridError):  # the engine was closed
        pin = await hold
        if pin is not None:
            await engine.call(lambda own: own.unpin(pin))
