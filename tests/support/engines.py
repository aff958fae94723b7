"""The shared parts of tests of the engine."""

import os
import random
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hybrid import CacheConfig, Engine, RequestOutput, SamplingParams

GRID = 16


def engine_on(
    tiny: Engine,
    *,
    pages: int = 128,
    states: int = 32,
    overlap: bool | None = None,
    enforce_eager: bool = False,
    **config: Any,
) -> Engine:
    """An engine with an empty cache of its own: pages of 16 tokens, numbers of pages and state slots."""
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, **config)
    own = replace(tiny.config, overlap=overlap, enforce_eager=enforce_eager)
    return tiny.with_cache(settings, size=(pages, states), config=own)


def ids(count: int, seed: int = 0) -> list[int]:
    """Token ids of a prompt. Another seed, another prompt."""
    rng = random.Random(seed)
    return [rng.randrange(3, 1024) for _ in range(count)]


def greedy(count: int = 8, **more: Any) -> SamplingParams:
    """Exactly `count` tokens."""
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **more)


def answer(engine: Engine, prompt: Any, params: SamplingParams | None = None, **more: Any) -> RequestOutput:
    """The answer to one prompt."""
    return engine.generate([prompt], params or greedy(), progress=False, **more)[0]


KNOWN = WeakKeyDictionary[Engine, dict[tuple[Any, ...], RequestOutput]]()
"""Cold answers of each engine, which many tests ask for."""


def cold(tiny: Engine, prompt: Any, params: SamplingParams | None = None) -> RequestOutput:
    """The answer of an engine that keeps nothing, to this prompt alone."""
    params = params or greedy()
    if params.logits_processors or not isinstance(prompt, list):  # functions and images have no lasting name
        return answer(engine_on(tiny, enabled=False), prompt, params)
    known = KNOWN.setdefault(tiny, {})
    key = (tuple(prompt), repr(params), os.environ.get("HYBRID_KERNELS"), torch.get_num_threads())
    if key not in known:
        known[key] = answer(engine_on(tiny, enabled=False), prompt, params)
    return known[key]


def run_to_end(engine: Engine) -> dict[str, RequestOutput]:
    """Step until there is nothing to do; the last output of each request."""
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs.update({output.request_id: output for output in engine.step()})
    return outputs


def run_despite_failures(engine: Engine) -> tuple[dict[str, RequestOutput], int]:
    """As `run_to_end`, where steps raise RuntimeErrors: the cache is audited after each. Returns their number, too."""
    outputs: dict[str, RequestOutput] = {}
    failures = 0
    while engine.has_work:
        try:
            outputs.update({output.request_id: output for output in engine.step()})
        except RuntimeError:
            failures += 1
            engine.cache.audit()
    return outputs, failures


def assert_nothing_held(engine: Engine) -> None:
    """No request holds anything: every page and every slot is free or cached."""
    engine.cache.audit()
    stats = engine.cache.stats()
    assert stats.pages_private == 0
    assert stats.states_private == 0
    assert not engine.has_work


def no_even_tokens(answer: list[int], logits: Tensor) -> Tensor:
    """Processes logits: tokens with an even id cannot be chosen."""
    logits[::2] = -torch.inf
    return logits


def not_twice_in_a_row(prompt: list[int], answer: list[int], logits: Tensor) -> Tensor:
    """Processes logits, prompt given: the last token cannot be chosen again."""
    logits[(answer or prompt)[-1]] = -torch.inf
    return logits


def computing_is_slow(engine: Engine) -> None:
    """Restoring is worth it, and is waited for though the machine pauses meanwhile."""
    for _ in range(20):
        engine.cache.note_pass(1, 1.0)
