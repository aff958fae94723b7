"""A failure belongs to one request: the others of the step keep their tokens, and the next ones compute afresh."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hybrid import Engine, ImagePrompt, RequestOutput, SamplingParams
from hybrid.engine.planner import Plan, plan
from hybrid.engine.step import Part, Step
from hybrid.errors import AuditError
from hybrid.prompts.images import Image
from hybrid.speculation.drafts import Drafts
from support.engines import GRID, answer, assert_nothing_held, cold, engine_on, greedy, ids, run_to_end


def assert_others_are_right(tiny: Engine, engine: Engine, outputs: dict[str, RequestOutput], failed: str) -> None:
    """One request failed, and all others have the answers of cold runs; so has a request that comes later."""
    assert outputs[failed].finish_reason == "error"
    assert outputs[failed].error
    for name, output in outputs.items():
        if name != failed:
            assert output.error is None
            expected = cold(tiny, output.prompt_token_ids, greedy(len(output.token_ids)))
            assert output.token_ids == expected.token_ids
    assert_nothing_held(engine)
    late = answer(engine, ids(90, seed=99), greedy(5))
    assert late.token_ids == cold(tiny, ids(90, seed=99), greedy(5)).token_ids


def add_some(engine: Engine, **special: Any) -> tuple[str, list[str]]:
    """Six requests in two namespaces; the third one has special parameters, and decodes into a new page at once."""
    names = [
        engine.add_request(
            ids(2 * GRID + 7 * (n - 2), seed=n), greedy(6, **(special if n == 2 else {})), namespace="ab"[n % 2]
        )
        for n in range(6)
    ]
    return names[2], names


# Delivery


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("token", [1, 3, 6])
def test_a_detokenizer_that_raises_fails_one_request(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, overlap: bool, token: int
) -> None:
    engine = engine_on(tiny, overlap=overlap)
    failing, names = add_some(engine)
    text = next(request.text for request in engine.scheduler.waiting.in_turn(set()) if request.request_id == failing)
    assert text is not None
    append, calls = text.append, []

    def raising(token_id: int) -> bool:
        calls.append(token_id)
        if len(calls) == token:
            raise ValueError("not a character")
        return append(token_id)

    monkeypatch.setattr(text, "append", raising)
    outputs = run_to_end(engine)
    assert set(outputs) == set(names)
    assert outputs[failing].error == "ValueError: not a character"
    assert_others_are_right(tiny, engine, outputs, failing)


def test_a_pin_that_raises_fails_one_request(tiny: Engine) -> None:
    """With warnings as errors, a pin that is too large is an exception."""
    engine = engine_on(tiny, pages=24)
    names = [engine.add_request(ids(20, seed=n), greedy(6), namespace="ab"[n % 2]) for n in range(4)]
    failing = engine.add_request(ids(15 * GRID, seed=8), greedy(6, pin_for=60.0), namespace="a")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        outputs = run_to_end(engine)
    assert set(outputs) == {*names, failing}
    assert "is not pinned" in (outputs[failing].error or "")
    assert_others_are_right(tiny, engine, outputs, failing)


@pytest.mark.parametrize("where", ["commit", "begin", "reserve", "capture", "end_turn", "advance"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_cache_that_raises_for_one_request_fails_no_other(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, where: str, deterministic: bool
) -> None:
    engine = engine_on(tiny, deterministic=deterministic)
    failing, names = add_some(engine)
    mine = next(request for request in engine.scheduler.waiting.in_turn(set()) if request.request_id == failing)
    original = getattr(engine.cache, where)

    def raising(first: Any, *arguments: Any) -> Any:
        if first is mine.lease or first == mine.key():
            raise RuntimeError("the cache is broken")
        return original(first, *arguments)

    monkeypatch.setattr(engine.cache, where, raising)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        try:
            outputs.update({output.request_id: output for output in engine.step()})
        except RuntimeError:
            engine.cache.audit()
    monkeypatch.undo()
    assert set(outputs) == set(names)
    assert_others_are_right(tiny, engine, outputs, failing)


# Passes


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("overlap", [True, False])
def test_of_a_step_that_always_fails_only_the_culprit_ends(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, number: int, overlap: bool
) -> None:
    engine = engine_on(tiny, overlap=overlap)
    names = [engine.add_request(ids(20 + 9 * n, seed=n), greedy(6), namespace="ab"[n % 2]) for n in range(6)]
    failures = fail_with(engine, monkeypatch, lambda part: part.request.request_id == names[number])
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        try:
            outputs.update({output.request_id: output for output in engine.step()})
        except RuntimeError:
            engine.cache.audit()
    assert outputs[names[number]].error == "RuntimeError: no kernel for this"
    assert len(failures) <= 8
    assert set(outputs) == set(names)
    assert_others_are_right(tiny, engine, outputs, names[number])


@pytest.mark.parametrize("num_others", [0, 3])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_failure_in_the_middle_of_an_answer_ends_that_request(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, num_others: int, deterministic: bool
) -> None:
    """The tokens that were undone pass when they are computed again, up to where it failed."""
    engine = engine_on(tiny, deterministic=deterministic)
    names = [engine.add_request(ids(20 + 9 * n, seed=n), greedy(8)) for n in range(1 + num_others)]
    failures = fail_with(engine, monkeypatch, lambda part: part.request.request_id == names[0] and part.end >= 24)
    outputs: dict[str, RequestOutput] = {}
    for _ in range(200):
        if not engine.has_work:
            break
        try:
            outputs.update({output.request_id: output for output in engine.step()})
        except RuntimeError:
            engine.cache.audit()
    assert outputs[names[0]].error == "RuntimeError: no kernel for this"
    assert len(failures) <= 6
    assert set(outputs) == set(names)
    assert all(outputs[name].finish_reason == "length" for name in names[1:])
    assert_nothing_held(engine)


def test_generate_and_streams_go_on_without_the_culprit(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tiny)
    fail_with(engine, monkeypatch, lambda part: len(part.request.prompt_token_ids) == 33)
    good = "def add(a, b):"
    stream = engine.stream(good, greedy(8))
    pieces = [next(stream)]
    outputs = engine.generate([ids(20), ids(33), ids(40)], greedy(5), progress=False)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    for output in (outputs[0], outputs[2]):
        assert output.token_ids == cold(tiny, output.prompt_token_ids, greedy(5)).token_ids
    assert "".join([*pieces, *stream]) == answer(engine_on(tiny), good, greedy(8)).text
    assert_nothing_held(engine)


def fail_with(engine: Engine, monkeypatch: pytest.MonkeyPatch, is_culprit: Callable[[Part], bool]) -> list[Step]:
    """Let every pass fail that has a part of the culprit. Returns the steps that failed."""
    build, failed = engine.runner.plan, []

    def failing(step: Step, before: Any) -> Plan:
        if any(is_culprit(part) for part in step.parts):
            failed.append(step)
            raise RuntimeError("no kernel for this")
        return build(step, before)

    monkeypatch.setattr(engine.runner, "plan", failing)
    return failed


def test_a_plan_whose_numbers_disagree_is_refused(tiny: Engine) -> None:
    """A request without the token that its part computes would shift the rows of all requests after it."""
    engine = engine_on(tiny)
    engine.add_request(ids(20), greedy(6))
    engine.step()
    step = engine.scheduler.schedule()
    (part,) = step.parts
    config = engine.cache.config
    plan(step, config.page_size, config.chunk_size, True)
    part.request.ids.pop()
    with pytest.raises(AuditError, match=r"has 0 tokens for positions \[20, 21\) of a decode step"):
        plan(step, config.page_size, config.chunk_size, True)
    part.end = part.start
    with pytest.raises(AuditError, match="has 0 tokens"):
        plan(step, config.page_size, config.chunk_size, True)
    part.request.ids.append(7)
    part.end = part.start + 1
    part.drafts = Drafts((5,) * config.page_size, (-1,) * config.page_size, "test")
    with pytest.raises(AuditError, match=f"has 2 pages for {21 + config.page_size} tokens"):
        plan(step, config.page_size, config.chunk_size, True)


# NaN


@contextmanager
def poisoned(engine: Engine, passes: set[int], layer: int, rows: slice) -> Iterator[None]:
    """Let a layer give NaN in some rows of some passes, counted from 1."""
    calls = 0

    def poison(module: Any, arguments: Any, result: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls not in passes:
            return None
        x = result[0].clone()
        x[rows] = float("nan")
        return (x, *result[1:])

    handle = engine.model.model.layers[layer].register_forward_hook(poison)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("passes", [{1}, {4}])
@pytest.mark.parametrize("deterministic", [True, False])
def test_nothing_of_a_pass_with_nan_is_shared(
    tiny: Engine, overlap: bool, layer: int, passes: set[int], deterministic: bool
) -> None:
    """Scenario 28. The prompt is computed over two steps; the third one decodes."""
    engine = engine_on(tiny, overlap=overlap, deterministic=deterministic)
    prompt = ids(300)
    with poisoned(engine, passes, layer, slice(-1, None)):
        output = answer(engine, prompt, greedy(6, temperature=0.8, seed=1))
    if passes == {1}:
        assert output.finish_reason == "error"
        assert output.error is not None and "NaN or infinity" in output.error
    else:  # it read what it had shared of its prompt, and was computed once more
        assert output.token_ids == cold(tiny, prompt, greedy(6, temperature=0.8, seed=1)).token_ids
    assert_nothing_held(engine)
    for tensor in (engine.cache.kv, *engine.cache.state_tensors.values()):
        for _, node in engine.cache.tree.nodes():
            used = node.pages if tensor is engine.cache.kv else [node.slot] if node.slot is not None else []
            assert all(bool(tensor[index].isfinite().all()) for index in used)
    again = answer(engine, prompt, greedy(6))
    assert again.token_ids == cold(tiny, prompt, greedy(6)).token_ids
    assert again.finish_reason == "length"


def test_nan_in_the_row_of_one_request_fails_no_other(tiny: Engine) -> None:
    engine = engine_on(tiny)
    names = [engine.add_request(ids(12, seed=n), greedy(8), namespace="ab"[n % 2]) for n in range(4)]
    engine.step()
    with poisoned(engine, {1}, 1, slice(2, 3)):
        outputs = {output.request_id: output for output in engine.step()}
    outputs.update(run_to_end(engine))
    assert "NaN" in (outputs[names[2]].error or "")
    assert_others_are_right(tiny, engine, outputs, names[2])


def test_a_captured_state_with_infinity_is_not_shared(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are finite; the checkpoint is not."""
    engine = engine_on(tiny)
    prompt, launch = ids(3 * GRID + 5), engine.runner.launch
    model = engine.model.forward

    def spoiling(batch: Any, kv: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch, kv, state)
        for slot in batch.checkpoints[:, 2].tolist():
            next(iter(state.values()))[slot].view(-1)[3] = float("inf")
        return logits

    monkeypatch.setattr(engine.model, "forward", spoiling)
    output = answer(engine, prompt, greedy(3))
    monkeypatch.undo()
    assert engine.runner.launch == launch
    assert output.finish_reason == "error"
    assert answer(engine, prompt, greedy(3)).usage.cached_tokens == 0
    assert_nothing_held(engine)


