"""Structured output: answers that follow a JSON schema, a regular expression, a grammar, or are one of several texts.

The grammar decides which tokens may come next, and the others are excluded from the logits: `llguidance` computes them
(the extra `structured`). What may come next depends on the answer alone, so that hits and cold runs are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

import numpy as np

from hybrid.errors import ArgumentError, SamplingError

Numbers = np.ndarray[Any, Any]

JSON_OPTIONS = {"whitespace_pattern": r"[ \n\t]{0,24}"}
"""Between the parts of JSON there is white space for indentation, and no endless run of it."""

JSON_OPTIONS_BEFORE_1_8 = {
    "whitespace_flexible": False,
    "item_separator": r",[ \n\t]{0,24}",
    "key_separator": r":[ \n\t]{0,24}",
}
"""llguidance 1.7 repeats a pattern of white space without end. There, white space follows commas and colons alone."""

UNFORCED = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @form'}
"""The grammar around every other. Where only one text can follow, llguidance would allow only the token that the
tokenizer begins it with: for the name of a control token that is the control token, which is not the text."""

MAX_GRAMMARS = 64
"""The number of grammars that an engine keeps compiled."""


class Matcher:
    """A grammar, and the answer up to now.

    Args:
        matcher: of llguidance, at the beginning of an answer.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow the answer."""
        return bool(self._matcher.is_stopped())

    def accept(self, token: int) -> None:
        """The answer continues with this token.

        Raises:
            SamplingError: the grammar does not allow it, or is too large to be followed further.
        """
        if not self._matcher.consume_token(token):
            raise SamplingError(f"structured: the answer cannot be followed: {self._matcher.get_error()!s:.300}")

    def mask(self, drafts: Sequence[int] = ()) -> Numbers:
        """Which tokens may follow the answer and these drafts: `[ceil(vocab / 32)]` int32, a bit for each token. Where
        a draft is not allowed, no token after it counts, and the mask is that of its place.

        Raises:
            SamplingError: the grammar is too large to be followed further.
        """
        num_allowed = self._matcher.try_consume_tokens(list(drafts)) if drafts else 0
        try:
            bits = self._matcher.compute_bitmask()
        finally:
            if num_allowed:
                self._matcher.rollback(num_allowed)
        if self._matcher.is_error():
            raise SamplingError(f"structured: the answer cannot be followed: {self._matcher.get_error()!s:.300}")
        return np.frombuffer(bits, np.int32)


class Grammars:
    """Compiles the grammars of one engine, and keeps the last ones.

    Args:
        tokenizer: of transformers.
        vocab_size: of the model; tokens beyond the tokenizer's are never allowed.
        end_tokens: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = sorted(end_tokens)
        self._wrapped: Any = None
        self._compiled: dict[str, Any] = {}

    def matcher(self, structured: Mapping[str, Any]) -> Matcher:
        """A matcher at the beginning of an answer.

        Args:
            structured: as `SamplingParams.structured`.

        Raises:
            SamplingError: the schema, expression or grammar cannot be used.
            ArgumentError: llguidance is not installed, or cannot use the tokenizer.
        """
        library = _library()
        text = json.dumps(dict(structured), sort_keys=True)
        if text not in self._compiled:
            if self._wrapped is None:
                self._wrapped = self._wrap(library)
            self._compiled[text] = self._compile(library, structured)
            while len(self._compiled) > MAX_GRAMMARS:
                del self._compiled[next(iter(self._compiled))]
        return Matcher(self._compiled[text].deep_copy())

    def _wrap(self, library: ModuleType) -> Any:
        import llguidance.hf

        try:
            return llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=self._end_tokens or None
            )
        except Exception as error:  # the library raises many kinds
            raise ArgumentError(f"structured: this tokenizer cannot be used: {error!s:.300}") from error

    def _compile(self, library: ModuleType, structured: Mapping[str, Any]) -> Any:
        (kind, value), *_ = structured.items()
        try:
            form = COMPILERS[kind](library.LLMatcher, value) | {"name": "form"}
            grammars = json.dumps({"grammars": [UNFORCED, form]})
            matcher = library.LLMatcher(self._wrapped, grammars, log_level=0)
        except ValueError as error:
            raise SamplingError(f"structured: this {kind} cannot be used: {error!s:.500}") from error
        if matcher.is_error():
            reason = " ".join(str(matcher.get_error()).split())
            raise SamplingError(f"structured: this {kind} cannot be used: {reason:.500}")
        return matcher


def json_options() -> dict[str, Any]:
    """How the installed llguidance limits white space in JSON."""
    major, minor = map(int, version("llguidance").split(".")[:2])
    return JSON_OPTIONS if (major, minor) >= (1, 8) else JSON_OPTIONS_BEFORE_1_8


def _choice(texts: Sequence[str]) -> dict[str, Any]:
    return {"lark_grammar": f"start: {' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}"}


def _first(grammars: str) -> dict[str, Any]:
    """The grammar that llguidance has made of something else."""
    found: dict[str, Any] = json.loads(grammars)["grammars"][0]
    return found


COMPILERS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "json_schema": lambda matcher, schema: _first(matcher.grammar_from_json_schema(schema, overrides=json_options())),
    "json_object": lambda matcher, _: _first(
        matcher.grammar_from_json_schema({"type": "object"}, overrides=json_options())
    ),
    "regex": lambda matcher, regex: _first(matcher.grammar_from_regex(regex)),
    "grammar": lambda _, lark: {"lark_grammar": lark},
    "choice": lambda _, texts: _choice(texts),
}
"""For each key of `SamplingParams.structured`: from its value to a grammar of llguidance."""


def _library() -> ModuleType:
    try:
        import llguidance

        module: ModuleType = llguidance
    except ImportError as error:
        raise ArgumentError(
            f"structured output needs llguidance ({error}): install this package with its extra 'structured'"
        ) from error
    return module
