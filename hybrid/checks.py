"""Checks of arguments: each returns the value, as Python's own type, or raises an error that names it.

What a setting may be is a `Rule`; `settings` reads all fields of a dataclass by theirs.
"""

from __future__ import annotations

import math
import reprlib
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeGuard, TypeVar

from hybrid.errors import ArgumentError, CheckpointError, KeywordError

Settings = TypeVar("Settings", bound=type)
Given = ParamSpec("Given")
Result = TypeVar("Result")
Value = TypeVar("Value")

DTYPE_NAMES = ("float32", "bfloat16", "float16")
"""The types that a model runs in, for who checks arguments before torch is imported."""

KV_DTYPE_NAMES = ("auto", "fp8", "int8")
"""The types in which keys and values can be kept."""

STATE_DTYPE_NAMES = ("float32", "bfloat16", "int8")
"""The types in which checkpoints can be stored."""

MAX_JSON_DEPTH = 100
"""Objects and lists within each other in JSON from elsewhere: what reads it recurses, and a process may end by that."""

SETTINGS_ELSEWHERE = {
    "max_tokens": "max_new_tokens",
    "min_new_tokens": "min_tokens",
    "do_sample": "temperature",
    "num_return_sequences": "n",
    "lora_request": "adapter",
    "guided_json": "structured",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "block_size": "page_size",
    "gpu_memory_utilization": "memory",
    "mem_fraction_static": "memory",
    "kv_cache_dtype": "kv_dtype",
    "enable_prefix_caching": "enabled",
    "max_running_requests": "max_num_seqs",
    "context_length": "max_model_len",
    "sampling_params": "params",
    "generation_config": "params",
    "use_tqdm": "progress",
    "torch_dtype": "dtype",
    "device_map": "device",
    "quantization": "load_dtype",
    "speculative_config": "speculation",
    "cache_salt": "namespace",
    "rid": "request_id",
}
"""Names of vLLM, SGLang and transformers, and what they are called here (docs/migrating.md)."""


def known_names(settings: Settings) -> Settings:
    """Make a dataclass of settings refuse a keyword that it does not have with an error that names the one meant.

    Raises:
        KeywordError: by its constructor.
    """
    make: Callable[..., None] = vars(settings)["__init__"]
    names = [field.name for field in fields(settings)]

    @wraps(make)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        refuse_unknown(f"{settings.__name__} has no", given, names)
        make(self, *args, **given)

    type.__setattr__(settings, "__init__", checked)
    return settings


def known_keywords(**settings: type) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Make a function refuse a keyword that it does not have with an error that names the one meant.

    Args:
        settings: dataclasses of settings that the function takes, by argument: their fields are often given to the
            function itself.

    Raises:
        KeywordError: by the function.
    """

    def decorate(call: Callable[Given, Result]) -> Callable[Given, Result]:
        names = [name for name in signature(call).parameters if name not in ("self", "cls")]

        @wraps(call)
        def checked(*args: Given.args, **given: Given.kwargs) -> Result:
            for name in given:
                if name not in names:
                    _refuse_misplaced(call.__qualname__, name, settings)
                    refuse_unknown(f"{call.__qualname__} has no", [name], names)
            return call(*args, **given)

        return checked

    return decorate


def _refuse_misplaced(call: str, name: str, settings: Mapping[str, type]) -> None:
    """Refuse the name of a setting that belongs into an argument of a function.

    Raises:
        KeywordError: it is one.
    """
    meant = SETTINGS_ELSEWHERE.get(name, name)
    for argument, made in settings.items():
        if meant in (field.name for field in fields(made)):
            raise KeywordError(f"{call} has no {shown(name)}; give {argument}={made.__name__}({meant}=...)")


def refuse_unknown(refusal: str, given: Iterable[str], names: Sequence[str]) -> None:
    """Refuse keywords that there are not.

    Args:
        refusal: the message up to the keyword.
        given: the keywords.
        names: those that there are.

    Raises:
        KeywordError: for the first that there is not; it names the one meant.
    """
    for name in given:
        if name not in names:
            meant = [SETTINGS_ELSEWHERE[name]] if SETTINGS_ELSEWHERE.get(name) in names else []
            meant = meant or get_close_matches(name, names, n=1)
            remedy = f"; did you mean {meant[0]}?" if meant else f"; there are: {', '.join(names)}"
            raise KeywordError(f"{refusal} {shown(name)}{remedy}")


MAX_INT = 2**63 - 1


class ShortRepr(reprlib.Repr):
    """Cuts what is long. It sorts no more keys than it shows: a dict may have millions."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Cut a dict."""
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


SHORT = ShortRepr()


def shown(value: object) -> str:
    """A value for a message: cut where it is long, and integers too long to be printed by their size."""
    if isinstance(value, int) and not -(10**20) < value < 10**20:
        return f"an integer of {value.bit_length()} bits"
    try:
        return SHORT.repr(value)
    except Exception:  # a repr may raise anything
        return f"a {type(value).__name__}"


def is_integer(value: object) -> TypeGuard[Integral]:
    """Tell whether a value is an integer of any type, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


class RuleError(Exception):
    """What is wrong with a value, where a rule's own words do not say it: said after the name of the setting."""


