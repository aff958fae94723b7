"""From logits to tokens: what is refused, what is sampled and how often, and what a seed promises."""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hybrid
from hybrid.engine import sampler
from hybrid.engine.results import logprobs_of
from hybrid.engine.sampler import (
    SampleRow,
    SamplingRows,
    choose,
    new_seed,
    presample,
    probabilities,
    sample,
    sampling_numbers,
    token_logprobs,
    uniform,
)
from hybrid.engine.sampling_params import SamplingParams
from support.engines import engine_on, ids
from support.tensors import same_bits

LOGITS = [1.5, -0.3, 2.0, 0.1, 1.9, -4.0, 0.9, 0.0]

# Parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", None),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_p", "most"),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", None),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("seed", "seven"),
        ("logprobs", -1),
        ("logprobs", 101),
        ("logprobs", 1.5),
        ("logprobs", True),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [5]),
        ("stop", None),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", None),
        ("stop_token_ids", 7),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [0] * 1025),
        ("max_new_tokens", 2**31),
        ("max_new_tokens", 10**400),
        pytest.param("max_new_tokens", 10**5000, id="more digits than Python prints"),
        ("max_new_tokens", np.float64(3)),
        ("temperature", 10**400),
        ("temperature", 1e7),
        ("temperature", np.float32(np.nan)),
        ("temperature", True),
        ("top_k", 10**400),
        ("top_k", np.bool_(True)),
        ("top_p", 10**400),
        ("top_p", -(10**400)),
        ("top_p", True),
        ("min_p", 10**400),
        ("min_p", math.nan),
        ("seed", 10**400),
        ("seed", True),
        ("logprobs", 10**400),
        ("priority", 101),
        ("priority", -101),
        ("priority", 10**400),
        ("priority", 0.5),
        ("priority", True),
        ("tenant", ""),
        ("tenant", 3),
        ("pin_for", 10**400),
        ("pin_for", 2e9),
        ("pin_for", 0),
        ("pin_for", -math.inf),
        ("pin_for", math.nan),
        ("pin_for", True),
        ("checkpoint_at", 5),
        ("checkpoint_at", [1.5]),
        ("checkpoint_at", [True]),
        ("checkpoint_at", [10**400]),
        ("checkpoint_at", [1] * 1025),
        ("ignore_eos", 1),
        ("ignore_eos", None),
        ("stop", ["a"] * 257),
        ("stop", "a" * 16385),
        ("stop", ["a" * 8193, "b" * 8192]),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_name(name: str, value: Any) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, name: value}
    with pytest.raises(hybrid.SamplingError, match=rf"^SamplingParams: {name} ") as raised:
        SamplingParams(**settings)
    assert isinstance(raised.value, ValueError)
    assert len(str(raised.value)) < 300  # a value of many digits is not printed whole


@pytest.mark.parametrize("setting", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"seed": 0}])
def test_a_temperature_of_zero_is_greedy_whatever_else_is_set(setting: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, **setting)
    assert sampled(torch.tensor(LOGITS), params, 3) == [2, 2, 2]


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        max_new_tokens=np.int64(5),
        temperature=np.float32(0.5),
        top_k=np.int32(7),
        top_p=np.float64(0.5),
        seed=np.uint64(2**63 - 1),
        logprobs=np.int8(3),
        stop_token_ids=[np.int64(1)],
        checkpoint_at=(np.int16(-3),),
        ignore_eos=np.True_,
        pin_for=np.float64(2),
        priority=np.int64(-100),
    )
    expected = SamplingParams(
        max_new_tokens=5,
        temperature=0.5,
        top_k=7,
        top_p=0.5,
        seed=2**63 - 1,
        logprobs=3,
        stop_token_ids=(1,),
        checkpoint_at=(-3,),
        ignore_eos=True,
        pin_for=2.0,
        priority=-100,
    )
    assert params == expected
    assert [type(value) for value in vars(params).values()] == [type(value) for value in vars(expected).values()]


def test_the_default_is_greedy_and_the_most_likely_token_alone_is_greedy_too() -> None:
    assert SamplingParams() == SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, seed=None)
    assert SamplingParams(top_k=1).temperature == 0


