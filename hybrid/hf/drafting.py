"""Decoding with drafts, of the cache, of prompt lookup or of an assistant model: several tokens per pass of the model,
the same answer.

transformers accepts a function in the place of its own loop (`custom_generate`). This one computes drafts together with
the tokens before them, and takes one token after the other as transformers would: its logits are processed, and it is
drawn, after all tokens before it are known. So the random numbers, the stopping criteria and the processors see what
they see without drafts; a draft saves a pass if it is the token that was drawn.

A pass cannot keep a state after each draft. Where drafts were wrong, the past goes back to what it was before the pass,
and the next pass computes the accepted tokens again, together with its own drafts.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hybrid.cache.cache import HybridCache
from hybrid.errors import ArgumentError
from hybrid.hf.installed import as_argument, unexpected
from hybrid.hf.layers import fork_layer, refuse_unsupported
from hybrid.hf.options import Assistance, GenerateCall, option
from hybrid.hf.pass_model import PassModel
from hybrid.hf.past import Past
from hybrid.interrupts import deferred
from hybrid.models.torch_functions import use_torch_functions_on_cpu
from hybrid.speculation.config import MAX_DRAFTS, SpeculationConfig
from hybrid.speculation.drafter import Drafter, History
from hybrid.speculation.drafts import Drafts
from hybrid.speculation.speculator import DrafterStats, Speculator, clock_of, make_speculator

Chain = tuple[Sequence[int], Sequence[int]]


class LookupDrafter(Drafter):
    """Drafts what followed the last tokens where they first occurred in the same sequence, as transformers finds it.

    Args:
        num_tokens: drafts of a pass, at most.
        max_ngram: up to this many last tokens are looked for.
    """

    def __init__(self, num_tokens: int, max_ngram: int) -> None:
        self._num_tokens = num_tokens
        self._max_ngram = max_ngram

    @property
    def name(self) -> str:
        """Name the drafter."""
        return "prompt_lookup"

    def propose(self, history: History, limit: int) -> Chain:
        """Propose what followed the last tokens."""
        generator = PromptLookupCandidateGenerator(
            num_output_tokens=min(limit, self._num_tokens),
            max_matching_ngram_size=self._max_ngram,
            max_length=len(history) + limit + 1,
        )
        found, _ = generator.get_candidates(torch.tensor([history[:].tolist()]))
        tokens = found[0, len(history) :].tolist()
        return tokens, range(-1, len(tokens) - 1)


class AssistantDrafter(Drafter):
    """Drafts what another, smaller model says.

    Its cache holds the known tokens and nothing else: drafts are computed on a copy of it, so that no model needs to
    forget any, whatever its layers are.

    Args:
        assistant: a causal language model of transformers with the same vocabulary, in evaluation mode.
        vocab_size: of the model for which it drafts.
        min_confidence: no draft follows one of less than this probability.

    Raises:
        ArgumentError: the vocabularies differ.
        UnsupportedModelError: its cache cannot be copied.
    """

    def __init__(self, assistant: PassModel, vocab_size: int, min_confidence: float) -> None:
        if assistant.vocab_size != vocab_size:
            raise ArgumentError(
                f"generate: assistant_model: its vocabulary has {assistant.vocab_size} tokens, and the model's "
                f"{vocab_size}; give an assistant with the same tokenizer"
            )
        if assistant.device.type == "cpu":
            use_torch_functions_on_cpu(assistant.inner)
        self._model = assistant
        self._past = assistant.empty_cache()
        self._num_tokens = 0
        self._min_confidence = min_confidence
        refuse_unsupported(self._past.layers, type(assistant.inner).__name__)

    @property
    def name(self) -> str:
        """Name the drafter."""
        return "assistant"

    @torch.no_grad()
    def propose(self, history: History, limit: int) -> Chain:
        """The assistant's own continuation, greedily."""
        logits = self._model.forward(history[self._num_tokens :].tolist(), self._past, self._num_tokens)
        self._num_tokens = len(history)
        past, tokens = self._model.empty_cache(), [int(logits.argmax())]
        past.layers = [fork_layer(layer) for layer in self._past.layers]
        while len(tokens) < limit and float(logits.float().softmax(-1).max()) >= self._min_confidence:
            logits = self._model.forward(tokens[-1:], past, self._num_tokens + len(tokens) - 1)
            tokens.append(int(logits.argmax()))
        return tokens, range(-1, len(tokens) - 1)


