"""Every request makes progress, and no token is computed without bound.

A request that fits into an empty cache ends within a number of steps that can be stated beforehand, whatever else the
engine runs; and of any load at most twice the useful tokens are computed.
"""

import random
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hybrid import (
    CacheMemory,
    Engine,
    EngineConfig,
    HybridError,
    Image,
    ImagePrompt,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from support.engines import GRID, assert_nothing_held, greedy, ids
from support.scheduling import Counting, engine_without_model

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

# Thrashing


@pytest.mark.parametrize(("deterministic", "overlap"), [(True, False), (False, True)])
@pytest.mark.parametrize(
    ("pages", "requests", "prompt", "new"),
    [(70, 8, 64, 950), (60, 12, 16, 300), (40, 5, 200, 200), (33, 4, 300, 200)],
)
def test_at_most_twice_the_useful_tokens_are_computed(
    pages: int, requests: int, prompt: int, new: int, deterministic: bool, overlap: bool
) -> None:
    """Scenario 33: requests that outgrow the memory together."""
    runner = Counting()
    config = EngineConfig(overlap=overlap)
    engine = engine_without_model(pages, 80, config=config, runner=runner, deterministic=deterministic)
    for seed in range(requests):
        engine.add_request(ids(prompt, seed=seed), greedy(new))
    while engine.has_work:
        engine.step()
    useful = requests * (prompt + new)
    assert runner.computed <= 2 * useful
    assert runner.replayed <= 2 * useful
    assert engine.scheduler.num_retractions <= requests
    assert_nothing_held(engine)


def test_a_retracted_request_is_not_retracted_again() -> None:
    engine = engine_without_model(40, 40, deterministic=True)
    for seed in range(6):
        engine.add_request(ids(60, seed=seed), greedy(400), namespace="ab"[seed % 2])
    retracted: set[str] = set()
    before: set[str] = set()
    while engine.has_work:
        engine.step()
        running = {request.request_id for request in engine.scheduler.running if not request.is_replay}
        waiting = {request.request_id for request in engine.scheduler.waiting.in_turn(set())}
        now = (before & waiting) - running
        assert not now & retracted
        retracted |= now
        before = running
    assert retracted


# The proof: any load ends


@dataclass
class Load:
    """A random load, and what must be true of it.

    The steps that it may take are those that compute the tokens of all requests twice, one by one, and replay them,
    with some for every failure.
    """

    seed: int
    rng: random.Random = field(init=False)
    engine: Engine = field(init=False)
    runner: Counting = field(init=False)
    steps: int = 0
    failures: int = 0
    work: int = 0
    due: set[str] = field(default_factory=set)
    ended: dict[str, RequestOutput] = field(default_factory=dict)
    streams: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.runner = Counting(rng=random.Random(self.seed + 1))
        if rng.random() < 0.5:
            self.runner.fails, self.runner.spoils = rng.choice((0.0, 0.02)), rng.choice((0.0, 0.01))
        if rng.random() < 0.5:
            memory = CacheMemory.of_indices(rng.randrange(6, 80), rng.choice((2, 3, 4, 12, 40)))
        else:
            memory = CacheMemory.of_bytes(64 * rng.randrange(30, 160), 64, rng.choice((64, 180, 500)))
        chunk = GRID * rng.choice((1, 2))
        config = EngineConfig(
            max_num_seqs=rng.choice((1, 2, 5, 16)),
            max_num_batched_tokens=rng.choice((chunk + 16, 4 * chunk + 16, 1024)),
            overlap=rng.random() < 0.5,
            audit=self.seed % 4 == 0,
        )
        self.engine = engine_without_model(
            memory=memory,
            config=config,
            runner=self.runner,
            deterministic=rng.random() < 0.5,
            eviction=rng.choice(("lhd", "lru", "flop_aware", "fifo")),
            placement=rng.choice((("branch", "prompt_end", "turn_end", "geometric"), ("turn_end",), ())),
        )
        self.shared = [ids(2000, seed=self.seed + n) for n in range(2)]

    def prompt(self) -> Any:
        """A prompt that shares something with others, perhaps with images."""
        rng, most = self.rng, self.engine.cache.largest_request * GRID
        length = rng.choice((rng.randrange(1, 40), rng.randrange(1, max(2, most // 2)), int(0.8 * most)))
        shared = min(length - 1, rng.choice((0, GRID, 4 * GRID, rng.randrange(1 + length))))
        prompt = rng.choice(self.shared)[:shared]
        prompt = prompt + ids(max(1, length - len(prompt)), seed=rng.randrange(10**6))
        if rng.random() < 0.2 and len(prompt) > 8:
            start = rng.randrange(len(prompt) - 4)
            count = rng.randrange(1, min(len(prompt) - start, 60))
            kind = rng.randrange(3)
            return ImagePrompt(prompt, [Image(start, torch.full((count, 4), 0.5 + kind), bytes([kind]))])
        return prompt

    def add(self) -> None:
        """A request, if it fits into an empty cache."""
        rng = self.rng
        prompt = self.prompt()
        num_tokens = len(prompt.token_ids) if isinstance(prompt, ImagePrompt) else len(prompt)
        params = SamplingParams(
            max_new_tokens=rng.choice((1, 5, GRID, 5 * GRID)),
            ignore_eos=True,
            pin_for=rng.choice((None, None, None, 1e6)),
            priority=rng.choice((0, 0, 100)),
            checkpoint_at=[rng.randrange(num_tokens)] if rng.random() < 0.2 else (),
        )
        try:
            name = self.engine.add_request(prompt, params, namespace=rng.choice(("", "", "a", "b")))
        except HybridError:
            return
        # each token in a step of its own, computed twice, and replayed; a step to start, and one to end
        self.work += 3 * (num_tokens + params.max_new_tokens) + 4
        self.due.add(name)

    def step(self) -> None:
        """A step, after which no request is overdue."""
        self.steps += 1
        try:
            outputs = self.engine.step()
        except RuntimeError:
            self.failures += 1
            return
        for output in outputs:
            if output.finish_reason is not None:
                assert output.request_id not in self.ended
                self.ended[output.request_id] = output
        allowed = self.work + 40 * self.failures
        late = self.due - self.ended.keys()
        assert self.steps <= allowed, f"seed {self.seed}: {late} after {self.steps} steps of {allowed}"

    def run(self, operations: int) -> None:
        """Random operations, and then steps until all have ended."""
        for _ in range(operations):
            action = self.rng.random()
            live = sorted(self.due - self.ended.keys())
            if action < 0.2 and len(live) < 30:
                self.add()
            elif action < 0.23 and live:
                with suppress(RequestError):  # it has ended, and its output is still to come
                    self.engine.abort(self.rng.choice(live))
            elif action < 0.24:
                self.engine.cache.clear()
            elif self.engine.has_work:
                self.step()
        while self.engine.has_work:
            self.step()
        assert set(self.ended) == self.due


@pytest.mark.parametrize("seed", range(24))
def test_every_request_that_fits_ends_within_a_stated_number_of_steps(seed: int) -> None:
    load = Load(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # pins that are too large
        load.run(250)
    assert_nothing_held(load.engine)
    if not load.runner.fails and not load.runner.spoils:
        assert {output.finish_reason for output in load.ended.values()} <= {"length", "abort"}
