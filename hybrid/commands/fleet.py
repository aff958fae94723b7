"""`hybrid fleet`: replicas of a model on Ray Serve, behind the APIs of `hybrid serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets

from rich.console import Console

from hybrid.cache.config import CacheConfig
from hybrid.commands.commands import Outcome
from hybrid.commands.serve import callers_of, limits_of, name_of
from hybrid.engine.config import EngineConfig
from hybrid.errors import ArgumentError

EVENTS_KEY = "HYBRID_EVENTS_KEY"
"""The environment variable with the key of the sockets of events, where a cluster was joined."""


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Serve until a signal ends it."""
    try:
        from hybrid.fleet.deployment import connect, start, stop, wait_for_signal
        from hybrid.fleet.settings import FleetSettings
        from hybrid.server.tenants import LOOPBACK
    except ImportError as error:
        raise ArgumentError(f"hybrid fleet needs the extra 'ray': pip install '.[ray]' ({error})") from None

    keys, limits, name = callers_of(args, "fleet"), limits_of(args), name_of(args)
    settings = FleetSettings(
        model=args.model,
        name=name,
        device=args.device,
        dtype=args.dtype,
        speculation=args.speculation,
        cache=CacheConfig(memory=args.memory, host=args.host_memory, disk=args.disk, directory=args.directory),
        engine=EngineConfig(
            max_num_seqs=args.max_num_seqs,
            max_waiting=args.max_requests,
            max_model_len=args.max_model_len,
            tenants={caller.name: caller.config for caller in keys.values()},
        ),
        threads=args.threads,
        keys=keys,
        hosts=() if keys else LOOPBACK,
        limits=limits,
        events_key=(os.environ.get(EVENTS_KEY) or secrets.token_urlsafe()) if args.address is not None else None,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    connect(args.address)
    try:
        start(settings, args.replicas, args.host, args.port, num_cpus=args.cpus, drain_seconds=args.drain)
        address = f"http://{args.host}:{args.port}"
        text = f"hybrid serves {name} on {args.replicas} replicas at {address}  (OpenAI's base URL: {address}/v1)"
        asyncio.run(wait_for_signal(lambda: console.print(text)))
    finally:
        stop()
    return Outcome(True, {"model": name, "replicas": args.replicas})
