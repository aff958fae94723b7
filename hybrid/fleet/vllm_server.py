"""Ray Serve LLM's server with events for `hybrid.fleet.vllm_router`: `LLMConfig(server_cls=...)`."""

from __future__ import annotations

import os
from typing import Any

from ray.serve.llm.deployment import LLMServer

from hybrid.events.sockets import EVENTS_KEY
from hybrid.fleet.vllm_replica import VllmEvents


class VllmServer(LLMServer):
    """Ray Serve LLM's own server; its vLLM publishes what it has."""

    async def start(self) -> None:
        """Start the engine."""
        self._events = VllmEvents(os.environ.get(EVENTS_KEY))
        self._llm_config.update_engine_kwargs(kv_events_config=self._events.config)
        await super().start()

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Where its events are, for routers."""
        return self._events.metadata(self.engine._engine_client.vllm_config.cache_config.block_size)
