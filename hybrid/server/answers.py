"""What is new in an output of the engine, answer by answer; log-probabilities with the texts of their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybrid.engine.output import Completion, RequestOutput
from hybrid.prompts.answer_parser import ToolCall

Logprobs = list[dict[int, float]]

MIN_LOGPROB = -9999.0
"""Stands for the logarithm of zero, which JSON does not have."""


@dataclass(slots=True)  # not frozen: one is made for each token
class AnswerChange:
    """What is new of one answer.

    Attributes:
        index: of the answer.
        text: that was added, without reasoning and calls where the answer is taken apart.
        token_ids: that were added.
        logprobs: of these; None: not asked for.
        finish_reason: set once, with the end.
        token_bytes: of the tokens in `logprobs`.
        reasoning: that was added.
        calls: of tools, that were completed.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None
    finish_reason: str | None
    token_bytes: Mapping[int, bytes] | None = None
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class Changes:
    """Finds what is new in the outputs of one request, of which a reader has each once.

    Args:
        n: number of answers.
        is_single: an answer may have one call of a tool.
    """

    def __init__(self, n: int, is_single: bool = False) -> None:
        self._ended = [False] * n
        self._is_single = is_single

    def of(self, output: RequestOutput) -> list[AnswerChange]:
        """Return the changes since the output before."""
        if not output.completions and output.logprobs is None and output.parsed is None:  # as most are, for every token
            is_new = output.delta or output.finish_reason is not None
            return [AnswerChange(0, output.delta, output.delta_token_ids, None, output.finish_reason)] if is_new else []
        found = []
        for answer in output.outputs:
            index, new = answer.index, answer.delta_token_ids
            if self._ended[index]:
                continue
            self._ended[index] = answer.finish_reason is not None
            if new or answer.delta or self._ended[index]:
                logprobs = None if answer.logprobs is None else answer.logprobs[len(answer.token_ids) - len(new) :]
                change = _change(answer, output, answer.delta, new, logprobs)
                if self._is_single and change.calls and (parts := answer.parsed) is not None:
                    is_first = len(parts.tool_calls) == len(change.calls)
                    change = replace(change, calls=change.calls[:1] if is_first else ())
                found.append(change)
        return found


def whole(output: RequestOutput, is_single: bool = False) -> list[AnswerChange]:
    """The answers of a request from their beginnings to their ends.

    Args:
        is_single: an answer may have one call of a tool.
    """
    found = []
    for answer in output.outputs:
        change = _change(answer, output, answer.text, answer.token_ids, answer.logprobs)
        if (parts := answer.parsed) is not None:
            calls = parts.tool_calls[:1] if is_single else parts.tool_calls
            change = replace(change, text=parts.content, reasoning=parts.reasoning, calls=calls)
        found.append(change)
    return found


def _change(
    answer: Completion, output: RequestOutput, text: str, tokens: list[int], logprobs: Logprobs | None
) -> AnswerChange:
    change = AnswerChange(answer.index, text, tokens, logprobs, answer.finish_reason, output.token_bytes)
    if (new := answer.parsed) is None:
        return change
    return replace(change, text=new.delta_content, reasoning=new.delta_reasoning, calls=new.delta_tool_calls)


def chat_logprobs(change: AnswerChange, top: int) -> list[dict[str, Any]]:
    """Log-probabilities in the form of OpenAI's chat completions.

    Args:
        top: alternatives of each token.
    """
    found = []
    for token, known in zip(change.token_ids, change.logprobs or (), strict=False):
        best = sorted(known.items(), key=lambda item: -item[1])[:top]
        found.append(_entry(change, token, known[token]) | {"top_logprobs": [_entry(change, *one) for one in best]})
    return found


def _entry(change: AnswerChange, token: int, logprob: float) -> dict[str, Any]:
    raw = (change.token_bytes or {})[token]
    return {"token": raw.decode(errors="replace"), "logprob": max(logprob, MIN_LOGPROB), "bytes": [*raw]}


def completion_logprobs(change: AnswerChange, top: int, offset: int) -> dict[str, Any]:
    """Log-probabilities in the form of OpenAI's completions.

    Args:
        top: alternatives of each token.
        offset: characters before the first of these tokens.
    """
    tokens, chosen, best, offsets = [], [], [], []
    for token, known in zip(change.token_ids, change.logprobs or (), strict=False):
        text = _text(change, token)
        tokens.append(text)
        chosen.append(max(known[token], MIN_LOGPROB))
        ordered = sorted(known.items(), key=lambda item: -item[1])[:top]
        best.append({_text(change, one): max(value, MIN_LOGPROB) for one, value in ordered})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": best, "text_offset": offsets}


def _text(change: AnswerChange, token: int) -> str:
    return (change.token_bytes or {})[token].decode(errors="replace")
