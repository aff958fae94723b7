"""Steps on a CPU that other threads compute while the next one is scheduled: the same answers, whatever comes between
a launch and its results."""

import gc
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hybrid import Engine, RequestOutput, SamplingParams
from hybrid.engine.model_runner import ModelRunner
from hybrid.engine.results import ForwardPass
from hybrid.kernels.cpu.team import Posted, Team
from support.engines import GRID, answer, assert_nothing_held, engine_on, greedy, ids, no_even_tokens, run_to_end

pytestmark = [pytest.mark.unwatched, pytest.mark.usefixtures("untraced")]

PARAMS = [
    greedy(3 * GRID),
    greedy(20, temperature=1.0, top_k=20, seed=1),
    greedy(25, logprobs=3),
    greedy(17, frequency_penalty=0.5, logits_processors=[no_even_tokens]),
    greedy(1),
    greedy(30, n=2, temperature=0.8, seed=3),
    SamplingParams(max_new_tokens=30, min_tokens=3),
]
PROMPTS = [ids(10 + 9 * seed, seed) for seed in range(len(PARAMS))]


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """Torch has two threads, or as many as a test sets."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Note what happens in order: "launch" of a pass, "post" of one to other threads, and "wait" for results."""
    events: list[str] = []
    launch, post, wait = ModelRunner.launch, Team.post, ForwardPass.results

    def launched(runner: ModelRunner, plan: Any) -> ForwardPass:
        events.append("launch")
        return launch(runner, plan)

    def posted(team: Team, *args: Any) -> Posted | None:
        found = post(team, *args)
        if found is not None:
            events[-1] = "post"
        return found

    def waited(launched: ForwardPass) -> Any:
        events.append("wait")
        return wait(launched)

    with (
        patch.object(ModelRunner, "launch", launched),
        patch.object(Team, "post", posted),
        patch.object(ForwardPass, "results", waited),
    ):
        yield events


def contents(outputs: list[RequestOutput]) -> list[Any]:
    return [(own.token_ids, own.text, own.finish_reason, own.logprobs) for out in outputs for own in out.outputs]


