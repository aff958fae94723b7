"""The formats of traffic that are recognised, line by line: logs of OpenAI requests, token ids, hashes of blocks."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from hybrid.doctor.request import HASH_BYTES, UNIT, hashed
from hybrid.doctor.text import Template
from hybrid.errors import ArgumentError
from hybrid.units import ceil_div

FORMATS = (
    "token ids (input_tokens and output_tokens, or prompt_token_ids), OpenAI requests (messages or prompt, alone, "
    "as request and response, or as body of a batch file), LiteLLM logs, ShareGPT files, Mooncake traces (hash_ids), "
    "logs of vLLM and SGLang that show token ids, and what hybrid doctor anonymize writes"
)

MOONCAKE_BLOCK = 512
"""Tokens of a hash in Mooncake's traces."""

LOGGED_IDS = re.compile(r"(?:prompt_token_ids: |input_ids=)\[([\d, ]+)\]")
"""Token ids in a line of a log of vLLM or SGLang."""

ARRAY = re.compile(rb"\[\s*(?:\{|$)")
"""The beginning of an array of requests; a line of a log may begin with a bracket too."""

MAX_SECONDS = 1e11
"""A time beyond it is in milliseconds."""

CHUNK = 1 << 20
"""Bytes that are read at a time of a file that is one JSON array."""


@dataclass(slots=True)
class Record:
    """One logged request.

    Attributes:
        ids: token ids of the prompt and the answer; empty: hashes alone are known.
        num_prompt, num_tokens: tokens of the prompt, and of both.
        hashes: of prefixes, in units of `UNIT` tokens.
        text: of the prompt and the answer; None: not known.
        time: of arrival, in seconds; None: not known.
        namespace: tenant, salt or adapter.
        line: number of its line in the file.
    """

    ids: array[int]
    num_prompt: int
    num_tokens: int
    hashes: array[int]
    text: str | None
    time: float | None
    namespace: str
    line: int


def records(path: Path, template: Template, progress: Callable[[int], object]) -> Iterator[Record]:
    """Read the requests of a file, in its order.

    Args:
        template: makes tokens of texts.
        progress: called with the number of bytes read.

    Raises:
        ArgumentError: a line is in no known format; the message names the line and the formats.
    """
    with path.open("rb") as file:
        for number, value in _values(path, file, progress):
            try:
                made = list(_requests(value, template, number))
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise ArgumentError(f"{path}, line {number}: a request that cannot be read ({error!r:.200})") from error
            if not made and not _is_known(value):
                shown = json.dumps(value)[:80] if not isinstance(value, str) else value[:80]
                raise ArgumentError(f"{path}, line {number}: in no format that is known: {shown}; known are {FORMATS}")
            yield from made


def _values(path: Path, file: BinaryIO, progress: Callable[[int], object]) -> Iterator[tuple[int, Any]]:
    """The JSON values of a file with their lines: one a line, or the elements of one array; other lines as texts."""
    is_array = ARRAY.match(file.read(64)) is not None
    file.seek(0)
    if is_array:
        yield from _elements(path, file, progress)
        return
    for number, line in enumerate(file, 1):
        progress(len(line))
        if not line.strip():
            continue
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise ArgumentError(
                f"{path}, line {number}: not text in UTF-8; traffic is one JSON object a line"
            ) from error
        try:
            yield number, json.loads(text)
        except (ValueError, RecursionError):
            yield number, text.rstrip("\n")


def _elements(path: Path, file: BinaryIO, progress: Callable[[int], object]) -> Iterator[tuple[int, Any]]:
    """The elements of an array, without reading all of it at once."""
    decoder, rest, number, is_end = json.JSONDecoder(), "", 0, False
    file.seek(1)
    partial = b""
    while not is_end:
        data = file.read(CHUNK)
        progress(len(data))
        is_end = len(data) < CHUNK
        partial += data
        try:
            rest, partial = rest + partial.decode(), b""
        except UnicodeDecodeError as error:
            rest, partial = rest + partial[: error.start].decode(), partial[error.start :]
        while rest := rest.lstrip(" \t\r\n,"):
            if rest[0] == "]":
                return
            try:
                value, end = decoder.raw_decode(rest)
            except ValueError as error:
                if is_end:
                    raise ArgumentError(f"{path}: the array ends inside its element {number + 1}: {error}") from error
                break
            number += 1
            yield number, value
            rest = rest[end:]


def _is_known(value: Any) -> bool:
    """Return whether a line is of a log, and no request."""
    return isinstance(value, str) and bool(re.match(r"(?:INFO|DEBUG|WARNING|ERROR|\[|\(|\d{4}-)", value))


def _requests(value: Any, template: Template, line: int) -> Iterator[Record]:
    if isinstance(value, str):
        if found := LOGGED_IDS.search(value):
            ids = array("i", map(int, found[1].split(",")))
            yield _of_ids(ids, len(ids), None, {}, line)
        return
    if not isinstance(value, dict):
        return
    if "hash_ids" in value:
        yield _of_mooncake(value, line)
    elif "hashes" in value:
        yield _of_hashes(value, line)
    elif "conversations" in value:
        yield from _of_sharegpt(value, template, line)
    elif (given := value.get("input_tokens", value.get("prompt_token_ids"))) is not None and isinstance(given, list):
        ids = array("i", given)
        answer = value.get("output_tokens") or value.get("output_token_ids") or []
        yield _of_ids(ids + array("i", answer), len(ids), None, value, line)
    else:
        request = _request_of(value)
        if request is not None:
            yield _of_openai(value, request, template, line)


