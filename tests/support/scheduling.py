"""An engine without a model, to test the scheduler: tokens are random, and states and pages are numbers."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from hybrid import CacheConfig, CacheMemory, Engine, EngineConfig, HybridCache
from hybrid.engine.build import LoadedModel
from hybrid.engine.results import Result
from hybrid.engine.step import Step
from hybrid.models.engine_model import EngineModel
from support.engines import GRID

VOCAB = 1024


@dataclass(frozen=True)
class Known:
    """A pass whose results are known."""

    known: list[Result]

    def results(self) -> list[Result]:
        return self.known


@dataclass
class Counting:
    """Random tokens, and the number of tokens that were computed, of requests and of replays.

    Attributes:
        fails: chance of a pass to fail.
        spoils: chance of a part to give NaN.
    """

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    fails: float = 0.0
    spoils: float = 0.0
    computed: int = 0
    replayed: int = 0

    def plan(self, step: Step, under_way: Known | None) -> Step:
        return step

    def launch(self, step: Step) -> Known:
        for part in step.parts:
            written = [one for one in part.lease.captured if part.start < one.num_tokens <= part.end]
            assert written == [] or part.is_prefill
            assert len(part.lease.block_table) * GRID >= part.end
            if part.request.is_replay:
                self.replayed += part.end - part.start
            else:
                self.computed += part.end - part.start
        if self.rng.random() < self.fails:
            raise RuntimeError("a pass failed")
        return Known([self._result(part.samples) for part in step.parts])

    def _result(self, samples: bool) -> Result:
        return Result(self.rng.random() >= self.spoils, (self.rng.randrange(VOCAB),) if samples else ())


def engine_without_model(
    pages: int | None = None,
    states: int = 0,
    *,
    memory: CacheMemory | None = None,
    config: EngineConfig | None = None,
    runner: Counting | None = None,
    **settings: Any,
) -> Engine:
    """An engine on numbers alone: of pages and state slots, or of a memory."""
    shape = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=100_000, hidden_size=4)
    loaded = LoadedModel(model=EngineModel(shape), device=torch.device("cpu"))
    if memory is None:
        assert pages is not None
        memory = CacheMemory.of_indices(pages, states)
    cache = HybridCache(memory, CacheConfig(page_size=GRID, chunk_size=GRID, **settings))
    return Engine(loaded, cache, config, runner=runner or Counting())