@pytest.fixture(scope="module")
def expected(tiny: Engine) -> list[Any]:
    """The answers of an engine that waits for every pass, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return contents(engine_on(tiny, overlap=False).generate(PROMPTS, PARAMS, progress=False))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("overlap", [None, True])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_answers_are_those_of_an_engine_that_waits(
    tiny: Engine, expected: list[Any], threads: Callable[[int], None], num_threads: int, overlap: bool | None
) -> None:
    threads(num_threads)
    engine = engine_on(tiny, overlap=overlap, verify_contents=num_threads == 2)
    for _ in range(2):
        with watched() as events:
            assert contents(engine.generate(PROMPTS, PARAMS, progress=False)) == expected
        assert "post" in events
    assert_nothing_held(engine)


def test_a_step_is_posted_before_the_results_of_the_last_are_waited_for(tiny: Engine) -> None:
    engine = engine_on(tiny)
    engine.generate(PROMPTS[:2], greedy(9), progress=False)  # its passes are captured
    engine.cache.clear()
    for prompt in PROMPTS[:2]:
        engine.add_request(prompt, greedy(9))
    with watched() as events:
        run_to_end(engine)
    assert "".join(event[0] for event in events if event).startswith("lwp" + "pw" * 7 + "w")


def test_prompts_are_not_computed_before_tokens_that_are_known(tiny: Engine) -> None:
    """No other thread computes them, and who waits for a token would wait for them."""
    engine = engine_on(tiny)
    engine.generate(PROMPTS[:1], greedy(9), progress=False)
    engine.add_request(ids(20, 50), greedy(30))
    for _ in range(4):
        engine.step()
    engine.add_request(ids(20, 51), greedy(3))
    with watched() as events:
        engine.step()
        engine.step()
    assert events[:3] == ["wait", "launch", "wait"]


@pytest.mark.parametrize("how", ["one thread", "overlap=False", "enforce_eager"])
def test_nothing_is_posted_where_it_is_not_asked_for(
    tiny: Engine, expected: list[Any], threads: Callable[[int], None], how: str
) -> None:
    if how == "one thread":
        threads(1)
    engine = engine_on(tiny, overlap=False if how == "overlap=False" else None, enforce_eager=how == "enforce_eager")
    with watched() as events:
        assert contents(engine.generate(PROMPTS, PARAMS, progress=False)) == expected
    assert events == ["launch", "wait"] * (len(events) // 2)


def test_the_number_of_threads_may_change_between_steps(
    tiny: Engine, expected: list[Any], threads: Callable[[int], None]
) -> None:
    engine = engine_on(tiny)
    outputs: dict[str, RequestOutput] = {}
    names = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    for step in count():
        threads(1 + step // 2 % 3)
        outputs.update({out.request_id: out for out in engine.step()})
        if not engine.has_work:
            break
    assert contents([outputs[name] for name in names]) == expected


@pytest.mark.parametrize("overlap", [None, True])
def test_a_pass_that_fails_in_another_thread_is_computed_again(
    tiny: Engine, expected: list[Any], monkeypatch: pytest.MonkeyPatch, overlap: bool | None
) -> None:
    """Whoever waits for it is told, and so is nobody else."""
    engine, wait = engine_on(tiny, overlap=overlap, verify_contents=True), Posted.wait
    seen: list[Posted] = []

    def failing(posted: Posted) -> None:
        wait(posted)
        if posted not in seen:
            seen.append(posted)
        if seen.index(posted) in (3, 4, 11, 30):
            raise MemoryError("a compiled operation found no memory for what it keeps meanwhile")

    monkeypatch.setattr(Posted, "wait", failing)
    assert contents(engine.generate(PROMPTS, PARAMS, progress=False)) == expected
    assert len(seen) > 30
    assert_nothing_held(engine)
    engine.cache.audit(contents=True)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_while_a_pass_is_waited_for_undoes_the_step(
    tiny: Engine, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, wait, calls = engine_on(tiny), Posted.wait, []

    def interrupted(posted: Posted) -> None:
        calls.append(None)
        if len(calls) in (5, 6, 17, 33):
            signal.raise_signal(signal.SIGINT)
        wait(posted)

    monkeypatch.setattr(Posted, "wait", interrupted)
    names = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    outputs: dict[str, RequestOutput] = {}
    interrupts = 0
    while engine.has_work:
        try:
            outputs.update({out.request_id: out for out in engine.step()})
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 4
    assert contents([outputs[name] for name in names]) == expected
    assert_nothing_held(engine)


def under_way(engine: Engine) -> None:
    """Have a pass computed by other threads."""
    engine.generate(PROMPTS[:2], greedy(5), progress=False)
    for prompt in PROMPTS[:2]:
        engine.add_request(prompt, greedy(30))
    for _ in range(4):
        engine.step()
    assert engine.cache.memory.in_flight.is_under_way


def test_an_abort_between_steps_leaves_the_others_as_they_are(tiny: Engine) -> None:
    engine, long = engine_on(tiny, verify_contents=True), [ids(20, 70), ids(21, 71)]
    alone = answer(engine_on(tiny, overlap=False), long[1], greedy(40)).token_ids
    answer(engine, ids(20), greedy(4))
    for at in range(2, 12):
        name, other = (engine.add_request(prompt, greedy(40)) for prompt in long)
        for _ in range(at):
            engine.step()
        engine.abort(name)
        outputs = run_to_end(engine)
        assert outputs[other].token_ids == alone
        engine.cache.audit(contents=True)
    assert_nothing_held(engine)


def test_an_engine_may_be_closed_or_forgotten_while_a_pass_is_under_way(tiny: Engine) -> None:
    engine = engine_on(tiny)
    under_way(engine)
    engine.close()
    assert not engine.cache.memory.in_flight.is_under_way
    for _ in range(5):
        engine = engine_on(tiny)
        under_way(engine)
        del engine
        gc.collect()


def test_two_engines_take_turns_in_one_thread(tiny: Engine, expected: list[Any]) -> None:
    engines = [engine_on(tiny), engine_on(tiny)]
    names = [[engine.add_request(*each) for each in zip(PROMPTS, PARAMS, strict=True)] for engine in engines]
    outputs: list[dict[str, RequestOutput]] = [{}, {}]
    while any(engine.has_work for engine in engines):
        for engine, found in zip(engines, outputs, strict=True):
            if engine.has_work:
                found.update({out.request_id: out for out in engine.step()})
    for own, found in zip(names, outputs, strict=True):
        assert contents([found[name] for name in own]) == expected


def test_retracted_requests_have_the_same_answers(tiny: Engine) -> None:
    """Steps that were launched ahead of a retraction write nothing that is kept."""
    prompts, params = [ids(30 + n, n) for n in range(6)], greedy(4 * GRID)
    known = [answer(engine_on(tiny, overlap=False), prompt, params).token_ids for prompt in prompts]
    for deterministic in (True, False):
        engine = engine_on(tiny, pages=20, states=12, deterministic=deterministic, verify_contents=True)
        outputs = engine.generate(prompts, params, progress=False)
        if deterministic:
            assert [output.token_ids for output in outputs] == known
        assert engine.stats().retractions > 0
        engine.cache.audit(contents=True)
        assert_nothing_held(engine)


ENDING = """
import os, torch
torch.set_num_threads(3)
from hybrid import CacheConfig, Engine, SamplingParams
engine = Engine.from_pretrained("tiny", cache=CacheConfig(memory="64MiB"))
params = SamplingParams(max_new_tokens=50, ignore_eos=True)
engine.generate([[5] * 20], params, progress=False)
engine.add_request([6] * 20, params)
for _ in range(5):
    engine.step()
assert engine.cache.memory.in_flight.is_under_way
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    engine.cache.adopt()
found = []
while child == 0 and engine.has_work:
    found += [len(output.token_ids) for output in engine.step()]
if child == 0:
    os._exit(found[-1])
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 50
assert engine.step()
print("under way", engine.cache.memory.in_flight.is_under_way)
"""


def test_a_process_may_be_forked_or_end_while_a_pass_is_under_way() -> None:
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", ENDING], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "under way True\n", "")
