"""Sessions of agents, as WEKA's kv-cache-tester and AgentX record them: hashes of blocks, answers, pauses, subagents.

A file of JSON per session, or one session a line:

    {"block_size": 64, "tool_tokens": 11899, "system_tokens": 2926, "requests": [
        {"t": 0.0, "in": 25259, "out": 86, "hash_ids": [1, 2, ...], "stop": "tool_use", "api_time": 4.1,
         "think_time": 0},
        {"t": 9.5, "type": "subagent", "tool_tokens": 7401, "system_tokens": 1014, "requests": [...]}, ...]}

`hash_ids` name the whole blocks of a prompt, within one session (`"hash_id_scope": "global"`: everywhere). Sessions
with equal sizes of tools and system prompt share these. What a request answers is what the next one of its conversation
has there, where that continues it. Many sessions pack well into one file of numbers (`.npz`), which is read too.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from hybrid.doctor.request import UNIT, Turn
from hybrid.errors import ArgumentError
from hybrid.units import ceil_div

BLOCK = 64
"""Tokens of a block, where a session does not say it, and in packed files."""

GAP = 240.0
"""Seconds between the beginnings of sessions, on average, where they do not say when they began."""

MAX_PAUSE = 1800.0
"""Seconds that nothing happens in a session, at most: what was longer is cut."""

STOPS = ("", "tool_use", "end_turn", "max_tokens", "stop_sequence")
"""Reasons for which an answer ends, by their numbers in packed files."""

HEAD_BYTES = 4096
"""Of a file, in which a session shows itself."""

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
Blocks = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True, eq=False)
class SessionRequest:
    """A request of a session.

    Attributes:
        number: in order of arrival; time: of arrival, in seconds.
        num_prompt, num_tokens: tokens of the prompt, and with the answer.
        blocks: local names of the whole blocks of the prompt, and of what is known of the answer.
        turn: its place.
    """

    number: int
    time: float
    num_prompt: int
    num_tokens: int
    blocks: Blocks
    turn: Turn


@dataclass(slots=True, eq=False)
class _Row:
    """A request as it is recorded: `at` and `api` are seconds, `think` those before it (None: not recorded)."""

    session: int
    agent: int
    at: float
    num_prompt: int
    num_answer: int
    stop: str
    api: float
    think: float | None
    blocks: Blocks
    sizes: tuple[int, int] | None


@dataclass(slots=True)
class _Session:
    """Where a session began, if that is known, and what it calls the blocks that others have too: for each pair of
    sizes the names of the blocks of tools and system prompt."""

    start: float | None = None
    is_global: bool = False
    common: dict[tuple[int, int], Blocks] = field(default_factory=dict)


class SessionLog:
    """Recorded sessions, as one log of requests in order of arrival.

    Attributes:
        requests: all of them.
        block_size: tokens of a block.
        num_sessions: how many sessions there are.
    """

    def __init__(self, rows: list[_Row], sessions: list[_Session], block_size: int, max_pause: float) -> None:
        self.requests: list[SessionRequest] = []
        self.block_size: int = block_size
        self.num_sessions: int = len(sessions)
        self._sessions = sessions
        self._per = block_size // UNIT
        self._powers = np.ones(1, np.uint64)
        self._place(rows, max_pause)

    @classmethod
    def read(cls, paths: Sequence[Path], gap: float | None = None, max_pause: float = MAX_PAUSE) -> SessionLog:
        """Read sessions.

        Args:
            paths: folders of files, files of JSON, or packed files.
            gap: seconds between the beginnings of sessions, on average, drawn with a fixed seed; None: as in the files,
                where these say it, else `GAP`.
            max_pause: seconds that nothing happens in a session, at most.

        Raises:
            ArgumentError: a file is not a session, or sessions have blocks of different sizes; the message names it.
        """
        rows: list[_Row] = []
        sessions: list[_Session] = []
        size = None
        for path in paths:
            for file in sorted(path.glob("*.json*")) if path.is_dir() else [path]:
                size = _read_file(file, rows, sessions, size)
        if not rows:
            raise ArgumentError(f"{', '.join(map(str, paths))}: no session with a request in it")
        drawn, at = random.Random(1), 0.0
        for session in sessions:
            at += drawn.expovariate(1 / (gap or GAP))
            if gap is not None or session.start is None:
                session.start = at
        _cut_pauses(rows, max_pause)
        return cls(rows, sessions, size or BLOCK, max_pause)

    def hashes(self, request: SessionRequest) -> array[int]:
        """The hashes of the prefixes of a request and its answer, one for each `UNIT` tokens and one for a rest."""
        prefixes = self._prefixes(request)
        units = (prefixes[:, None] + np.arange(self._per, dtype=np.uint64) * ODD).reshape(-1)
        found = mixed(units[: ceil_div(request.num_tokens, UNIT)])
        if rest := request.num_tokens % UNIT:
            found[-1] = mixed(found[-1:] + np.uint64(rest))[0]
        return array("Q", found.tobytes())

    def token_ids(self, request: SessionRequest) -> array[int]:
        """Made up token ids of a request and its answer, at least 0: they begin alike as far as blocks do."""
        names = (self._prefixes(request) >> np.uint64(33)).astype(np.int32)
        return array("i", names.repeat(self.block_size)[: request.num_tokens].tobytes())

    def _prefixes(self, request: SessionRequest) -> Numbers:
        """A number for each prefix of whole blocks, and for all there is."""
        count, turn = ceil_div(request.num_tokens, self.block_size), request.turn
        session, known = self._sessions[turn.session], request.blocks[:count]
        keys = np.arange(count, dtype=np.uint64) + np.uint64((request.number + 1) << 32)  # no other request has these
        scope = 0 if session.is_global else (turn.session + 1) << 40
        keys[: len(known)] = known.astype(np.uint64) ^ np.uint64(1 << 63 | scope)
        is_own = np.ones(len(known), bool)
        for sizes, common in session.common.items():
            end = min(len(common), len(known))
            is_common = is_own[:end] & (known[:end] == common[:end])
            name = np.uint64(hash(sizes) & (1 << 62) - 1 | 1 << 62)
            keys[:end][is_common] = mixed(np.arange(end, dtype=np.uint64) ^ name)[is_common]
            is_own[:end] &= ~is_common
        if count > len(self._powers):
            self._powers = np.cumprod(np.full(2 * count, ODD, np.uint64), dtype=np.uint64)
        return mixed(np.cumsum(mixed(keys) * self._powers[:count], dtype=np.uint64))

    def _place(self, rows: list[_Row], max_pause: float) -> None:
        """Put the requests of all sessions in order of arrival, and find what each waits for and answers."""
        starts = [session.start or 0.0 for session in self._sessions]
        rows.sort(key=lambda row: starts[row.session] + row.at)
        following: dict[tuple[int, int], _Row] = {}
        known: dict[int, tuple[Blocks, float | None]] = {}
        for number in range(len(rows) - 1, -1, -1):
            row = rows[number]
            then = following.get((row.session, row.agent))
            blocks, count = row.blocks, len(row.blocks)
            if then is not None and np.array_equal(then.blocks[:count], blocks):
                blocks = then.blocks[: ceil_div(row.num_prompt + row.num_answer, self.block_size)]
            known[number] = blocks, None if then is None else max(0.0, then.at - row.at - row.api)
            following[row.session, row.agent] = row
        waits = _waits(rows, max_pause)
        names: dict[tuple[int, int], int] = {}
        for number, (row, (after, pause)) in enumerate(zip(rows, waits, strict=True)):
            blocks, next_in = known.pop(number)
            conversation = names.setdefault((row.session, row.agent), len(names))
            turn = Turn(row.session, conversation, after, pause, row.stop, next_in)
            time, num_tokens = starts[row.session] + row.at, row.num_prompt + row.num_answer
            self.requests.append(SessionRequest(number, time, row.num_prompt, num_tokens, blocks, turn))


ODD = np.uint64(0x9E3779B97F4A7C15)


def mixed(numbers: Numbers) -> Numbers:
    """Mix the bits of numbers: each result is that of one number alone."""
    numbers = (numbers + np.uint64(1)) * ODD
    numbers ^= numbers >> np.uint64(31)
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    return numbers ^ numbers >> np.uint64(29)


def is_session(path: Path) -> bool:
    """Return whether a path is a folder of sessions, a session, or a packed file of them."""
    if path.is_dir():
        return any(map(is_session, sorted(path.glob("*.json*"))[:1]))
    if path.suffix == ".npz":
        return True
    if not path.suffix.startswith(".json") or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return head.lstrip()[:1] == b"{" and b'"requests"' in head and b'"hash_ids"' in head


def _read_file(path: Path, rows: list[_Row], sessions: list[_Session], size: int | None) -> int:
    """Add the requests of a file. Returns the tokens of a block."""
    try:
        if path.suffix == ".npz":
            _unpack(path, rows, sessions)
            found = [BLOCK]
        else:
            found = [_add(value, rows, sessions) for value in _values(path)]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError, BadZipFile) as error:
        raise ArgumentError(
            f"{path}: not a recorded session ({error!r:.200}); one has requests with t, in, out and hash_ids"
        ) from error
    for block_size in found:
        size = size or block_size
        if block_size != size or size % UNIT:
            raise ArgumentError(
                f"{path}: blocks of {block_size} tokens; all must have blocks of one size, a multiple of {UNIT}"
            )
    return size or BLOCK


def _values(path: Path) -> Iterator[dict[str, Any]]:
    """The sessions of a file: one, or one a line."""
    text, at = path.read_text(encoding="utf-8").lstrip(), 0
    while at < len(text):
        value, end = json.JSONDecoder().raw_decode(text, at)
        yield value
        while end < len(text) and text[end].isspace():
            end += 1
        at = end


def _add(value: dict[str, Any], rows: list[_Row], sessions: list[_Session]) -> int:
    """Add a recorded session. Returns the tokens of a block."""
    session, number = _Session(is_global=value.get("hash_id_scope") == "global"), len(sessions)
    made: list[_Row] = []
    agents = 0
    sizes = _sizes_of(value)
    for one in value["requests"]:
        if "requests" not in one:
            made.append(_row(one, number, 0, 0.0, sizes))
            continue
        agents += 1
        own = _sizes_of(one) or sizes
        made += [_row(each, number, agents, float(one["t"]), own) for each in one["requests"] if "in" in each]
    sessions.append(session)
    block_size = int(value.get("block_size", BLOCK))
    _note_common(session, made, block_size)
    rows += made
    return block_size


def _sizes_of(value: dict[str, Any]) -> tuple[int, int] | None:
    """Tokens of tools and of the system prompt; None: not recorded."""
    tools, system = int(value.get("tool_tokens") or 0), int(value.get("system_tokens") or 0)
    return (tools, system) if tools + system > 0 else None


def _row(one: dict[str, Any], session: int, agent: int, start: float, sizes: tuple[int, int] | None) -> _Row:
    num_prompt, think = int(one["in"]), one.get("think_time")
    blocks = np.array(one.get("hash_ids") or [], np.int64)
    if num_prompt < 1:
        raise ValueError(f"a request of {num_prompt} tokens")
    return _Row(
        session,
        agent,
        start + float(one["t"]),
        num_prompt,
        max(0, int(one.get("out") or 0)),
        str(one.get("stop") or ""),
        float(one.get("api_time") or 0.0),
        None if think is None else float(think),
        blocks,
        sizes,
    )


def _unpack(path: Path, rows: list[_Row], sessions: list[_Session]) -> None:
    """Add the sessions of a packed file.

    It has `sess` [sessions, 4]: number of the trace, tokens of tools and of the system prompt, milliseconds at which it
    began; `rows` [requests, 13]: session, agent, milliseconds since it began, tokens of prompt and answer, number of
    the stop reason, 1 for a tool's result, milliseconds of the answer, number of blocks, and these: the first `rl` of
    request `ref` (-1: none), `k` new ones in sequence, `rest` of `raw`.
    """
    with path.open("rb") as packed, np.lib.npyio.NpzFile(packed) as file:
        given, numbers, raw = (file[name].astype(np.int64) for name in ("sess", "rows", "raw"))
    first, made = len(sessions), list[_Row]()
    sessions += [_Session(start / 1000) for start in given[:, 3].tolist()]
    top: dict[int, int] = {}
    taken = 0
    for s, agent, ms, num_prompt, num_answer, stop, _, api, count, ref, rl, k, rest in numbers.tolist():
        blocks = np.empty(count, np.int64)
        blocks[:rl] = made[ref].blocks[:rl] if rl else 0
        blocks[rl : rl + k] = top.get(s, 0) + 1 + np.arange(k)
        blocks[rl + k :] = raw[taken : taken + rest]
        taken += rest
        top[s] = max(top.get(s, 0) + k, int(blocks[rl + k :].max()) if rest else 0)
        sizes = (int(given[s, 1]), int(given[s, 2])) if agent == 0 else None
        made.append(
            _Row(first + s, agent, ms / 1000, num_prompt, num_answer, STOPS[stop], api / 1000, None, blocks, sizes)
        )
    by_session: dict[int, list[_Row]] = {}
    for row in made:
        by_session.setdefault(row.session, []).append(row)
    for number, of_one in by_session.items():
        _note_common(sessions[number], of_one, BLOCK)
    rows += made


def _note_common(session: _Session, rows: list[_Row], block_size: int) -> None:
    """Note what a session calls the blocks of tools and system prompt: those that a conversation begins with."""
    if session.is_global:
        return
    for row in rows:
        if row.sizes is not None and row.sizes not in session.common and len(row.blocks):
            session.common[row.sizes] = row.blocks[: sum(row.sizes) // block_size]


def _cut_pauses(rows: list[_Row], most: float) -> None:
    """Cut the times in which nothing happens in a session."""
    rows.sort(key=lambda row: (row.session, row.at))
    session, clock, before = -1, 0.0, 0.0
    for row in rows:
        if row.session != session:
            session, clock, before = row.session, 0.0, 0.0
        clock, before = clock + min(max(0.0, row.at - before), most), row.at
        row.at = clock


def _waits(rows: list[_Row], max_pause: float) -> Iterator[tuple[tuple[int, ...], float]]:
    """Of each request, in order, the numbers of those whose answers it waits for, and its pause after them: the one
    before it in its conversation and, of the main agent, the ends of the subagents that began since then; the first of
    a subagent waits for the main agent's last."""
    last: dict[tuple[int, int], int] = {}  # by conversation, the last request in all
    for number, row in enumerate(rows):
        last[row.session, row.agent] = number
    before: dict[tuple[int, int], int] = {}
    begun: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        own = before.get((row.session, row.agent))
        after = [own] if own is not None else []
        if row.agent == 0:
            after += [last[row.session, agent] for agent in begun.pop(row.session, ())]
        elif own is None:
            begun.setdefault(row.session, []).append(row.agent)
            after += [before[row.session, 0]] if (row.session, 0) in before else []
        before[row.session, row.agent] = number
        ends = [rows[other].at + rows[other].api for other in after]
        pause = max(0.0, row.at - max(ends)) if ends else 0.0
        if row.think is not None and len(after) == 1 and own is not None:
            pause = row.think
        yield tuple(after), min(pause, max_pause)
