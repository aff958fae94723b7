"""The memory of drafters is cleared with the cache."""

import random
from array import array
from collections.abc import Sequence
from functools import partial

import pytest

from hybrid import Drafter, Engine, History, Key, SpeculationConfig
from hybrid.speculation.cached import GramDrafter
from support.engines import GRID, answer, engine_on, greedy, ids


def drafting(tiny: Engine, *drafters: str | Drafter, **config: object) -> Engine:
    own = engine_on(tiny, **config)
    settings = SpeculationConfig(drafters=drafters, adaptive=False)
    return Engine(own.loaded, own.cache, own.config, speculation=settings)


def num_drafts(engine: Engine) -> int:
    return answer(engine, ids(3 * GRID), greedy(20)).usage.drafted_tokens


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_drafted_from_texts_that_were_cleared(tiny: Engine, enabled: bool) -> None:
    engine = drafting(tiny, "cache", enabled=enabled)
    first = num_drafts(engine)
    assert num_drafts(engine) > first
    engine.cache.clear()
    assert num_drafts(engine) == first


def test_an_index_of_n_grams_gives_its_memory_back_and_requests_that_run_keep_their_own_text() -> None:
    rng, drafter = random.Random(0), GramDrafter()
    own, other = (array("i", [rng.randrange(50_000) for _ in range(400)]) for _ in range(2))
    drafter.end(History(other, 1, "", partial(Key.of, other)))
    own.extend(other[50:58])
    history = History(own, 1, "", partial(Key.of, own))
    assert drafter.propose(history, 3)[0] == other[58:61]
    drafter.clear()
    assert (drafter.num_tokens, drafter.num_bytes) == (0, 0)
    own.append(other[58])
    assert not drafter.propose(history, 3)[0]
    own.extend(other[100:300])
    drafter.propose(history, 3)  # all of it is indexed
    own.extend(own[20:28])
    assert drafter.propose(history, 3)[0] == own[28:31]
    drafter.end(history)
    assert drafter.num_tokens == len(own)


class Remembering(Drafter):
    """Counts how often it was to forget."""

    def __init__(self) -> None:
        self.num_cleared = 0

    def propose(self, history: History, limit: int) -> tuple[Sequence[int], Sequence[int]]:
        return (), ()

    def clear(self) -> None:
        self.num_cleared += 1
        raise RuntimeError("it does not forget")


def test_a_drafter_of_ones_own_is_asked_to_forget_too(tiny: Engine) -> None:
    own = Remembering()
    engine = drafting(tiny, own)
    engine.cache.clear()
    assert own.num_cleared == 1
    assert engine.stats().speculation["Remembering"].refused == 1
    engine.cache.audit()
