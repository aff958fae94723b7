"""Replicas that run vLLM, for `hybrid.fleet.vllm_router`: what they have is published."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from itertools import count
from typing import Any

import ray

from hybrid.events.feed import FeedSnapshot
from hybrid.events.sockets import Publisher, new_address
from hybrid.events.vllm_feed import VllmFeed
from hybrid.fleet.state import HOLD_SECONDS, Promise


class VllmEvents:
    """The way of a vLLM's KV events to the routers: vLLM sends them through a socket of this user alone, in its own
    format and with token ids; from here routers get digests, encrypted where there is a key.

    Args:
        key: that the routers have, too, where they are on other machines; None: all are on this one.

    Attributes:
        config: what vLLM needs as its `kv_events_config`.
    """

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._folder = tempfile.mkdtemp(prefix="hybrid-vllm-")
        self._source, self._replay = f"ipc://{self._folder}/events", f"ipc://{self._folder}/replay"
        self._feed: VllmFeed | None = None
        self._publisher: Publisher | None = None
        self.config: dict[str, Any] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._source,
            "replay_endpoint": self._replay,
        }

    def metadata(self, page_size: int) -> dict[str, Any]:
        """Begin, where that was not done, and tell routers where the events are.

        Args:
            page_size: tokens per block of vLLM.
        """
        if self._publisher is None:
            feed = self._feed = VllmFeed(self._source, self._replay)

            async def snapshot() -> FeedSnapshot:
                return feed.feed.snapshot()

            key = self._key
            address = new_address(self._folder) if key is None else f"tcp://{ray.util.get_node_ip_address()}:*"
            self._publisher = Publisher(feed.feed, snapshot, address, key)
        return {"events": self._publisher.address, "page_size": page_size}

    async def close(self) -> None:
        """End."""
        if self._publisher is not None:
            await self._publisher.close()
        if self._feed is not None:
            await self._feed.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class VllmReplica:
    """A replica for plain Ray Serve, which takes token ids.

    Args:
        engine_args: of vLLM's `AsyncEngineArgs`.
        events_key: see `VllmEvents`.
    """

    def __init__(self, engine_args: Mapping[str, Any], events_key: str | None = None) -> None:
        self._engine_args = dict(engine_args)
        self._events = VllmEvents(events_key)
        self._lock = asyncio.Lock()
        self._engine: Any = None
        self._count = count(1)

    async def _begin(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        async with self._lock:
            if self._engine is None:
                args = AsyncEngineArgs(**self._engine_args, kv_events_config=self._events.config)
                self._engine = AsyncLLM.from_engine_args(args)
        return self._engine

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Where its events are, for routers."""
        engine = await self._begin()
        return self._events.metadata(engine.vllm_config.cache_config.block_size)

    async def check_health(self) -> None:
        """Raise when it is to be replaced."""
        if self._engine is not None:
            await self._engine.check_health()

    async def generate(
        self, prompt_token_ids: list[int], params: Mapping[str, Any], promise: Promise | None = None, **more: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Run a request.

        Args:
            prompt_token_ids: of its prompt.
            params: of vLLM's `SamplingParams`.
            promise: what the router counts on, where the caller gave one to be filled in; it comes back as
                `promised_tokens`.
            more: `cache_salt`; `session`, which only the router reads.

        Yields:
            The tokens and the text that have come until then, the tokens that were not computed, and why it ended.
        """
        from vllm import SamplingParams

        engine, prompt = await self._begin(), {"prompt_token_ids": prompt_token_ids}
        if more.get("cache_salt"):
            prompt["cache_salt"] = more["cache_salt"]
        own = {"hybrid_hold": HOLD_SECONDS, **(params.get("extra_args") or {})}  # for our scheduler; vLLM's has no pins
        sampling = SamplingParams(**{**params, "extra_args": own})
        async for output in engine.generate(prompt, sampling, f"request-{next(self._count)}"):
            answer = output.outputs[0]
            yield {
                "token_ids": [*answer.token_ids],
                "text": answer.text,
                "cached_tokens": output.num_cached_tokens,
                "promised_tokens": promise.num_tokens if promise is not None else None,
                "finish_reason": answer.finish_reason,
            }

    async def __del__(self) -> None:
        await self._events.close()
        if self._engine is not None:
            self._engine.shutdown()