def _request_of(value: dict[str, Any]) -> dict[str, Any] | None:
    """The OpenAI request of a logged one: itself, or the part of it that has messages or a prompt."""
    for part in (value, *(value.get(key) for key in ("request", "body", "request_body", "kwargs", "data", "input"))):
        if isinstance(part, str) and part.startswith("{"):
            part = json.loads(part)
        if isinstance(part, dict):
            if isinstance(part.get("messages"), list) or isinstance(part.get("prompt"), str):
                return part
            if isinstance(part.get("body"), dict) and ("messages" in part["body"] or "prompt" in part["body"]):
                body: dict[str, Any] = part["body"]
                return body
    return None


def _of_openai(value: dict[str, Any], request: dict[str, Any], template: Template, line: int) -> Record:
    messages, tools = request.get("messages"), request.get("tools") or []
    prompt = template.prompt(messages, tools) if isinstance(messages, list) else request["prompt"]
    answer = _answer_of(value, template, prompt, messages, tools)
    ids = template.ids(prompt)
    num_prompt = len(ids)
    if answer:
        ids = ids + template.ids(answer)
    return _of_ids(ids, num_prompt, prompt + answer, {**request, **value}, line)


def _answer_of(value: dict[str, Any], template: Template, prompt: str, messages: Any, tools: list[Any]) -> str:
    """The text of the answer that is logged with a request, or nothing."""
    response = value.get("response") or value.get("response_body") or value.get("output") or value
    if isinstance(response, str):
        response = json.loads(response) if response.startswith("{") else {"choices": [{"text": response}]}
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response = response["body"]
    for choice in (response.get("choices") or []) if isinstance(response, dict) else []:
        if isinstance(choice.get("message"), dict):
            return template.answer(choice["message"], prompt, messages if isinstance(messages, list) else None, tools)
        return str(choice.get("text") or "")
    return ""


def _of_sharegpt(value: dict[str, Any], template: Template, line: int) -> Iterator[Record]:
    roles = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
    history: list[dict[str, Any]] = []
    for turn in value["conversations"]:
        role = roles.get(turn.get("from", turn.get("role")), "user")
        message = {"role": role, "content": turn.get("value", turn.get("content")) or ""}
        if role == "assistant" and history:
            prompt = template.prompt(history, [])
            answer = template.answer(message, prompt, history)
            ids = template.ids(prompt)
            yield _of_ids(ids + template.ids(answer), len(ids), prompt + answer, {}, line)
        history.append(message)


def _of_mooncake(value: dict[str, Any], line: int) -> Record:
    """A request of Mooncake's traces: a number for each prefix of whole blocks of 512 tokens."""
    num_prompt, hashes = int(value["input_length"]), array("Q")
    for number in value["hash_ids"]:
        for part in range(MOONCAKE_BLOCK // UNIT):
            digest = blake2b(b"%d %d" % (number, part), digest_size=HASH_BYTES).digest()
            hashes.append(int.from_bytes(digest, "little"))
    del hashes[ceil_div(num_prompt, UNIT) :]
    num_prompt = min(num_prompt, len(hashes) * UNIT)
    time = value.get("timestamp")
    return Record(
        array("i"), num_prompt, num_prompt, hashes, None, None if time is None else float(time) / 1000, "", line
    )


def _of_hashes(value: dict[str, Any], line: int) -> Record:
    """A request of an anonymized file."""
    hashes = array("Q", bytes.fromhex(value["hashes"]))
    num_prompt, num_tokens = int(value["prompt_tokens"]), int(value["tokens"])
    if not 0 < num_prompt <= num_tokens or len(hashes) != ceil_div(num_tokens, UNIT):
        raise ValueError(f"{len(hashes)} hashes of {UNIT} tokens for {num_tokens} tokens, {num_prompt} of them prompt")
    time = value.get("time")
    return Record(array("i"), num_prompt, num_tokens, hashes, None, time, value.get("namespace", ""), line)


def _of_ids(ids: array[int], num_prompt: int, text: str | None, value: dict[str, Any], line: int) -> Record:
    if not num_prompt:
        raise ValueError("the prompt is empty")
    return Record(ids, num_prompt, len(ids), hashed(ids), text, _time_of(value), _namespace_of(value), line)


def _time_of(value: dict[str, Any]) -> float | None:
    """The time of arrival, by the names that logs give it."""
    for name in ("ts", "time", "timestamp", "startTime", "start_time", "arrival_time", "created_at", "created"):
        given = value.get(name)
        if isinstance(given, int | float) and not isinstance(given, bool):
            return given / 1000 if given > MAX_SECONDS else float(given)
        if isinstance(given, str):
            try:
                return datetime.fromisoformat(given).timestamp()
            except ValueError:
                continue
    return None


def _namespace_of(value: dict[str, Any]) -> str:
    """What keeps requests apart, by the names that engines and proxies give it."""
    extra = value.get("extra_body")
    for part in (value, extra if isinstance(extra, dict) else {}):
        for name in ("namespace", "cache_salt", "tenant", "team_id", "lora_path", "lora_name", "adapter"):
            if part.get(name):
                return str(part[name])
    return ""
