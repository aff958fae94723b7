"""`hybrid serve` as a process: it starts, answers, and ends without losing a stream."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from hybrid.commands.main import main

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and its address."""
    command = [sys.executable, "-m", "hybrid", "serve", "tiny", "--port", "0", "--memory", "16MiB", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as own:
        try:
            assert own.stdout is not None
            yield own, own.stdout.readline().split(" at ")[1].split()[0]
        finally:
            own.kill()


def test_sigterm_under_load_loses_no_stream() -> None:
    body = {"model": "tiny", "prompt": "import os", "max_tokens": 60, "ignore_eos": True, "stream": True}

    async def read(client: httpx.AsyncClient, address: str, begun: asyncio.Event) -> int:
        count = 0
        async with client.stream("POST", f"{address}/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                begun.set()
                if line == "data: [DONE]":
                    return count
                count += line.startswith("data: ")
        return -1

    async def run(own: subprocess.Popen[str], address: str) -> tuple[list[int], int, int]:
        begun = [asyncio.Event() for _ in range(16)]
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            streams = [asyncio.create_task(read(client, address, one)) for one in begun]
            await asyncio.gather(*(one.wait() for one in begun))
            own.send_signal(signal.SIGTERM)
            while (ready := (await client.get(f"{address}/ready")).status_code) == 200:
                await asyncio.sleep(0.01)
            late = (await client.post(f"{address}/v1/completions", json=body)).status_code
            return await asyncio.gather(*streams), ready, late

    with process() as (own, address):
        counts, ready, late = asyncio.run(run(own, address))
        assert own.wait(60) == 0
    assert min(counts) > 0 and (ready, late) == (503, 503)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--host", "0.0.0.0"], "--api-key"), (["--keys", "/nowhere.json"], "nowhere"), (["--max-body", "x"], "max-body")],
)
def test_what_cannot_be_served_is_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "tiny", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "tiny", "--memory", "4MiB", "--port", str(port)]) == 2
    assert f"127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err
