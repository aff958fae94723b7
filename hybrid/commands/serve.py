"""`hybrid serve`: the engine behind HTTP, for clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hybrid.commands.commands import API_KEY, Outcome
from hybrid.commands.engine import adapters_of, cache_of, model_arguments
from hybrid.engine.config import EngineConfig
from hybrid.engine.engine import Engine
from hybrid.errors import ArgumentError
from hybrid.serve.async_engine import AsyncEngine

if TYPE_CHECKING:
    from hybrid.server.connections import ConnectionLimits
    from hybrid.server.service import ServerLimits
    from hybrid.server.tenants import Caller


def callers_of(args: argparse.Namespace, command: str) -> dict[str, Caller]:
    """The callers of a server by their keys, as the arguments of a command say; empty: no key is needed.

    Raises:
        ArgumentError: they contradict each other, or others can reach the address and no key is there.
    """
    from hybrid.server.tenants import EVERYONE, LOOPBACK, read_keys

    key = args.api_key or os.environ.get(API_KEY)
    if key and args.keys:
        raise ArgumentError(f"{command}: --keys has a key for each tenant; leave --api-key out")
    keys = read_keys(args.keys) if args.keys else {key: EVERYONE} if key else {}
    if not keys and args.host not in LOOPBACK:
        raise ArgumentError(
            f"{command}: --host {args.host} is reached by other machines, which needs --api-key, {API_KEY} or --keys"
        )
    return keys


def limits_of(args: argparse.Namespace) -> ServerLimits:
    """The limits of a server, as the arguments of a command say.

    Raises:
        ArgumentError: one is none.
    """
    from hybrid.server.service import ServerLimits

    limits = ServerLimits(
        body=args.max_body, body_seconds=args.body_timeout, seconds=args.timeout, tokens=args.max_tokens
    )
    limits.body_bytes  # noqa: B018 - raises before a model is loaded
    return limits


def connection_limits_of(args: argparse.Namespace) -> ConnectionLimits:
    """The limits of a server's connections, as the arguments of a command say.

    Raises:
        ArgumentError: one is none.
    """
    from hybrid.server.connections import ConnectionLimits

    limits = ConnectionLimits(
        head=args.max_head,
        headers=args.max_headers,
        head_seconds=args.head_timeout,
        idle_seconds=args.idle_timeout,
        send_seconds=args.send_timeout,
        connections=args.max_connections,
        per_address=args.max_connections_per_address,
    )
    limits.head_bytes  # noqa: B018 - raises before a model is loaded
    return limits


def name_of(args: argparse.Namespace) -> str:
    """The name of the model in requests and responses."""
    name: str = args.name or (Path(args.model).name if Path(args.model).is_dir() else args.model)
    return name


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Serve until a signal ends it."""
    try:
        from hybrid.server.adapter_folder import AdapterFolder
        from hybrid.server.service import Server
        from hybrid.server.serving import serve
        from hybrid.server.tenants import LOOPBACK, Tenants
    except ImportError as error:
        raise ArgumentError(f"hybrid serve needs the extra 'server': pip install '.[server]' ({error})") from None

    keys, limits, name = callers_of(args, "serve"), limits_of(args), name_of(args)
    connections = connection_limits_of(args)
    adapters, folder = adapters_of(args, name), AdapterFolder(args.adapter_dir) if args.adapter_dir else None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    num_running = min(args.max_num_seqs, args.max_requests - 1)
    engine = Engine.from_pretrained(
        args.model,
        cache=cache_of(args),
        config=EngineConfig(
            max_num_seqs=num_running,
            max_waiting=args.max_requests - num_running,
            max_model_len=args.max_model_len,
            tenants={caller.name: caller.config for caller in keys.values()},
        ),
        **model_arguments(args),
    )
    for adapter, path in adapters.items():
        engine.adapters.load(adapter, path)

    def started(address: str) -> None:
        text = f"hybrid serves {name} at {address}  (the page: {address}/, OpenAI's base URL: {address}/v1)"
        console.print(text, soft_wrap=True)

    async def main() -> bool:
        async with AsyncEngine(engine, when_full="refuse") as served:
            tenants = Tenants(keys, () if keys else LOOPBACK)
            server = Server(served, name, tenants, limits, folder)
            return await serve(server, args.host, args.port, connections, drain_seconds=args.drain, on_start=started)

    try:
        from uvloop import run as run_loop
    except ImportError:  # it is not for every system
        run_loop = asyncio.run
    return Outcome(run_loop(main()), {"model": name})