@dataclass(frozen=True)
class Rule(Generic[Value]):
    """What a setting may be.

    Attributes:
        expected: in words, said after "must be".
        accepts: whether a value is as expected.
        read: returns it as Python's own type. It may raise `RuleError`.
    """

    expected: str
    accepts: Callable[[Any], object]
    read: Callable[[Any], Value]

    def check(self, name: str, value: object, error: type[Exception] = ArgumentError) -> Value:
        """Read a value.

        Args:
            name: of the setting, for the message.
            error: raised if the value is not as expected.
        """
        try:
            if self.accepts(value):
                return self.read(value)
        except RuleError as refused:
            raise error(f"{name} {refused}") from refused.__cause__
        raise error(f"{name} must be {self.expected}; got {shown(value)}")


def settings(given: object, error: type[Exception] = ArgumentError, /, **rules: Rule[Any]) -> None:
    """Read fields of a frozen dataclass, each by its rule, and store them as Python's own types.

    Args:
        given: the dataclass, which has the values as they were given.
        error: raised for the first that is not as expected; it names the class and the field.
        rules: by field.
    """
    kind = type(given)
    for name, rule in rules.items():
        value = getattr(given, name)
        if value is not getattr(kind, name, MISSING):  # defaults are right as they are
            object.__setattr__(given, name, rule.check(f"{kind.__name__}: {name}", value, error))


def where(expected: str, accepts: Callable[[Any], object]) -> Rule[Any]:
    """The values of which something is true, as they are."""
    return Rule(expected, accepts, lambda value: value)


def optional(rule: Rule[Value]) -> Rule[Value | None]:
    """What a rule accepts, or None."""
    return Rule(
        f"{rule.expected}, or None",
        lambda value: value is None or rule.accepts(value),
        lambda value: None if value is None else rule.read(value),
    )


def one_of(*names: str) -> Rule[str]:
    """Some texts and no others."""
    return where(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def integers(low: int, high: int = MAX_INT, *, remedy: str = "") -> Rule[int]:
    """Integers in `[low, high]`.

    Args:
        remedy: what else may be given, for the message.
    """
    expected = f"an integer from {low}{f' to {high}' if high < MAX_INT else ' on'}{remedy}"
    return Rule(expected, lambda value: is_integer(value) and low <= int(value) <= high, int)


def numbers(expected: str, accepts: Callable[[float], bool]) -> Rule[float]:
    """Numbers of a range.

    Args:
        expected: the range in words.
        accepts: whether a number is in it. NaN is in none.
    """
    return Rule(expected, lambda value: accepts(_as_float(value)), float)


def numbers_within(low: float, high: float) -> Rule[float]:
    """Numbers in `[low, high]`."""
    return numbers(f"a number from {low:g} to {high:g}", lambda number: low <= number <= high)


def _as_float(value: object) -> float:
    """A value as a float; NaN where it is no number, or one that no float can hold."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def _is_boolean(value: object) -> bool:
    import numpy as np  # not above: the help of the command line reads this file

    return isinstance(value, bool | np.bool_)


def _read_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RuleError(
            f"is not a text: its character {error.start} is {value[error.start]!r}, a lone surrogate; decode bytes "
            "with the right encoding, or with errors='replace'"
        ) from None
    return value


BOOLEANS = Rule("True or False", _is_boolean, bool)
"""True and False: no text, and no number."""

TEXTS = Rule("a text", lambda value: isinstance(value, str), _read_text)
"""Texts that can be written in UTF-8."""


def boolean(name: str, value: object) -> bool:
    """Check that an argument is True or False."""
    return BOOLEANS.check(name, value)


def integer(name: str, value: object, low: int, high: int = MAX_INT) -> int:
    """Check that an argument is an integer in `[low, high]`."""
    return integers(low, high).check(name, value)


def count(name: str, value: object) -> int:
    """Check that an argument is a number of tokens, pages and the like: an integer from 0 on."""
    return value if type(value) is int and value >= 0 else integer(name, value, 0)


def number(name: str, value: object) -> float:
    """Check that an argument is a number, and not NaN. Infinity is one."""
    return numbers("a number", lambda number: number == number).check(name, value)


def text(name: str, value: object) -> str:
    """Check that an argument is a text that can be written in UTF-8."""
    return TEXTS.check(name, value)


def is_file(path: Path) -> bool:
    """Tell whether a checkpoint has a file, which it may also lack.

    Raises:
        CheckpointError: something of that name is there, and is not a file that can be read: a folder, a pipe, a link
            that leads nowhere, as in a download of which parts were deleted. It is not taken for a file that is
            missing.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            with path.open("rb"):
                return True
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link to {str(path.readlink())!r:.200}, which is not there; download the checkpoint again"
            ) from error
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; check its permissions, or copy it again") from error
    kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
    raise CheckpointError(f"{path} is {kind}, and must be a file; remove it, or copy the checkpoint again")


def is_deeper(value: object, limit: int = MAX_JSON_DEPTH) -> bool:
    """Tell whether a value of JSON has more than `limit` objects and lists within each other, without recursion."""
    level: list[Any] = [value]
    for _ in range(limit + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return False
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return True
