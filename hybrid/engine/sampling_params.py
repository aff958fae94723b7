"""The parameters of a request: how its prompt is continued. Values are checked, and bounded, when they are set."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from hybrid import checks
from hybrid.errors import ArgumentError, SamplingError
from hybrid.hints import MAX_SESSION_CHARACTERS, Hints, session_of
from hybrid.key import MAX_NAMESPACE_CHARACTERS

LogitsProcessor = Callable[..., Tensor]
"""`(answer, logits) -> logits` or `(prompt, answer, logits) -> logits`: lists of token ids, and one row `[vocab]` fp32.
It must be a pure function of its arguments."""

MAX_INT = 2**31 - 1
"""The largest token id, position and number of tokens."""

MAX_TEMPERATURE = 1e6
"""From here on every token is about as likely as any other, and fp32 logits would lose their order."""

MAX_LOGPROBS = 100
"""The maximum number of log-probabilities per token."""

MAX_ANSWERS = 128
"""The maximum number of answers to one prompt."""

MAX_PRIORITY = 100
"""Priorities are between minus this and this."""

MAX_PIN_SECONDS = 1e9
"""The longest time to live of a pin, about 30 years; `math.inf` has no end."""

MAX_STOP_TEXTS = 256
"""The maximum number of stop texts of a request, and of bad words."""

MAX_STOP_CHARACTERS = 16384
"""The maximum length of all stop texts of a request together, and of all bad words."""

MAX_LISTED = 1024
"""The maximum number of entries of a list in the parameters."""

FORMS = ("json_schema", "json_object", "regex", "grammar", "choice")
"""Keys of `SamplingParams.structured`."""

MAX_PENALTY = 2.0
"""Presence and frequency penalties are between minus this and this."""

MAX_FACTOR = 1e6
"""The largest repetition penalty."""

MAX_BIAS = 100.0
"""Entries of `logit_bias` are between minus this and this."""


@checks.known_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters for continuing a prompt. The default is greedy.

    `SamplingParams()` are these defaults, whatever the checkpoint's `generation_config.json` says: that file makes
    `Engine.default_params`, which are used where a call gives no parameters. To change some of them, use
    `dataclasses.replace(engine.default_params, max_new_tokens=64)`.

    Numbers may be those of Python or of NumPy, and lists may be arrays; they are stored as Python's. With
    `temperature=0` answers are greedy whatever `top_k`, `top_p`, `min_p` and `seed` are. Options that change logits do
    so in this order: `logit_bias`, penalties, `logits_processors`; at last tokens are excluded (`bad_words`,
    `min_tokens`). Log-probabilities are those of the model, before all of these.

    Args:
        max_new_tokens: the maximum number of tokens of the answer. 0: the prompt is computed and kept, and there is no
            answer (`Engine.prewarm`).
        temperature: 0 chooses the most likely token; otherwise logits are divided by it. At most 1e6.
        top_k: sample from the k most likely tokens; 0: all.
        top_p: sample from the most likely tokens up to this probability; 1: all.
        min_p: sample from tokens whose probability is at least this fraction of the largest; 0: all.
        seed: of this request's random numbers; None: a different one each time.
        stop: texts that end the answer, and are not part of it: up to 256, of up to 16384 characters together. Of
            several, the one whose last character comes first counts.
        stop_token_ids: tokens that end the answer, in addition to the model's own.
        ignore_eos: continue after the model's end-of-text tokens.
        logprobs: report the log-probabilities of the k most likely tokens and of the chosen one, per token; None: none.
        checkpoint_at: positions of the prompt, in tokens, where later prompts will branch off: a checkpoint is placed
            at the last multiple of the grid up to each. Negative positions count from the end of the prompt.
        pin_for: seconds for which the cached prefix of this request is not evicted (`math.inf`: until
            `Engine.unpin`); None: it is not pinned.
        session: name of the session that this request belongs to: hints may name it; None: it belongs to none.
        hints: what is known of what this request will have left in the cache, `hybrid.Hints`: when its session
            continues, or that it has ended; None: nothing.
        priority: of what this request leaves in the cache, for eviction policies that use it. Higher is kept longer
            than what else its tenant has there.
        tenant: who sends this request; None: its namespace.
        scheduling_priority: of waiting requests of one tenant those with lower values start earlier. One with a higher
            value may wait for as long as such come.
        presence_penalty: subtracted from the logits of tokens that are in the answer so far; -2 to 2.
        frequency_penalty: subtracted from the logits of tokens once per occurrence in the answer so far; -2 to 2.
        repetition_penalty: positive logits of tokens in prompt or answer are divided by it, negative ones multiplied.
        logit_bias: `{token_id: number}`, added to the logits of tokens; -100 to 100.
        bad_words: texts that the answer does not contain, at the beginning of a word or alone, as the tokenizer encodes
            them.
        min_tokens: the answer has at least this many tokens: until then tokens that would end it are excluded, and stop
            texts do not count.
        logits_processors: functions `(answer, logits) -> logits` or `(prompt, answer, logits) -> logits` of token ids
            and a row of logits. They must be pure: a token may be sampled again after a failure.
        truncate_prompt_tokens: keep this many of the last tokens of a longer prompt; -1: as many as the model takes.
        detokenize: decode the answer; otherwise `text` is empty.
        skip_special_tokens: leave the names of control tokens out of the text. Stop texts are searched for among them
            all the same: `stop="<|im_start|>"` ends an answer where the token stands.
        structured: the answer follows a form, given by one entry: `{"json_schema": dict or JSON}`, `{"json_object":
            True}`, `{"regex": text}`, `{"grammar": Lark grammar}` or `{"choice": [texts]}`. A schema may be a class of
            pydantic, also by itself. JSON has no white space but for a blank after commas and colons. The answer ends
            when nothing can follow, or with an end-of-text token where it may end. Where the prompt ends in reasoning
            that the answer continues, the form begins after that. None: any answer.
        n: number of answers (`RequestOutput.outputs`). The prompt is computed once; each answer has random numbers of
            its own, which follow from `seed`. The first answer is that of n=1.
        prompt_logprobs: report the log-probabilities of the k most likely tokens and of the actual one at each position
            of the prompt; None: none. What they are of is computed, and only what is before it taken from the cache.
        logprob_start_len: `prompt_logprobs` of the tokens from this position on; those before it have none, and may be
            taken from the cache.
        adapter: name of a LoRA adapter (`Engine.adapters`) that prompt and answer are computed with; None: none.
        parse_response: take the answer apart (`RequestOutput.reasoning`, `content`, `tool_calls`), by the checkpoint's
            response template or the form of its chat template.
        tools: descriptions of the tools that the answer may call, as in a chat template: their schemas give arguments
            their types. Empty: those of the prompt, `{"messages": ..., "tools": ...}`.
        tool_choice: "auto": the answer calls tools or not; "none": it calls none; "required": it is a call of one of
            them; the name of one: it is a call of that one.

    Raises:
        SamplingError: a value is out of range, or two contradict each other.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    checkpoint_at: tuple[int, ...] | list[int] = ()
    pin_for: float | None = None
    session: str | None = None
    hints: Hints | None = None
    priority: int = 0
    tenant: str | None = None
    scheduling_priority: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: str | tuple[str, ...] | list[str] = ()
    min_tokens: int = 0
    logits_processors: tuple[LogitsProcessor, ...] | list[LogitsProcessor] = ()
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured: Mapping[str, Any] | None = field(default=None, hash=False)
    n: int = 1
    prompt_logprobs: int | None = None
    adapter: str | None = None
    logprob_start_len: int = 0
    parse_response: bool = False
    tools: Sequence[Mapping[str, Any]] = field(default=(), hash=False)
    tool_choice: str = "auto"

    def __post_init__(self) -> None:
        for name, value in {**self._sampling(), **self._limits(), **self._logits()}.items():
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_new_tokens:
            raise SamplingError(
                f"SamplingParams: min_tokens={self.min_tokens} is more than max_new_tokens={self.max_new_tokens}; "
                "lower the one, or raise the other"
            )
        if self.n > 1 and not self.max_new_tokens:
            raise SamplingError(f"SamplingParams: n={self.n} answers of max_new_tokens=0 tokens; leave n out")
        if self.structured is not None and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise SamplingError(f"SamplingParams: {name} contradicts structured, which ends the answer; leave one out")
        if self.forces_call and self.structured is not None:
            raise SamplingError(
                f"SamplingParams: tool_choice={self.tool_choice!r} contradicts structured: a call has a form "
                "of its own; leave one out"
            )
        if self.parse_response and not self.detokenize:
            raise SamplingError("SamplingParams: parse_response needs detokenize=True: the parts are those of the text")
        if self.stop and not self.detokenize:
            raise SamplingError(
                "SamplingParams: stop texts need detokenize=True: they are found in the text; use stop_token_ids"
            )

    @property
    def forces_call(self) -> bool:
        """Tell whether the answer is the call of a tool."""
        return self.tool_choice not in ("auto", "none")

    def _sampling(self) -> dict[str, Any]:
        """Return how a token is chosen, as checked values."""
        return {
            "temperature": _temperature(self.temperature),
            "top_k": _integer("top_k", self.top_k, 0, MAX_INT, "; use 0 for all tokens"),
            "top_p": _probability("top_p", self.top_p, excluding_zero=True),
            "min_p": _probability("min_p", self.min_p),
            "seed": _optional("seed", self.seed, 0, 2**63 - 1),
            "logprobs": _optional("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "prompt_logprobs": _optional("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
            "logprob_start_len": _integer("logprob_start_len", self.logprob_start_len, 0, MAX_INT),
            "n": _integer("n", self.n, 1, MAX_ANSWERS),
        }

    def _limits(self) -> dict[str, Any]:
        """Return where the answer ends, and what happens to the prompt, as checked values."""
        return {
            "max_new_tokens": _integer("max_new_tokens", self.max_new_tokens, 0, MAX_INT),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, MAX_INT),
            "stop": _texts("stop", self.stop),
            "stop_token_ids": _integers("stop_token_ids", self.stop_token_ids, 0, "token ids"),
            "ignore_eos": _boolean("ignore_eos", self.ignore_eos),
            "detokenize": _boolean("detokenize", self.detokenize),
            "skip_special_tokens": _boolean("skip_special_tokens", self.skip_special_tokens),
            "truncate_prompt_tokens": _truncation(self.truncate_prompt_tokens),
            "checkpoint_at": _integers("checkpoint_at", self.checkpoint_at, -MAX_INT, "positions in tokens"),
            "session": _session(self.session),
            "hints": _hints(self.hints),
            "pin_for": None if self.pin_for is None else _seconds(self.pin_for),
            "priority": _integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY),
            "tenant": _name("tenant", self.tenant, "a sender"),
            "scheduling_priority": _integer("scheduling_priority", self.scheduling_priority, -MAX_INT, MAX_INT),
        }

    def _logits(self) -> dict[str, Any]:
        """Return what is done to logits, as checked values."""
        return {
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 1 / MAX_FACTOR, MAX_FACTOR),
            "logit_bias": _bias(self.logit_bias),
            "bad_words": _texts("bad_words", self.bad_words),
            "logits_processors": _functions(self.logits_processors),
            "adapter": _name("adapter", self.adapter, "an adapter"),
            "structured": None if self.structured is None else _form(self.structured),
            "parse_response": _boolean("parse_response", self.parse_response),
            "tools": _tools(self.tools),
            "tool_choice": _name("tool_choice", self.tool_choice, "a tool, 'auto', 'none', 'required'") or "auto",
        }


def tenant_of(params: SamplingParams | None, namespace: str) -> str:
    """Name who sends a request: the tenant of its parameters, or else its namespace."""
    own = params.tenant if isinstance(params, SamplingParams) else None  # what is no parameters is refused later
    return own or namespace


def _refuse(name: str, expected: str, value: object) -> SamplingError:
    return SamplingError(f"SamplingParams: {name} must be {expected}; got {_short(value)}")


def _short(value: object) -> str:
    """A value for a message; integers too long to be printed by their size."""
    if isinstance(value, int) and not -(10**20) < value < 10**20:
        return f"an integer of {value.bit_length()} bits"
    try:
        return checks.SHORT.repr(value)
    except ValueError:  # an integer too long to be printed, inside of a list
        return f"a {type(value).__name__}"


def _integer(name: str, value: object, low: int, high: int, remedy: str = "") -> int:
    """A value as an integer in `[low, high]`."""
    if checks.is_integer(value) and low <= int(value) <= high:
        return int(value)
    raise _refuse(name, f"an integer from {low} to {high}{remedy}", value)


def _optional(name: str, value: object, low: int, high: int) -> int | None:
    """None, or a value as an integer in `[low, high]`."""
    return None if value is None else _integer(name, value, low, high, ", or None")


def _truncation(value: object) -> int | None:
    expected = "a positive number of tokens, -1 for as many as the model takes, or None"
    if value is None or (checks.is_integer(value) and int(value) == -1):
        return None if value is None else -1
    if checks.is_integer(value) and 1 <= int(value) <= MAX_INT:
        return int(value)
    raise _refuse("truncate_prompt_tokens", expected, value)


def _real(value: object) -> float:
    """A value as a float; NaN where it is not a number, or one that no float can hold."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _number(name: str, value: object, low: float, high: float) -> float:
    number = _real(value)
    if low <= number <= high:
        return number
    raise _refuse(name, f"a number from {low:g} to {high:g}", value)


