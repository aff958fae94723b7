"""With every option of a request the answers with drafts are those without: tokens, texts and log-probabilities."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hybrid import CacheConfig, Engine, EngineConfig, RequestOutput, SamplingParams
from hybrid.commands.parity import KnownAnswers
from hybrid.engine import forms
from hybrid.speculation.config import SpeculationConfig
from support.drafters import VOCAB, following
from support.engines import GRID, assert_nothing_held, engine_on, ids

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["map", "list"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def moving(answer: Sequence[int], row: torch.Tensor) -> torch.Tensor:
    """A logits processor that depends on the whole answer."""
    row = row.clone()
    row[sum(answer) * 7 % VOCAB] += 5
    row[len(answer) * 13 % VOCAB] -= 3
    return row


OPTIONS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 1.2, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {5: 3.0, 77: -100}},
    "bad words": {"bad_words": ["the", " a", "def"]},
    "min_tokens": {"min_tokens": 20, "ignore_eos": False, "logit_bias": {0: 20.0, 1: 20.0, 2: 20.0}},
    "processor": {"logits_processors": [moving]},
    "json": {"structured": {"json_schema": SCHEMA}, "ignore_eos": False},
    "regex": {"structured": {"regex": "[0-9]{3}-[a-f]+;[a-z ]{0,40}"}, "ignore_eos": False},
    "choice": {"structured": {"choice": ["yes, it is", "no, it is not"]}, "ignore_eos": False},
    "grammar": {"structured": {"grammar": 'start: "[" item ("," item)* "]"\nitem: /[a-c]{2}/\n'}, "ignore_eos": False},
    "n": {"n": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "stop": {"stop": ["e "], "ignore_eos": False},
}

Answers = list[list[Any]]


def answers_of(outputs: list[RequestOutput], exactly: bool) -> Answers:
    return [
        [(one.token_ids, one.text, one.finish_reason, one.logprobs if exactly else None) for one in output.outputs]
        + [output.prompt_logprobs if exactly else None]
        for output in outputs
    ]


def run(tiny: Engine, requests: list[Any], deterministic: bool, drafts: Any) -> tuple[list[Answers], int]:
    """The answers, cold and after hits, and how many drafts were accepted."""
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, deterministic=deterministic)
    engine = tiny.with_cache(settings, size=(96, 24), config=EngineConfig(max_num_seqs=8), speculation=drafts)
    prompts, params = zip(*requests, strict=True)
    found, accepted = [], 0
    for _ in range(2):
        outputs = engine.generate(list(prompts), list(params), progress=False)
        found.append(answers_of(outputs, deterministic))
        accepted += sum(output.usage.accepted_tokens for output in outputs)
    assert_nothing_held(engine)
    return found, accepted


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
def test_drafts_change_no_answer(tiny: Engine, deterministic: bool) -> None:
    requests = []
    for seed, options in enumerate(OPTIONS.values()):
        prompt = [*ids(12, seed=seed), *[7, 8, 9] * 4]
        sampled = {"temperature": 0.8, "seed": seed, "top_p": 0.95} if seed % 2 else {}
        settings: dict[str, Any] = {"ignore_eos": True, "logprobs": 1, "max_new_tokens": 20, **sampled, **options}
        requests.append((prompt, SamplingParams(**settings)))
    plain, _ = run(tiny, requests, deterministic, None)
    known = {tuple(prompt): answer[0][0] for (prompt, _), answer in zip(requests, plain[0], strict=True)}
    for drafter in (following(known), following(known, 0.6), KnownAnswers(known, wrong_every=3, as_tree=True)):
        drafts = SpeculationConfig(drafters=(drafter,), adaptive=False)
        found, accepted = run(tiny, requests, deterministic, drafts)
        for name, expected, *others in zip(OPTIONS, *plain, *found, strict=True):
            assert [expected] * 3 == others, name
        assert accepted > 60
    assert run(tiny, requests, deterministic, "cache")[0] == plain


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_the_token_that_completes_a_form_is_the_last(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, overlap: bool, is_late: bool
) -> None:
    """With drafts up to it and beyond, where forms are late, and where it is the last one that there is room for."""
    prompt, form = ids(12), {"choice": ["yes, it is", "no, it is not"]}
    end = min(tiny.loaded.end_tokens)
    engine = engine_on(tiny, overlap=overlap)

    def found(count: int, drafts: Any) -> tuple[list[int], str, str | None]:
        own = Engine(engine.loaded, engine.cache, engine.config, speculation=drafts)
        (output,) = own.generate([prompt], SamplingParams(max_new_tokens=count, structured=form), progress=False)
        assert output.error is None
        assert_nothing_held(own)
        return output.token_ids, output.text, output.finish_reason

    monkeypatch.setattr(forms, "AT_ONCE", 60.0)
    tokens, text, _ = expected = found(40, None)
    assert text in form["choice"]
    assert expected == (tokens, text, "stop")
    assert end not in tokens
    monkeypatch.setattr(forms, "AT_ONCE", 1e-6 if is_late else 60.0)
    count = len(tokens)
    for more in ([], [end], [end, end, 5], [5, 6]):
        known = following({tuple(prompt): [*tokens, *more]})
        for drafts in (None, SpeculationConfig(drafters=(known,), adaptive=False)):
            assert found(40, drafts) == found(count + 1, drafts) == found(count, drafts) == expected
            assert found(count - 1, drafts)[::2] == (tokens[:-1], "length")
