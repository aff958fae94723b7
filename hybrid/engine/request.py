"""A request on its way through the engine, and what it gives back."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from hybrid.cache.explain import Explanation
from hybrid.cache.lease import Lease
from hybrid.cache.pins import Pin
from hybrid.engine.sampler import new_seed, uniform
from hybrid.engine.sampling_params import SamplingParams
from hybrid.key import Key
from hybrid.prompts.detokenizer import TextStream
from hybrid.prompts.images import Media


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens that were not computed (the usable hit).
        page_tokens: prompt tokens whose pages were there (the page hit).
        completion_tokens: tokens of the answer.
    """

    prompt_tokens: int
    cached_tokens: int
    page_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of a prompt, up to now.

    Attributes:
        request_id: as `Engine.add_request` gave it.
        prompt_token_ids: the prompt.
        text: the answer, without what ended it; empty without a tokenizer.
        token_ids: the answer's tokens, with the one that ended it.
        finish_reason: "stop", "length", "abort"; None while it runs.
        usage: tokens asked, cached, made.
        logprobs: per token of the answer `{token_id: logprob}`; None unless asked for.
        explain: why the hit was what it was: tokens asked, page hit, usable hit, and what was missing.
        time_to_first_token: seconds from the arrival; None before it.
        tokens_per_second: of the answer, from its first token on; None before the second token.
        pin: what `SamplingParams(pin_for=...)` keeps, for `Engine.unpin`; None before the end, and without one.
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


@dataclass(eq=False)
class Request:
    """A prompt and its continuation.

    Attributes:
        ids: prompt and answer; the positions of images have ids of their own, below 0.
        media: its images.
        prompt_len: tokens of the prompt.
        params: None for a replay: finished tokens that are computed once more, as whole chunks, to be shared.
        num_computed: tokens whose K, V and state are there.
        prefill_end: tokens before this are computed as prompt, those after it one at a time.
        kept_len: tokens that a next turn can have in common with this one: those before a stop text.
        wanted: positions at which others wait for a checkpoint of this request.
        leader: (request, position): this one waits until that one has committed so much.
        pin: what is pinned for it; a replay pins on.
        seed: of its own random numbers.
    """

    request_id: str
    ids: array[int]
    prompt_len: int
    params: SamplingParams | None
    namespace: str = ""
    text: TextStream | None = None
    max_len: int = 0
    status: Status = Status.WAITING
    lease: Lease | None = None
    num_computed: int = 0
    prefill_end: int = 0
    kept_len: int = 0
    finish_reason: str | None = None
    explanation: Explanation | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    wanted: set[int] = field(default_factory=set)
    leader: tuple[Request, int] | None = None
    seed: int = 0
    prompt_token_ids: list[int] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    last_token_at: float | None = None
    priority: int = 0
    pin_for: float | None = None
    pin: Pin | None = None
    media: Media | None = None

    @classmethod
    def of(
        cls,
        request_id: str,
        ids: Sequence[int],
        params: SamplingParams,
        namespace: str,
        text: TextStream | None,
        max_len: int,
        media: Media | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> Request:
        """A user's request, of at most `max_len` tokens in the end.

        Args:
            prompt_token_ids: the prompt as the user has it, when `ids` are others because of images.
        """
        prompt = list(ids)
        return cls(
            request_id,
            array("i", prompt),
            len(prompt),
            params,
            namespace,
            text,
            max_len,
            prompt_token_ids=prompt if prompt_token_ids is None else list(prompt_token_ids),
            seed=new_seed() if params.seed is None else params.seed,
            priority=params.priority,
            pin_for=params.pin_for,
            media=media,
        )

    @classmethod
    def replay(cls, of: Request, num_tokens: int) -> Request:
        """The first `num_tokens` tokens of a finished request, to be computed as whole chunks."""
        return cls(
            f"{of.request_id}/replay",
            of.ids[:num_tokens],
            num_tokens,
            None,
            of.namespace,
            priority=of.priority,
            pin_for=of.pin_for,
            pin=of.pin,
            media=of.media,
        )

    @property
    def is_replay(self) -> bool:
        return self.params is None

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_end

    @property
    def num_output(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def random_number(self) -> float:
        """For the next token; 0 when it is the most likely one."""
        return uniform(self.seed, self.num_output) if self.params is not None and self.params.temperature else 0.0

    @property
    def ends_with_next_token(self) -> bool:
        """Whether there is no room for another token after the next one."""
        return self._is_full(1)

    def _is_full(self, more: int) -> bool:
        assert self.params is not None
        return self.num_output + more >= self.params.max_new_tokens or len(self.ids) + more >= self.max_len

    def key(self) -> Key:
        return Key.of(self.ids, self.namespace, self.media.units if self.media is not None else ())

    def append(self, token: int, end_tokens: frozenset[int]) -> None:
        """Take a new token of the answer, and see whether it ends it."""
        params = self.params
        assert params is not None
        now = time.perf_counter()
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now
        self.ids.append(token)
        if token in end_tokens or token in params.stop_token_ids or (self.text is not None and self.text.append(token)):
            self.finish_reason = "stop"
        elif self._is_full(0):
            self.finish_reason = "length"
        if self.finish_reason and self.text is not None:
            self.text.finish()
        self.kept_len = (
            self.prompt_len + self.text.num_kept if self.text is not None and self.text.stopped else len(self.ids)
        )

    def output(self) -> RequestOutput:
        """What there is to tell now."""
        spent = (self.last_token_at or 0.0) - (self.first_token_at or 0.0)
        hit = self.explanation
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            text=self.text.text if self.text is not None else "",
            token_ids=list(self.ids[self.prompt_len :]),
            finish_reason=self.finish_reason,
            usage=Usage(self.prompt_len, hit.usable_hit if hit else 0, hit.page_hit if hit else 0, self.num_output),
            logprobs=list(self.logprobs) if self.params is not None and self.params.logprobs is not None else None,
            explain=str(hit) if hit else "not started yet",
            time_to_first_token=self.first_token_at - self.arrived if self.first_token_at is not None else None,
            tokens_per_second=(self.num_output - 1) / spent if self.num_output > 1 and spent > 0 else None,
            pin=self.pin,
        )
