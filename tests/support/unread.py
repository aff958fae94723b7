"""Clients that ask and do not read, and clients that never end their headers."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import psutil

LOGPROBS = 20


@contextmanager
def unread(address: str, count: int, num_tokens: int) -> Iterator[list[socket.socket]]:
    """As many clients that ask for log-probabilities and do not read them, half of them as a stream; and as many that
    have sent most of their headers."""
    url, clients = urlsplit(address), list[socket.socket]()
    headers = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 280) for number in range(90))
    try:
        for number in range(2 * count):
            one = socket.socket()
            clients.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect((url.hostname, url.port))
            if number % 2:
                one.sendall(b"GET /health HTTP/1.1\r\n" + headers)
                continue
            asked = {"prompt": f"{number} is", "max_tokens": num_tokens, "ignore_eos": True, "logprobs": LOGPROBS}
            body = json.dumps(asked | {"stream": number % 4 == 0}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
            one.sendall(head + body)
        yield clients
    finally:
        for one in clients:
            one.close()


def largest(address: str, process: psutil.Process, seconds: float) -> int:
    """The most memory of a server, in bytes, until no request runs or waits."""
    found, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        found = max(found, process.memory_info().rss)
        if not httpx.get(f"{address}/live", timeout=60).json()["live"]:
            break
        time.sleep(0.1)
    return found
