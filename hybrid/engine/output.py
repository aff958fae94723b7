"""The results of a request, as its caller gets them."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.cache.pins import Pin


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens of a request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens that were not computed (the usable hit).
        page_tokens: prompt tokens whose pages were cached (the page hit).
        completion_tokens: tokens of the answer.
    """

    prompt_tokens: int
    cached_tokens: int
    page_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of a request after a step. Each output holds the whole answer up to now.

    Attributes:
        request_id: as returned by `Engine.add_request`.
        prompt_token_ids: the prompt.
        text: the answer, without the stop text; empty without a tokenizer.
        token_ids: the answer's tokens, including the one that ended it.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        usage: numbers of tokens.
        logprobs: for each token of the answer `{token_id: logprob}`; None unless requested.
        explain: why the hit was what it was: prompt tokens, page hit, usable hit, and what was missing.
        time_to_first_token: seconds from the arrival; None before the first token.
        tokens_per_second: of the answer, from its first token on; None before the second token.
        pin: made by `SamplingParams(pin_for=...)`, for `Engine.unpin`; None before the end, and without a pin.
        error: why the request failed, when `finish_reason` is "error".
    """

    request_id: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str | None
    usage: Usage
    logprobs: list[dict[int, float]] | None
    explain: str
    time_to_first_token: float | None
    tokens_per_second: float | None
    pin: Pin | None = None
    error: str | None = None


class Outputs:
    """Outputs that wait for their consumer: a caller of `step`, one `generate`, or one `stream`.

    Outputs are cumulative, so that only the latest of each request is kept.
    """

    def __init__(self) -> None:
        self._latest: dict[str, RequestOutput] = {}

    def __bool__(self) -> bool:
        return bool(self._latest)

    def put(self, output: RequestOutput) -> None:
        """Add an output. It replaces an earlier one of the same request."""
        self._latest[output.request_id] = output

    def take(self) -> list[RequestOutput]:
        """Remove and return all outputs, in the order in which their requests first got one."""
        latest, self._latest = self._latest, {}
        return list(latest.values())
