"""What a client without a key can do with connections: nothing that others notice."""

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import hybrid.server.connections
from hybrid import ArgumentError, CacheConfig
from hybrid.server.connections import ConnectionLimits
from hybrid.server.serving import OWN_FILES, with_files
from hybrid.server.tenants import Caller
from support.served import Poster, served

HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\n"
CLOSE = b"connection: close\r\n\r\n"
CHUNKED = b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
LIMITS = ConnectionLimits(
    head="4KiB", headers=20, head_seconds=0.4, idle_seconds=0.4, send_seconds=0.4, connections=12, per_address=14
)


@pytest.fixture(scope="module")
def address(tiny: Any) -> Iterator[str]:
    engine = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid.server.connections, "LINGER_SECONDS", 0.3)
        with served(engine, keys={"k": Caller("ann", "ann")}, connections=LIMITS) as (url, _):
            yield url


def connected(address: str) -> socket.socket:
    url = urlsplit(address)
    return socket.create_connection((url.hostname, url.port), timeout=10)


def answer(address: str, *pieces: bytes) -> bytes:
    """All that the server says until it ends the connection."""
    with connected(address) as client:
        for piece in pieces:
            client.sendall(piece)
        return rest(client)


def rest(client: socket.socket) -> bytes:
    found = b""
    while piece := client.recv(65536):
        found += piece
    return found


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"x: " + b"y" * 5000,
        b"GET /" + b"y" * 5000,
        HEAD + b"x: y\r\n" * 20 + b"\r\n",
        b"\r\n" * 3000,
    ],
    ids=["value", "line", "number", "before"],
)
def test_headers_beyond_a_limit_are_refused(address: str, head: bytes) -> None:
    assert answer(address, head).startswith(b"HTTP/1.1 431 ")
    assert answer(address, HEAD + b"x: y\r\n" * 18 + CLOSE).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "begin",
    [HEAD + b"x: ", CHUNKED + b"0\r\nx: ", CHUNKED + b"1;", HEAD + b"\r\n" + HEAD + b"x: "],
    ids=["header", "trailer", "extension", "second"],
)
def test_headers_beyond_the_limit_are_not_parsed(address: str, begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    original = HttpToolsProtocol.data_received
    monkeypatch.setattr(
        HttpToolsProtocol, "data_received", lambda own, data: parsed.append(len(data)) or original(own, data)
    )
    with connected(address) as client:
        client.sendall(begin)
        with suppress(ConnectionError):
            for _ in range(100):
                client.sendall(b"y" * 10_000)
            assert rest(client)[9:12] in (b"431", b"200")
    assert sum(parsed) <= 2 * 4096 + len(begin)


def test_what_is_no_request_is_refused(address: str) -> None:
    assert answer(address, b"GET \xff\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert answer(address, b"GET http://[ HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_a_request_has_one_key_and_one_host_which_stand_before_its_body(address: str) -> None:
    models = b"/v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    key, other = b"authorization: Bearer k\r\n", b"Authorization: Bearer other\r\n"
    assert answer(address, b"GET " + models + key + b"\r\n").startswith(b"HTTP/1.1 200")
    for twice in (key + other, other + key, key + b"Host: y\r\n"):
        assert answer(address, b"GET " + models + twice + b"\r\n").startswith(b"HTTP/1.1 400")
    body = b"0\r\n%s\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n"
    assert answer(address, b"GET " + models + key + chunked, body % other).startswith(b"HTTP/1.1 200")
    text = b'{"tokens":[1]}'
    post = b"POST /detokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    last = b"%x\r\n%s\r\n" % (len(text), text) + body
    assert answer(address, post + key + chunked + last % b"x: y\r\n").startswith(b"HTTP/1.1 200")
    assert answer(address, post + key + chunked + last % other).startswith(b"HTTP/1.1 200")
    assert answer(address, post + chunked + last % key).startswith(b"HTTP/1.1 401")


def test_a_request_of_http_1_1_has_a_host_and_a_body_is_chunked_alone_or_not_at_all(address: str) -> None:
    assert answer(address, b"GET /health HTTP/1.1\r\n" + CLOSE).startswith(b"HTTP/1.1 400 ")
    assert answer(address, b"GET /health HTTP/1.0\r\n" + CLOSE).startswith(b"HTTP/1.1 200 ")
    for coding, status in ((b"Chunked", b"200"), (b"gzip, chunked", b"501"), (b"gzip", b"501")):
        found = answer(address, HEAD + b"Transfer-Encoding: " + coding + b"\r\n" + CLOSE, b"0\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 " + status)


def test_a_client_that_leaves_with_requests_ahead_ends_the_first_and_is_no_line_of_the_log(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    post = Poster(address, "k")
    body = b'{"prompt": "left", "max_tokens": 4000, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: k\r\ncontent-length: %d\r\n\r\n" % len(body)
    client = connected(address)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.sendall((head + body) * 3)
    end = time.monotonic() + 30
    while not post.get("/live").json()["live"]:
        assert time.monotonic() < end
    client.close()
    while (found := post.get("/live").json())["live"]:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert found["ended"][0]["state"] == "abort"
    assert caplog.text == ""


def test_half_sent_heads_keep_nobody_out(address: str) -> None:
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(closing(connected(address))).sendall(b"GET /hea")
            if _ % 10 == 0:
                assert answer(address, HEAD + CLOSE).startswith(b"HTTP/1.1 200 ")


def test_a_client_has_its_time(address: str) -> None:
    assert answer(address, b"GET /hea").startswith(b"HTTP/1.1 408 ")
    assert answer(address) == b""
    assert answer(address, HEAD, b"\r\n").startswith(b"HTTP/1.1 200 ")  # and the next request does not come
    early = answer(address, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
    assert early.startswith(b"HTTP/1.1 401 ")  # and the rest of the body does not come


def test_requests_that_come_ahead_are_answered_in_order_and_are_not_many(address: str) -> None:
    paths = [b"/health", b"/ready", b"/v1/none", b"/health"]
    found = answer(address, b"".join(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path for path in paths))
    assert [part[1:4] for part in found.split(b"HTTP/1.1")[1:]] == [b"200", b"200", b"404", b"200"]
    many = answer(address, (HEAD + b"\r\n") * 200)
    assert many.count(b"HTTP/1.1 200") <= hybrid.server.connections.MAX_AHEAD + 1


def test_an_address_has_a_limit_if_asked(tiny: Any) -> None:
    engine = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))
    with served(engine, connections=ConnectionLimits(per_address=2)) as (url, _), connected(url), connected(url):
        assert answer(url).startswith(b"HTTP/1.1 503 ")


def test_a_client_that_takes_nothing_ends_its_request(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = HttpToolsProtocol.connection_made

    def with_little_room(own: Any, transport: Any) -> None:  # or the system takes the whole answer
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(own, transport)

    monkeypatch.setattr(HttpToolsProtocol, "connection_made", with_little_room)
    post = Poster(address, "k")
    body = b'{"prompt": "a", "max_tokens": 4000, "ignore_eos": true, "stream": true, "logprobs": 5}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: k\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        url = urlsplit(address)
        client.connect((url.hostname, url.port))
        client.sendall(head + body)
        end = time.monotonic() + 30
        while (found := post.get("/live").json())["live"] or not found["ended"]:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert found["ended"][0]["state"] == "abort"


def test_connections_are_as_many_as_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    wanted: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: wanted.append(pair))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    assert with_files(ConnectionLimits()) == ConnectionLimits() and wanted == [(1024 + OWN_FILES, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    assert with_files(ConnectionLimits()).connections == 256 - OWN_FILES
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    with pytest.raises(ArgumentError, match="ulimit"):
        with_files(ConnectionLimits())