def test_stops_are_kept_as_tuples_however_they_are_given() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert SamplingParams().stop == ()


def sampled(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    """`count` tokens of one request, all from the same logits."""
    seed = new_seed() if params.seed is None else params.seed
    numbers = sampling_numbers([SampleRow(params, uniform(seed, index)) for index in range(count)])
    return sample(logits.expand(count, -1), SamplingRows(*torch.tensor(numbers, dtype=torch.float64))).tolist()


@pytest.mark.parametrize(
    "setting",
    [
        {"top_p": 1},
        {"min_p": 1},
        {"temperature": 2},
        {"temperature": 1e6},
        {"seed": 2**63 - 1},
        {"logprobs": 0},
        {"logprobs": 100},
        {"max_new_tokens": 2**31 - 1},
        {"pin_for": math.inf},
        {"pin_for": 10**9},
        {"priority": 100},
        {"priority": -100},
        {"stop": "a" * 16384},
        {"stop": ["a"] * 256},
    ],
)
def test_the_ends_of_a_range_belong_to_it(setting: dict[str, Any]) -> None:
    SamplingParams(**{"temperature": 1.0, **setting})


# Tokens


def expected_distribution(params: SamplingParams) -> dict[int, float]:
    """Probabilities of the tokens of `LOGITS`, by the definitions of the parameters, in plain Python."""
    weights = {token: math.exp(logit / params.temperature) for token, logit in enumerate(LOGITS)}
    best = sorted(weights, key=lambda token: -weights[token])
    if params.top_k:
        best = best[: params.top_k]
    total, mass, kept = sum(weights[token] for token in best), 0.0, []
    for token in best:
        kept.append(token)
        mass += weights[token] / total
        if mass >= params.top_p:
            break
    kept = [token for token in kept if weights[token] >= params.min_p * weights[best[0]]]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 1e-6},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
        {"temperature": 2.0, "top_p": 0.95, "min_p": 0.4},
        {"top_k": 4, "min_p": 0.35},
    ],
)
def test_tokens_are_sampled_as_often_as_they_should_be(setting: dict[str, Any]) -> None:
    params, count = SamplingParams(**{"temperature": 1.0, "seed": 1, **setting}), 3000
    counts = Counter(sampled(torch.tensor(LOGITS), params, count))
    expected = expected_distribution(params)
    assert counts.keys() <= expected.keys()
    for token, probability in expected.items():
        deviation = math.sqrt(count * probability * (1 - probability))
        assert abs(counts[token] - count * probability) <= 4.5 * deviation + 1e-9


def test_greedy_takes_the_most_likely_token() -> None:
    assert sample(torch.tensor([LOGITS]), None).tolist() == [2]
    assert sampled(torch.tensor(LOGITS), SamplingParams(), 3) == [2, 2, 2]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 5e-324])
def test_a_temperature_near_zero_is_greedy_and_not_an_overflow(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=0)
    logits = 30 * torch.randn(500, generator=torch.Generator().manual_seed(0))
    assert sampled(logits, params, 1) == [int(logits.argmax())]


def test_tokens_that_are_ruled_out_are_never_sampled() -> None:
    params = SamplingParams(temperature=1e6, seed=0)
    assert set(sampled(torch.tensor([-math.inf, 0.0, -math.inf, 3.0]), params, 200)) == {1, 3}


def test_sampling_leaves_the_logits_alone() -> None:
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=0)
    logits = torch.tensor(LOGITS)
    sampled(logits, params, 1)
    assert logits.tolist() == torch.tensor(LOGITS).tolist()


def test_equal_seeds_give_equal_tokens_and_others_do_not() -> None:
    def tokens(seed: int | None) -> list[int]:
        params = SamplingParams(temperature=3.0, seed=seed)
        return sampled(torch.tensor(LOGITS), params, 50)

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)


def test_sampling_does_not_touch_the_random_numbers_of_torch() -> None:
    before = torch.random.get_rng_state()
    params = SamplingParams(temperature=1.0)
    sampled(torch.tensor(LOGITS), params, 1)
    assert torch.equal(torch.random.get_rng_state(), before)


