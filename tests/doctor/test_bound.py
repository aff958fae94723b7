"""The bound: nothing hits more, and a hand-made case has it to the token."""

import random
from array import array

import pytest

from hybrid.doctor import Sizes
from hybrid.doctor.bound import Bound
from hybrid.doctor.engines import ENGINES, engine_of
from hybrid.doctor.request import LoggedRequest, hashed

PAGE, STATE = 16 * 1000, 50_000
SIZES = Sizes(1000, STATE)


def request(name: int, num_tokens: int) -> LoggedRequest:
    ids = [name * 100_000 + n for n in range(num_tokens)]
    return LoggedRequest(hashed(ids), num_tokens, num_tokens)


def test_two_prompts_in_turns_and_memory_for_one() -> None:
    bound, num_tokens = Bound(SIZES), 161
    for n in range(10):
        bound.add(request(n % 2, num_tokens))
    # Each of the last eight may hit 160 tokens, whose ten pages and state are kept for two requests.
    needed = 10 * PAGE + STATE
    assert bound.hit_tokens(10 * needed) == 8 * 160
    for memory in (needed // 2, needed):
        assert bound.hit_tokens(memory) == pytest.approx(160 * 10 * memory / (2 * needed), abs=1)
    assert bound.hit_tokens(0) == 0


def test_a_state_is_needed_at_the_end_of_a_hit() -> None:
    """A part of a prompt that many share is worth a state; the rest of one that comes back late is worth another."""
    shared = [*range(16_000)]
    bound = Bound(SIZES)
    for n in range(4):
        ids = shared + [100_000 * (n + 1) + at for at in range(33)]
        bound.add(LoggedRequest(hashed(ids), len(ids), len(ids)))
    assert bound.hit_tokens(1 << 40) == 3 * 16_000
    assert bound.hit_tokens(1000 * PAGE + STATE) == 3 * 16_000
    assert bound.hit_tokens((1000 * PAGE + STATE) // 2) < 3 * 16_000


def traffic(seed: int, count: int) -> list[LoggedRequest]:
    """Conversations that share beginnings, go on, branch and end."""
    rng, made = random.Random(seed), []
    beginnings = [array("i", [rng.randrange(32000) for _ in range(rng.randrange(40, 1500))]) for _ in range(3)]
    open_ones = [array("i", rng.choice(beginnings)) for _ in range(10)]
    for _ in range(count):
        place = rng.randrange(10)
        if rng.random() < 0.1:
            open_ones[place] = array("i", rng.choice(beginnings))
        history = open_ones[place]
        history.extend(rng.randrange(32000) for _ in range(rng.randrange(10, 500)))
        num_prompt = len(history)
        history.extend(rng.randrange(32000) for _ in range(rng.randrange(1, 200)))
        made.append(LoggedRequest(hashed(history), num_prompt, len(history), namespace="ab"[rng.random() < 0.2]))
        if rng.random() < 0.2:
            del history[rng.randrange(len(history)) :]
    return made


@pytest.mark.parametrize(
    ("engine", "memory"),
    [*((name, 600_000_000) for name in ENGINES), ("vllm", 2_000_000_000), ("hybrid", 2_000_000_000)],
)
def test_no_engine_hits_more(engine: str, memory: int) -> None:
    sizes, requests = Sizes(32768, 25_000_000), traffic(memory % 7, 150)
    bound, model = Bound(sizes), engine_of(engine, sizes, memory)
    hits = 0
    for one in requests:
        bound.add(one)
        hits += model.serve(one).num_tokens
    assert 0 < hits <= bound.hit_tokens(memory)
