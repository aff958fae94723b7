"""Running a server until it is ended by a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import uvicorn

from hybrid.errors import ArgumentError
from hybrid.server.app import make_app
from hybrid.server.connections import ConnectionLimits, Connections
from hybrid.server.service import Server

log: logging.Logger = logging.getLogger(__name__)

SWITCH_SECONDS = 0.001
"""Threads that want Python's lock have it after so long: those that read large bodies do not hold up the event loop and
the engine."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that drain the server; a second one ends it at once."""


OWN_FILES = 160
"""Files and sockets that the process opens for other things than connections, the forms of answers among them."""


class Listener(uvicorn.Server):
    """uvicorn's server, whose end is decided here: it closes its sockets at a signal, and then `/ready` could not say
    that requests are to go elsewhere.

    Args:
        server: that answers.
        limits: of connections.
    """

    def __init__(self, server: Server, limits: ConnectionLimits) -> None:
        config = uvicorn.Config(
            make_app(server),
            http=Connections(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # a warning for each request that is none would fill the log
            access_log=False,
            server_header=False,
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Any:
        """Leave signals alone."""
        yield


async def serve(
    server: Server,
    host: str,
    port: int,
    limits: ConnectionLimits,
    *,
    drain_seconds: float | None,
    on_start: Callable[[str], None],
) -> bool:
    """Serve until SIGTERM or SIGINT; then take no request, and end when those under way have ended.

    Args:
        host, port: that it listens on; port 0: any that is free.
        limits: of connections.
        drain_seconds: to wait for requests under way, at most; None: as long as it takes.
        on_start: called with the address when it takes requests.

    Returns:
        Whether all requests under way have ended by themselves.

    Raises:
        ArgumentError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise ArgumentError(
                f"{_shown(host)}:{port} cannot be listened on: {error}; give another --port or --host"
            ) from None
        listener = Listener(server, with_files(limits))
        ended = asyncio.Event()
        second = asyncio.Event()

        def end() -> None:
            (second if ended.is_set() else ended).set()

        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, end)
        running = asyncio.create_task(listener.serve(sockets=[listening]))
        switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        gc.collect()
        gc.freeze()  # what is loaded is not looked through for garbage again, which a large body would cause often
        try:
            while not listener.started and not running.done():
                await asyncio.sleep(0.01)
            on_start(f"http://{_shown(host)}:{listening.getsockname()[1]}")
            await asyncio.wait([running, asyncio.create_task(ended.wait())], return_when=asyncio.FIRST_COMPLETED)
            drained = await _drained(server, drain_seconds, second)
            listener.should_exit = True
            listener.force_exit = not drained
            await running
        finally:
            gc.unfreeze()
            sys.setswitchinterval(switch_seconds)
            for number in SIGNALS:
                loop.remove_signal_handler(number)
        return drained


def with_files(limits: ConnectionLimits) -> ConnectionLimits:
    """Limits of as many connections as the process may have files for. It is let open more, as far as the system does.

    Raises:
        ArgumentError: there are not enough for a single one.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limits.connections + OWN_FILES
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        allowed = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return limits
    if allowed <= OWN_FILES:
        raise ArgumentError(f"this process may open {allowed} files, and needs more than {OWN_FILES}; see 'ulimit -n'")
    log.warning("up to %d connections instead of %d: see 'ulimit -n'", allowed - OWN_FILES, limits.connections)
    return replace(limits, connections=allowed - OWN_FILES)


async def _drained(server: Server, seconds: float | None, second: asyncio.Event) -> bool:
    """Wait until all requests have ended, or a second signal comes."""
    log.info("draining: %d requests are under way", len(server.records))
    draining = asyncio.create_task(server.engine.drain(seconds))
    stopped = asyncio.create_task(second.wait())
    await asyncio.wait([draining, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return draining.done() and draining.result()


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
