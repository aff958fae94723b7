"""Choices scored after prompts, and log-probabilities of the end of a prompt: as a cold run, and with the cache."""

from dataclasses import replace

import pytest
import torch

from hybrid import Engine, PromptError, SamplingParams
from hybrid.models.torch_functions import use_torch_functions
from support.engines import GRID, answer, assert_nothing_held, cold, engine_on, greedy, ids

CHOICES = [" a context manager", " the block", " nothing at all, as it is"]
TEXT = "The with statement wraps the execution of a block with methods defined by"


@pytest.mark.parametrize("overlap", [False, True])
def test_log_probabilities_from_a_position_on_hit_before_it_and_are_those_of_a_cold_run(
    tiny: Engine, overlap: bool
) -> None:
    prompt, start = ids(9 * GRID + 5), 7 * GRID + 3
    whole = cold(tiny, prompt, greedy(3, prompt_logprobs=2, logprobs=1))
    engine = engine_on(tiny, overlap=overlap)
    params = greedy(3, prompt_logprobs=2, logprobs=1, logprob_start_len=start)
    for cached in (0, 7 * GRID):
        found = answer(engine, prompt, params)
        assert found.usage.cached_tokens == cached
        assert found.prompt_logprobs is not None
        assert whole.prompt_logprobs is not None
        assert found.prompt_logprobs[:start] == [None] * start
        assert found.prompt_logprobs[start:] == whole.prompt_logprobs[start:]
        assert (found.token_ids, found.logprobs) == (whole.token_ids, whole.logprobs)
    assert str(found.explain) == (
        f"{7 * GRID} of {len(prompt)} tokens cached, pages up to {7 * GRID}: all up to token {start - 1}: from there "
        "on log-probabilities are computed"
    )
    assert answer(engine, prompt, greedy(1, prompt_logprobs=1)).usage.cached_tokens == 0
    with pytest.raises(PromptError, match="logprob_start_len=149 is outside the prompt of 149 tokens"):
        answer(engine, prompt, SamplingParams(prompt_logprobs=0, logprob_start_len=149))
    assert_nothing_held(engine)


@pytest.mark.parametrize("size", [400, 20])
def test_scores_are_the_sums_of_a_cold_run_and_the_prompt_is_computed_once(tiny: Engine, size: int) -> None:
    engine = engine_on(tiny, pages=size)
    prompts = [ids(6 * GRID + 3, seed=seed) for seed in range(3)]
    choices = [ids(5, seed=9), ids(2, seed=8), ids(GRID, seed=7)]
    for again in range(2):
        scores = engine.score(prompts, choices)
        for prompt, row in zip(prompts, scores, strict=True):
            for choice, score in zip(choices, row, strict=True):
                known = cold(tiny, prompt + choice, greedy(1, prompt_logprobs=1)).prompt_logprobs
                assert known is not None
                values = [at[token] for at, token in zip(known[len(prompt) :], choice, strict=True) if at is not None]
                assert score.token_logprobs == values
                assert score.logprob == sum(values)
                assert score.token_ids == choice
        if size == 400:  # the first choice of each prompt computes it
            cached = [[score.cached_tokens for score in row] for row in scores]
            assert [row[1:] for row in cached] == [[6 * GRID] * 2] * 3
            assert [row[0] for row in cached] == [6 * GRID * again] * 3
    assert_nothing_held(engine)


def test_texts_are_scored_as_they_are_tokenized_together(tiny: Engine) -> None:
    engine = engine_on(tiny)
    scores = engine.score(TEXT, CHOICES)[0]
    assert tiny.tokenizer is not None
    for choice, score in zip(CHOICES, scores, strict=True):
        assert tiny.tokenizer(TEXT + choice).input_ids[-len(score.token_ids) :] == score.token_ids
    likely = engine.generate(TEXT, greedy(4))[0].token_ids
    (found,) = engine.score([engine.encode(TEXT)], [likely])[0]
    assert found.is_greedy
    assert not all(score.is_greedy for score in scores)
    each = engine.score([TEXT, "import"], [CHOICES[:2], [" os"]])
    assert [len(row) for row in each] == [2, 1]
    assert replace(each[0][0], cached_tokens=0) == replace(scores[0], cached_tokens=0)
    for wrong, message in (([], "no choices"), ([[" a"], [" b"]], "for 2 prompts"), ([""], "at least one token")):
        with pytest.raises(PromptError, match=message):
            engine.score(TEXT, wrong)  # type: ignore[arg-type]


def test_scores_are_those_of_transformers(tiny: Engine) -> None:
    from transformers import AutoModelForCausalLM

    from hybrid.models.loading import TINY

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    use_torch_functions(model)
    prompt, choice = ids(50), ids(6, seed=3)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + choice])).logits[0].log_softmax(-1)
    expected = sum(logits[49 + at, token].item() for at, token in enumerate(choice))
    assert engine_on(tiny).score([prompt], [choice])[0][0].logprob == pytest.approx(expected, abs=2e-3)
