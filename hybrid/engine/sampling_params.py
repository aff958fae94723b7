"""The parameters of a request: how its prompt is continued. Values are checked, and bounded, when they are set."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from hybrid.errors import SamplingError

MAX_INT = 2**31 - 1
"""The largest token id, position and number of tokens."""

MAX_TEMPERATURE = 1e6
"""From here on every token is about as likely as any other, and fp32 logits would lose their order."""

MAX_LOGPROBS = 100
"""The maximum number of log-probabilities per token."""

MAX_PRIORITY = 100
"""Priorities are between minus this and this."""

MAX_PIN_SECONDS = 1e9
"""The longest time to live of a pin, about 30 years; `math.inf` has no end."""

MAX_STOP_TEXTS = 256
"""The maximum number of stop texts of a request."""

MAX_STOP_CHARACTERS = 16384
"""The maximum length of all stop texts of a request together."""

MAX_LISTED = 1024
"""The maximum number of entries of `stop_token_ids` and of `checkpoint_at`."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. The default is greedy.

    Numbers may be those of Python or of NumPy; they are stored as Python's.

    Args:
        max_new_tokens: the maximum number of tokens of the answer.
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
        priority: of what this request leaves in the cache, for eviction policies that use it. Higher is kept longer.

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
    priority: int = 0

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "max_new_tokens": _integer("max_new_tokens", self.max_new_tokens, 1, MAX_INT),
            "temperature": _temperature(self.temperature),
            "top_k": _integer("top_k", self.top_k, 0, MAX_INT, "; use 0 for all tokens"),
            "top_p": _probability("top_p", self.top_p, excluding_zero=True),
            "min_p": _probability("min_p", self.min_p),
            "seed": None if self.seed is None else _integer("seed", self.seed, 0, 2**63 - 1, ", or None"),
            "stop": _stop_texts(self.stop),
            "stop_token_ids": _integers("stop_token_ids", self.stop_token_ids, 0, "token ids"),
            "ignore_eos": _boolean("ignore_eos", self.ignore_eos),
            "logprobs": None
            if self.logprobs is None
            else _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, ", or None"),
            "checkpoint_at": _integers("checkpoint_at", self.checkpoint_at, -MAX_INT, "positions in tokens"),
            "pin_for": None if self.pin_for is None else _seconds(self.pin_for),
            "priority": _integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.temperature == 0:
            self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        """Greedy answers do not depend on these parameters: who sets them expects something else."""
        wanted = {
            "top_k": self.top_k not in (0, 1),
            "top_p": self.top_p != 1,
            "min_p": self.min_p != 0,
            "seed": self.seed is not None,
        }
        for name in (name for name, is_set in wanted.items() if is_set):
            raise SamplingError(
                f"SamplingParams: {name}={vars(self)[name]} has no effect with temperature=0 (greedy); set "
                "temperature=1.0 or leave it out"
            )


def _refuse(name: str, expected: str, value: object) -> SamplingError:
    return SamplingError(f"SamplingParams: {name} must be {expected}; got {_short(value)}")


def _short(value: object) -> str:
    """A value for a message; integers too long to be printed by their size."""
    if isinstance(value, int) and not -(10**20) < value < 10**20:
        return f"an integer of {value.bit_length()} bits"
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer too long to be printed, inside of a list
        return f"a {type(value).__name__}"


def _integer(name: str, value: object, low: int, high: int, remedy: str = "") -> int:
    """A value as an integer in `[low, high]`."""
    if isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high:
        return int(value)
    raise _refuse(name, f"an integer from {low} to {high}{remedy}", value)


def _real(value: object) -> float:
    """A value as a float; NaN where it is not a number, or one that no float can hold."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


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


def _boolean(name: str, value: object) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise _refuse(name, "True or False", value)


def _entries(name: str, values: object, of: str) -> Iterable[object]:
    if not isinstance(values, tuple | list):
        raise _refuse(name, f"a tuple or list of {of}", values)
    if len(values) > MAX_LISTED:
        raise SamplingError(f"SamplingParams: {name} must have at most {MAX_LISTED} entries; got {len(values)}")
    return values


def _integers(name: str, values: object, low: int, of: str) -> tuple[int, ...]:
    """A tuple or list as a tuple of integers in `[low, MAX_INT]`."""
    return tuple(_integer(f"{name} ({of})", value, low, MAX_INT) for value in _entries(name, values, of))


def _stop_texts(values: object) -> tuple[str, ...]:
    """One text, or a tuple or list of texts, as a tuple."""
    texts = (values,) if isinstance(values, str) else values
    if not isinstance(texts, tuple | list):
        raise _refuse("stop", "a text, or a tuple or list of texts", values)
    if len(texts) > MAX_STOP_TEXTS:
        raise SamplingError(
            f"SamplingParams: stop must have at most {MAX_STOP_TEXTS} texts; got {len(texts)}. Give their common "
            "beginning instead"
        )
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _refuse("stop", "non-empty texts", text)
    length = sum(map(len, texts))
    if length > MAX_STOP_CHARACTERS:
        raise SamplingError(
            f"SamplingParams: stop must have at most {MAX_STOP_CHARACTERS} characters in all its texts; got {length}. "
            "Give the beginning of a long text instead"
        )
    return tuple(texts)
