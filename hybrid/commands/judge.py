"""What `hybrid parity` compares: requests that share a cache, with each of them cold and alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hybrid.cache.config import CacheConfig
from hybrid.engine.engine import Engine
from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import HybridError
from hybrid.memory.memory import smallest_memory
from hybrid.speculation.config import SpeculationConfig

ANSWER = SamplingParams(max_new_tokens=24, logprobs=5, ignore_eos=True)
ONE_TOKEN = replace(ANSWER, max_new_tokens=1)
"""Of requests that are to compute their prompts and are not compared."""


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        passed: whether it holds.
        hit_tokens: prompt tokens that the warm runs did not compute, None where hits do not matter. A scenario without
            hits fails.
        detail: the measurement in words.
    """

    name: str
    passed: bool
    hit_tokens: int | None
    detail: str


class Judge:
    """Runs requests warm, and each of them cold and alone, and compares.

    Args:
        engine: its weights are used; every scenario gets a cache of its own.
        seed: of the random prompts.
    """

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine: Engine = engine
        self._seed = seed
        config = engine.cache.config
        self.grid: int = config.grid
        self._config = CacheConfig(
            page_size=config.page_size, chunk_size=config.chunk_size, kv_dtype=config.kv_dtype, deterministic=True
        )
        self._answers: dict[tuple[tuple[int, ...], SamplingParams], RequestOutput] = {}
        self._cold = engine.with_cache(replace(self._config, enabled=False), size=(256, 16))

    def ids(self, count: int) -> list[int]:
        """The random token ids of this length. Scenarios whose prompts have equal lengths ask for the same ones, which
        are answered cold once; what is warm each computes in a cache of its own."""
        rng = random.Random(f"{self._seed} {count}")
        return [rng.randrange(self.engine.model.config.vocab_size) for _ in range(count)]

    def next_turn(self, output: RequestOutput) -> list[int]:
        """The prompt that continues an answer: half a chunk and a few tokens more."""
        return output.prompt_token_ids + output.token_ids + self.ids(self.grid // 2 + 3)

    def warm(
        self,
        pages: int = 256,
        states: int = 64,
        speculation: SpeculationConfig | None = None,
        longest: int = 0,
        host: str | None = None,
        directory: Path | None = None,
    ) -> Engine:
        """An engine with an empty cache of its own: one budget, the size of `pages` and `states`, or the smallest there
        is. Where no request of `longest` pages would fit into the pieces of that budget, because pages are small
        compared with a state, it has pools of these sizes; with a tier, which has no pools, the smallest budget into
        which one fits."""
        page_bytes, state_bytes = self.engine.cache.unit_bytes
        memory = pages * page_bytes + states * state_bytes
        least = smallest_memory(max(longest, 1), page_bytes, state_bytes, None)
        if longest and memory < least and host is None and directory is None:
            return self.engine.with_cache(self._config, size=(pages, states), speculation=speculation)
        config = replace(self._config, memory=max(memory, least), host=host)
        if directory is not None:
            config = replace(config, disk="1GiB", directory=directory)
        return self.engine.with_cache(config, speculation=speculation)

    def cold(self, prompt: list[int], params: SamplingParams = ANSWER) -> RequestOutput:
        """The answer to a prompt alone, without a cache and without drafts."""
        known = (tuple(prompt), params)
        if known not in self._answers:
            self._answers[known] = self._cold.generate([prompt], params, progress=False)[0]
        return self._answers[known]

    def differences(self, outputs: list[RequestOutput], params: SamplingParams = ANSWER) -> list[str]:
        """The outputs that differ from a cold run of the same prompt alone, in a token or in a log-probability."""
        wrong = []
        for output in outputs:
            cold = self.cold(output.prompt_token_ids, params)
            assert cold.usage.cached_tokens == 0
            if cold.token_ids != output.token_ids:
                wrong.append(f"{output.request_id}: tokens differ")
            elif cold.logprobs != output.logprobs:
                wrong.append(f"{output.request_id}: log-probabilities differ")
        return wrong

    def attempt(self, scenario: Callable[..., Check], *given: object) -> Check:
        """The check of a scenario. It fails with the error in words where the scenario raises one of ours."""
        try:
            return scenario(self, *given)
        except HybridError as error:
            return Check(scenario.__name__.replace("_", " "), False, None, f"{type(error).__name__}: {error}")

    def check(self, name: str, outputs: list[RequestOutput], *conditions: tuple[str, bool]) -> Check:
        """A scenario passes if its outputs equal cold runs, something was hit, and its own conditions hold.

        Args:
            conditions: (message, holds) of each further condition.
        """
        hits = sum(output.usage.cached_tokens for output in outputs)
        wrong = (
            self.differences(outputs)
            + ([] if hits else ["nothing was hit"])
            + [message for message, holds in conditions if not holds]
        )
        detail = "; ".join(wrong) if wrong else f"{len(outputs)} requests, bitwise equal"
        return Check(name, not wrong, hits, detail)