def _temperature(value: object) -> float:
    number = _real(value)
    if 0 <= number <= MAX_TEMPERATURE:
        return number
    raise _refuse("temperature", f"a number from 0 (greedy) to {MAX_TEMPERATURE:g}", value)


def _probability(name: str, value: object, excluding_zero: bool = False) -> float:
    number = _real(value)
    if 0 <= number <= 1 and not (excluding_zero and number == 0):
        return number
    raise _refuse(name, f"a number in {'(' if excluding_zero else '['}0, 1]", value)


def _seconds(value: object) -> float:
    number = _real(value)
    if 0 < number <= MAX_PIN_SECONDS or number == math.inf:
        return number
    raise _refuse(
        "pin_for", f"a positive number of seconds up to {MAX_PIN_SECONDS:g}, math.inf for no end, or None", value
    )


def _session(value: object) -> str | None:
    if value is not None and session_of(value) is None:
        raise _refuse("session", f"a name of up to {MAX_SESSION_CHARACTERS} characters, or None", value)
    return session_of(value)


def _hints(value: object) -> Hints | None:
    if value is None or isinstance(value, Hints):
        return value
    raise _refuse("hints", "hybrid.Hints(...) or None", value)


def _boolean(name: str, value: object) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise _refuse(name, "True or False", value)


