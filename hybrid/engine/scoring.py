"""Choices scored after prompts: how probable the model finds each as a continuation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybrid.engine.output import RequestOutput
from hybrid.errors import PromptError, RequestError
from hybrid.prompts.encode import Prompt

Choice = str | list[int]
"""A text, or token ids."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one choice after one prompt.

    Attributes:
        logprob: of the choice after the prompt, the sum over its tokens.
        token_ids: of the choice.
        token_logprobs: of each of its tokens.
        is_greedy: each of its tokens is the most likely one: greedy decoding would give the choice.
        cached_tokens: of prompt and choice, those that were not computed.
    """

    logprob: float
    token_ids: list[int]
    token_logprobs: list[float]
    is_greedy: bool
    cached_tokens: int


def score_of(output: RequestOutput, start: int) -> Score:
    """The score of the tokens of a prompt from `start` on.

    Raises:
        RequestError: the request failed.
    """
    if output.error is not None or output.prompt_logprobs is None:
        raise RequestError(f"{output.request_id} failed: {output.error}")
    tokens = output.prompt_token_ids[start:]
    known = output.prompt_logprobs[start:]
    values, is_greedy = [], True
    for token, row in zip(tokens, known, strict=True):
        assert row is not None
        values.append(row[token])
        is_greedy = is_greedy and row[token] == max(row.values())
    return Score(sum(values), tokens, values, is_greedy, output.usage.cached_tokens)


def joined(tokenizer: Any | None, prompt: Prompt, ids: list[int], choice: Choice) -> tuple[list[int], int]:
    """The token ids of a prompt and a choice, and where the choice begins. Of two texts they are those of both
    together, and the choice begins where they part from those of the prompt.

    Args:
        ids: of the prompt.

    Raises:
        PromptError: there is no tokenizer for a text, or the choice is empty.
    """
    if isinstance(choice, str):
        if tokenizer is None:
            raise PromptError("this checkpoint has no tokenizer; give choices as lists of token ids")
        if isinstance(prompt, str):
            whole: list[int] = tokenizer(prompt + choice).input_ids
            start = next((at for at, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), len(ids))
        else:
            whole, start = ids + tokenizer(choice, add_special_tokens=False).input_ids, len(ids)
    else:
        whole, start = ids + list(choice), len(ids)
    if not 0 < start < len(whole):
        raise PromptError("a choice has at least one token, after a prompt of at least one")
    return whole, start


def choices_of(choices: Sequence[Choice] | Sequence[Sequence[Choice]], num_prompts: int) -> list[list[Choice]]:
    """The choices of each of several prompts: the same for all, or for each its own.

    Raises:
        PromptError: they are for another number of prompts, or there are none.
    """
    many: list[Any] = list(choices)
    is_own = bool(many) and all(
        isinstance(each, list | tuple) and bool(each) and not isinstance(each[0], int) for each in many
    )
    if is_own and len(many) != num_prompts:
        raise PromptError(f"choices for {len(many)} prompts, and there are {num_prompts}: give a list for each, or one")
    if not many:
        raise PromptError("there are no choices; give at least one text")
    return [list(each) for each in many] if is_own else [many] * num_prompts
