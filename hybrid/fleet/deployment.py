"""A fleet on Ray Serve: starting it, and ending it."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybrid.errors import ArgumentError
from hybrid.fleet.settings import FleetSettings

try:
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig
except ImportError as error:
    raise ArgumentError(f"hybrid fleet needs the extra 'ray': pip install '.[ray]' ({error})") from None

from hybrid.fleet.front import Front
from hybrid.fleet.ray_router import FleetRouter
from hybrid.fleet.replica import Replica

log: logging.Logger = logging.getLogger(__name__)

REPLICAS, FRONT = "Replica", "Front"
"""Names of the deployments."""

ENDING_SECONDS = 15.0
"""That Ray takes to end a fleet after its requests."""


def connect(address: str | None, num_cpus: int | None = None) -> None:
    """Start Ray on this machine, or join a cluster.

    Args:
        address: of the cluster, "auto" for the one of this machine; None: Ray is started here.
        num_cpus: that Ray counts on where it is started here; None: what there is.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common = {"log_to_driver": False, "logging_level": logging.WARNING, "namespace": "hybrid"}
    if address is None:
        ray.init(include_dashboard=False, num_cpus=num_cpus, object_store_memory=256 << 20, **common)
    else:
        ray.init(address=address, **common)


def application(settings: FleetSettings, num_replicas: int, *, num_cpus: float, drain_seconds: float) -> Any:
    """The application of a fleet.

    Args:
        settings: of the fleet.
        num_replicas: of the model.
        num_cpus: that each of them takes of what Ray counts.
        drain_seconds: that a replica has for the requests under way when it is to end.
    """
    limit = settings.engine.max_num_seqs + (settings.engine.max_waiting or 1 << 16) + 8
    router = RequestRouterConfig(
        request_router_class=FleetRouter,
        request_router_kwargs={"fleet": settings.name, "events_key": settings.events_key},
        request_routing_stats_period_s=1.0,
    )
    common = {"graceful_shutdown_timeout_s": drain_seconds, "graceful_shutdown_wait_loop_s": 0.5}
    replicas = serve.deployment(
        Replica,
        name=REPLICAS,
        num_replicas=num_replicas,
        max_ongoing_requests=limit,
        ray_actor_options={"num_cpus": num_cpus},
        request_router_config=router,
        health_check_period_s=2.0,
        **common,
    )
    front = serve.deployment(
        serve.ingress()(Front),
        name=FRONT,
        num_replicas=1,
        max_ongoing_requests=1 << 16,
        ray_actor_options={"num_cpus": 0},
        **common,
    )
    return front.bind(replicas.bind(settings), settings)


def start(
    settings: FleetSettings,
    num_replicas: int,
    host: str,
    port: int,
    *,
    num_cpus: float = 1.0,
    drain_seconds: float = 60.0,
) -> FleetSettings:
    """Start a fleet, and wait until it takes requests. Ray must be connected. Returns its settings, with where its
    events are."""
    if settings.events_key is None and settings.events is None:
        folder = tempfile.mkdtemp(prefix="hybrid-fleet-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        settings = replace(settings, events=folder)
    serve.start(http_options={"host": host, "port": port})
    app = application(settings, num_replicas, num_cpus=num_cpus, drain_seconds=drain_seconds)
    serve.run(app, name=settings.name, route_prefix="/")
    return settings


def stop(name: str, drain_seconds: float = 60.0) -> None:
    """End a fleet, and Ray where it was started here; what else runs on a cluster that was joined stays.

    Args:
        name: of the fleet.
        drain_seconds: that its replicas have for the requests under way.
    """
    if name in serve.status().applications:
        serve.delete(name, _blocking=False)  # which would wait for 60 seconds, and `serve.shutdown` for 30
        end = time.monotonic() + drain_seconds + ENDING_SECONDS
        while name in serve.status().applications and time.monotonic() < end:
            time.sleep(0.1)
    ray.shutdown()


async def wait_for_signal(on_start: Callable[[], None]) -> None:
    """Wait for SIGTERM or SIGINT."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    on_start()
    await ended.wait()
