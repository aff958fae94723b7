"""Steps that are launched before the tokens of the last one are known to the host: what the host waits for, and what
becomes of a step whose request has ended, or whose token the device did not know."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import Mock, patch
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

from hybrid import Drafter, Engine, History, SamplingParams, SpeculationConfig
from hybrid.engine import sampler
from hybrid.engine.base_loop import ScheduledPass
from hybrid.engine.loops import drop_late
from hybrid.engine.request import Request
from hybrid.engine.results import ForwardPass
from hybrid.engine.scheduler import Scheduler
from hybrid.engine.step import Part, Step
from hybrid.errors import ArgumentError
from hybrid.memory.device import HostCopy
from hybrid.prompts.encode import EncodedPrompt
from support.engines import GRID, answer, assert_nothing_held, cold, engine_on, greedy, ids, run_to_end
from support.graphs import overlapping, with_graphs

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""Methods of tensors for which the host waits for a GPU."""


@contextmanager
def watched(engine: Engine) -> Iterator[list[str]]:
    """Note what the host does, in order: "launch", "wait" for results that were sent, and every other read of a tensor
    outside of the model, by its name."""
    events: list[str] = []
    inside = [False]
    launch, wait, model = engine.runner.launch, HostCopy.wait, engine.runner.model  # type: ignore[attr-defined]

    def quiet(run: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name is not None and not inside[0]:
                events.append(name)
            before, inside[0] = inside[0], True
            try:
                return run(*args)
            finally:
                inside[0] = before

        return call

    watched_model: Any = quiet(model)
    watched_model.replay = quiet(model.replay)

    def launched(plan: Any) -> Any:
        events.append("launch")
        return launch(plan)

    def read(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not inside[0]:
                events.append(name)
            return method(*args, **kwargs)

        return call

    with (
        patch.object(engine.runner, "launch", launched),
        patch.object(engine.runner, "model", watched_model),
        patch.object(HostCopy, "wait", quiet(wait, "wait")),
        patch.multiple(Tensor, **{name: read(name) for name in READS}),
    ):
        yield events


PARAMS = {
    "greedy": greedy(12),
    "sampled": greedy(12, temperature=1.0, top_k=20, seed=1),
    "log-probabilities": greedy(12, temperature=0.7, top_k=20, seed=1, logprobs=3),
    "penalties": greedy(12, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={5: 2.0}, min_tokens=4),
}


@pytest.mark.parametrize("name", PARAMS)
def test_the_host_waits_once_per_step_and_only_after_the_next_launch(tiny: Engine, name: str) -> None:
    engine = overlapping(engine_on(tiny, enforce_eager=True))
    for seed in range(3):
        engine.add_request(ids(GRID + 3 * seed, seed), PARAMS[name])
    with watched(engine) as events:
        run_to_end(engine)
    assert set(events) == {"launch", "wait"}
    decoding = "".join(event[0] for event in events)
    assert decoding.startswith("llwlwlwlwlwlwlwlwlw")
    assert decoding.count("l") == decoding.count("w")


def test_without_overlap_each_step_is_waited_for_before_the_next(tiny: Engine) -> None:
    engine = engine_on(tiny, overlap=False, enforce_eager=True)
    engine.add_request(ids(GRID), PARAMS["sampled"])
    with watched(engine) as events:
        run_to_end(engine)
    assert events == ["launch", "wait"] * (len(events) // 2)


@contextmanager
def retreats() -> Iterator[list[Part]]:
    """The parts that are computed again."""
    found: list[Part] = []
    original = Scheduler.retreat

    def watching(scheduler: Scheduler, part: Part) -> None:
        found.append(part)
        original(scheduler, part)

    with patch.object(Scheduler, "retreat", watching):
        yield found


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_token_that_only_sorting_tells_is_computed_again(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, deterministic: bool, graphs: bool
) -> None:
    """The device does not know it when the next pass begins: what would continue from it writes nothing."""
    sampled = SamplingParams(max_new_tokens=3 * GRID, temperature=3.0, seed=4, logprobs=2, ignore_eos=True)
    options = [sampled, replace(sampled, repetition_penalty=1.2), greedy(3 * GRID)]
    prompts = [ids(30, seed) for seed in range(3)]
    settings: dict[str, Any] = {"deterministic": deterministic, "verify_contents": True}
    expected = [answer(engine_on(tiny, **settings), p, o) for p, o in zip(prompts, options, strict=True)]
    made = engine_on(tiny, **settings)
    engine = overlapping(made)
    if graphs:
        engine = Engine(made.loaded, made.cache, engine.config, runner=with_graphs(made)[0].runner)
    monkeypatch.setattr(sampler, "PRESELECTED", 40)
    with retreats() as again:
        outputs = engine.generate(prompts, options, progress=False)
    assert len(again) > 5 and {part.swaps for part in again} == {False} | {not deterministic}
    assert not any(part.request.params.temperature == 0 for part in again)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    if deterministic:
        assert [output.logprobs for output in outputs] == [output.logprobs for output in expected]
    engine.cache.audit(contents=True)
    assert_nothing_held(engine)
    assert answer(engine, prompts[2] + outputs[2].token_ids, greedy(5)).usage.cached_tokens >= 2 * GRID


def test_a_request_that_was_retracted_before_its_token_was_known_keeps_its_part() -> None:
    """It begins again in the next step, with tokens that are known. The other one's part wrote nothing."""
    requests = [Request(name, EncodedPrompt(ids(20)), greedy(9), 30) for name in ("retracted", "late", "known")]
    parts = [
        Part(requests[0], Mock(), 0, 20, True),
        Part(requests[1], Mock(), 25, 26, False, num_unknown=1),
        Part(requests[2], Mock(), 25, 26, False, num_unknown=1),
    ]
    ahead, now, scheduler = ScheduledPass(Step(parts), Mock(), 0.0), ScheduledPass(Step(parts), Mock(), 0.0), Mock()
    late = [Mock(is_late=number < 2) for number in range(3)]
    drop_late(ahead, now, late, scheduler)
    assert [call.args[0].request.request_id for call in scheduler.retreat.mock_calls] == ["late"]
    assert [part.request.request_id for part in parts if not part.is_dropped] == ["retracted", "known"]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("at", [GRID - 1, GRID, GRID + 1])
def test_nothing_is_cached_of_a_step_whose_request_has_ended(tiny: Engine, deterministic: bool, at: int) -> None:
    """It is under way when the end is known, on a boundary or beside it. Here it computes NaN, which nobody sees."""
    prompt = ids(2 * GRID)
    known = cold(tiny, prompt, greedy(3 * GRID)).token_ids
    stop = next(token for index, token in enumerate(known) if index >= at and token not in known[:index])
    index = known.index(stop)
    engine = overlapping(engine_on(tiny, deterministic=deterministic, verify_contents=True))
    seen: list[int] = []

    def spoiled(module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        batch = inputs[2].batch
        seen.append(int(batch.positions[-1]))
        if batch.decodes is None or seen[-1] != len(prompt) + index:
            return None
        return output[0] * torch.nan, output[1]

    hooks = [layer.register_forward_hook(spoiled) for layer in tiny.model.model.layers]
    try:
        output = answer(engine, prompt, SamplingParams(max_new_tokens=3 * GRID, stop_token_ids=[stop], ignore_eos=True))
    finally:
        for hook in hooks:
            hook.remove()
    assert max(seen) == len(prompt) + index  # the step was launched
    assert (output.finish_reason, output.token_ids) == ("stop", known[: index + 1])
    assert_nothing_held(engine)
    engine.cache.audit(contents=True)
    for tensor in (engine.cache.kv, *engine.cache.state_tensors.values()):
        for _, node in engine.cache.tree.nodes():
            used = node.pages if tensor is engine.cache.kv else [node.slot] if node.slot is not None else []
            assert all(bool(tensor[place].isfinite().all()) for place in used)
    again = answer(engine, prompt + known[: index + 1] + ids(5), greedy(4))
    assert again.usage.cached_tokens >= (len(prompt) + index) // GRID * GRID
    assert again.token_ids == cold(tiny, prompt + known[: index + 1] + ids(5), greedy(4)).token_ids


def test_a_launch_ahead_that_fails_takes_no_token_from_the_step_before(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = overlapping(engine_on(tiny))
    launch, calls = engine.runner.launch, []

    def failing(plan: Any) -> Any:
        calls.append(plan)
        if len(calls) in (2, 5, 6):
            launch(plan)  # it has written states when it fails
            raise RuntimeError("out of memory, say")
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", failing)
    names = [engine.add_request(ids(30 + n, n), greedy(9)) for n in range(3)]
    outputs, counts = {}, []
    while engine.has_work:
        try:
            moved = engine.step()
        except RuntimeError:
            assert engine.is_retrying
            moved = []
        counts.append(len(moved))
        outputs.update({output.request_id: output for output in moved})
    for n, name in enumerate(names):
        assert outputs[name].token_ids == cold(tiny, ids(30 + n, n), greedy(9)).token_ids
    assert_nothing_held(engine)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_failure_while_tokens_are_chosen_is_met_by_one_step_and_its_pass_is_forgotten(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, overlap: bool, graphs: bool
) -> None:
    """The device fails whenever the tokens of some passes are asked for. They are computed again by other passes."""
    made = engine_on(tiny)
    engine = overlapping(made, overlap)
    if graphs:
        engine = Engine(made.loaded, made.cache, engine.config, runner=with_graphs(made)[0].runner)
    launch, choose = engine.runner.launch, ForwardPass.tokens
    numbers = WeakKeyDictionary[ForwardPass, int]()
    broken, launches = {1, 4, 9}, count()

    def numbered(plan: Any) -> Any:
        launched = launch(plan)
        assert isinstance(launched, ForwardPass)
        numbers[launched] = next(launches)
        return launched

    def failing(launched: ForwardPass) -> Tensor:
        if numbers.get(launched) in broken:
            raise RuntimeError("an illegal access, say")
        return choose(launched)

    monkeypatch.setattr(engine.runner, "launch", numbered)
    monkeypatch.setattr(ForwardPass, "tokens", failing)
    params = [greedy(12), greedy(12, temperature=1.0, top_k=20, seed=1)]
    names = [engine.add_request(ids(30 + n, n), params[n]) for n in range(2)]
    outputs, failures = {}, 0
    while engine.has_work:
        before = failures
        try:
            outputs.update({output.request_id: output for output in engine.step()})
        except RuntimeError:
            failures += 1
        engine.cache.audit()
        if failures > before:
            gc.collect()
            assert len(numbers) == 0  # neither the pass, nor one that was launched after it
    gc.collect()
    assert (failures, len(numbers)) == (len(broken), 0)
    for n, name in enumerate(names):
        assert outputs[name].token_ids == cold(tiny, ids(30 + n, n), params[n]).token_ids
    assert_nothing_held(engine)


def test_a_step_under_way_does_not_outlive_an_abort_or_a_close(tiny: Engine) -> None:
    engine = overlapping(engine_on(tiny))
    names = [engine.add_request(ids(30 + n, n), greedy(20)) for n in range(2)]
    for _ in range(3):
        engine.step()
    for name in names:
        engine.abort(name)
    assert_nothing_held_but(engine, dict.fromkeys(names, "abort"))
    assert answer(engine, ids(40, 7), greedy(6)).token_ids == cold(tiny, ids(40, 7), greedy(6)).token_ids
    engine.add_request(ids(20), greedy(20))
    engine.step()
    engine.close()


def assert_nothing_held_but(engine: Engine, reasons: dict[str, str]) -> None:
    """No request holds memory, and these outputs are still to be taken."""
    assert engine.cache.stats().pages_private == 0
    assert {output.request_id: output.finish_reason for output in engine.step()} == reasons
    assert_nothing_held(engine)


def test_the_fork_of_a_prompt_is_not_of_the_state_after_its_first_token(tiny: Engine) -> None:
    """Other answers copy the state when the first tokens are known: no pass is launched before that."""
    prompt = ids(GRID + 5)
    params = SamplingParams(max_new_tokens=8, n=3, temperature=1.0, seed=3, ignore_eos=True)
    expected = answer(engine_on(tiny, overlap=False), prompt, params)
    output = answer(overlapping(engine_on(tiny)), prompt, params)
    assert [own.token_ids for own in output.outputs] == [own.token_ids for own in expected.outputs]


@pytest.mark.parametrize("way", [{"bad_words": ["e", "a"]}, {"repetition_penalty": 1.5}, {"logit_bias": {5: 100.0}}])
def test_an_abort_of_several_answers_leaves_the_rows_of_others_what_they_are(tiny: Engine, way: dict[str, Any]) -> None:
    """It comes after their pass was launched, and before tokens are chosen."""
    params = greedy(12, temperature=1.0, seed=2, logprobs=1, **way)
    expected = cold(tiny, ids(30), params)
    for steps in range(2, 5):
        engine = overlapping(engine_on(tiny))
        name = engine.add_request(ids(30), params)
        for _ in range(steps):
            engine.step()
        others = engine.add_request(ids(20, 1), greedy(8, n=3, temperature=1.0, seed=3))
        engine.step()
        engine.abort(others)
        outputs = run_to_end(engine)
        assert (outputs[name].token_ids, outputs[name].logprobs) == (expected.token_ids, expected.logprobs)
        assert outputs[others].finish_reason == "abort"
        assert_nothing_held(engine)


def test_a_step_with_drafts_is_waited_for_though_nothing_more_is_drafted(tiny: Engine) -> None:
    """The cached text ends with its drafts: how many are accepted is not known before."""
    drafts = SpeculationConfig(drafters=("cache",), adaptive=False)
    for known in range(10, 20):
        engine = overlapping(engine_on(tiny, deterministic=False), speculation=drafts)
        prompt, params = ids(20), greedy(40, logprobs=1)
        answer(engine, prompt, greedy(known))
        output = answer(engine, prompt, params)
        assert output.token_ids == cold(tiny, prompt, params).token_ids
        assert output.usage.accepted_tokens > 0
        assert_nothing_held(engine)


class Silent(Drafter):
    """Has nothing."""

    def propose(self, history: History, limit: int) -> tuple[list[int], list[int]]:
        return [], []


@pytest.mark.parametrize("drafter", ["cache", Silent()], ids=["cache", "own"])
def test_a_step_is_launched_ahead_where_no_drafter_has_anything(tiny: Engine, drafter: str | Drafter) -> None:
    """Drafters of others are asked when the last token is known, until they had nothing for some time."""
    engine = overlapping(engine_on(tiny, enforce_eager=True), speculation=SpeculationConfig(drafters=(drafter,)))
    engine.add_request(ids(GRID), greedy(40, temperature=5.0, top_k=500, seed=1))  # in which nothing is repeated
    with watched(engine) as events:
        run_to_end(engine)
    started = "".join(event[0] for event in events)
    assert started.startswith("llwlwlw" if drafter == "cache" else "lwlwlw") and "llwlw" in started
    assert started.count("l") == started.count("w")


@pytest.mark.parametrize(
    ("sampling", "deterministic", "graphs"),
    [
        ({}, True, False),
        ({}, False, True),
        ({"temperature": 0.4, "top_k": 20, "seed": 2}, True, True),
        ({"temperature": 0.4, "top_k": 20, "seed": 2}, False, False),
    ],
)
def test_drafts_and_steps_launched_ahead_change_no_answer(
    tiny: Engine, sampling: dict[str, Any], deterministic: bool, graphs: bool
) -> None:
    """A step waits for the last token and has drafts where a source has more; the one after the last draft is launched
    ahead again."""
    params = greedy(60, logprobs=2, **sampling)
    prompts = [ids(GRID + 5 * seed, seed) for seed in range(3)]
    expected = [answer(engine_on(tiny, deterministic=deterministic), prompt, params) for prompt in prompts]
    own = SpeculationConfig(drafters=("cache",), adaptive=False)
    engine = overlapping(engine_on(tiny, deterministic=deterministic), speculation=own)
    if graphs:
        engine = Engine(
            engine.loaded, engine.cache, engine.config, runner=with_graphs(engine)[0].runner, speculation=own
        )
    started, accepted = "", 0
    for asked in ([0], [1], [0, 2], [2, 1, 0]):  # alone, beside others, and again: then the cache knows what follows
        numbers = {engine.add_request(prompts[number], params): number for number in asked}
        with watched(engine) as events:
            outputs = run_to_end(engine)
        started += "".join(event[0] for event in events)
        for name, number in numbers.items():
            assert outputs[name].token_ids == expected[number].token_ids
            if deterministic:
                assert outputs[name].logprobs == expected[number].logprobs
            accepted += outputs[name].usage.accepted_tokens
    assert accepted > 60 and started.count("llw") > 5 and started.count("wlw") > 20
    assert_nothing_held(engine)


def test_a_lease_retreats_to_before_its_last_pass_only(tiny: Engine) -> None:
    engine = engine_on(tiny)
    engine.add_request(ids(GRID), greedy(8))
    engine.step()
    (request,) = engine.scheduler.running
    assert request.lease is not None
    with pytest.raises(ArgumentError, match=r"to 16 tokens, from 16"):
        engine.cache.undo_advance(request.lease, GRID, False)
    engine.scheduler.discard(request)
    engine.close()
