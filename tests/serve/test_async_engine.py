"""Many tasks on one engine: every reader gets its own answer, whole and in order, whatever the others do."""

import asyncio
import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from hybrid import (
    Accepted,
    ArgumentError,
    AsyncEngine,
    CacheConfig,
    ClosedError,
    Engine,
    EngineConfig,
    MemoryBudgetError,
    OutputStream,
    PromptError,
    QueueFullError,
    RequestError,
    RequestOutput,
    SamplingParams,
    TenantConfig,
)
from hybrid.engine.results import Result
from hybrid.engine.step import Step
from support.engines import answer, engine_on, greedy, ids
from support.scheduling import VOCAB, Counting, Known, engine_without_model


def expected(prompt: list[int], count: int) -> list[int]:
    """Return what `Echo` answers."""
    return [(prompt[0] * 31 + prompt[1] * 7 + at) % VOCAB for at in range(len(prompt), len(prompt) + count)]


@dataclass
class Echo(Counting):
    """Tokens that follow from the prompt and the position, so that an answer of another request is noticed.

    Attributes:
        seconds: that a step takes.
    """

    seconds: float = 0.0

    def launch(self, step: Step) -> Known:
        if self.seconds:
            time.sleep(self.seconds)
        super().launch(step)
        return Known([self._answer(part) for part in step.parts])

    def _answer(self, part: Any) -> Result:
        known = part.request.ids
        token = (known[0] * 31 + known[1] * 7 + part.end) % VOCAB
        return Result(True, (token,) if part.samples else ())


@asynccontextmanager
async def echoing(
    *, seconds: float = 0.0, fails: float = 0.0, pages: int = 400, when_full: Any = "wait", **config: Any
) -> AsyncIterator[AsyncEngine]:
    """An engine without a model, that must hold nothing when its requests have ended."""
    runner = Echo(seconds=seconds, fails=fails)
    engine = AsyncEngine(
        engine_without_model(pages, 40, config=EngineConfig(**config), runner=runner), when_full=when_full
    )
    async with engine:
        yield engine
        await nothing_held(engine)


