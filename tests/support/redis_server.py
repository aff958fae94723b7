"""A real Redis server for tests, where there is one."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def redis_at(folder: Path) -> Iterator[str]:
    """Run a server on a socket of its own in a folder. Yields its URL."""
    pytest.importorskip("redis")
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("there is no redis-server here")
    path = folder / "socket"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    server = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 20
        while not _answers(path):
            assert server.poll() is None and time.monotonic() < end, "the server does not start"
            time.sleep(0.02)
        yield f"unix://{path}"
    finally:
        server.terminate()
        server.wait()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False