def test_a_weight_of_nan_is_an_error_of_every_request(tiny: Engine) -> None:
    """One row of the last matrix: the logit of one token is NaN, whichever way a token is chosen."""
    engine = engine_on(tiny)
    weight = engine.model.lm_head.weight.data
    row, weight[7] = weight[7].clone(), float("nan")
    sampled = SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=3)
    try:
        outputs = engine.generate([ids(20), ids(30), ids(40)], [greedy(3), sampled, greedy(3, logprobs=2)])
    finally:
        weight[7] = row
    assert [output.finish_reason for output in outputs] == ["error"] * 3
    assert engine.cache.stats().pages_cached == 0
    assert answer(engine, ids(20), greedy(3)).token_ids == cold(tiny, ids(20), greedy(3)).token_ids


def test_embeddings_of_nan_are_an_error_of_their_request(tiny: Engine) -> None:
    engine = engine_on(tiny)
    size = engine.model.config.hidden_size
    bad = ImagePrompt(ids(40), [Image(5, torch.full((4, size), float("nan")), content=b"bad")])
    good = ImagePrompt(ids(40), [Image(5, torch.full((4, size), 0.1), content=b"good")])
    expected = answer(engine_on(tiny), good, greedy(4))
    try:
        outputs = engine.generate([bad, good, ids(50)], greedy(4), progress=False)
    except ValueError:  # refused where it comes in
        return
    assert [output.finish_reason for output in outputs] == ["error", "length", "length"]
    assert outputs[1].token_ids == expected.token_ids
    assert outputs[2].token_ids == cold(tiny, ids(50), greedy(4)).token_ids
    assert_nothing_held(engine)


def test_prompts_with_images_over_several_steps_hold_no_other_up(tiny: Engine) -> None:
    """Scenario 32: a budget of 256 tokens, and images on both sides of each boundary."""
    engine = engine_on(tiny)
    size = engine.model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    images = [Image(at, torch.randn(30, size, generator=generator) / 10) for at in (10, 240, 490, 560)]
    prompt = ImagePrompt(ids(700), images)
    texts = [ids(40, seed=n) for n in range(3)]
    for _ in range(2):
        first, *others = engine.generate([prompt, *texts], greedy(5), progress=False)
        assert (first.finish_reason, first.error) == ("length", None)
        for output in others:
            assert output.token_ids == cold(tiny, output.prompt_token_ids, greedy(5)).token_ids
    assert_nothing_held(engine)