async def nothing_held(engine: AsyncEngine) -> None:
    """All requests have ended, and hold nothing."""

    def check(own: Engine) -> bool:
        own.cache.audit()
        stats = own.cache.stats()
        return not own.has_work and stats.pages_private == stats.states_private == 0

    async with asyncio.timeout(20):
        while not await engine.call(check):
            await asyncio.sleep(0.005)
    stats = engine.stats()
    assert (stats.waiting, stats.running) == (0, 0)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the coroutine of a test, for a minute at most."""

    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


async def read(engine: AsyncEngine, prompt: list[int], count: int, pause: float = 0.0, **more: Any) -> RequestOutput:
    """Read a stream to its end. Deltas are the answer in order; the last output has a finish reason, and no other."""
    tokens: list[int] = []
    output = None
    async for output in engine.stream(prompt, greedy(count), **more):
        assert output.delta_token_ids or output.finish_reason is not None
        tokens += output.delta_token_ids
        assert output.token_ids == tokens
        if pause:
            await asyncio.sleep(pause)
    assert output is not None
    assert output.finish_reason is not None
    return output


def test_200_tasks_with_random_cancellations_and_slow_readers_lose_nothing() -> None:
    rng = random.Random(11)

    async def test() -> None:
        async with echoing(fails=0.01, max_num_seqs=16, max_waiting=24) as engine:
            done: list[int] = []

            async def one(number: int) -> None:
                prompt, count = ids(rng.randrange(2, 60), seed=number % 50), rng.randrange(1, 80)
                pause = 0.01 if number % 20 == 0 else 0.0
                output = await read(engine, prompt, count, pause, namespace="abc"[number % 3])
                assert output.finish_reason == "length"
                assert output.token_ids == expected(prompt, count)
                done.append(number)

            tasks = [asyncio.create_task(one(number)) for number in range(200)]
            cancelled = rng.sample(range(200), 60)
            for number in cancelled:
                await asyncio.sleep(rng.random() * 0.01)
                tasks[number].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            wrong = [result for result in results if isinstance(result, Exception)]
            assert wrong == []
            assert {n for n, task in enumerate(tasks) if task.cancelled()} | set(done) == set(range(200))
            assert len(done) >= 140
            await nothing_held(engine)
            stats = engine.stats()
            assert stats.finished["error"] == 0
            assert stats.finished["length"] >= len(done)

    run(test)


def test_a_reader_that_is_slow_gets_long_deltas_and_holds_up_nothing() -> None:
    async def test() -> None:
        async with echoing(max_num_seqs=8) as engine:
            slow = engine.stream(ids(20), greedy(500))
            tokens = (await anext(slow)).delta_token_ids
            others = [read(engine, ids(20, seed=n), 60) for n in range(1, 8)]
            await asyncio.gather(*others)
            await nothing_held(engine)  # the slow one has ended, too
            rest = [output async for output in slow]
            assert len(rest) == 1
            assert tokens + rest[0].delta_token_ids == rest[0].token_ids == expected(ids(20), 500)

    run(test)


def test_outputs_are_passed_to_a_function_until_the_last_one() -> None:
    async def test() -> None:
        async with echoing(seconds=0.005) as engine:
            ids = [[5, at] * 20 for at in range(8)]
            params = greedy(60)
            expected = [output.token_ids for output in await engine.generate(ids, params)]
            streams = await engine.submit_all(ids, params)

            async def passed(at: int, stream: Any) -> tuple[list[int], int]:
                found: list[int] = []
                calls = 0

                def take(output: RequestOutput) -> asyncio.Future[None] | None:
                    nonlocal calls
                    calls += 1
                    found.extend(output.delta_token_ids)
                    return asyncio.ensure_future(asyncio.sleep(0.05)) if at % 2 else None  # a slow one

                last = await stream.pass_on(take)
                assert last.finish_reason == "length" and last.token_ids == found + last.delta_token_ids
                return last.token_ids, calls

            results = await asyncio.gather(*(passed(at, stream) for at, stream in enumerate(streams)))
            assert [ids for ids, _ in results] == expected
            assert any(calls > 0 for _, calls in results)  # what comes before a reader does is one output

    run(test)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_function_that_fails_ends_its_stream_alone(is_late: bool) -> None:
    async def test() -> None:
        async with echoing(seconds=0.002) as engine:
            other = asyncio.create_task(read(engine, [1] * 40, 40))
            stream = await engine.submit([7] * 40, greedy(400))

            async def failing() -> None:
                raise ValueError("it is full")

            def take(output: RequestOutput) -> asyncio.Future[None] | None:
                if is_late:
                    return asyncio.ensure_future(failing())
                raise ValueError("it is full")

            with pytest.raises(ValueError, match="it is full"):
                await stream.pass_on(take)
            assert len((await other).token_ids) == 40

    run(test)


def test_an_event_loop_that_is_held_up_holds_up_nothing() -> None:
    async def test() -> None:
        async with echoing() as engine:
            stream = engine.stream(ids(20), greedy(300))
            tokens = (await anext(stream)).delta_token_ids
            while engine.stats().finished["length"] == 0:
                time.sleep(0.01)  # a task that never gives way
            rest = [output async for output in stream]
            assert len(rest) <= 2
            assert tokens + [token for output in rest for token in output.delta_token_ids] == expected(ids(20), 300)

    run(test)


# Cancelling


async def until_running(engine: AsyncEngine, number: int) -> None:
    async with asyncio.timeout(20):
        while engine.stats().running != number:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("where", ["waiting for an output", "between two outputs", "in generate"])
def test_a_cancelled_task_aborts_its_request(where: str) -> None:
    async def test() -> None:
        async with echoing(seconds=0.002) as engine:
            kept: list[Any] = []

            async def one() -> None:
                if where == "in generate":
                    await engine.generate([ids(20, seed=n) for n in range(3)], greedy(900))
                    return
                stream = engine.stream(ids(20), greedy(900))
                kept.append(stream)  # so that it is not dropped
                async for _ in stream:
                    if where == "between two outputs":
                        await asyncio.sleep(30)

            task = asyncio.create_task(one())
            await until_running(engine, 3 if where == "in generate" else 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await nothing_held(engine)
            assert engine.stats().finished["abort"] == (3 if where == "in generate" else 1)
            assert [output for stream in kept async for output in stream] == []

    run(test)


def test_a_task_that_is_cancelled_while_its_request_waits_leaves_nothing() -> None:
    async def test() -> None:
        async with echoing(seconds=0.002, max_num_seqs=1, max_waiting=1) as engine:
            tasks = [asyncio.create_task(read(engine, ids(20, seed=n), 300)) for n in range(6)]
            while engine.engine.stats().waiting != 5:
                await asyncio.sleep(0.001)
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks[1:], return_exceptions=True)
            assert (await tasks[0]).token_ids == expected(ids(20), 300)
            assert engine.stats().finished == {"stop": 0, "length": 1, "abort": 5, "error": 0}

    run(test)


@pytest.mark.parametrize("how", ["break", "aclose", "drop", "timeout"])
def test_a_stream_that_is_given_up_aborts_its_request(how: str) -> None:
    async def test() -> None:
        async with echoing(seconds=0.002) as engine:
            stream = engine.stream(ids(20), greedy(900))
            async for _ in stream:
                if how == "timeout":
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0):
                            await anext(stream)
                break
            if how == "aclose":
                await stream.aclose()
                assert [output async for output in stream] == []
            if how in ("break", "drop"):
                del stream
                gc.collect()
            await nothing_held(engine)
            assert engine.stats().finished["abort"] == 1

    run(test)


def test_a_request_is_aborted_by_its_id() -> None:
    async def test() -> None:
        async with echoing(seconds=0.002, max_num_seqs=1, max_waiting=1) as engine:
            first = asyncio.create_task(read(engine, ids(20), 900, request_id="first"))
            await until_running(engine, 1)
            second = asyncio.create_task(read(engine, ids(20), 900, request_id="second"))
            while engine.engine.stats().waiting != 1:
                await asyncio.sleep(0.001)
            await engine.abort("first")
            await engine.abort("second")
            assert (await first).finish_reason == (await second).finish_reason == "abort"
            with pytest.raises(RequestError, match="no request 'first'"):
                await engine.abort("first")

    run(test)


def test_an_id_can_be_used_again_when_its_request_was_given_up() -> None:
    async def test() -> None:
        async with echoing(seconds=0.001) as engine:
            for ends in ("closed", "aborted", "cancelled") * 5:
                stream = engine.stream(ids(20), greedy(900), request_id="mine")
                assert (await anext(stream)).delta_token_ids != []
                if ends == "closed":
                    await stream.aclose()
                elif ends == "aborted":
                    await engine.abort("mine")
                else:
                    reader = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
                    await asyncio.sleep(0)
                    reader.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await reader
            assert (await read(engine, ids(20), 5, request_id="mine")).token_ids == expected(ids(20), 5)
            with pytest.raises(ArgumentError, match="request_id"):
                await anext(engine.stream(ids(20), request_id=["mine"]))  # type: ignore[arg-type]

    run(test)


# Back-pressure


def test_prompts_wait_by_turns_between_namespaces_however_many_there_are() -> None:
    async def test() -> None:
        async with echoing(max_num_seqs=1, max_waiting=1) as engine:
            ended: list[str] = []

            async def one(name: str, seed: int) -> None:
                await read(engine, ids(20, seed=seed), 3, namespace=name)
                ended.append(name)

            all_wait = threading.Event()
            held = asyncio.create_task(engine.call(lambda _: all_wait.wait(60)))  # until the last one is there
            tasks = [asyncio.create_task(one("many", n)) for n in range(40)]
            tasks.append(asyncio.create_task(one("single", 99)))
            await asyncio.sleep(0)
            all_wait.set()
            await asyncio.gather(held, *tasks)
            assert ended.index("single") <= 5

    run(test)


def test_with_refusals_a_full_queue_is_an_error_at_once() -> None:
    async def test() -> None:
        async with echoing(seconds=0.002, max_num_seqs=1, max_waiting=2, when_full="refuse") as engine:
            first = asyncio.create_task(read(engine, ids(20), 100))
            await until_running(engine, 1)
            with pytest.raises(QueueFullError, match="max_waiting=2"):
                await engine.generate([ids(20, seed=n) for n in range(3)], greedy(4))
            outputs = await engine.generate([ids(20, seed=n) for n in range(2)], greedy(4))
            assert [output.token_ids for output in outputs] == [expected(ids(20, seed=n), 4) for n in range(2)]
            await first

    run(test)


def test_many_prompts_at_once_do_not_hold_up_those_that_run() -> None:
    """Prompts are encoded between steps, a few at a time."""

    async def test() -> None:
        async with echoing(max_num_seqs=64) as engine:
            prepare, tokens = engine.engine.prepare, []

            def slow(*arguments: Any, **more: Any) -> str:
                tokens.append(engine.stats().completion_tokens)
                time.sleep(0.02)
                return prepare(*arguments, **more)

            stream = engine.stream(ids(20), greedy(900))
            await anext(stream)
            engine.engine.prepare = slow  # type: ignore[method-assign]
            await engine.generate([ids(20, seed=n) for n in range(30)], greedy(1))
            assert tokens[-1] - tokens[0] >= 8
            await stream.aclose()

    run(test)


# Idle, and the end


def test_an_idle_engine_takes_no_processor_time() -> None:
    async def test() -> None:
        async with echoing() as engine:
            await read(engine, ids(20), 5)
            await nothing_held(engine)
            for _ in range(20):
                before = time.process_time()
                await asyncio.sleep(0.2)
                if time.process_time() - before < 0.02:
                    return
            raise AssertionError("it never rests")

    run(test)


def test_closing_ends_what_runs_and_what_waits() -> None:
    async def test() -> None:
        async with echoing(seconds=0.002, max_num_seqs=1, max_waiting=1) as engine:
            tasks = [asyncio.create_task(read(engine, ids(20, seed=n), 900)) for n in range(4)]
            await until_running(engine, 1)
            while engine.engine.stats().waiting != 3:
                await asyncio.sleep(0.001)
            let_go = threading.Event()
            engine.engine.prepare = lambda *arguments: let_go.wait(20)  # type: ignore[method-assign,assignment,return-value]
            tasks.append(asyncio.create_task(read(engine, ids(20), 900)))
            while engine.stats().waiting != 4:
                await asyncio.sleep(0.001)
            await engine.close()
            let_go.set()
            await engine.close()
            assert not engine.is_running
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            reasons = [end.finish_reason if isinstance(end, RequestOutput) else type(end) for end in ends]
            assert reasons == [*["abort"] * 4, ClosedError]
            assert (engine.stats().waiting, engine.stats().running) == (0, 0)
            for call in (engine.generate([ids(9)]), engine.call(len), engine.abort("x")):  # type: ignore[arg-type]
                with pytest.raises(ClosedError, match="was closed"):
                    await call
            with pytest.raises(ClosedError):
                await anext(engine.stream(ids(9)))
            assert engine.stats().finished["abort"] == 4

    with pytest.raises(ClosedError):  # `echoing` looks at it once more
        run(test)


def test_a_thread_that_dies_ends_all_with_an_error() -> None:
    async def test() -> None:
        settings = EngineConfig(max_waiting=1, max_num_seqs=1)
        engine = AsyncEngine(engine_without_model(100, 12, config=settings, runner=Echo(seconds=0.002)))
        tasks = [asyncio.create_task(read(engine, ids(20, seed=n), 900)) for n in range(5)]
        await until_running(engine, 1)

        def broken(only: object, expected: object) -> None:
            raise MemoryError("no memory for a list")

        engine.engine.scheduler.schedule = broken  # type: ignore[method-assign,assignment]
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(end, ClosedError)
            assert isinstance(end.__cause__, MemoryError)
        with pytest.raises(ClosedError, match="ended with an error: MemoryError: no memory for a list"):
            await engine.generate([ids(9)])
        assert not engine.is_running
        await engine.close()

    run(test)


@pytest.mark.parametrize("name", ["new_id", "prepare", "enter", "predict"])
def test_what_raises_for_one_prompt_ends_that_prompt_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with echoing(seconds=0.001) as engine:
            call, calls = getattr(engine.engine, name), itertools.count()

            def broken(*arguments: Any, **more: Any) -> Any:
                if next(calls) == 2:
                    raise MemoryError("no memory for a list")
                return call(*arguments, **more)

            monkeypatch.setattr(engine.engine, name, broken)
            asked = [asyncio.create_task(engine.submit(ids(20, seed), greedy(4))) for seed in range(5)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(one) for one in found if not isinstance(one, OutputStream)] == [MemoryError]
            for seed, stream in enumerate(found):
                if isinstance(stream, OutputStream):
                    assert [output async for output in stream][-1].token_ids == expected(ids(20, seed), 4)

    run(test)


def test_an_abort_that_raises_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with echoing(seconds=0.001) as engine:
            stream, abort, calls = engine.stream(ids(20), greedy(40)), engine.engine.abort, itertools.count()
            await anext(stream)

            def broken(request_id: str) -> None:
                abort(request_id)
                if next(calls) == 0:
                    raise MemoryError("no memory for a list")

            monkeypatch.setattr(engine.engine, "abort", broken)
            await stream.aclose()
            assert (await read(engine, ids(20), 5)).token_ids == expected(ids(20), 5)
            assert next(calls) == 1

    run(test)


def test_a_call_whose_caller_is_cancelled_before_is_not_made() -> None:
    async def test() -> None:
        async with echoing() as engine:
            until, made = threading.Event(), []
            held = asyncio.create_task(engine.call(lambda own: until.wait(20)))
            late = asyncio.create_task(engine.call(made.append))
            await asyncio.sleep(0.01)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
            until.set()
            assert await held
            assert await engine.call(lambda own: made == [])

    run(test)


def test_a_step_that_no_request_made_fail_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with echoing() as engine:
            scheduler, calls = engine.engine.scheduler, []
            schedule = scheduler.schedule

            def broken(*arguments: Any) -> Any:
                calls.append(arguments)
                if len(calls) in (3, 4, 7):
                    raise MemoryError("no memory for a list")
                return schedule(*arguments)

            monkeypatch.setattr(scheduler, "schedule", broken)
            outputs = await asyncio.gather(*(read(engine, ids(20, seed), 9) for seed in range(4)))
            assert [output.token_ids for output in outputs] == [expected(ids(20, seed), 9) for seed in range(4)]
            assert len(calls) > 7

    run(test)


def test_an_engine_that_is_dropped_ends_its_thread(tiny: Engine) -> None:
    before = {*threading.enumerate()}

    async def test() -> None:
        engine = AsyncEngine(engine_on(tiny))
        [own] = (thread for thread in threading.enumerate() if thread not in before)  # a step may start others
        await engine.generate([ids(20)], greedy(2))
        dropped = weakref.ref(engine.engine)
        del engine
        while dropped() is not None:
            await asyncio.sleep(0.005)
            gc.collect()
        while own.is_alive():
            await asyncio.sleep(0.005)

    run(test)


def test_an_engine_is_used_from_two_event_loops_at_once() -> None:
    engine = AsyncEngine(engine_without_model(200, 40, runner=Echo(seconds=0.001)))
    failures: list[BaseException] = []

    async def some(offset: int) -> None:
        results = await asyncio.gather(*(read(engine, ids(30, seed=offset + n), 40) for n in range(8)))
        for n, output in enumerate(results):
            assert output.token_ids == expected(ids(30, seed=offset + n), 40)

    def other(offset: int) -> None:
        try:
            asyncio.run(some(offset))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=other, args=(100 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == []
    asyncio.run(nothing_held(engine))
    asyncio.run(engine.close())


def test_a_loop_that_ends_in_the_middle_leaves_nothing() -> None:
    engine = AsyncEngine(engine_without_model(200, 40, runner=Echo(seconds=0.001)))
    kept: list[Any] = []

    async def begin() -> None:
        kept.append(engine.stream(ids(20), greedy(900)))
        await anext(kept[0])

    asyncio.run(begin())
    asyncio.run(nothing_held(engine))
    assert engine.stats().finished["abort"] == 1

    async def go_on() -> None:
        with pytest.raises(RequestError, match="started in another event loop"):
            await anext(kept[0])
        await engine.close()

    asyncio.run(go_on())


def test_a_loop_that_is_closed_during_a_call_is_let_go_of() -> None:
    engine = AsyncEngine(engine_without_model(200, 40, runner=Echo()))
    loop, others = asyncio.new_event_loop(), asyncio.new_event_loop()
    dropped = weakref.ref(loop)
    begun = loop.create_task(engine.call(lambda own: time.sleep(0.05)))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    del loop, begun
    others.run_until_complete(nothing_held(engine))
    gc.collect()
    assert dropped() is None
    others.run_until_complete(engine.close())
    others.close()


def test_a_loop_that_has_ended_is_let_go_of() -> None:
    engine = AsyncEngine(engine_without_model(200, 40, runner=Echo()))
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def test() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await read(engine, ids(20), 3)

    for _ in range(3):
        run(test)
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3
    asyncio.run(engine.close())


def test_one_task_reads_a_stream_and_any_task_may_close_it() -> None:
    async def test() -> None:
        async with echoing(seconds=0.02) as engine:
            stream = engine.stream(ids(20), greedy(900))
            await anext(stream)
            reader = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="another task is waiting"):
                await anext(stream)
            assert len((await reader).token_ids) >= 2
            reader = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await reader

    run(test)


# Bad input


def test_bad_input_is_refused_and_others_are_not_affected() -> None:
    async def test() -> None:
        async with echoing() as engine:
            good = asyncio.create_task(read(engine, ids(20), 100))
            for prompt, error in (
                ([], PromptError),
                ([VOCAB], PromptError),
                ([1.5], PromptError),
                ("text", PromptError),
            ):
                with pytest.raises(error):
                    await anext(engine.stream(prompt))  # type: ignore[arg-type]
            with pytest.raises(MemoryBudgetError):
                await engine.generate([ids(20), ids(20)], [greedy(4), greedy(90000)])
            with pytest.raises(ArgumentError, match="2 SamplingParams for 1 prompts"):
                await engine.generate(["a"], [greedy(), greedy()])
            with pytest.raises(ArgumentError, match="namespace"):
                engine.stream(ids(20), namespace=["a"])  # type: ignore[arg-type]
            with pytest.raises(ArgumentError, match="request_id"):
                await anext(engine.stream(ids(20), request_id=""))
            with pytest.raises(ZeroDivisionError):
                await engine.call(lambda own: 1 // 0)
            with pytest.raises(RuntimeError, match="StopIteration"):  # a future that cannot have it was never resolved
                await asyncio.wait_for(engine.call(lambda own: next(iter(()))), 20)
            assert (await good).token_ids == expected(ids(20), 100)

    run(test)


def test_wrong_arguments_of_an_engine_are_refused(tiny: Engine) -> None:
    with pytest.raises(ArgumentError, match="when_full must be 'wait' or 'refuse', got 'queue'"):
        AsyncEngine(engine_on(tiny), when_full="queue")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="use from_pretrained"):
        AsyncEngine("tiny")  # type: ignore[arg-type]


def test_a_request_is_submitted_before_its_first_token() -> None:
    async def test() -> None:
        async with echoing(seconds=0.5, max_num_seqs=1, when_full="refuse", max_waiting=2) as engine:
            first = await engine.submit(ids(40), greedy(5, stop_token_ids=[7]), request_id="mine")
            assert engine.stats().time_to_first_token.count == 0  # nothing was awaited but the queue
            engine.engine.runner.seconds = 0.0  # type: ignore[attr-defined]
            assert first.accepted is not None
            assert first.accepted == Accepted("mine", 40, first.accepted.predicted, frozenset([7]))
            assert first.accepted.predicted.usable_hit == 0
            second = await engine.submit(ids(40), greedy(5))
            outputs = [output async for output in first]
            assert [token for output in outputs for token in output.delta_token_ids] == expected(ids(40), 5)
            assert [output async for output in second][-1].token_ids == expected(ids(40), 5)
            again = await engine.submit(ids(40), greedy(5))
            assert again.accepted is not None
            assert again.accepted.predicted.usable_hit == [output async for output in again][-1].usage.cached_tokens > 0
            with pytest.raises(PromptError, match="the prompt is empty"):
                await engine.submit([])
            with pytest.raises(ArgumentError, match="request_id"):
                await engine.submit(ids(4), request_id="")
            dropped = await engine.submit(ids(40), greedy(5))
            del dropped
            gc.collect()
            left = asyncio.create_task(engine.submit(ids(40), greedy(5)))
            await asyncio.sleep(0)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left

    run(test)


def test_requests_are_refused_when_slots_and_queue_are_full() -> None:
    async def test() -> None:
        async with echoing(pages=4000, max_num_seqs=64, max_waiting=64, when_full="refuse") as engine:
            results = await asyncio.gather(
                *(engine.submit(ids(20, seed=n), greedy(500)) for n in range(220)), return_exceptions=True
            )
            refused = [result for result in results if isinstance(result, QueueFullError)]
            assert len(refused) == 220 - 128
            assert not [result for result in results if not isinstance(result, QueueFullError | OutputStream)]
            for stream in results:
                if isinstance(stream, OutputStream):
                    stream.abort()

    run(test)


def test_a_tenant_has_as_many_prompts_under_way_as_it_may() -> None:
    async def test() -> None:
        tenants = {"a": TenantConfig(max_requests=3)}
        async with echoing(seconds=0.001, max_num_seqs=1, max_waiting=1, tenants=tenants) as engine:
            params = greedy(20, tenant="a")  # one runs, one waits, one is not taken yet: each counts
            tasks = [asyncio.create_task(engine.generate(ids(20, seed=n), params)) for n in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match=r"'a' would have 4 requests: TenantConfig\(max_requests=3\)"):
                await engine.submit(ids(20), params)
            other = await engine.generate(ids(20), greedy(2))
            assert other[0].finish_reason == "length"
            await asyncio.gather(*tasks)
            with pytest.raises(QueueFullError, match="would have 4"):
                await engine.submit_all([ids(20)] * 4, params)  # none of them
            streams = await engine.submit_all([ids(20), ids(30)], params)
            assert [stream.accepted.prompt_tokens for stream in streams if stream.accepted] == [20, 30]
            for stream in streams:
                assert [output async for output in stream][-1].finish_reason == "length"

    run(test)


def test_an_engine_that_drains_takes_nothing_and_finishes_the_rest() -> None:
    async def test() -> None:
        async with echoing(seconds=0.002, max_num_seqs=2) as engine:
            streams = [await engine.submit(ids(20, seed=n), greedy(100)) for n in range(5)]
            assert not await engine.drain(timeout=0.01)
            assert not engine.is_running and not engine.has_ended
            with pytest.raises(ClosedError, match="it drains"):
                await engine.submit(ids(20))
            with pytest.raises(ClosedError, match="it drains"):
                await engine.generate([ids(20)])
            assert await engine.drain()
            for n, stream in enumerate(streams):
                assert [output async for output in stream][-1].token_ids == expected(ids(20, seed=n), 100)
            assert await engine.drain(timeout=5)

    run(test)


# On a model


def test_chats_and_prompts_without_an_answer_are_those_of_a_plain_engine(tiny: Engine) -> None:
    messages = [{"role": "user", "content": "The with statement " * 12}]

    async def test() -> None:
        async with AsyncEngine(engine_on(tiny)) as engine:
            kept = await engine.prewarm({"messages": messages}, ttl=60)
            assert kept.token_ids == [] and kept.pin is not None
            answer = await engine.chat(messages, greedy(4))
            assert answer.message() == engine_on(tiny).chat(messages, greedy(4)).message()
            assert answer.usage.cached_tokens > 0

    run(test)


def test_streams_of_the_model_are_the_answers_of_a_plain_engine(tiny: Engine) -> None:
    texts = ["def add(a, b):", "class Foo:", "The with statement", "import"]
    params = SamplingParams(max_new_tokens=12)
    wanted = [answer(engine_on(tiny), text, params).text for text in texts]

    async def one(engine: AsyncEngine, text: str) -> str:
        return "".join([output.delta async for output in engine.stream(text, params)])

    async def test() -> None:
        config = CacheConfig(memory="64MiB", page_size=16, chunk_size=16)
        async with AsyncEngine.from_pretrained("tiny", cache=config) as engine:
            assert await asyncio.gather(*(one(engine, text) for text in texts)) == wanted
            again = await engine.generate(texts, params)
            assert [output.text for output in again] == wanted
            pin = await engine.call(lambda own: own.pin(ids(20))) if again[0].usage.cached_tokens > 99 else None
            assert pin is None
            await nothing_held(engine)

    run(test)
