"""Decode steps that run as recorded graphs, and steps that are scheduled while the last one is computed. Recording
itself needs a GPU; what is recorded, and what fills a step up, does not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid import Engine, SamplingParams
from hybrid.engine import results, sampler
from hybrid.engine.captured_passes import SharedLogits
from hybrid.engine.model_runner import LaunchedPass
from hybrid.engine.padding import Padding, padding_of
from hybrid.engine.planner import ALIGNMENT, Plan, PlanBuffer, plan
from hybrid.engine.results import Result
from hybrid.engine.step import Step
from hybrid.speculation.drafts import Drafts
from support.engines import GRID, assert_nothing_held, cold, engine_on, greedy, ids, run_despite_failures, run_to_end
from support.graphs import overlapping, replays, with_graphs


@pytest.mark.parametrize("deterministic", [True, False])
def test_answers_through_graphs_are_those_without(tiny: Engine, deterministic: bool) -> None:
    prompts = [ids(20 + 17 * n, seed=n) for n in range(5)]
    params = [greedy(9), SamplingParams(max_new_tokens=12, temperature=1.5, seed=3, logprobs=2), *[greedy(6)] * 3]
    expected = engine_on(tiny, deterministic=deterministic).generate(prompts, params, progress=False)
    engine, graphs = with_graphs(engine_on(tiny, deterministic=deterministic))
    outputs = engine.generate(prompts, params, progress=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    if deterministic:
        assert [output.logprobs for output in outputs] == [output.logprobs for output in expected]
    assert len(graphs.graphs) >= 2
    assert_nothing_held(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_captured_pass_on_a_cpu_chooses_the_most_likely_tokens_itself(
    overlap: bool, tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the next pass, which writes them again, is launched before they are read."""
    pytest.importorskip("numba", reason="passes on a CPU are captured where they are compiled")
    prompts, params = [ids(20 + 17 * n, seed=n) for n in range(3)], [greedy(6), greedy(9), greedy(12)]
    expected = engine_on(tiny, enforce_eager=True).generate(prompts, params, progress=False)
    asked: list[int] = []

    def most_likely(logits: Tensor) -> Tensor:
        asked.append(len(logits))
        return sampler.most_likely(logits)

    monkeypatch.setattr(results, "most_likely", most_likely)
    outputs = overlapping(engine_on(tiny), overlap).generate(prompts, params, progress=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert len(asked) <= 2  # passes with prompts


@pytest.mark.parametrize("deterministic", [True, False])
def test_answers_with_prompts_through_graphs_are_those_without(
    tiny: Engine, deterministic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts come while others decode, and steps are launched before the tokens of the last one are known."""
    pytest.importorskip("numba", reason="the blocks of rows that torch multiplies are those of the prompts captured")
    made = engine_on(tiny, deterministic=deterministic)
    runner = with_graphs(made, max_prompt_tokens=512)[0].runner
    engine = Engine(made.loaded, made.cache, replace(made.config, overlap=True), runner=runner)
    params = [greedy(5 + n % 3, logprobs=2) if n % 2 else greedy(9, temperature=1.0, seed=n) for n in range(8)]
    names, outputs = {}, {}
    with caplog.at_level("INFO", logger="hybrid.engine.captured_passes"):
        for n, own in enumerate(params):
            prompt = ids(2 * GRID, seed=9) + ids(5 + 3 * n, seed=n)
            names[engine.add_request(prompt, own)] = prompt, own
            outputs.update({output.request_id: output for output in engine.step()})
        outputs.update(run_to_end(engine))
    captured = [message for message in caplog.messages if "64 tokens of prompts and 8 rows" in message]
    assert len(captured) == 1
    for name, (prompt, own) in names.items():
        expected = cold(tiny, prompt, own)
        assert outputs[name].token_ids == expected.token_ids
        if deterministic:
            assert outputs[name].logprobs == expected.logprobs
    assert_nothing_held(engine)


def test_a_shape_is_recorded_once(tiny: Engine) -> None:
    engine, graphs = with_graphs(engine_on(tiny))
    engine.generate([ids(30)], greedy(20), progress=False)
    assert len(graphs.graphs) == 1
    engine.generate([ids(40, seed=1)], greedy(20), progress=False)
    assert len(graphs.graphs) == 1


def test_a_capture_that_fails_is_told_once_and_steps_go_on_without(
    tiny: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [ids(20 + 17 * n, seed=n) for n in range(5)]
    params = [replace(greedy(3), max_new_tokens=3 + 4 * n) for n in range(5)]  # fewer rows with time: several layouts
    calls: list[int] = []

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        calls.append(len(calls))
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replays(run)

    expected = engine_on(tiny, deterministic=True).generate(prompts, params, progress=False)
    engine, graphs = with_graphs(engine_on(tiny, deterministic=True), capture)
    with caplog.at_level("WARNING", logger="hybrid.engine.captured_passes"):
        outputs = engine.generate(prompts, params, progress=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    told = [record.getMessage() for record in caplog.records if record.name == "hybrid.engine.captured_passes"]
    assert (len(calls), len(graphs.graphs), len(told)) == (2, 1, 1)
    assert "OutOfMemoryError: CUDA out of memory" in told[0]
    assert_nothing_held(engine)


def test_what_fills_a_step_up_writes_nothing(tiny: Engine) -> None:
    engine = engine_on(tiny)
    for seed in range(3):
        engine.add_request(ids(30, seed=seed), greedy(8))
    engine.step()
    step = engine.scheduler.schedule()
    config, cache = engine.cache.config, engine.cache
    host = plan(step, config.page_size, config.chunk_size, True, Padding(8, 16))
    batch = host.batch(host.idle())
    kv, state = cache.kv.clone(), {name: tensor.clone() for name, tensor in cache.state_tensors.items()}
    engine.model(batch, cache.kv, cache.state_tensors)
    assert torch.equal(kv.view(torch.uint8), cache.kv.contiguous().view(torch.uint8))
    for name, tensor in state.items():
        assert torch.equal(tensor.view(torch.uint8), cache.state_tensors[name].contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("requests", "pages", "padding"),
    [(1, 1, (1, 16)), (3, 16, (4, 16)), (9, 17, (16, 32)), (17, 100, (24, 128)), (32, 4096, (32, 4096))],
)
def test_few_shapes_occur(requests: int, pages: int, padding: tuple[int, int]) -> None:
    assert Padding.of(requests, pages) == Padding(*padding)


@pytest.mark.parametrize(
    ("sizes", "padding"),
    [
        ((1, 1, 0, 1, 1), (8, 16, 64, 2, 4)),
        ((65, 2, 1, 0, 3), (0, 16, 128, 4, 4)),
        ((512, 4, 5, 17, 17), (32, 32, 512, 8, 8)),
    ],
)
def test_few_shapes_occur_with_prompts(sizes: tuple[int, ...], padding: tuple[int, ...]) -> None:
    assert Padding.with_prompts(*sizes) == Padding(*padding)


def test_a_model_with_hooks_is_launched_so_that_they_are_called(tiny: Engine) -> None:
    engine, graphs = with_graphs(engine_on(tiny))
    calls: list[int] = []
    handle = engine.model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    try:
        expected = engine.generate([ids(30)], greedy(5), progress=False)[0].token_ids
    finally:
        handle.remove()
    passes = len(calls)
    assert passes >= 5 and graphs.graphs == ()
    engine.cache.clear()
    assert engine.generate([ids(30)], greedy(5), progress=False)[0].token_ids == expected
    assert (len(calls), len(graphs.graphs)) == (passes, 1)


# Overlap


@pytest.mark.parametrize("deterministic", [True, False])
def test_answers_with_overlap_are_those_without(tiny: Engine, deterministic: bool) -> None:
    shared = ids(64, seed=9)
    prompts = [shared + ids(5 + 13 * n, seed=n) for n in range(6)]
    params = [replace(greedy(10), max_new_tokens=3 + 4 * n) for n in range(6)]
    engine = overlapping(engine_on(tiny, deterministic=deterministic))
    for _ in range(2):
        outputs = engine.generate(prompts, params, progress=False)
        for output, prompt, asked in zip(outputs, prompts, params, strict=True):
            assert output.token_ids == cold(tiny, prompt, asked).token_ids
    assert_nothing_held(engine)


def test_a_request_that_ends_unexpectedly_is_dropped_from_the_step_scheduled_ahead(tiny: Engine) -> None:
    engine = overlapping(engine_on(tiny))
    prompt = ids(30)
    answer = cold(tiny, prompt, greedy(12)).token_ids
    stop = next(token for at, token in enumerate(answer) if at >= 3 and token not in answer[:at])
    params = SamplingParams(max_new_tokens=12, stop_token_ids=[stop], ignore_eos=True)
    other = engine.add_request(ids(25, seed=4), greedy(12))
    mine = engine.add_request(prompt, params)
    outputs = run_to_end(engine)
    assert outputs[mine].token_ids == answer[: answer.index(stop) + 1]
    assert outputs[mine].finish_reason == "stop"
    assert outputs[other].token_ids == cold(tiny, ids(25, seed=4), greedy(12)).token_ids
    assert_nothing_held(engine)


def test_abort_between_steps_drops_what_was_scheduled_ahead(tiny: Engine) -> None:
    engine = overlapping(engine_on(tiny))
    gone, stays = engine.add_request(ids(40), greedy(20)), engine.add_request(ids(41, seed=1), greedy(20))
    for _ in range(4):
        engine.step()
    engine.abort(gone)
    engine.cache.audit()
    outputs = run_to_end(engine)
    assert set(outputs) == {gone, stays}
    assert outputs[gone].finish_reason == "abort"
    assert outputs[stays].token_ids == cold(tiny, ids(41, seed=1), greedy(20)).token_ids
    assert_nothing_held(engine)


def test_under_memory_pressure_overlap_loses_no_token(tiny: Engine) -> None:
    """A request may be retracted for a step that is scheduled while its own token is computed."""
    engine = overlapping(tiny.with_cache(engine_on(tiny).cache.config, size=(16, 8)))
    prompts = [ids(50 + 9 * n, seed=n) for n in range(5)]
    outputs = engine.generate(prompts, greedy(40), progress=False)
    assert engine.scheduler.num_retractions > 0
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.token_ids == cold(tiny, prompt, greedy(40)).token_ids
    assert_nothing_held(engine)


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_that_never_arrive_are_computed_again(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    engine = overlapping(engine_on(tiny), overlap)
    launch, calls = engine.runner.launch, []

    def lost() -> list[Result]:
        raise RuntimeError("the device is gone, say")

    def unreliable(plan: Plan) -> LaunchedPass:
        launched = launch(plan)
        calls.append(plan)
        if len(calls) in (1, 4, 5, 11):
            monkeypatch.setattr(launched, "results", lost)
        return launched

    monkeypatch.setattr(engine.runner, "launch", unreliable)
    prompts = [ids(50, seed=n) for n in range(3)]
    requests = [engine.add_request(prompt, greedy(8)) for prompt in prompts]
    outputs, failures = run_despite_failures(engine)
    assert failures == (3 if overlap else 4)  # passes 4 and 5 are under way together
    for request, prompt in zip(requests, prompts, strict=True):
        assert outputs[request].token_ids == cold(tiny, prompt, greedy(8)).token_ids
    assert_nothing_held(engine)


def test_known_tokens_that_are_computed_again_keep_the_layout_of_a_graph(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retracted request decodes tokens that it knows, and needs no new ones for them: a step of as many rows is laid
    out alike."""
    engine, graphs = with_graphs(tiny.with_cache(engine_on(tiny).cache.config, size=(14, 12)))
    assert engine.deterministic
    build, layouts, known = engine.runner.plan, {}, []

    def watching(step: Step, before: Any) -> Plan:
        plan = build(step, before)
        if plan.is_padded:
            shape = plan.layout["decodes.block_table"][1]
            assert layouts.setdefault(shape, plan.shape) == plan.shape
            known.append(not all(rows.samples for rows in plan.sampled))
        return plan

    monkeypatch.setattr(engine.runner, "plan", watching)
    prompts = [ids(3 * 16, seed=n) for n in range(4)]
    outputs = engine.generate(prompts, greedy(4 * 16), progress=False)
    assert engine.scheduler.num_retractions > 0
    assert any(known)
    assert len(graphs.graphs) == len(layouts)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.token_ids == cold(tiny, prompt, greedy(4 * 16)).token_ids
    assert_nothing_held(engine)


def test_a_graph_runs_only_plans_of_its_layout(tiny: Engine) -> None:
    engine, graphs = with_graphs(engine_on(tiny))
    for seed in range(3):
        engine.add_request(ids(30, seed=seed), greedy(8))
    engine.step()
    step = engine.scheduler.schedule()
    plan_ = engine.runner.plan(step, None)
    graphs.run(plan_)
    graphs.run(plan_)
    assert len(graphs.graphs) == 1
    shifted = {name: (start + 2 * (start > 0), shape) for name, (start, shape) in plan_.layout.items()}
    numbers = torch.cat((plan_.numbers[:2], plan_.numbers))
    graphs.run(replace(plan_, layout=shifted, numbers=numbers))
    assert len(graphs.graphs) == 2
    engine.scheduler.retract_all("a test asks for it")


def test_the_graph_that_was_not_used_for_longest_goes(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.engine.captured_passes.MAX_GRAPHS", 2)
    sizes: list[int] = []

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        again, logits = replays(run)
        sizes.append(len(logits))
        return again, logits

    engine, graphs = with_graphs(engine_on(tiny), capture)
    for count in (1, 2, 1, 3, 1, 2):
        engine.generate([ids(20, seed=n) for n in range(count)], greedy(3), progress=False)
    assert sizes == [1, 2, 3, 2]
    assert len(graphs.graphs) == 2


@pytest.mark.parametrize(
    ("limits", "occurs", "captured"),
    [
        ({}, [0, 2, 0, 0, 2], [2, 4]),
        ({"MAX_GRAPHS": 1}, [0, 0, 2, 2, 0, 0], [1, 3, 5]),  # whose graph went is new again
        ({"MAX_OCCURRED": 2}, [0, 2, 4, 0, 0], [4]),  # the first was forgotten when it came again
    ],
)
def test_a_layout_with_prompts_is_captured_when_it_occurs_again(
    tiny: Engine, limits: dict[str, int], occurs: list[int], captured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in limits.items():
        monkeypatch.setattr(f"hybrid.engine.captured_passes.{name}", limit)
    captures: list[int] = []

    def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        captures.append(number)
        return replays(run)

    engine, graphs = with_graphs(engine_on(tiny), capture, max_prompt_tokens=512, on_gpu=True)
    engine.add_request(ids(30), greedy(8))
    step = engine.scheduler.schedule()
    plan_ = engine.runner.plan(step, None)
    for number, shift in enumerate(occurs):  # noqa: B007 - `capture` notes it
        layout = {name: (start + shift * (start > 0), shape) for name, (start, shape) in plan_.layout.items()}
        graphs.run(replace(plan_, layout=layout, numbers=torch.cat((plan_.numbers[:shift], plan_.numbers))))
    assert captures == captured
    engine.scheduler.retract_all("a test asks for it")


def test_the_logits_of_all_graphs_are_in_few_memories() -> None:
    shared = SharedLogits()
    held = [shared.hold(torch.full((count, 3), float(count))) for count in range(1, 65)]
    assert [len(logits) for logits in held] == [*range(1, 65)]
    assert len({logits.untyped_storage().data_ptr() for logits in held}) == 7  # powers of two up to 64
    assert held[-1].eq(64).all()


@pytest.mark.parametrize(
    ("params", "attributes"),
    [
        ({"prompt_logprobs": 1}, {}),  # rows of logits as many as the prompt has tokens
        ({"n": 2}, {}),
        (
            {},
            {"media": object(), "is_plain": False},
        ),  # embeddings and weights of adapters are not among the numbers of a plan
        ({}, {"adapter": "one", "is_plain": False}),
    ],
)
def test_prompts_that_graphs_do_not_know_are_not_padded(
    tiny: Engine, params: dict[str, Any], attributes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(tiny)
    engine.add_request(ids(30), greedy(8))
    assert padding_of(engine.scheduler.schedule(), 512) is not None
    engine.scheduler.retract_all("a test asks for it")
    engine.add_request(ids(30, seed=1), greedy(8, **params))
    step = engine.scheduler.schedule()
    for name, value in attributes.items():
        monkeypatch.setattr(step.parts[-1].request, name, value)
    assert padding_of(step, 512) is None


def test_prompts_beside_drafts_are_not_padded(tiny: Engine) -> None:
    engine = engine_on(tiny)
    engine.add_request(ids(30), greedy(8))
    engine.step()
    engine.add_request(ids(30, seed=1), greedy(8))
    step = engine.scheduler.schedule()
    assert [part.is_prefill for part in step.parts] == [True, False]
    assert padding_of(step, 512) is not None
    drafted = replace(step.parts[1], drafts=Drafts.chain([1, 2], "mine", [0.5, 0.5]))
    assert padding_of(Step([step.parts[0], drafted]), 512) is None
    assert padding_of(Step([drafted]), 512) is not None


def test_every_piece_of_a_plan_begins_where_kernels_expect_it() -> None:
    pieces = PlanBuffer()
    for count in (1, 2, 3, 5):
        pieces.add(f"few {count}", range(count))
        pieces.add_array(f"array {count}", np.arange(count))
    numbers = pieces.numbers()
    for name, (start, shape) in pieces.layout.items():
        assert start % ALIGNMENT == 0, name
        assert numbers[start : start + shape[0]].tolist() == [*range(shape[0])], name
