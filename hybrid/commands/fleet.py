"""`hybrid fleet`: replicas of a model on Ray Serve, behind the APIs of `hybrid serve`."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import logging
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from hybrid.commands.commands import Outcome
from hybrid.commands.engine import adapters_of, cache_of, model_arguments
from hybrid.commands.serve import callers_of, limits_of, name_of
from hybrid.engine.config import EngineConfig
from hybrid.errors import ArgumentError
from hybrid.tiers.remote import open_store

MEMORY = Path("/dev/shm")
"""A file system in memory, which all processes of a machine see."""


def shared_directory() -> str:
    """Make a directory in memory, which goes when this process ends.

    Raises:
        ArgumentError: this machine has no file system in memory.
    """
    if not MEMORY.is_dir():
        raise ArgumentError(f"hybrid fleet: --shared-memory needs {MEMORY}, which is not here; use --disk")
    folder = tempfile.mkdtemp(prefix="hybrid-fleet-", dir=MEMORY)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Serve until a signal ends it."""
    try:
        from hybrid.events.sockets import EVENTS_KEY
        from hybrid.fleet.deployment import connect, start, stop, wait_for_signal
        from hybrid.fleet.settings import FleetSettings
        from hybrid.server.tenants import LOOPBACK
    except ImportError as error:
        raise ArgumentError(f"hybrid fleet needs the extra 'ray': pip install '.[ray]' ({error})") from None

    store = args.store
    if store is not None:
        store = store if "://" in store else str(Path(store).resolve())
        open_store(store)  # raises what is wrong with it before anything starts
    keys, limits, name = callers_of(args, "fleet"), limits_of(args), name_of(args)
    disk, directory = args.disk, args.directory
    if args.shared_memory is not None:
        if disk is not None or directory is not None:
            raise ArgumentError("hybrid fleet: --shared-memory stands in place of --disk and --directory; choose one")
        disk, directory = args.shared_memory, shared_directory()
    settings = FleetSettings(
        model=args.model,
        name=name,
        cache=cache_of(args, disk=disk, directory=directory),
        adapters=adapters_of(args, name),
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
        store=store,
        events_key=(os.environ.get(EVENTS_KEY) or secrets.token_urlsafe()) if args.address is not None else None,
        **model_arguments(args),
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    connect(args.address)
    try:
        start(settings, args.replicas, args.host, args.port, num_cpus=args.cpus, drain_seconds=args.drain)
        address = f"http://{args.host}:{args.port}"
        text = f"hybrid serves {name} on {args.replicas} replicas at {address}  (OpenAI's base URL: {address}/v1)"
        asyncio.run(wait_for_signal(lambda: console.print(text, soft_wrap=True)))
    finally:
        stop(settings.name, args.drain)
    return Outcome(True, {"model": name, "replicas": args.replicas})
