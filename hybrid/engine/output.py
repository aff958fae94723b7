"""The results of a request, as its caller gets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hybrid.cache.explain import Explanation
from hybrid.cache.pins import Pin
from hybrid.observe import notebook
from hybrid.prompts.answer_parser import ParsedAnswer, ToolCall


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens of a request; where it has several answers, the last three count those of all.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens that were not computed (the usable hit).
        page_tokens: prompt tokens whose pages were cached (the page hit).
        completion_tokens: tokens of the answer.
        written_tokens: prompt tokens after the usable hit, up to the last checkpoint that the cache has taken of the
            prompt: the same prompt will not compute them again.
        drafted_tokens: drafts that were computed for the answer.
        accepted_tokens: of these, those that were what came next, and are in the answer.
    """

    prompt_tokens: int
    cached_tokens: int
    page_tokens: int
    completion_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    written_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that an engine has queued, before its first token.

    Attributes:
        request_id: of the request; its outputs have it.
        prompt_tokens: tokens of the prompt.
        predicted: the hit that it would have if it started now: what requests before it compute may add to it, and what
            they evict may take from it; copies in host memory and on disk are not looked at.
        end_token_ids: the tokens that end its answer: the model's, unless they are ignored, and its own.
    """

    request_id: str
    prompt_tokens: int
    predicted: Explanation
    end_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer to a prompt.

    Attributes:
        index: 0 is the first.
        text, token_ids, delta, delta_token_ids, finish_reason, stop_reason, logprobs, error, error_code, parsed: as in
            `RequestOutput`.
    """

    index: int
    text: str
    token_ids: list[int]
    delta: str
    delta_token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[dict[int, float]] | None
    error: str | None
    error_code: str | None
    parsed: ParsedAnswer | None

    def since(self, previous: Completion | None) -> Completion:
        """The same answer for a reader whose last one was `previous`, or None if it had none."""
        return replace(self, **_unread(self, previous))


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of a request after a step. Each output holds the whole answer up to now, and what of it is new.

    Attributes:
        request_id: as returned by `Engine.add_request`.
        prompt_token_ids: the prompt.
        text: the answer, without the stop text; empty without a tokenizer.
        token_ids: the answer's tokens, including the one that ended it.
        delta: the end of `text` that the request's output before this one did not have.
        delta_token_ids: the end of `token_ids` that the request's output before this one did not have.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        usage: numbers of tokens.
        logprobs: for each token of the answer `{token_id: logprob}`; None unless requested.
        explain: why the hit was what it was: prompt tokens, page hit, usable hit, and what was missing; `str` of it is
            a line of text.
        time_to_first_token: seconds from the arrival; None before the first token.
        tokens_per_second: of the answer, from its first token on; None before the second token.
        time_queued: seconds from the arrival until it got its memory, encoding included; None before that.
        time_to_end: seconds from the arrival until its answers had ended; None before that.
        stop_reason: what ended an answer whose `finish_reason` is "stop": the stop text, or the id of the token, the
            model's end-of-text tokens included; None where a grammar ended it.
        token_bytes: for each token in `logprobs` and `prompt_logprobs` the bytes of its text: several tokens may make
            one character, and the name of a control token is its text. It grows with the answer; None without
            log-probabilities, and without a tokenizer.
        pin: made by `SamplingParams(pin_for=...)`, for `Engine.unpin`; None before the end, and without a pin.
        error: why the request failed, when `finish_reason` is "error".
        error_code: the kind of this error, for programs: `HybridError.code`, or "internal" for other exceptions.
        prompt_logprobs: for each token of the prompt `{token_id: logprob}`, None for the first one and those before
            `SamplingParams.logprob_start_len`, as far as they are computed; None unless requested.
        completions: the answers, where there are several; see `outputs`.
        parsed: the parts of the answer; None without `SamplingParams(parse_response=True)`.
    """

    request_id: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    delta: str
    delta_token_ids: list[int]
    finish_reason: str | None
    usage: Usage
    logprobs: list[dict[int, float]] | None
    explain: Explanation
    time_to_first_token: float | None
    tokens_per_second: float | None
    time_queued: float | None = None
    time_to_end: float | None = None
    stop_reason: str | int | None = None
    token_bytes: Mapping[int, bytes] | None = None
    pin: Pin | None = None
    error: str | None = None
    error_code: str | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    completions: tuple[Completion, ...] = ()
    parsed: ParsedAnswer | None = None

    @property
    def reasoning(self) -> str:
        """The reasoning of the answer, without the marks around it; empty where it was not taken apart."""
        return self.parsed.reasoning if self.parsed is not None else ""

    @property
    def content(self) -> str:
        """The answer without reasoning and calls of tools; the whole text where it was not taken apart."""
        return self.parsed.content if self.parsed is not None else self.text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools that are complete; none where the answer was not taken apart."""
        return self.parsed.tool_calls if self.parsed is not None else ()

    def message(self) -> dict[str, Any]:
        """The answer as a message of a chat, with its reasoning and its calls of tools."""
        if self.parsed is not None:
            return self.parsed.message()
        return {"role": "assistant", "content": self.text}

    @property
    def outputs(self) -> tuple[Completion, ...]:
        """The `SamplingParams.n` answers. The fields of the output itself are those of the first; its `finish_reason`
        is set when all answers have ended."""
        return self.completions or (self.completion(0),)

    def completion(self, index: int) -> Completion:
        """Its own answer, as one of several."""
        return Completion(
            index,
            self.text,
            self.token_ids,
            self.delta,
            self.delta_token_ids,
            self.finish_reason,
            self.stop_reason,
            self.logprobs,
            self.error,
            self.error_code,
            self.parsed,
        )

    def since(self, previous: RequestOutput | None) -> RequestOutput:
        """The same output for a reader whose last one was `previous`, of the same request, or None if it had none:
        with the deltas after it."""
        num_tokens, num_characters = (len(previous.token_ids), len(previous.text)) if previous is not None else (0, 0)
        has_all = len(self.delta_token_ids) == len(self.token_ids) - num_tokens
        has_all = has_all and len(self.delta) == len(self.text) - num_characters
        if has_all and not self.completions and self.parsed is None:  # the reader missed none, as with most tokens
            return self
        former = previous.completions if previous is not None else (None,) * len(self.completions)
        completions = tuple(own.since(before) for own, before in zip(self.completions, former, strict=True))
        return replace(self, completions=completions, **_unread(self, previous))

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows of it."""
        times = [] if self.time_to_first_token is None else [f"first token after {self.time_to_first_token:.3f} s"]
        times += [] if self.tokens_per_second is None else [f"{self.tokens_per_second:.1f} tokens per second"]
        rows = [
            ("request", self.request_id),
            ("answer", f"{self.usage.completion_tokens} tokens, {self.finish_reason or 'unfinished'}"),
            ("time", ", ".join(times)),
            ("hit", str(self.explain)),
            ("error", self.error or ""),
        ]
        shown = self.text or " ".join(map(str, self.token_ids))
        given = [row for row in rows if row[1]]
        return notebook.answer(shown, self.usage.cached_tokens, self.usage.prompt_tokens, given)


def _unread(answer: Completion | RequestOutput, previous: Completion | RequestOutput | None) -> dict[str, Any]:
    """The fields of an answer that differ for a reader whose last one was `previous`, or None if it had none."""
    num_tokens, num_characters = (len(previous.token_ids), len(previous.text)) if previous is not None else (0, 0)
    before = previous.parsed if previous is not None else None
    return {
        "delta": answer.text[num_characters:],
        "delta_token_ids": answer.token_ids[num_tokens:],
        "parsed": answer.parsed.since(before) if answer.parsed is not None else None,
    }


class OutputSource(Protocol):
    """A source of outputs: a request."""

    @property
    def request_id(self) -> str: ...

    @property
    def has_ended(self) -> bool:
        """Tell whether its next output is the last."""
        ...

    def output(self, previous: RequestOutput | None = None) -> RequestOutput:
        """The answer up to now; what `previous` does not have is its delta."""
        ...


class Outputs:
    """Outputs that wait for their consumer: a caller of `step`, one `generate`, or one `stream`.

    An output is made when it is taken: a consumer that is late gets all that is new in one piece.
    """

    def __init__(self) -> None:
        self._moved: dict[str, OutputSource] = {}
        self._taken: dict[str, RequestOutput] = {}  # the last output of each request that has not ended

    def __bool__(self) -> bool:
        return bool(self._moved)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._moved

    def put(self, request: OutputSource) -> None:
        """Record that a request has a new token, or has ended."""
        self._moved[request.request_id] = request

    def take(self) -> list[RequestOutput]:
        """Remove and return the outputs of all requests that moved, in the order in which they first did."""
        taken = dict(self._taken)
        outputs = [request.output(taken.pop(name, None)) for name, request in self._moved.items()]
        taken.update((output.request_id, output) for output in outputs if output.finish_reason is None)
        self._moved, self._taken = {}, taken  # last: a signal handler may raise anywhere before
        return outputs

    def take_ended(self) -> list[RequestOutput]:
        """Take the outputs of the requests that have ended, as `take` does; none is made of the others."""
        ended = [name for name, request in self._moved.items() if request.has_ended]
        if not ended:
            return []
        outputs = [self._moved[name].output(self._taken.get(name)) for name in ended]
        self._taken = {name: output for name, output in self._taken.items() if name not in ended}
        self._moved = {name: request for name, request in self._moved.items() if name not in ended}
        return outputs
