"""A server over HTTP in a thread of this process, for clients in the others."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from hybrid import AsyncEngine, Engine
from hybrid.server.app import make_app
from hybrid.server.service import Server, ServerLimits
from hybrid.server.serving import Listener
from hybrid.server.tenants import LOOPBACK, Caller, Tenants


@contextmanager
def served(engine: Engine, *, keys: dict[str, Caller] | None = None, **limits: Any) -> Iterator[tuple[str, Server]]:
    """A server of an engine, as its address and itself.

    Args:
        keys: of tenants; None: no key is needed.
        limits: as for `ServerLimits`.
    """
    tenants = Tenants(keys or {}, () if keys else LOOPBACK)
    found: dict[str, Any] = {}
    began = threading.Event()

    async def run(listening: socket.socket) -> None:
        async with AsyncEngine(engine) as own:
            server = Server(own, "tiny", tenants, ServerLimits(**limits))
            listener = Listener(uvicorn.Config(make_app(server), lifespan="off", log_config=None, access_log=False))
            running = asyncio.create_task(listener.serve(sockets=[listening]))
            while not listener.started:
                await asyncio.sleep(0.005)
            found.update(server=server, listener=listener)
            began.set()
            await running

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(run(listening)), daemon=True)
        thread.start()
        assert began.wait(60)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", found["server"]
        found["listener"].should_exit = True
        thread.join(60)