MAX_PENDING = 16
"""Maximum number of tokens to compute again; beyond it a pass without drafts computes them for good."""

NONE = Drafts((), (), ())
"""No drafts."""


class Answer:
    """The tokens that have been decoded.

    Args:
        input_ids: `[1, tokens]`, the prompt.
        config: of transformers' `generate`.
        streamer: receives each token; None: there is none.
    """

    def __init__(self, input_ids: Tensor, config: Any, streamer: BaseStreamer | None) -> None:
        self.ids: Tensor = input_ids
        self._config = config
        self._streamer = streamer
        self._scores: tuple[Tensor, ...] = ()
        self._logits: tuple[Tensor, ...] = ()

    def draw(self, logits: Tensor, processors: LogitsProcessorList) -> int:
        """Draw the next token as transformers' own loop does.

        Args:
            logits: `[1, vocabulary]`, fp32.
        """
        scores = processors(self.ids, logits)
        if self._config.output_scores:
            self._scores += (scores,)
        if self._config.output_logits:
            self._logits += (logits,)
        if self._config.do_sample:
            token = torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1)
        else:
            token = scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], dim=-1)
        if self._streamer is not None:
            self._streamer.put(token[0].cpu())
        return int(token)

    def is_finished(self, criteria: StoppingCriteriaList) -> bool:
        """Tell whether nothing follows."""
        return bool(criteria(self.ids, self._scores or None).all())

    def output(self, past: Past) -> Any:
        """The return value of `generate`."""
        if self._streamer is not None:
            self._streamer.end()
        if not self._config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.ids,
            scores=self._scores if self._config.output_scores else None,
            logits=self._logits if self._config.output_logits else None,
            **as_argument(past),
        )