def _entries(name: str, values: object, of: str) -> Iterable[object]:
    if isinstance(values, np.ndarray) and values.ndim == 1:
        values = values.tolist() if len(values) <= MAX_LISTED else [None] * len(values)
    if not isinstance(values, tuple | list):
        raise _refuse(name, f"a tuple or list of {of}", values)
    if len(values) > MAX_LISTED:
        raise SamplingError(f"SamplingParams: {name} must have at most {MAX_LISTED} entries; got {len(values)}")
    return values


def _integers(name: str, values: object, low: int, of: str) -> tuple[int, ...]:
    """A tuple or list as a tuple of integers in `[low, MAX_INT]`."""
    return tuple(_integer(f"{name} ({of})", value, low, MAX_INT) for value in _entries(name, values, of))


def _bias(values: object) -> dict[int, float]:
    """Numbers by token id. Ids may be texts, as in JSON."""
    if not isinstance(values, Mapping):
        raise _refuse("logit_bias", "a dict of numbers by token id", values)
    if len(values) > MAX_LISTED:
        raise SamplingError(f"SamplingParams: logit_bias must have at most {MAX_LISTED} entries; got {len(values)}")
    checked = {}
    for key, value in values.items():
        is_text = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 11
        token = _integer("logit_bias (token ids)", int(key) if is_text else key, 0, MAX_INT)
        checked[token] = _number(f"logit_bias of token {token}", value, -MAX_BIAS, MAX_BIAS)
    return checked