# Log-probabilities


def test_logprobs_are_those_of_the_most_likely_tokens_and_of_the_chosen_one() -> None:
    total = math.log(sum(map(math.exp, LOGITS)))
    found = token_logprobs(torch.tensor([LOGITS, LOGITS]), torch.tensor([5, 2]), 3)
    assert found.tokens.tolist() == [[2, 4, 0]] * 2
    expected = torch.tensor([[LOGITS[token] - total for token in (2, 4, 0)]] * 2)
    torch.testing.assert_close(found.values, expected)
    torch.testing.assert_close(found.chosen, torch.tensor([LOGITS[5] - total, LOGITS[2] - total]))


def test_of_tokens_that_are_equally_likely_the_first_are_reported_however_many_are_asked_for() -> None:
    """The number of those that are asked for is the largest of a batch: in 16 bits many are equal, and which of them
    were reported depended on the other requests."""
    logits = torch.randint(-4, 4, (6, 500), generator=torch.Generator().manual_seed(0)).float()
    logits[1] = 1.0
    chosen = torch.zeros(6, dtype=torch.int64)
    expected = logits.sort(dim=-1, descending=True, stable=True).indices
    values = token_logprobs(logits, chosen, logits.shape[1]).values
    torch.testing.assert_close(values, torch.log_softmax(logits, -1).gather(-1, expected))
    for count in (1, 2, 3, 20, 77, 100):
        found = token_logprobs(logits, chosen, count)
        assert torch.equal(found.tokens, expected[:, :count])
        assert torch.equal(found.values, values[:, :count])
    with_nan = token_logprobs(torch.full((1, 8), torch.nan), chosen[:1], 3)  # its request ends with an error
    assert with_nan.tokens.shape == (1, 3)


@pytest.mark.parametrize(("count", "tokens"), [(0, {4}), (1, {2, 4}), (2, {2, 4}), (100, set(range(8)))])
def test_the_chosen_token_is_reported_once_however_many_are_asked_for(count: int, tokens: set[int]) -> None:
    chosen = torch.tensor([4])
    logprobs = token_logprobs(torch.tensor([LOGITS]), chosen, count)
    assert logprobs_of([values.tolist() for values in logprobs], 0, 4, count).keys() == tokens


@pytest.mark.parametrize("vocab", [8, 1000, 3001])
def test_the_bits_of_probabilities_do_not_depend_on_other_rows(vocab: int) -> None:
    logits = 4 * torch.randn(9, vocab, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=0.3 + 0.2 * row) for row in range(9)]
    rows = SamplingRows(*torch.tensor(sampling_numbers([SampleRow(each, 0.5) for each in params]), dtype=torch.float64))
    chosen = torch.arange(9) % vocab
    values, logprobs = probabilities(logits, rows), token_logprobs(logits, chosen, 5)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for few in ([8], [3, 1], [8, 7, 6, 5, 4, 3, 2, 1, 0]):
                own = SamplingRows(*(numbers[few] for numbers in rows))
                assert same_bits(probabilities(logits[few], own), values[few])
                for part, whole in zip(token_logprobs(logits[few], chosen[few], 5), logprobs, strict=True):
                    assert torch.equal(part, whole[few])
    finally:
        torch.set_num_threads(before)


# In the engine


def test_a_seed_gives_the_same_answer_whatever_else_runs(checkpoint: Path) -> None:
    config = hybrid.CacheConfig(memory="8MiB", page_size=16)
    engine = hybrid.Engine.from_pretrained(checkpoint, device="cpu", dtype="float32", cache=config)
    prompt, others = list(range(10, 100)), [[5, 6, 7], list(range(200, 280))]
    seeded = SamplingParams(temperature=2.0, seed=3, max_new_tokens=16, ignore_eos=True)
    free = SamplingParams(temperature=2.0, max_new_tokens=12, ignore_eos=True)
    alone = engine.generate([prompt], seeded)[0].token_ids
    together = engine.generate([others[0], prompt, others[1]], [free, seeded, free])[1].token_ids
    assert together == alone
    assert engine.generate([prompt], SamplingParams(temperature=2.0, seed=4, max_new_tokens=16))[0].token_ids != alone