class DraftedDecoding:
    """The decoding of one sequence with drafts.

    Args:
        past: holds some or all tokens of the prompt but its last one.
        speculator: has drafts.
        guard: makes the context in which the speculator is used.
        grid: where the past may be committed: no pass with drafts goes beyond the next multiple.
        streamer: of the call of `generate`.

    Attributes:
        was_called: whether transformers has called it.
    """

    def __init__(
        self,
        past: Past,
        speculator: Speculator,
        guard: Callable[[], AbstractContextManager[None]],
        grid: int,
        streamer: BaseStreamer | None,
    ) -> None:
        self.was_called = False
        self._past = past
        self._speculator = speculator
        self._guard = guard
        self._grid = grid
        self._streamer = streamer

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Decode: `generate` calls it with what it gives to its own loop."""
        self.was_called = True
        answer = Answer(input_ids, generation_config, self._streamer)
        tokens = array("i", input_ids[0, self._past.pads[0] :].tolist())
        keys = self._past.keys
        history = History(tokens, len(tokens), keys.namespace, lambda: keys.key(0, tokens))
        drafts, is_first, is_finished = NONE, True, False
        clock = clock_of(input_ids.device.type)
        try:
            while not is_finished:
                saved = self._past.save() if len(drafts) else None
                start, num_rows = clock(), len(tokens) + len(drafts) - self._past.num_seen(0)
                logits = self._pass(model, answer.ids, drafts, model_kwargs, is_first)
                num_drawn = 0
                while num_drawn <= len(drafts):
                    tokens.append(answer.draw(logits[:, num_drawn], logits_processor))
                    num_drawn += 1
                    is_finished = answer.is_finished(stopping_criteria)
                    if is_finished or num_drawn > len(drafts) or tokens[-1] != drafts.tokens[num_drawn - 1]:
                        break
                seconds = clock() - start
                is_right = num_drawn <= len(drafts) and tokens[-1] == drafts.tokens[num_drawn - 1]  # and ends it
                with self._guard():
                    if not is_first:
                        self._speculator.timed(num_rows, seconds, len(drafts))
                    if len(drafts):
                        self._speculator.verified(history, drafts, range(num_drawn - 1 + is_right))
                if saved is not None:
                    self._past.take_back(saved, len(drafts) + 1 - num_drawn)
                model_kwargs, is_first = _extended(model, model_kwargs, num_drawn), False
                drafts = self._propose(history, generation_config.max_length - answer.ids.shape[1] - 1)
        finally:
            with self._guard():
                self._speculator.end(history)
        self._compute_rest(model, answer.ids, model_kwargs)
        return answer.output(self._past)

    def _propose(self, history: History, limit: int) -> Drafts:
        """Drafts for the next pass, which computes the tokens that the past does not hold as well."""
        pending = len(history) - self._past.num_seen(0)
        if self._grid > 1:
            limit = min(limit, -len(history) % self._grid)
        if limit < 1 or pending > MAX_PENDING:
            return NONE
        with self._guard():
            drafts = self._speculator.propose(history, limit, pending)
        return NONE if drafts is None else drafts.first_path()  # the layers of transformers know chains alone

    def _pass(self, model: Any, ids: Tensor, drafts: Drafts, kwargs: dict[str, Any], is_first: bool) -> Tensor:
        """One pass over what the past does not hold, and drafts.

        Returns:
            `[1, drafts + 1, vocabulary]` fp32 logits of the last known token and of the drafts.
        """
        if len(drafts):
            ids = torch.cat([ids, torch.tensor([drafts.tokens], dtype=ids.dtype, device=ids.device)], dim=-1)
            kwargs = _extended(model, dict(kwargs), len(drafts))
        inputs = self._inputs(model, ids, kwargs, is_first)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = len(drafts) + 1
        logits: Tensor = model(**inputs, return_dict=True).logits[:, -len(drafts) - 1 :]
        return logits.to(copy=True, dtype=torch.float32, device=ids.device)

    def _compute_rest(self, model: Any, ids: Tensor, kwargs: dict[str, Any]) -> None:
        """Compute what the past does not hold of the answer but its last token: `generate` leaves a past like that."""
        pad, end = self._past.pads[0], ids.shape[1] - 1
        for stop in ((end - pad) // self._grid * self._grid + pad, end):
            if stop > self._past.get_seq_length():
                model(**self._inputs(model, ids[:, :stop], _shortened(kwargs, stop), False), return_dict=True)

    def _inputs(self, model: Any, ids: Tensor, kwargs: dict[str, Any], is_first: bool) -> dict[str, Any]:
        """The arguments of a pass over what the past does not hold of `ids`."""
        count = ids.shape[1] - self._past.get_seq_length()
        inputs: dict[str, Any] = model.prepare_inputs_for_generation(
            ids, next_sequence_length=count, is_first_iteration=is_first, **kwargs
        )
        return inputs


def _extended(model: Any, kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """The arguments for a sequence that is `count` tokens longer: mask and positions. Models with other arguments of
    this kind override the method."""
    extended: dict[str, Any] = model._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=count)
    return extended


def _shortened(kwargs: dict[str, Any], length: int) -> dict[str, Any]:
    """The arguments for the first `length` positions."""
    names = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
    cut = {name: kwargs[name][..., :length] for name in names if kwargs.get(name) is not None}
    return {**kwargs, **cut}


MAX_SPECULATORS = 16
"""Configurations whose speculators are kept: a call may be given a drafter of its own each time."""


class DraftProvider:
    """The drafts of a `PrefixCache`.

    Args:
        model: computes the passes.
        cache: knows what came next before.
        lock: held while the cache is read, and what is known of the drafters.
    """

    def __init__(self, model: PassModel, cache: HybridCache, lock: threading.RLock) -> None:
        self._model = model
        self._cache = cache
        self._lock = lock
        self._speculators: OrderedDict[Hashable, Speculator] = OrderedDict()  # the last one is at the end
        self._ended: dict[str, DrafterStats] = {}  # of drafters that are not asked any more

    @property
    def stats(self) -> dict[str, DrafterStats]:
        """Count what each drafter has done, by its name."""
        total: dict[str, DrafterStats] = {}
        with self._lock:
            for stats in (self._ended, *(speculator.stats for speculator in self._speculators.values())):
                _add(total, stats)
        return total

    def config(self, speculation: SpeculationConfig | str | None) -> SpeculationConfig | None:
        """Read what a call was given as `speculation`.

        Raises:
            ArgumentError: it is not a configuration, it needs a predictor, or the cache is deterministic.
        """
        config = SpeculationConfig.of(speculation)
        if config is not None and config.uses_predictor:
            raise ArgumentError(
                "generate: speculation: 'mtp' is the predictor of a checkpoint, which hybrid.Engine alone runs; use "
                "'cache', or a drafter of your own"
            )
        if config is not None and self._cache.config.deterministic:
            raise ArgumentError(
                "generate: speculation: a pass over drafts rounds otherwise than passes over single tokens, so that "
                "the bits of an answer would depend on what is cached; make the cache with deterministic=False"
            )
        return config

    def generate(
        self, call: GenerateCall, past: Past, config: SpeculationConfig | None, options: dict[str, Any]
    ) -> Any:
        """`model.generate` for a call with this past, with drafts if there is a drafter.

        Args:
            config: who drafts, where the call does not ask for assisted decoding itself. For several sequences none,
                nor in searches that are neither greedy nor sampled.
            options: of `model.generate`.
        """
        speculator = None
        if call.assistance is not None:
            speculator = self._assistance(call.assistance)
        elif config is not None and call.is_single and call.other_search is None:
            speculator = self._speculator(config)
        if speculator is None:
            return self._model.generate(call.input_ids, **as_argument(past), **options)
        options = _with_own_criteria(self._model.outer, options)
        guard = nullcontext if call.assistance is not None else self._owning  # the former is of this call alone
        grid, streamer = self._cache.config.grid, options.get("streamer")
        decoding = options["custom_generate"] = DraftedDecoding(past, speculator, guard, grid, streamer)
        try:
            output = self._model.generate(call.input_ids, **as_argument(past), **options)
            if not decoding.was_called:
                raise unexpected("generate did not call the decoding loop that it was given (custom_generate)")
            return output
        finally:
            if call.assistance is not None:
                with self._lock:
                    _add(self._ended, speculator.stats)

    @contextmanager
    def _owning(self) -> Iterator[None]:
        """Own the cache, and what is known of the drafters that several calls ask."""
        with self._lock, deferred():
            self._cache.adopt()
            yield

    def _speculator(self, config: SpeculationConfig) -> Speculator:
        """The speculator of a configuration. It learns from call to call; of many configurations the last ones do."""
        key = _identity(config)
        with self._lock:
            if key not in self._speculators:
                clock = clock_of(self._model.device.type)
                made = make_speculator(config, self._cache, self._model.vocab_size, clock=clock)
                assert made is not None
                self._speculators[key] = made
                if len(self._speculators) > MAX_SPECULATORS:
                    _, unused = self._speculators.popitem(last=False)
                    _add(self._ended, unused.stats)
            self._speculators.move_to_end(key)
            return self._speculators[key]

    def _assistance(self, assistance: Assistance) -> Speculator:
        """The speculator of one call with assisted decoding."""
        drafter: Drafter
        if assistance.assistant is not None:
            assistant = PassModel(assistance.assistant)
            drafter = AssistantDrafter(assistant, self._model.vocab_size, assistance.min_confidence)
            count = assistance.assistant_tokens
        else:
            assert assistance.lookup_tokens is not None
            drafter = LookupDrafter(assistance.lookup_tokens, assistance.lookup_ngram)
            count = assistance.lookup_tokens
        config = SpeculationConfig(drafters=(drafter,), max_drafts=min(count, MAX_DRAFTS), adaptive=False)
        return Speculator(config, (drafter,), self._model.vocab_size)


def _identity(config: SpeculationConfig) -> Hashable:
    """Make what a configuration is known by. Drafters that are equal are not the same one, and need not be hashable."""
    drafters = tuple([drafter if isinstance(drafter, str) else id(drafter) for drafter in config.drafters])
    return drafters, config.max_drafts, config.adaptive


def _add(total: dict[str, DrafterStats], stats: dict[str, DrafterStats]) -> None:
    for name, more in stats.items():
        before = total.get(name, DrafterStats())
        total[name] = DrafterStats(
            before.proposals + more.proposals,
            before.drafted_tokens + more.drafted_tokens,
            before.accepted_tokens + more.accepted_tokens,
            before.refused + more.refused,
        )


def _with_own_criteria(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options in which stop strings are a stopping criterion: a decoding loop that `generate` is given gets no
    tokenizer from it."""
    strings, tokenizer = option(model, options, "stop_strings"), options.get("tokenizer")
    if strings is None or tokenizer is None:
        return dict(options)
    criteria = StoppingCriteriaList(options.get("stopping_criteria") or ())
    criteria.append(StopStringCriteria(tokenizer, strings))
    rest = {name: value for name, value in options.items() if name != "tokenizer"}
    return {**rest, "stop_strings": None, "stopping_criteria": criteria}
