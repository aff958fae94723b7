"""Threads and signals: another thread is refused before anything changed, and handlers that raise leave the bookkeeping
whole wherever they come."""

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from hybrid import ClosedError, Engine, OwnershipError, RequestOutput, interrupts
from hybrid.interrupts import deferred, handlers_allowed
from support.engines import answer, assert_nothing_held, cold, engine_on, greedy, ids, run_to_end
from support.threads import in_a_thread

pytestmark = pytest.mark.usefixtures("untraced")

# Threads


def test_another_thread_is_refused_and_nothing_changed(tiny: Engine) -> None:
    """Scenario 30."""
    engine = engine_on(tiny)
    running = engine.add_request(ids(40), greedy(8))
    engine.step()
    waiting = engine.add_request(ids(50), greedy(8))
    for work in (
        lambda: engine.abort(running),
        lambda: engine.abort(waiting),
        lambda: engine.add_request(ids(20), greedy(4)),
        lambda: engine.generate([ids(20)], greedy(4)),
        lambda: list(engine.stream("def", greedy(4))),
        engine.step,
        lambda: engine.pin(ids(40)),
    ):
        assert isinstance(in_a_thread(work), OwnershipError)
        engine.cache.audit()
    outputs = run_to_end(engine)
    assert set(outputs) == {running, waiting}
    for name, prompt in ((running, ids(40)), (waiting, ids(50))):
        assert outputs[name].token_ids == cold(tiny, prompt, greedy(8)).token_ids
    assert_nothing_held(engine)


def test_a_thread_that_adopts_the_cache_may_use_the_engine(tiny: Engine) -> None:
    engine = engine_on(tiny)
    answer(engine, ids(40))

    def work() -> None:
        engine.cache.adopt()
        assert answer(engine, ids(40)).usage.cached_tokens > 0

    assert in_a_thread(work) is None
    with pytest.raises(OwnershipError):
        engine.add_request(ids(20))


# Signals


class TimeLimitError(Exception):
    """Raised by a timer."""