def _name(name: str, value: object, of: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAMESPACE_CHARACTERS:
        raise _refuse(name, f"the name of {of}, of up to {MAX_NAMESPACE_CHARACTERS} characters, or None", value)
    try:
        return checks.text(f"SamplingParams: {name}", value)
    except ArgumentError as error:
        raise SamplingError(str(error)) from None


def _form(value: object) -> dict[str, Any]:
    """The form of a structured answer: one entry of `FORMS`. Whether a schema is one is found where it is compiled."""
    if isinstance(value, type):
        value = {"json_schema": value}
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in FORMS:
        raise _refuse("structured", f"a dict with exactly one of the keys {', '.join(FORMS)}", value)
    ((kind, form),) = value.items()
    if kind == "choice":
        form = _texts("structured (choice)", form)
        if not form or isinstance(value[kind], str):
            raise _refuse("structured (choice)", "a list of one text or more", value[kind])
    elif kind == "json_object":
        if form is not True:
            raise _refuse("structured (json_object)", "True", form)
    elif kind == "json_schema":
        form = _schema(form)
    elif not isinstance(form, str) or not form:
        raise _refuse(f"structured ({kind})", "a text that is not empty", form)
    return {kind: form}


def _schema(value: object) -> dict[str, Any]:
    """A JSON schema, from a dict, from JSON, or from a class of pydantic."""
    expected = "a JSON schema: a dict, the text of one, or a class of pydantic"
    pydantic: Any = sys.modules.get("pydantic")
    if isinstance(value, type) and pydantic is not None and issubclass(value, pydantic.BaseModel):
        model: Any = value
        value = model.model_json_schema()
    try:
        schema = json.loads(value if isinstance(value, str) else json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingError(
            f"SamplingParams: structured (json_schema) must be {expected}; got {_short(value)}: {error!s:.200}"
        ) from error
    if not isinstance(schema, dict) or checks.is_deeper(schema):
        raise _refuse("structured (json_schema)", f"{expected}, nested up to {checks.MAX_JSON_DEPTH} deep", value)
    return schema


def _tools(values: object) -> tuple[dict[str, Any], ...]:
    """Descriptions of tools, with a name each."""
    tools = [dict(value) if isinstance(value, Mapping) else {} for value in _entries("tools", values, "dicts")]
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _refuse("tools", "dicts with a name, as {'type': 'function', 'function': {'name': ...}}", values)
    return tuple(tools)


def _functions(values: object) -> tuple[LogitsProcessor, ...]:
    for value in _entries("logits_processors", values, "functions"):
        if not callable(value):
            raise _refuse("logits_processors", "functions (answer, logits) -> logits", value)
    return tuple(values)  # type: ignore[arg-type]


def _texts(name: str, values: object) -> tuple[str, ...]:
    """One text, or a tuple or list of texts, as a tuple."""
    texts = (values,) if isinstance(values, str) else values
    if not isinstance(texts, tuple | list):
        raise _refuse(name, "a text, or a tuple or list of texts", values)
    if len(texts) > MAX_STOP_TEXTS:
        raise SamplingError(
            f"SamplingParams: {name} must have at most {MAX_STOP_TEXTS} texts; got {len(texts)}. Give their common "
            "beginning instead"
        )
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _refuse(name, "non-empty texts", text)
    length = sum(map(len, texts))
    if length > MAX_STOP_CHARACTERS:
        raise SamplingError(
            f"SamplingParams: {name} must have at most {MAX_STOP_CHARACTERS} characters in all its texts; got "
            f"{length}. Give the beginning of a long text instead"
        )
    return tuple(texts)
