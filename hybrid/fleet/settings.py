"""The settings of a fleet, as its processes get them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hybrid.cache.config import CacheConfig
from hybrid.engine.config import EngineConfig
from hybrid.fleet.score import Weights
from hybrid.server.service import ServerLimits
from hybrid.server.tenants import Caller


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """The settings of a fleet.

    Attributes:
        model: folder, hub id, or "tiny".
        name: of the model, in responses.
        device, dtype, load_dtype, speculation: as for `Engine.from_pretrained`.
        cache, engine: of each replica.
        adapters: folders of LoRA adapters by their names, of each replica.
        threads: of torch, in each replica; None: as many as it chooses.
        keys: tenants by their keys; empty: every caller of this machine.
        hosts: see `hybrid.server.tenants.Tenants`.
        limits: of requests.
        weights: of the score.
        events: the directory of the sockets of events, where all processes are of this machine; None: they are ports.
        events_key: that the processes share, for ports.
        store: the URL of what replicas of all machines share (`hybrid.tiers.remote.open_store`); None: nothing is.
    """

    model: str
    name: str
    device: str | None = None
    dtype: str | None = None
    load_dtype: str | None = None
    speculation: str | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    adapters: dict[str, str] = field(default_factory=dict)
    threads: int | None = None
    keys: dict[str, Caller] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    limits: ServerLimits = field(default_factory=ServerLimits)
    weights: Weights = field(default_factory=Weights)
    events: str | None = None
    events_key: str | None = None
    store: str | None = None

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Of `Engine.from_pretrained`."""
        return {name: getattr(self, name) for name in ("device", "dtype", "load_dtype", "speculation")}
