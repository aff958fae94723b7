"""Who drafts for a call of `generate`: the cache, prompt lookup, or an assistant model."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from hybrid.cache.cache import HybridCache
from hybrid.errors import ArgumentError
from hybrid.hf.decoding import DraftedDecoding, DraftSource
from hybrid.hf.drafters import AssistantDrafter, LookupDrafter
from hybrid.hf.installed import as_argument, unexpected
from hybrid.hf.options import Assistance, GenerateCall, option
from hybrid.hf.pass_model import PassModel
from hybrid.hf.past import Past
from hybrid.interrupts import deferred_interrupts
from hybrid.speculation.config import MAX_DRAFTS, SpeculationConfig
from hybrid.speculation.drafter import Drafter, History
from hybrid.speculation.drafts import Drafts
from hybrid.speculation.pace import clock_of
from hybrid.speculation.speculator import DrafterStats, Speculator, make_speculator

MAX_SPECULATORS = 16
"""Configurations whose speculators are kept: a call may be given a drafter of its own each time."""


class Drafting:
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
        """What each drafter has done, by its name."""
        total: dict[str, DrafterStats] = {}
        with self._lock:
            for stats in (self._ended, *(speculator.stats for speculator in self._speculators.values())):
                _add(total, stats)
        return total

    def config(self, speculation: SpeculationConfig | str | None) -> SpeculationConfig | None:
        """What a call was given as `speculation`.

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
        source = speculator if call.assistance is not None else _Locked(speculator, self._cache, self._lock)
        options = _with_own_criteria(self._model.outer, options)
        decoding = options["custom_generate"] = self._decoding(past, source, options.get("streamer"))
        try:
            output = self._model.generate(call.input_ids, **as_argument(past), **options)
            if not decoding.was_called:
                raise unexpected("generate did not call the decoding loop that it was given (custom_generate)")
            return output
        finally:
            if call.assistance is not None:
                with self._lock:
                    _add(self._ended, speculator.stats)

    def _decoding(self, past: Past, source: DraftSource, streamer: Any) -> DraftedDecoding:
        keys = past.keys

        def history(tokens: array[int]) -> History:
            return History(tokens, len(tokens), keys.namespace, lambda: keys.key(0, tokens))

        return DraftedDecoding(past, source, history, self._cache.config.grid, streamer)

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


class _Locked:
    """A speculator that several threads use."""

    def __init__(self, speculator: Speculator, cache: HybridCache, lock: threading.RLock) -> None:
        self._speculator = speculator
        self._cache = cache
        self._lock = lock

    def propose(self, history: History, limit: int, rows: int) -> Drafts | None:
        with self._lock, deferred_interrupts():
            self._cache.adopt()
            return self._speculator.propose(history, limit, rows)

    def verified(self, history: History, drafts: Drafts, path: Sequence[int]) -> None:
        with self._lock, deferred_interrupts():
            self._speculator.verified(history, drafts, path)

    def timed(self, rows: int, seconds: float, drafts: int) -> None:
        with self._lock, deferred_interrupts():
            self._speculator.timed(rows, seconds, drafts)

    def end(self, history: History) -> None:
        with self._lock, deferred_interrupts():
            self._speculator.end(history)


def _identity(config: SpeculationConfig) -> Hashable:
    """What a configuration is known by. Drafters that are equal are not the same one, and need not be hashable."""
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
