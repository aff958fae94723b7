"""From the fields of a body to `SamplingParams`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import ArgumentError, SamplingError
from hybrid.hints import Hints, hints_of, note_ignored
from hybrid.server.errors import HttpError
from hybrid.server.fields import Fields

NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty")
"""Fields that are `SamplingParams` of the same name and type, in OpenAI's API and as vLLM adds to it."""

MORE = ("top_k", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "skip_special_tokens")
"""More of these, of vLLM."""

HARMLESS = ("user", "metadata", "safety_identifier", "service_tier", "store", "prompt_cache_key")
"""Fields of OpenAI's API that change no answer of one server."""

RETENTION: dict[str, float | None] = {"in_memory": None, "in-memory": None, "24h": 86400.0}
TTL = {"30m": 1800.0, "12h": 43200.0, "5m": 300.0, "1h": 3600.0}
"""Seconds for which a prefix is pinned."""


def openai_params(fields: Fields, own: SamplingParams, max_tokens: int, *length: str) -> SamplingParams:
    """Read what both of OpenAI's completions have in common.

    Args:
        own: the model's defaults.
        max_tokens: of an answer, where the body says nothing.
        length: names of the field that says it.

    Raises:
        HttpError: a value cannot be used.
    """
    given = {name: value for name in NUMBERS + MORE if (value := fields.take(name)) is not None}
    given |= {name: value for name in ("seed", "n") if (value := fields.take(name)) is not None}
    stop = fields.take("stop")
    if stop is not None:
        given["stop"] = [stop] if isinstance(stop, str) else stop
    bias = fields.dictionary("logit_bias")
    if bias is not None:
        given["logit_bias"] = token_numbers(fields, bias)
    lengths = {name: value for name in length if (value := fields.take(name)) is not None}
    used = next(iter(lengths), length[0])
    given["max_new_tokens"] = lengths.get(used, max_tokens)
    given |= cache_options(fields) | hint_options(fields)
    fields.ignore(*HARMLESS)
    return changed(own, given, fields, used)


def changed(
    own: SamplingParams, given: dict[str, Any], fields: Fields, length: str = "max_tokens", stop: str = "stop"
) -> SamplingParams:
    """Parameters with other values.

    Args:
        length, stop: names of these fields in the body.

    Raises:
        HttpError: one cannot be used; it is named as the body names it.
    """
    try:
        return replace(own, **given)
    except SamplingError as error:
        text = str(error).removeprefix("SamplingParams: ").replace("max_new_tokens", length)
        text = re.sub(r"^stop\b", stop, text)
        found = re.match(r"(\w+)", text)
        raise HttpError(400, text, fields.path(found[1]) if found else None, "invalid_value") from None


def token_numbers(fields: Fields, values: dict[str, Any]) -> dict[int, Any]:
    """Numbers by token ids, which are texts in JSON."""
    found: dict[int, Any] = {}
    for key, value in values.items():
        if not re.fullmatch(r"\d{1,10}", key):
            raise fields.refuse("logit_bias", "numbers by token ids", key)
        found[int(key)] = value
    return found


def cache_options(fields: Fields) -> dict[str, Any]:
    """Parameters for what is kept of a prompt: seconds for which it is not evicted, and that there is no answer.

    Raises:
        HttpError: an option is not known.
    """
    retention = RETENTION[fields.one_of("prompt_cache_retention", tuple(RETENTION), "in_memory")]
    options = fields.nested("prompt_cache_options")
    if options is None:
        return {} if retention is None else {"pin_for": retention}
    ttl = options.one_of("ttl", tuple(TTL), "")
    options.one_of("mode", ("implicit", "explicit"), "implicit")  # what is worth it is kept in any case
    is_alone = options.boolean("prewarm")
    options.close()
    seconds = TTL[ttl] if ttl else retention
    return ({"max_new_tokens": 0} if is_alone else {}) | ({} if seconds is None else {"pin_for": seconds})


def hint_options(fields: Fields) -> dict[str, Any]:
    """Parameters for what is known of the request's session: `session_id`, or the header `X-Session-ID`, and
    `kv_hints`, the envelope of vLLM and SGLang, or hints by name. Actions of an envelope that are not known are left
    out.

    Raises:
        HttpError: a value cannot be used.
    """
    name = fields.text("session_id")
    hints = fields.dictionary("kv_hints")
    given: dict[str, Any] = {} if not name else {"session": name}
    if not hints:
        return given
    if "actions" in hints:
        found, ignored = hints_of(hints)
        note_ignored(ignored)
        return given | {"hints": found}
    try:
        return given | {"hints": Hints(**hints)}
    except (ArgumentError, TypeError) as error:
        raise HttpError(400, f"kv_hints: {error}", fields.path("kv_hints"), "invalid_value") from None


def structured_of(fields: Fields) -> dict[str, Any] | None:
    """The form that an answer must have: OpenAI's `response_format`, or vLLM's `structured_outputs`.

    Raises:
        HttpError: it cannot be used.
    """
    own = fields.nested("structured_outputs")
    if own is not None:
        names = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
        names["json_object"] = "json_object"
        given = {form: value for name, form in names.items() if (value := own.take(name)) is not None}
        own.close()
        own.check_json("json", given.get("json_schema"))
        return given or None
    wanted = fields.nested("response_format")
    if wanted is None:
        return None
    kind = wanted.one_of("type", ("text", "json_object", "json_schema"), "")
    schema = wanted.nested("json_schema")
    if not kind:
        raise wanted.refuse("type", "'text', 'json_object' or 'json_schema'", None)
    wanted.close()
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if schema is None:
        raise wanted.refuse("json_schema", "an object with a name and a schema", None)
    return schema_of(schema)


def schema_of(fields: Fields) -> dict[str, Any]:
    """The schema in an object of OpenAI's API. Any answer follows it, whether `strict` is asked for or not."""
    fields.ignore("name", "description", "strict")
    found = fields.dictionary("schema")
    fields.close()
    return {"json_object": True} if found is None else {"json_schema": found}
