"""The parameters of a request: how its prompt is continued. Values are checked, and bounded, when they are set."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from hybrid import checks
from hybrid.checks import BOOLEANS, Rule, RuleError, integers, numbers, numbers_within, optional, where
from hybrid.errors import SamplingError
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
        checks.settings(self, SamplingError, **RULES)
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


def tenant_of(params: SamplingParams | None, namespace: str) -> str:
    """Name who sends a request: the tenant of its parameters, or else its namespace."""
    own = params.tenant if isinstance(params, SamplingParams) else None  # what is no parameters is refused later
    return own or namespace


def _lists(expected: str, entries: Rule[Any], of: str = "") -> Rule[tuple[Any, ...]]:
    """Lists of up to `MAX_LISTED` entries, as tuples.

    Args:
        expected: in words.
        entries: what each may be.
        of: said of one that is not as expected.
    """

    def read(values: Any) -> tuple[Any, ...]:
        if len(values) > MAX_LISTED:
            raise RuleError(f"must have at most {MAX_LISTED} entries; got {len(values)}")
        given = values.tolist() if isinstance(values, np.ndarray) else values
        return tuple([entries.check(of, value, RuleError) for value in given])

    return Rule(
        expected,
        lambda values: isinstance(values, tuple | list) or (isinstance(values, np.ndarray) and values.ndim == 1),
        read,
    )


def _read_texts(values: Any) -> tuple[str, ...]:
    texts = (values,) if isinstance(values, str) else values
    if len(texts) > MAX_STOP_TEXTS:
        raise RuleError(
            f"must have at most {MAX_STOP_TEXTS} texts; got {len(texts)}. Give their common beginning instead"
        )
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RuleError(f"must be non-empty texts; got {checks.shown(text)}")
    length = sum(map(len, texts))
    if length > MAX_STOP_CHARACTERS:
        raise RuleError(
            f"must have at most {MAX_STOP_CHARACTERS} characters in all its texts; got {length}. Give the beginning of "
            "a long text instead"
        )
    return tuple(texts)


def _read_bias(values: Mapping[Any, Any]) -> dict[int, float]:
    """Numbers by token id. Ids may be texts, as in JSON."""
    if len(values) > MAX_LISTED:
        raise RuleError(f"must have at most {MAX_LISTED} entries; got {len(values)}")
    checked = {}
    for key, value in values.items():
        is_text = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 11
        token = COUNTS.check("(token ids)", int(key) if is_text else key, RuleError)
        checked[token] = BIASES.check(f"of token {token}", value, RuleError)
    return checked


def _names(of: str) -> Rule[str | None]:
    """Names of up to `MAX_NAMESPACE_CHARACTERS` characters, and None."""
    return optional(
        Rule(
            f"the name of {of}, of up to {MAX_NAMESPACE_CHARACTERS} characters",
            lambda value: isinstance(value, str) and 0 < len(value) <= MAX_NAMESPACE_CHARACTERS,
            checks.TEXTS.read,
        )
    )


def _is_form(value: object) -> bool:
    return isinstance(value, type) or (isinstance(value, Mapping) and len(value) == 1 and {*value} <= {*FORMS})


def _read_form(value: Any) -> dict[str, Any]:
    """The form of a structured answer: one entry of `FORMS`. Whether a schema is one is found where it is compiled."""
    ((kind, form),) = value.items() if isinstance(value, Mapping) else [("json_schema", value)]
    return {kind: FORMS[kind].check(f"({kind})", form, RuleError)}


def _read_schema(value: Any) -> dict[str, Any]:
    pydantic: Any = sys.modules.get("pydantic")
    if isinstance(value, type) and pydantic is not None and issubclass(value, pydantic.BaseModel):
        model: Any = value
        value = model.model_json_schema()
    try:
        schema = json.loads(value if isinstance(value, str) else json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RuleError(f"must be {SCHEMA}; got {checks.shown(value)}: {error!s:.200}") from error
    if not isinstance(schema, dict) or checks.is_deeper(schema):
        raise RuleError(f"must be {SCHEMA}, nested up to {checks.MAX_JSON_DEPTH} deep; got {checks.shown(value)}")
    return schema


def _has_name(tool: object) -> bool:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


COUNTS = integers(0, MAX_INT)
BIASES = numbers_within(-MAX_BIAS, MAX_BIAS)
LOGPROBS = optional(integers(0, MAX_LOGPROBS))
PENALTIES = numbers_within(-MAX_PENALTY, MAX_PENALTY)
TEXTS = Rule("a text, or a tuple or list of texts", lambda value: isinstance(value, str | tuple | list), _read_texts)
SOURCES = where("a text that is not empty", lambda value: isinstance(value, str) and value)
TOOLS = _names("a tool, 'auto', 'none', 'required'")
SCHEMA = "a JSON schema: a dict, the text of one, or a class of pydantic"

FORMS: dict[str, Rule[Any]] = {
    "json_schema": Rule(SCHEMA, lambda value: True, _read_schema),
    "json_object": where("True", lambda value: value is True),
    "regex": SOURCES,
    "grammar": SOURCES,
    "choice": Rule("a list of one text or more", lambda value: isinstance(value, tuple | list) and value, _read_texts),
}
"""What the entry of `SamplingParams.structured` may be, by its key."""

RULES: dict[str, Rule[Any]] = {
    "temperature": numbers(
        f"a number from 0 (greedy) to {MAX_TEMPERATURE:g}", lambda number: 0 <= number <= MAX_TEMPERATURE
    ),
    "top_k": integers(0, MAX_INT, remedy="; use 0 for all tokens"),
    "top_p": numbers("a number in (0, 1]", lambda number: 0 < number <= 1),
    "min_p": numbers("a number in [0, 1]", lambda number: 0 <= number <= 1),
    "seed": optional(integers(0)),
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "logprob_start_len": COUNTS,
    "n": integers(1, MAX_ANSWERS),
    "max_new_tokens": COUNTS,
    "min_tokens": COUNTS,
    "stop": TEXTS,
    "stop_token_ids": _lists("a tuple or list of token ids", COUNTS, "(token ids)"),
    "ignore_eos": BOOLEANS,
    "detokenize": BOOLEANS,
    "skip_special_tokens": BOOLEANS,
    "truncate_prompt_tokens": optional(
        Rule(
            "a positive number of tokens, -1 for as many as the model takes",
            lambda value: checks.is_integer(value) and (int(value) == -1 or 1 <= int(value) <= MAX_INT),
            int,
        )
    ),
    "checkpoint_at": _lists("a tuple or list of positions in tokens", integers(-MAX_INT, MAX_INT), "(positions)"),
    "session": optional(where(f"a name of up to {MAX_SESSION_CHARACTERS} characters", session_of)),
    "hints": optional(where("hybrid.Hints(...)", lambda value: isinstance(value, Hints))),
    "pin_for": optional(
        numbers(
            f"a positive number of seconds up to {MAX_PIN_SECONDS:g}, math.inf for no end",
            lambda seconds: 0 < seconds <= MAX_PIN_SECONDS or seconds == math.inf,
        )
    ),
    "priority": integers(-MAX_PRIORITY, MAX_PRIORITY),
    "tenant": _names("a sender"),
    "scheduling_priority": integers(-MAX_INT, MAX_INT),
    "presence_penalty": PENALTIES,
    "frequency_penalty": PENALTIES,
    "repetition_penalty": numbers_within(1 / MAX_FACTOR, MAX_FACTOR),
    "logit_bias": Rule("a dict of numbers by token id", lambda value: isinstance(value, Mapping), _read_bias),
    "bad_words": TEXTS,
    "logits_processors": _lists(
        "a tuple or list of functions", where("functions (answer, logits) -> logits", callable)
    ),
    "adapter": _names("an adapter"),
    "structured": optional(Rule(f"a dict with exactly one of the keys {', '.join(FORMS)}", _is_form, _read_form)),
    "parse_response": BOOLEANS,
    "tools": _lists(
        "a tuple or list of dicts",
        Rule("with a name, as {'type': 'function', 'function': {'name': ...}}", _has_name, dict),
        "(dicts)",
    ),
    "tool_choice": Rule(TOOLS.expected, TOOLS.accepts, lambda value: TOOLS.read(value) or "auto"),
}
"""What the fields of `SamplingParams` may be."""
