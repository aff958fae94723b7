"""Rules of running requests that share, wait, branch, give way and disappear. Chunks and pages have 16 tokens."""

from typing import Any

import pytest
import torch

from hybrid import Engine, SamplingParams
from hybrid.commands.checkpoints import check_checkpoints
from support.engines import GRID, answer, assert_nothing_held, cold, engine_on, greedy, ids, run_to_end
from support.scheduling import engine_without_model


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("deterministic", [True, False])
def test_abort_at_any_point_gives_everything_back(tiny: Engine, steps: int, deterministic: bool) -> None:
    """Scenario 6, first half: both slots of the ping-pong pair return."""
    engine = engine_on(tiny, deterministic=deterministic)
    request = engine.add_request(ids(GRID + 12), greedy(40))
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    assert [(output.request_id, output.finish_reason) for output in engine.step()] == [(request, "abort")]
    assert_nothing_held(engine)


def test_a_late_result_for_a_dead_request_writes_nowhere(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenario 6, second half: aborted while its pass is under way, a request keeps its memory until the pass is
    done."""
    engine = engine_on(tiny)
    dead = engine.add_request(ids(40, seed=1), greedy(20))
    alive = engine.add_request(ids(40, seed=2), greedy(20))
    engine.step()
    launch = engine.runner.launch

    def aborting(plan: Any) -> Any:
        pending = launch(plan)
        held = engine.cache.stats().pages_private
        engine.abort(dead)
        assert engine.cache.stats().pages_private == held
        return pending

    monkeypatch.setattr(engine.runner, "launch", aborting)
    moved = {output.request_id: output.finish_reason for output in engine.step()}
    monkeypatch.undo()
    assert moved == {dead: "abort", alive: None}
    engine.cache.audit()
    outputs = run_to_end(engine)
    assert list(outputs) == [alive]
    assert outputs[alive].token_ids == cold(tiny, ids(40, seed=2), greedy(20)).token_ids


def test_bookkeeping_is_applied_to_the_request_it_was_planned_for(tiny: Engine) -> None:
    """Scenario 7: the request was retracted and started again between plan and commit."""
    engine = engine_on(tiny)
    engine.add_request(ids(40), greedy(6))
    step = engine.scheduler.schedule()
    engine.runner.launch(engine.runner.plan(step, None))
    request = step.parts[0].request
    engine.scheduler.retract_all("a test asks for it")
    engine.scheduler.schedule()
    assert request.lease is not None
    computed = request.num_computed
    engine.scheduler.advance(step)
    assert step.parts[0].is_dropped
    assert request.num_computed == computed
    engine.cache.audit()


def test_a_full_hit_still_computes_a_token_and_writes_no_shared_page(tiny: Engine) -> None:
    """Scenario 19: the prompt is cached whole, its last page too."""
    engine = engine_on(tiny)
    prompt = ids(4 * GRID)
    first = answer(engine, [*prompt, *ids(GRID, seed=1)], greedy(1))
    assert first.usage.cached_tokens == 0
    before = {node.end: tiny_pages(engine, node) for _, node in engine.cache.tree.nodes()}
    again = answer(engine, prompt, greedy(6, logprobs=3))
    assert again.usage.cached_tokens < 4 * GRID
    assert again.logprobs == cold(tiny, prompt, greedy(6, logprobs=3)).logprobs
    for _, node in engine.cache.tree.nodes():
        if node.end in before:
            assert torch.equal(tiny_pages(engine, node), before[node.end])
    assert_nothing_held(engine)


def tiny_pages(engine: Engine, node: Any) -> torch.Tensor:
    """A copy of the pages of a node's whole path."""
    return engine.cache.kv[engine.cache.tree.pages(node, node.end).tolist()].clone()


def test_siblings_in_one_step_do_not_wait_for_ever_and_do_not_write_each_other_s_pages(tiny: Engine) -> None:
    """Scenario 20."""
    shared = ids(3 * GRID + 5)
    prompts = [shared + ids(own, seed=own) for own in (2, 9, GRID, 40)]
    engine = engine_on(tiny)
    outputs = engine.generate(prompts, greedy(6, logprobs=2), progress=False)
    assert [output.logprobs for output in outputs] == [cold(tiny, p, greedy(6, logprobs=2)).logprobs for p in prompts]
    assert_nothing_held(engine)


def test_every_checkpoint_is_exactly_the_state_of_its_key(tiny: Engine) -> None:
    """Scenario 25: after turns, branches, evictions and retractions every slot equals a recomputation, bit by bit."""
    engine = engine_on(tiny, pages=40, states=12)
    document = ids(9 * GRID)
    for round_ in range(3):
        prompts = [document[: 16 * cut + 5] + ids(20, seed=10 * round_ + cut) for cut in (2, 5, 7)]
        outputs = engine.generate(prompts, greedy(2 * GRID), progress=False)
        turns = [output.prompt_token_ids + output.token_ids + ids(5) for output in outputs]
        engine.generate(turns, greedy(GRID), progress=False)
    assert engine.cache.stats().evicted_checkpoints > 0
    checked, wrong = check_checkpoints(engine)
    assert checked >= 5
    assert wrong == 0


def test_requests_launched_together_compute_their_common_prefix_once(tiny: Engine) -> None:
    engine = engine_on(tiny)
    shared = ids(5 * GRID + 3)
    outputs = engine.generate([shared + ids(20, seed=n) for n in range(1, 6)], greedy(3), progress=False)
    assert [output.usage.cached_tokens for output in outputs] == [0] + [5 * GRID] * 4
    ends = [node.end for _, node in engine.cache.tree.nodes() if node.slot is not None]
    assert 5 * GRID in ends  # the checkpoint at the end of what they share


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_prompt_that_another_contains_waits_for_the_part_of_it_that_it_can_use(deterministic: bool) -> None:
    """Its last token is computed in any case: of a prompt that ends on the grid the last chunk cannot be a hit."""
    engine = engine_without_model(60, 20, deterministic=deterministic, placement=("branch", "prompt_end"))
    shared = ids(3 * GRID)
    longer = engine.add_request(shared + ids(2 * GRID, seed=1), greedy(2))
    whole = engine.add_request(shared, greedy(2))
    outputs = run_to_end(engine)
    assert [outputs[name].usage.cached_tokens for name in (longer, whole)] == [0, 2 * GRID]


def test_a_prompt_waits_for_another_although_its_own_end_is_cached() -> None:
    """The checkpoint at the end of a prompt does not serve that prompt: its last token is computed in any case."""
    engine = engine_without_model(60, 20, placement=("branch",))
    prompt = ids(3 * GRID)
    engine.add_request(prompt + ids(5, seed=2), SamplingParams(max_new_tokens=1, checkpoint_at=[3 * GRID]))
    run_to_end(engine)
    assert [node.end for _, node in engine.cache.tree.nodes() if node.slot is not None] == [3 * GRID]
    other = engine.add_request(prompt[: 2 * GRID] + ids(2 * GRID, seed=1), greedy(2))
    again = engine.add_request(prompt, greedy(2))
    outputs = run_to_end(engine)
    assert [outputs[name].usage.cached_tokens for name in (other, again)] == [0, 2 * GRID]


def test_a_first_page_is_shared_when_it_is_the_only_one() -> None:
    engine = engine_without_model(60, 20, deterministic=True, placement=("branch",))
    engine.add_request(ids(GRID + 3), greedy(2))
    run_to_end(engine)
    assert engine.cache.stats().pages_cached == 1


def test_waiting_for_a_shared_prefix_holds_back_no_other(tiny: Engine) -> None:
    engine = engine_on(tiny)
    shared = ids(20 * GRID)  # longer than one step's budget
    leader = engine.add_request(shared + ids(3, seed=1), greedy(2))
    follower = engine.add_request(shared + ids(3, seed=2), greedy(2))
    stranger = engine.add_request(ids(10, seed=3), greedy(2))
    first_moved: list[str] = []
    while engine.has_work:
        first_moved += [o.request_id for o in engine.step() if o.request_id not in first_moved]
    assert first_moved.index(stranger) < first_moved.index(follower)
    assert first_moved.index(leader) < first_moved.index(follower)


def test_a_request_that_waits_for_one_that_is_aborted_goes_on_by_itself(tiny: Engine) -> None:
    engine = engine_on(tiny)
    shared = ids(20 * GRID)
    leader = engine.add_request(shared + ids(3, seed=1), greedy(2))
    follower = engine.add_request(shared + ids(3, seed=2), greedy(2))
    engine.step()
    engine.abort(leader)
    outputs = run_to_end(engine)
    assert outputs[follower].token_ids == cold(tiny, shared + ids(3, seed=2), greedy(2)).token_ids


def test_a_request_shares_what_a_running_one_has_finished(tiny: Engine) -> None:
    engine = engine_on(tiny)
    shared = ids(6 * GRID)
    early = engine.add_request(shared + ids(5, seed=1), greedy(60))
    for _ in range(4):
        engine.step()  # the first one decodes by now
    late = engine.add_request(shared + ids(5, seed=2), greedy(2))
    outputs: dict[str, Any] = {}
    while late not in outputs or outputs[late].finish_reason is None:
        outputs.update({output.request_id: output for output in engine.step()})
    assert outputs[late].usage.cached_tokens == 6 * GRID
    engine.abort(early)
    engine.step()
    assert_nothing_held(engine)


def test_a_first_branch_resumes_close_by_and_gets_a_checkpoint_at_its_branching_point(tiny: Engine) -> None:
    """With memory to spare a long prompt leaves checkpoints on its way; the second branch at the same place hits in
    full."""
    engine = engine_on(tiny, states=64)
    document = ids(14 * GRID)
    answer(engine, document)
    cut = 9 * GRID + 7
    first = answer(engine, document[:cut] + ids(20, seed=1))
    second = answer(engine, document[:cut] + ids(20, seed=2))
    assert first.usage.page_tokens == 9 * GRID
    assert 0.7 * 9 * GRID <= first.usage.cached_tokens <= 9 * GRID
    assert second.usage.cached_tokens == second.usage.page_tokens == 9 * GRID
    assert_nothing_held(engine)


def test_spare_checkpoints_take_no_memory_that_is_needed(tiny: Engine) -> None:
    engine = engine_on(tiny, states=12)
    for seed in range(6):
        answer(engine, ids(14 * GRID, seed=seed))
    last = answer(engine, ids(14 * GRID, seed=5))
    assert last.usage.cached_tokens == 13 * GRID  # its own checkpoint is there, whatever was spare


def test_a_long_prompt_is_computed_over_several_steps_while_others_decode(tiny: Engine) -> None:
    engine = engine_on(tiny)
    short = engine.add_request(ids(10, seed=1), greedy(30))
    engine.step()
    long = engine.add_request(ids(40 * GRID, seed=2), greedy(3))
    steps_of_short = 0
    while True:
        moved = [output.request_id for output in engine.step()]
        if long in moved:
            break
        steps_of_short += short in moved
    assert steps_of_short >= 2  # it went on decoding while the long prompt was computed
    outputs = run_to_end(engine)
    assert outputs[long].token_ids == cold(tiny, ids(40 * GRID, seed=2), greedy(3)).token_ids


@pytest.mark.parametrize("deterministic", [True, False])
def test_when_pages_run_out_the_youngest_gives_way_and_ends_all_the_same(
    tiny: Engine, deterministic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hybrid.engine.scheduler")
    engine = engine_on(tiny, pages=14, states=12, deterministic=deterministic)
    prompts = [ids(3 * GRID, seed=n) for n in range(4)]
    outputs = engine.generate(prompts, greedy(4 * GRID), progress=False)
    assert caplog.messages.count("request-3 is retracted: pages ran out") == 1
    assert [o.token_ids for o in outputs] == [cold(tiny, p, greedy(4 * GRID)).token_ids for p in prompts]
    assert_nothing_held(engine)


def test_running_out_of_state_slots_stops_no_request(tiny: Engine) -> None:
    """Three slots: the empty prefix, one front, one checkpoint. Requests go one after another."""
    engine = engine_on(tiny, states=3)
    prompts = [ids(5 * GRID, seed=n) for n in (1, 1, 2, 1)]
    outputs = engine.generate(prompts, greedy(5), progress=False)
    assert [o.token_ids for o in outputs] == [cold(tiny, p, greedy(5)).token_ids for p in prompts]
    assert_nothing_held(engine)


def test_a_replay_gives_way_to_a_request_that_needs_its_memory(tiny: Engine) -> None:
    engine = engine_on(tiny, pages=12, states=4)
    engine.add_request(ids(GRID), greedy(6 * GRID))
    while not any(output.finish_reason for output in engine.step()):
        pass
    assert engine.has_work  # the answer is still to be replayed
    prompt = ids(9 * GRID, seed=5)
    output = answer(engine, prompt, greedy(GRID))
    assert output.token_ids == cold(tiny, prompt, greedy(GRID)).token_ids
    run_to_end(engine)
    assert_nothing_held(engine)
