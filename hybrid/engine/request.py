"""A request on its way through the engine."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import replace

from hybrid.cache.explain import Explanation, not_started
from hybrid.cache.lease import Lease
from hybrid.cache.pins import Pin
from hybrid.engine.constraints import Constraints
from hybrid.engine.output import Completion, Outputs, OutputSource, RequestOutput, Usage
from hybrid.engine.sampler import SampleRow, new_seed, uniform
from hybrid.engine.sampling_params import SamplingParams, tenant_of
from hybrid.key import Key
from hybrid.models.adapters import Adapter
from hybrid.prompts.answer_parser import AnswerParser
from hybrid.prompts.breakpoints import Breakpoint
from hybrid.prompts.detokenizer import Detokenizer
from hybrid.prompts.encode import EncodedPrompt
from hybrid.prompts.images import Media
from hybrid.prompts.vocabulary import Vocabulary
from hybrid.speculation.drafter import History
from hybrid.tiers.tier import Reading


class Request:
    """A prompt and its continuation.

    Args:
        request_id: unique within the engine.
        prompt: its token ids and images.
        params: how to continue it.
        max_len: number of tokens of prompt and answer, at most.
        namespace: of the cache.
        outputs: where its outputs go.
        is_replay: it computes the tokens of a finished answer once more, as whole chunks, so that they can be shared in
            deterministic mode. It has no output.
        text: decodes its tokens; None: there is no tokenizer, or no text is wanted.
        constraints: what is done to logits because of its tokens; None: nothing.
        adapter: that it is computed with; None: the model alone.
        vocabulary: the texts of tokens; None: there is no tokenizer.
        parser: takes the text apart; None: nothing does.

    Attributes:
        ids: prompt and answer, with a placeholder at every position of an image.
        media: the images of the prompt.
        breakpoints: those of the prompt that are not pinned yet.
        declared: positions of the prompt at which the caller wants checkpoints.
        prompt_len: number of tokens of the prompt.
        max_len: number of tokens of the prompt and the longest answer that there is room for.
        lease: its memory; None: it waits, or has ended.
        num_confirmed: number of tokens of which the results are there, so that others may share them.
        num_written: tokens up to the last checkpoint of its prompt that the cache has taken.
        prefill_end: tokens before this are computed as prompt, later ones one at a time.
        kept_len: number of tokens that a next turn can share: those before a stop text.
        wanted: positions at which other requests wait for a checkpoint of this one.
        leader: (request, position): this one waits until that one has committed that many tokens.
        ahead: what it will need from disk is being read while it waits; None: nothing is.
        keeps_memory: it was retracted for lack of pages once: it starts with those for all its tokens, and keeps them.
        is_cold: it has started again without the cache, of which it takes and to which it gives nothing from then on: a
            pass that had read from the cache gave NaN or infinity.
        pin: keeps what was computed; a replay extends it.
        seed: of its own random numbers.
        history: its tokens as drafters see them.
        completions: all answers to its prompt, if there are several.
        is_fork: it is an answer after the first, and its first token is not known yet: it neither waits nor runs.
        prompt_logprobs: of the tokens of the prompt, as far as they are computed; None for the first, and for those
            before `SamplingParams.logprob_start_len`.
        is_plain: its tokens are the most likely ones, and it has no images, no adapter, and no other answers: a step
            of such requests looks for none of these.
        num_drafted, num_accepted: drafts that were computed, and that were what came next.
        arrived, started_at, first_token_at, last_token_at, ended_at: as `time.perf_counter`; `started_at` is when it
            first got its memory.
    """

    def __init__(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        max_len: int,
        *,
        namespace: str = "",
        outputs: Outputs | None = None,
        is_replay: bool = False,
        text: Detokenizer | None = None,
        constraints: Constraints | None = None,
        adapter: Adapter | None = None,
        vocabulary: Vocabulary | None = None,
        parser: AnswerParser | None = None,
    ) -> None:
        self.request_id: str = request_id
        self.params = params
        self.namespace = namespace
        self.text = text
        self.constraints = constraints
        self._parser = parser
        self._num_parsed = 0
        self.adapter = adapter
        self.outputs: Outputs = outputs if outputs is not None else Outputs()
        self.is_replay = is_replay
        self.prompt_token_ids: list[int] = list(prompt.ids)
        self.ids: array[int] = array("i", prompt.ids)
        self.media: Media | None = prompt.media
        self.breakpoints: tuple[Breakpoint, ...] = () if is_replay else prompt.breakpoints
        self.declared: tuple[int, ...] = (*params.checkpoint_at, *(one.num_tokens for one in self.breakpoints))
        self.prompt_len: int = len(self.ids)
        self.max_len: int = min(self.prompt_len + params.max_new_tokens, max_len)
        self.history: History = History(self.ids, self.prompt_len, namespace, self.key)
        self.completions: Completions | None = None
        self.is_fork: bool = False
        self.prompt_logprobs: list[dict[int, float] | None] = [None] * max(1, params.logprob_start_len)
        self.num_drafted: int = 0
        self.num_accepted: int = 0
        self.seed: int = new_seed() if params.seed is None else params.seed
        self.is_plain = (
            not params.temperature
            and params.logprobs is None
            and params.prompt_logprobs is None
            and prompt.media is None
            and constraints is None
            and adapter is None
        )
        self.lease: Lease | None = None
        self.num_confirmed: int = 0
        self.prefill_end: int = 0
        self.kept_len: int = 0
        self.wanted: set[int] = set()
        self.leader: tuple[Request, int] | None = None
        self.ahead: Reading | None = None
        self.keeps_memory: bool = False
        self.is_cold: bool = False
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.error_code: str | None = None
        self.num_written: int = 0
        self.explanation: Explanation | None = None
        self.logprobs: list[dict[int, float]] = []
        self.pin: Pin | None = None
        self._answer: list[int] = []  # what `output` copies; as numbers of `ids` each output would make them anew
        self.arrived: float = time.perf_counter()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.ended_at: float | None = None
        self._vocabulary: Vocabulary | None = None
        self._token_bytes: dict[int, bytes] = {}
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self._vocabulary = vocabulary

    def replay(self, num_tokens: int) -> Request:
        """The replay of the first `num_tokens` tokens of this request, which has ended."""
        ids = self.ids[:num_tokens].tolist()
        replay = Request(
            f"{self.request_id}/replay",
            EncodedPrompt(ids, self.media),
            self.params,
            num_tokens,
            namespace=self.namespace,
            is_replay=True,
            adapter=self.adapter,
        )
        replay.pin = self.pin
        return replay

    @property
    def tenant(self) -> str:
        """Who sends it: by turns between tenants requests start and share steps."""
        return tenant_of(self.params, self.namespace)

    @property
    def num_computed(self) -> int:
        """Number of tokens whose K, V and state have been computed, by passes that may still be running."""
        return self.lease.front_tokens if self.lease is not None else 0

    @property
    def is_prefilling(self) -> bool:
        """Tell whether it has memory, and tokens of its prompt are to be computed."""
        return self.lease is not None and self.lease.front_tokens < self.prefill_end

    @property
    def has_ended(self) -> bool:
        """Tell whether its answer has ended."""
        return self.finish_reason is not None

    @property
    def num_output(self) -> int:
        """Number of tokens of the answer."""
        return len(self.ids) - self.prompt_len

    def sample_row(self, drafts: Sequence[int] = (), num_unknown: int = 0) -> SampleRow:
        """Return how the token after the known ones, and after draft tokens that may follow them, is chosen. Asking
        changes nothing.

        Args:
            num_unknown: number of tokens between, which are not in the history yet.
        """
        index = self.num_output + num_unknown + len(drafts)
        return SampleRow(self.params, uniform(self.seed, index) if self.params.temperature else 0.0)

    @property
    def source(self) -> OutputSource:
        """The source of its outputs."""
        return self if self.completions is None else self.completions

    @property
    def answers(self) -> tuple[Request, ...]:
        """All answers to its prompt, itself included."""
        return (self,) if self.completions is None else self.completions.requests

    @property
    def forks(self) -> tuple[Request, ...]:
        """The answers that begin with the next token of this one, which is the first then."""
        answers = self.answers
        return tuple(request for request in answers if request.is_fork) if answers[0] is self else ()

    @property
    def why_no_token(self) -> str | None:
        """The failure when its next token was to be chosen; None: there was none."""
        return self.constraints.failure if self.constraints is not None else None

    @property
    def hit_limit(self) -> int:
        """The number of its tokens that need not be computed, at most: where log-probabilities of the prompt are
        wanted, those before the first position that has none yet."""
        if self.params.prompt_logprobs is None or self.is_replay or len(self.prompt_logprobs) >= self.prompt_len:
            return len(self.ids)
        return len(self.prompt_logprobs) - 1

    @property
    def num_left(self) -> int:
        """Number of tokens that there is room for in the answer."""
        return self.max_len - len(self.ids)

    def is_end(self, token: int, end_tokens: frozenset[int]) -> bool:
        """Tell whether a token ends the answer.

        Args:
            end_tokens: the model's.
        """
        return token in self.params.stop_token_ids or (token in end_tokens and not self.params.ignore_eos)

    def end_tokens(self, end_tokens: frozenset[int]) -> Sequence[int]:
        """The tokens that end the answer, of those of the model too."""
        own = self.params.stop_token_ids
        return own if self.params.ignore_eos else (*own, *end_tokens)

    def is_held(self, is_expected: bool) -> bool:
        """Tell whether nothing of it is computed until its form says what may follow its answer: it was late with that
        before.

        Args:
            is_expected: the answer's next token is chosen by a pass under way.
        """
        own = self.constraints
        return own is not None and (own.is_late or is_expected) and (own.was_late or self.is_full)

    @property
    def may_draft(self) -> bool:
        """Tell whether it is known at once what may follow drafts."""
        return self.constraints is None or not self.constraints.was_late

    @property
    def is_complete(self) -> bool:
        """Tell whether its form lets nothing follow, which is not known with the last token."""
        return self.constraints is not None and self.constraints.is_complete

    @property
    def is_full(self) -> bool:
        """Tell whether there is no room for another token, and its answer ends with the word of its form whether it is
        complete."""
        return (
            self.finish_reason is None
            and self.constraints is not None
            and len(self.ids) >= self.max_len > self.prompt_len
        )

    @property
    def may_end_anywhere(self) -> bool:
        """Tell whether more than single tokens ends the answer: a stop text, or the end of a grammar."""
        return bool(self.params.stop) or self.constraints is not None

    @property
    def ends_with_next_token(self) -> bool:
        """Tell whether the next token is the last one that there is room for."""
        return self.num_left <= 1

    def key(self) -> Key:
        """Its tokens up to now, as the cache compares them."""
        return Key.of(self.ids, self.namespace) if self.media is None else self.media.key(self.ids, self.namespace)

    def append(self, token: int, logprobs: dict[int, float] | None, end_tokens: frozenset[int]) -> None:
        """Add a token to the answer, and set `finish_reason` if that ends it.

        Args:
            token: of the vocabulary.
            logprobs: `{token_id: logprob}`; None: not requested.
            end_tokens: the model's tokens that end an answer.
        """
        now = time.perf_counter()
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now
        self.ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self._name_tokens(logprobs)
        ends = self.is_end(token, end_tokens)
        if self.constraints is not None and not ends:
            self.constraints.accept(token)
        if ends or (self.text is not None and self.text.append(token)):
            self.finish_reason = "stop"
            self.stop_reason = token if ends else self.text.stop_text if self.text is not None else None
        elif len(self.ids) >= self.max_len and not (self.constraints is not None and self.constraints.is_late):
            self.finish_reason = "stop" if self.is_complete else "length"
        if self.finish_reason and self.text is not None:
            self.text.finish()
        if self._parser is not None and self.text is not None:
            self._parse(self._parser, self.text.text)
        self.kept_len = (
            self.prompt_len + self.text.num_kept if self.text is not None and self.text.stopped else len(self.ids)
        )

    def end_by_form(self) -> None:
        """End an answer that nothing can follow, or for which there is no more room."""
        self.finish_reason = "stop" if self.is_complete else "length"
        if self.text is not None:
            self.text.finish()
            if self._parser is not None:
                self._parse(self._parser, self.text.text)

    def _parse(self, parser: AnswerParser, text: str) -> None:
        """Take apart what is new of the text."""
        if len(text) > self._num_parsed:
            parser.feed(text[self._num_parsed :])
            self._num_parsed = len(text)
        if self.finish_reason:
            parser.finish()

    def end_at_prompt(self) -> None:
        """End a request for no token: its prompt is computed."""
        self.finish_reason, self.kept_len = "length", self.prompt_len

    def add_prompt_logprobs(self, logprobs: Sequence[dict[int, float]], end: int) -> None:
        """Add the log-probabilities of tokens of the prompt that are not known yet: a request that starts again may
        compute some twice.

        Args:
            logprobs: of tokens one after the other, up to the one at `end` or the last one of the prompt.
            end: of the part that computed them.
        """
        missing = min(end, self.prompt_len - 1) + 1 - len(self.prompt_logprobs)
        more = logprobs[max(0, len(logprobs) - missing) :]
        self.prompt_logprobs += more
        for known in more:
            self._name_tokens(known)

    def _name_tokens(self, logprobs: dict[int, float]) -> None:
        """Note the texts of tokens, for whom log-probabilities are reported."""
        if self._vocabulary is not None:
            for token in logprobs:
                if token not in self._token_bytes:
                    self._token_bytes[token] = self._vocabulary.bytes_of(token)

    def _seconds_to(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.arrived

    def output(self, previous: RequestOutput | Completion | None = None) -> RequestOutput:
        """Its answer up to now, without those of other completions; what `previous` does not have is its delta."""
        text = self.text.text if self.text is not None else ""
        num_output = self.num_output
        self._answer += self.ids[self.prompt_len + len(self._answer) :]
        token_ids = self._answer.copy()
        num_characters, num_tokens = (len(previous.text), len(previous.token_ids)) if previous is not None else (0, 0)
        spent = (self.last_token_at or 0.0) - (self.first_token_at or 0.0)
        hit = self.explanation
        parsed = self._parser.parts() if self._parser is not None else None
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            text=text,
            token_ids=token_ids,
            delta=text[num_characters:],
            delta_token_ids=token_ids[num_tokens:],
            finish_reason=self.finish_reason,
            usage=Usage(
                self.prompt_len,
                hit.usable_hit if hit else 0,
                hit.page_hit if hit else 0,
                num_output,
                drafted_tokens=self.num_drafted,
                accepted_tokens=self.num_accepted,
                written_tokens=max(0, self.num_written - hit.usable_hit) if hit else 0,
            ),
            logprobs=list(self.logprobs) if self.params.logprobs is not None else None,
            explain=hit or not_started(self.prompt_len),
            time_to_first_token=self._seconds_to(self.first_token_at),
            tokens_per_second=(num_output - 1) / spent if num_output > 1 and spent > 0 else None,
            time_queued=self._seconds_to(self.started_at),
            time_to_end=self._seconds_to(self.ended_at),
            stop_reason=self.stop_reason,
            token_bytes=self._token_bytes if self._vocabulary is not None else None,
            pin=self.pin,
            error=self.error,
            error_code=self.error_code,
            parsed=parsed.since(previous.parsed if previous is not None else None) if parsed is not None else None,
            prompt_logprobs=None if self.params.prompt_logprobs is None else list(self.prompt_logprobs),
        )


class Completions:
    """The answers of one request (`SamplingParams(n=...)`).

    The first one computes the prompt. The token after it is sampled for each answer, from the same logits, and the
    state after the prompt is copied for each. An answer for which there is no memory at that moment waits, and starts
    as a request that was retracted.

    Args:
        requests: one for each answer. The first one is queued, and has the id of all.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests: tuple[Request, ...] = tuple(requests)

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.requests[0].request_id

    @property
    def has_ended(self) -> bool:
        """Tell whether all answers have ended."""
        return all(request.has_ended for request in self.requests)

    def output(self, previous: RequestOutput | None = None) -> RequestOutput:
        """The answers up to now. The fields beside `outputs` are those of the first, but its usage counts the tokens
        of all answers; it has a finish reason when all answers have one."""
        former = previous.completions if previous is not None else (None,) * len(self.requests)
        outputs = [request.output(before) for request, before in zip(self.requests, former, strict=True)]
        first = outputs[0]
        each = [output.usage for output in outputs]
        usage = replace(
            first.usage,
            completion_tokens=sum(usage.completion_tokens for usage in each),
            drafted_tokens=sum(usage.drafted_tokens for usage in each),
            accepted_tokens=sum(usage.accepted_tokens for usage in each),
        )
        completions = tuple(output.completion(index) for index, output in enumerate(outputs))
        ends = [output.time_to_end for output in outputs if output.time_to_end is not None]
        known = [output.token_bytes for output in outputs if output.token_bytes is not None]
        return replace(
            first,
            usage=usage,
            completions=completions,
            finish_reason=first.finish_reason if self.has_ended else None,
            time_to_end=max(ends) if self.has_ended and ends else None,
            token_bytes={token: raw for each in known for token, raw in each.items()} if known else None,
        )