# Preselection: the same tokens without sorting the vocabulary


def random_rows(rng: np.random.Generator, count: int) -> SamplingRows:
    """Parameters of all kinds: neutral ones, the usual ones, and ones that few tokens pass or nearly all."""
    some = [
        rng.choice([0.0, 0.05, 0.7, 1.0, 1.5, 30.0], count),
        rng.choice([0, 0, 0, 1, 5, 16, 17, 60, 10**6], count),
        rng.choice([1.0, 1.0, 1e-9, 0.3, 0.9, 0.95, 0.999999, 1 - 2**-53], count),
        rng.choice([0.0, 0.0, 0.0, 1e-12, 0.02, 0.5, 1.0], count),
        rng.choice([*rng.random(8), 0.0, 1 - 2**-53], count),
    ]
    return SamplingRows(*(torch.tensor(values, dtype=torch.float64) for values in some))


def random_logits(rng: np.random.Generator, count: int, vocab: int) -> torch.Tensor:
    """Peaked, flat, with ties of many tokens, and with tokens that are excluded."""
    logits = rng.normal(size=(count, vocab)) * rng.choice([0.01, 1.0, 4.0, 12.0], (count, 1))
    logits[::3] = np.round(logits[::3])
    logits[1::4] = np.where(rng.random((len(logits[1::4]), vocab)) < 0.6, -np.inf, logits[1::4])
    logits[:, 0] = np.maximum(logits[:, 0], -5)  # at least one token is left
    return torch.from_numpy(logits).float()


@pytest.mark.parametrize("vocab", [3, 16, 17, 300])
def test_preselection_chooses_the_same_token_or_says_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, vocab: int
) -> None:
    monkeypatch.setattr(sampler, "PRESELECTED", 16)
    settled = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        logits, rows = random_logits(rng, 40, vocab), random_rows(rng, 40)
        expected = sample(logits, rows)
        tokens, is_settled = presample(logits, rows)
        assert torch.equal(tokens[is_settled], expected[is_settled])
        chosen = choose(logits, None, rows)
        assert torch.equal(chosen.choose_sorted(), expected)
        settled += int(is_settled.sum())
    assert settled > 0.4 * 60 * 40
    if vocab <= 16:
        assert settled > 0.99 * 60 * 40


def test_a_vocabulary_of_qwens_size_is_settled_by_the_most_likely_tokens() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(6, 248320)) * 3.5).float()
    settings = [
        (0.7, 20, 0.95, 0),
        (0.8, 50, 0.8, 0),
        (1, 0, 0.8, 0),
        (1, 0, 0.9, 0.05),
        (0.6, 0, 1, 0.1),
        (0.9, 0, 1, 0.3),
    ]
    numbers = [*map(list, zip(*settings, strict=True)), [*rng.random(6)]]
    rows = SamplingRows(*torch.tensor(numbers, dtype=torch.float64))
    tokens, is_settled = presample(logits, rows)
    assert is_settled.tolist() == [True, True, False, True, True, True]  # a flat one with top_p alone is not
    assert torch.equal(tokens[is_settled], sample(logits, rows)[is_settled])


def test_answers_are_the_same_when_nothing_is_settled_at_first(
    tiny: hybrid.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is sorted once the host knows that it has to be; log-probabilities are of what is chosen then."""
    params = SamplingParams(max_new_tokens=12, temperature=3.0, seed=4, logprobs=2, ignore_eos=True)
    options = [params, dataclasses.replace(params, repetition_penalty=1.2), SamplingParams(max_new_tokens=12)]
    prompts = [ids(30, seed) for seed in range(3)]
    engine = engine_on(tiny, deterministic=True)
    monkeypatch.setattr(sampler, "PRESELECTED", 10**6)
    expected = engine.generate(prompts, options, progress=False)
    monkeypatch.setattr(sampler, "PRESELECTED", 1)
    engine.cache.clear()
    outputs = engine.generate(prompts, options, progress=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert [output.logprobs for output in outputs] == [output.logprobs for output in expected]