@contextmanager
def handler(number: int, function: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Handle a signal."""
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


def raising(number: int, frame: FrameType | None) -> None:
    raise TimeLimitError


def within_a_section(number: int, done: list[str]) -> None:
    with deferred():
        signal.raise_signal(number)
        done.append("section")


def before_a_pause(number: int, done: list[str]) -> None:
    with deferred():
        signal.raise_signal(number)
        done.append("closed")
        with handlers_allowed():
            done.append("paused")


def twice_in_a_pause(number: int, done: list[str]) -> None:
    with deferred(), handlers_allowed():
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)  # waits: the first one has ended the pause
            done.append("recovery")


def two_in_a_section(number: int, done: list[str]) -> None:
    with handler(signal.SIGUSR2, lambda *_: done.append("the other")), deferred():
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGUSR2)


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize(
    ("work", "happened"),
    [
        (within_a_section, ["section"]),
        (before_a_pause, ["closed"]),
        (twice_in_a_pause, ["recovery"]),
        (two_in_a_section, ["the other"]),
    ],
)
def test_handlers_wait_in_a_section_but_not_in_its_pauses_and_all_of_them_run(
    number: int, work: Callable[[int, list[str]], None], happened: list[str]
) -> None:
    done: list[str] = []
    with handler(number, raising):
        with pytest.raises(TimeLimitError):
            work(number, done)
        assert done == happened
        assert signal.getsignal(number) is raising


def test_handlers_are_put_back_although_each_is_called_then_and_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2
    put_back = interrupts.set_handler

    def ringing(number: int, function: Any) -> None:
        put_back(number, function)
        if function is raising:
            signal.raise_signal(number)

    with handler(numbers[0], raising), handler(numbers[1], raising), handler(numbers[2], raising):
        monkeypatch.setattr(interrupts, "set_handler", ringing)
        with pytest.raises(TimeLimitError), deferred():
            pass
        assert [signal.getsignal(number) for number in numbers] == [raising] * 3


def test_a_signal_that_is_handled_in_c_stays_so() -> None:
    with handler(signal.SIGUSR1, signal.SIG_IGN), deferred():
        signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("where", ["schedule", "advance", "commit", "finish", "discard"])
def test_a_handler_that_raises_in_the_bookkeeping_of_a_step_runs_after_it(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, where: str, overlap: bool
) -> None:
    """Handlers run in the pass that follows, or at the end of the step; no answer is lost."""
    engine = engine_on(tiny, overlap=overlap)
    names = {engine.add_request(ids(30 + n, seed=n), greedy(6)): ids(30 + n, seed=n) for n in range(3)}
    work, order = getattr(engine.scheduler, where), list[str]()

    def ringing(*arguments: Any) -> Any:
        if len(order) >= 4:
            return work(*arguments)
        signal.raise_signal(signal.SIGALRM)
        returned = work(*arguments)
        order.append("bookkeeping")
        return returned

    def handle(number: int, frame: FrameType | None) -> None:
        order.append("handler")
        raise TimeLimitError

    monkeypatch.setattr(engine.scheduler, where, ringing)
    outputs: dict[str, RequestOutput] = {}
    with handler(signal.SIGALRM, handle):
        while engine.has_work:
            with suppress(TimeLimitError):
                outputs.update({output.request_id: output for output in engine.step()})
            engine.cache.audit()
    assert order[0] == "bookkeeping"
    assert "handler" in order
    assert set(outputs) == set(names)
    for name, prompt in names.items():
        assert outputs[name].token_ids == cold(tiny, prompt, greedy(6)).token_ids
    assert_nothing_held(engine)
    assert engine.cache.stats().resets == 0


def test_ctrl_c_ends_a_long_pass(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, finished = engine_on(tiny), list[Any]()
    launch = engine.runner.launch

    def long(plan: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        finished.append(plan)
        return launch(plan)

    with handler(signal.SIGINT, signal.default_int_handler):
        monkeypatch.setattr(engine.runner, "launch", long)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([ids(40)], greedy(4), progress=False)
        monkeypatch.undo()
    assert finished == []
    assert_nothing_held(engine)
    assert answer(engine, ids(40), greedy(4)).token_ids == cold(tiny, ids(40), greedy(4)).token_ids


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_timer_that_raises_at_any_moment_leaves_the_bookkeeping_whole(
    tiny: Engine, overlap: bool, deterministic: bool
) -> None:
    """Scenario 31: a real timer at random microseconds, over many steps."""
    engine = engine_on(tiny, pages=40, states=12, overlap=overlap, deterministic=deterministic)
    rng = random.Random(7)
    prompts = {engine.add_request(ids(20 + 11 * n, seed=n), greedy(12)): ids(20 + 11 * n, seed=n) for n in range(4)}
    outputs: dict[str, RequestOutput] = {}
    interrupted = 0
    with handler(signal.SIGALRM, raising):
        while engine.has_work:
            limit = rng.uniform(20e-6, 10e-3) * (1 + interrupted / 5)  # slow machines end, too
            try:
                signal.setitimer(signal.ITIMER_REAL, limit)
                for output in engine.step():
                    outputs[output.request_id] = output
                signal.setitimer(signal.ITIMER_REAL, 0)
            except TimeLimitError:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            engine.cache.audit()
        assert signal.getsignal(signal.SIGALRM) is raising
    assert interrupted >= 5
    for name, prompt in prompts.items():
        if name in outputs and outputs[name].finish_reason:  # a timer may ring between `return` and the assignment
            assert outputs[name].token_ids == cold(tiny, prompt, greedy(12)).token_ids
    assert len(outputs) >= len(prompts) - 1
    assert_nothing_held(engine)
    assert engine.cache.stats().policy_failure is None


def test_a_handler_that_raises_within_a_policy_does_not_dismiss_it(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(tiny, pages=24)
    peek = engine.cache.tree.peek

    def ringing(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)
        return peek(*arguments)

    with handler(signal.SIGALRM, raising):
        engine.add_request(ids(60), greedy(4))
        monkeypatch.setattr(engine.cache.tree, "peek", ringing)
        with pytest.raises(TimeLimitError):
            engine.step()
        monkeypatch.undo()
        engine.cache.audit()
        run_to_end(engine)
    assert engine.cache.stats().policy_failure is None
    assert_nothing_held(engine)


def test_a_handler_may_abort_and_may_not_step(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tiny)
    gone, stays = engine.add_request(ids(40), greedy(9)), engine.add_request(ids(50), greedy(9))
    engine.step()
    launch, errors = engine.runner.launch, []

    def handle(number: int, frame: FrameType | None) -> None:
        engine.abort(gone)
        try:
            engine.step()
        except Exception as error:
            errors.append(str(error))

    def ringing(plan: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return launch(plan)

    with handler(signal.SIGUSR1, handle):
        monkeypatch.setattr(engine.runner, "launch", ringing)
        moved = {output.request_id: output.finish_reason for output in engine.step()}
        monkeypatch.undo()
    assert moved == {gone: "abort", stays: None}
    assert errors == ["a step is under way: a signal handler cannot start another one"]
    outputs = run_to_end(engine)
    assert outputs[stays].token_ids == cold(tiny, ids(50), greedy(9)).token_ids
    assert_nothing_held(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_a_handler_may_close_the_engine(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, overlap: bool, raises: bool
) -> None:
    """It is closed at the end of the step that is under way: all callers get what there is."""
    engine = engine_on(tiny, overlap=overlap)
    streamed = engine.stream("def", greedy(40))
    first = next(streamed)
    added = engine.add_request(ids(30), greedy(40))
    launch, calls = engine.runner.launch, []

    def handle(number: int, frame: FrameType | None) -> None:
        engine.close()
        if raises:
            raise TimeLimitError

    def ringing(plan: Any) -> Any:
        calls.append(plan)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGUSR1)
        return launch(plan)

    with handler(signal.SIGUSR1, handle):
        monkeypatch.setattr(engine.runner, "launch", ringing)
        if raises:
            with pytest.raises(TimeLimitError):
                engine.generate([ids(40), ids(200, 1)], greedy(40), progress=False)
        else:
            outputs = engine.generate([ids(40), ids(200, 1)], greedy(40), progress=False)
            assert {output.finish_reason for output in outputs} == {"abort"}
    assert first + "".join(streamed) != ""
    assert [(output.request_id, output.finish_reason) for output in engine.step()] == [(added, "abort")]
    with pytest.raises(ClosedError):
        engine.generate([ids(40)], greedy(4))
    assert engine.cache.memory.tensors is None
    assert_nothing_held(engine)


def test_a_handler_that_raises_while_an_engine_is_closed_waits(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tiny)
    answer(engine, ids(40), greedy(4, pin_for=100.0))
    give_up = engine.cache.expire_next_pin

    def ringing() -> bool:
        signal.raise_signal(signal.SIGUSR1)
        return give_up()

    monkeypatch.setattr(engine.cache, "expire_next_pin", ringing)
    with handler(signal.SIGUSR1, raising), pytest.raises(TimeLimitError):
        engine.close()
    assert engine.cache.memory.tensors is None
    assert engine.cache.stats().pages_cached == engine.cache.stats().pins == 0


def test_memory_is_freed_where_closing_fails(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tiny)

    def failing() -> None:
        raise OSError("planted")

    monkeypatch.setattr(engine.cache, "shutdown", failing)
    with pytest.raises(OSError, match="planted"):
        engine.close()
    assert engine.cache.memory.tensors is None


def test_an_engine_that_a_handler_closes_while_a_request_comes_takes_no_request(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler runs after the call has seen that the engine is open."""
    engine = engine_on(tiny)
    claim = engine.cache.claim

    def closing() -> None:
        claim()
        engine.close()

    monkeypatch.setattr(engine.cache, "claim", closing)
    with pytest.raises(ClosedError):
        engine.add_request(ids(40), greedy(4))
    assert not engine.has_work
