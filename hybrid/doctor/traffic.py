"""Traffic: the requests of files, read once and kept in a file of hashes, from which every replay takes them."""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, Any

from hybrid.doctor.formats import FORMATS, Record, records
from hybrid.doctor.past import Example, Fact, Rewrite, SeenTraffic
from hybrid.doctor.request import HASH_BYTES, LoggedRequest, Turn, hashed
from hybrid.doctor.sessions import MAX_PAUSE, SessionLog, is_session
from hybrid.doctor.text import Template
from hybrid.errors import ArgumentError

HEAD = struct.Struct("<IIIdHBIIIII")
"""Of each request in the file: number of hashes, tokens of the prompt and of all, time, namespace, and its `Fact`."""

REWRITES = tuple(Rewrite)

MAX_LATE = 512
"""Lines of a log between a request and its place in the order of arrival."""


class Traffic:
    """The requests of one or more files.

    Attributes:
        paths: the files.
        num_requests, num_prompt_tokens, num_tokens: how many there are; the last with answers.
        num_new_tokens: of these, behind what a request has in common with those before it.
        seconds: that reading and tokenizing them took.
        is_text: some are texts.
        has_times: it is known of all when they came.
        tokenizer: that made tokens of them; None: they are counted by words.
        turns: places of the requests in recorded sessions; empty: they are of none.
        examples: requests that differ where they might have shared, by reason.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.num_requests: int = 0
        self.num_prompt_tokens: int = 0
        self.num_tokens: int = 0
        self.num_new_tokens: int = 0
        self.seconds: float = 0.0
        self.is_text: bool = False
        self.has_times: bool = True
        self.tokenizer: Any = None
        self.examples: dict[Rewrite, Example] = {}
        self.turns: list[Turn] = []
        self._namespaces: dict[str, int] = {}
        self._names: list[str] = []
        self._places = array("Q")
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="hybrid-doctor-")  # noqa: SIM115 - gone with this

    @classmethod
    def read(
        cls,
        paths: str | Path | Sequence[str | Path],
        template: Template | None = None,
        progress: Callable[[int], object] = lambda num_bytes: None,
        *,
        gap: float | None = None,
        max_pause: float = MAX_PAUSE,
    ) -> Traffic:
        """Read files.

        Args:
            paths: one file or several, in any of the formats that `hybrid.doctor.formats` knows; or folders and files
                of recorded sessions, as `hybrid.doctor.sessions` reads them.
            template: makes tokens of texts; None: by words.
            progress: called with the number of bytes read.
            gap, max_pause: of sessions, as in `SessionLog.read`.

        Raises:
            ArgumentError: there is no such file, it is empty, or a line is in no known format.
        """
        named = [paths] if isinstance(paths, str | Path) else paths
        traffic, past, template = cls([Path(path) for path in named]), SeenTraffic(), template or Template()
        traffic.tokenizer = template.tokenizer
        start = time.perf_counter()
        sessions = [path for path in traffic.paths if is_session(path)]
        if sessions and len(sessions) < len(traffic.paths):
            other = next(path for path in traffic.paths if path not in sessions)
            raise ArgumentError(f"{other}: no recorded session, and {sessions[0]} is one; give sessions alone, or logs")
        if sessions:
            for record in _of_sessions(SessionLog.read(sessions, gap, max_pause), traffic.turns):
                traffic._add(record, past)
        for path in [] if sessions else traffic.paths:
            check_file(path)
            for record in in_order(records(path, template, progress)):
                traffic._add(record, past)
        if not traffic.num_requests:
            raise ArgumentError(f"{', '.join(map(str, traffic.paths))}: no request in it; known formats are {FORMATS}")
        traffic.examples = past.examples
        traffic.seconds = time.perf_counter() - start
        return traffic

    def _add(self, record: Record, past: SeenTraffic) -> None:
        request = LoggedRequest(record.hashes, record.num_prompt, record.num_tokens, record.time, record.namespace)
        fact = past.add(record, request)
        number = self._namespaces.setdefault(record.namespace, min(len(self._namespaces), 65535))
        if number == len(self._names):
            self._names.append(record.namespace)
        self._places.append(self._file.tell())
        self._file.write(
            HEAD.pack(
                len(record.hashes),
                record.num_prompt,
                record.num_tokens,
                math.nan if record.time is None else record.time,
                number,
                REWRITES.index(fact.rewrite),
                fact.seen,
                fact.elsewhere,
                fact.rewritten,
                fact.answer_from,
                fact.age,
            )
        )
        self._file.write(record.hashes.tobytes())
        self.num_requests += 1
        self.num_prompt_tokens += record.num_prompt
        self.num_tokens += record.num_tokens
        self.num_new_tokens += record.num_tokens - fact.seen
        self.is_text = self.is_text or record.text is not None
        self.has_times = self.has_times and record.time is not None

    def __iter__(self) -> Iterator[tuple[LoggedRequest, Fact]]:
        """The requests in the order of the files, with what the traffic says of each."""
        return (self[number] for number in range(self.num_requests))

    def __getitem__(self, number: int) -> tuple[LoggedRequest, Fact]:
        """A request by its place in that order."""
        self._file.flush()
        handle, place = self._file.fileno(), self._places[number]
        count, num_prompt, num_tokens, at, name, rewrite, *rest = HEAD.unpack(os.pread(handle, HEAD.size, place))
        hashes = array("Q", os.pread(handle, count * HASH_BYTES, place + HEAD.size))
        seen, elsewhere, rewritten, answer_from, age = rest
        fact = Fact(seen, elsewhere, rewritten, REWRITES[rewrite], answer_from, age)
        time_of, turn = None if math.isnan(at) else at, self.turns[number] if self.turns else None
        return LoggedRequest(hashes, num_prompt, num_tokens, time_of, self._names[name], turn), fact


def _of_sessions(log: SessionLog, turns: list[Turn]) -> Iterator[Record]:
    """The requests of recorded sessions, and their places in these."""
    for one in log.requests:
        turns.append(one.turn)
        yield Record(array("i"), one.num_prompt, one.num_tokens, log.hashes(one), None, one.time, "", one.number + 1)


def in_order(given: Iterator[Record]) -> Iterator[Record]:
    """Records in order of arrival, where their times are known: logs often have them in the order in which they ended.
    Those that are more than `MAX_LATE` lines from their place come as early as they can."""
    waiting: list[tuple[float, int, Record]] = []
    latest = -math.inf
    for number, record in enumerate(given):
        latest = latest if record.time is None else max(latest, record.time)
        heappush(waiting, (latest if record.time is None else record.time, number, record))
        if len(waiting) > MAX_LATE:
            yield heappop(waiting)[2]
    while waiting:
        yield heappop(waiting)[2]


def check_file(path: Path) -> None:
    """Check that a file can be read and has something in it.

    Raises:
        ArgumentError: it cannot.
    """
    if path.is_dir() and is_session(path):
        return
    if path.is_dir():
        raise ArgumentError(f"{path}: a folder; give a file of traffic, or several as {path}/*.jsonl")
    if not path.is_file():
        raise ArgumentError(f"{path}: there is no such file; give a file of traffic, one request a line")
    if not path.stat().st_size:
        raise ArgumentError(f"{path}: the file is empty; give a file of traffic, one request a line")


def anonymize(
    path: Path, out: IO[str], template: Template | None = None, progress: Callable[[int], object] = lambda size: None
) -> int:
    """Write what of a file replays need, and no text: for each request a salted hash of each 16 tokens and all before
    them, numbers of tokens, the time since the first request, and a hash of its namespace. The salt is random and is
    kept nowhere.

    Returns:
        Number of requests.

    Raises:
        ArgumentError: as in `Traffic.read`.
    """
    check_file(path)
    if is_session(path):
        raise ArgumentError(f"{path}: recorded sessions have no text in them; there is nothing to anonymize")
    key, first, count = secrets.token_bytes(32), None, 0
    for record in records(path, template or Template(), progress):
        hashes = hashed(record.ids, key) if record.ids else array("Q", b"".join(_digest(n, key) for n in record.hashes))
        line: dict[str, object] = {"prompt_tokens": record.num_prompt, "tokens": record.num_tokens}
        if record.time is not None:
            first = record.time if first is None else first
            line["time"] = round(record.time - first, 3)
        if record.namespace:
            line["namespace"] = _digest(record.namespace, key).hex()
        out.write(json.dumps({**line, "hashes": hashes.tobytes().hex()}) + "\n")
        count += 1
    return count


def _digest(value: object, key: bytes) -> bytes:
    return blake2b(str(value).encode(), digest_size=HASH_BYTES, key=key).digest()
