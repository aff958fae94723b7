"""A server over HTTP in a thread of this process, for clients in the others."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from hybrid import AsyncEngine, Engine
from hybrid.server.adapter_folder import AdapterFolder
from hybrid.server.connections import ConnectionLimits
from hybrid.server.service import Server, ServerLimits
from hybrid.server.serving import Listener
from hybrid.server.tenants import LOOPBACK, Caller, Tenants

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "The with statement"}]


class Poster:
    """Posts JSON to a server.

    Args:
        address: of the server.
        key: that it is sent with.
    """

    def __init__(self, address: str, key: str = "none") -> None:
        self.address = address
        self.headers = {"authorization": f"Bearer {key}"}
        self._client = httpx.Client(base_url=address, headers=self.headers, timeout=60, verify=False)

    def __call__(self, path: str, **body: Any) -> httpx.Response:
        return self._client.post(path, json={"model": "tiny"} | body)

    def raw(self, path: str, body: Any) -> httpx.Response:
        """Post any JSON, lone surrogates included."""
        return self.text(path, json.dumps(body))

    def text(self, path: str, body: str) -> httpx.Response:
        """Post a text."""
        return self._client.post(path, content=body.encode())

    def chat(self, **body: Any) -> httpx.Response:
        """A chat completion."""
        return self("/v1/chat/completions", **{"messages": ASKED, "max_tokens": 8} | body)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """What is at a path."""
        return self._client.get(path, headers=headers)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream of events, without its `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@contextmanager
def served(
    engine: Engine,
    *,
    keys: dict[str, Caller] | None = None,
    requests: int = 256,
    connections: ConnectionLimits | None = None,
    adapter_folder: Path | None = None,
    **limits: Any,
) -> Iterator[tuple[str, Server]]:
    """A server of an engine, as its address and itself.

    Args:
        keys: of tenants; None: no key is needed.
        requests: that run or wait, at most.
        connections: limits of them; None: the default ones.
        adapter_folder: below which adapters may be loaded at run time; None: none may.
        limits: as for `ServerLimits`.
    """
    tenants = Tenants(keys or {}, () if keys else LOOPBACK)
    running = min(engine.config.max_num_seqs, requests - 1)
    own_limits = {one.name: one.config for one in (keys or {}).values()}
    config = replace(engine.config, max_num_seqs=running, max_waiting=requests - running, tenants=own_limits)
    engine = Engine(engine.loaded, engine.cache, config)
    found: dict[str, Any] = {}
    began = threading.Event()

    async def run(listening: socket.socket) -> None:
        async with AsyncEngine(engine, when_full="refuse") as own:
            folder = AdapterFolder(adapter_folder) if adapter_folder is not None else None
            server = Server(own, "tiny", tenants, ServerLimits(**limits), folder)
            listener = Listener(server, connections or ConnectionLimits())
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
