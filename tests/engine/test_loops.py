"""The loop that launches ahead gives what the plain one gives, in random lives."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from hybrid import Engine, SamplingParams, SpeculationConfig
from support.engines import GRID, assert_nothing_held, engine_on, ids

NUM_REQUESTS = 10


class PlantedError(Exception):
    """Raised by a pass."""


@dataclass
class Asked:
    """A request of a life.

    Attributes:
        at: number of the step before which it comes.
        stay: tokens after which it is aborted.
        told: what every step has told of it.
    """

    at: int
    prompt: list[int]
    params: SamplingParams
    namespace: str
    stay: int
    told: list[Any] = field(default_factory=list)


def requests(rng: random.Random) -> list[Asked]:
    """Requests that share beginnings, with options of all kinds."""
    shared, made = ids(5 * GRID, seed=rng.randrange(100)), []
    for number in range(NUM_REQUESTS):
        prompt = shared[: rng.choice((0, GRID - 1, 2 * GRID, 5 * GRID))] + ids(rng.randrange(1, 40), seed=number)
        options: dict[str, Any] = {"max_new_tokens": rng.choice((1, 2, GRID, 30)), "ignore_eos": True, "logprobs": 2}
        if rng.random() < 0.4:
            options |= {"temperature": 0.9, "top_p": 0.9, "seed": number}
        if rng.random() < 0.3:
            options |= rng.choice(({"n": 2}, {"repetition_penalty": 1.3}, {"stop": ["e"]}, {"prompt_logprobs": 1}))
        stay = rng.randrange(1, 20) if rng.random() < 0.2 and options.get("n", 1) == 1 else 1000
        made.append(Asked(rng.randrange(25), prompt, SamplingParams(**options), rng.choice(("", "", "b")), stay))
    return made


def life(
    tiny: Engine, seed: int, overlap: bool, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], int]:
    """What each request of a life was given, and the number of retractions. Some passes fail."""
    rng = random.Random(seed)
    asked, failing = requests(rng), {rng.randrange(3, 30) for _ in range(2)}
    engine = engine_on(tiny, pages=rng.choice((20, 26)), states=12, overlap=overlap)
    if drafts:
        own = SpeculationConfig(drafters=("cache",), adaptive=False)
        engine = Engine(engine.loaded, engine.cache, engine.config, speculation=own)
    launch, launches = engine.runner.launch, 0

    def launched(plan: Any) -> Any:
        nonlocal launches
        launches += 1
        if launches in failing:
            raise PlantedError
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", launched)
    live: dict[str, Asked] = {}
    step = 0
    while engine.has_work or step <= max(one.at for one in asked):
        for one in asked:
            if one.at == step:
                live[engine.add_request(one.prompt, one.params, namespace=one.namespace)] = one
        step += 1
        if not engine.has_work:
            continue
        try:
            outputs = engine.step()
        except PlantedError:
            continue
        for output in outputs:
            one = live[output.request_id]
            one.told += output.delta_token_ids if one.params.n == 1 else []
            if output.finish_reason is None and len(output.token_ids) >= one.stay:
                engine.abort(output.request_id)
            elif output.finish_reason is not None:
                ends = [(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in output.outputs]
                assert one.params.n > 1 or one.told == output.token_ids
                one.told = [*ends, output.prompt_logprobs, output.error]
    assert launches > max(failing)
    assert_nothing_held(engine)
    return [one.told for one in asked], engine.scheduler.num_retractions


@pytest.mark.parametrize(("seed", "drafts"), [(0, False), (1, False), (2, False), (3, True)])
def test_the_loop_that_launches_ahead_gives_what_the_plain_one_gives(
    tiny: Engine, seed: int, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, retracted = life(tiny, seed, False, drafts, monkeypatch)
    ahead, _ = life(tiny, seed, True, drafts, monkeypatch)
    assert ahead == plain
    assert retracted > 0
