"""An engine's thread does not exist in a child of its process: the child is told, and waits for nothing."""

import asyncio
import os
import signal
import threading

import pytest

from hybrid import AsyncEngine, ClosedError
from support.engines import greedy, ids
from support.scheduling import Counting, engine_without_model


async def _refused_in_the_child(engine: AsyncEngine) -> None:
    assert not engine.is_running
    with pytest.raises(ClosedError, match="was forked from the one that has the engine's thread"):
        await engine.generate(ids(8), greedy(2))
    with pytest.raises(ClosedError, match="start processes with 'spawn'"):
        await engine.call(lambda own: own.stats())
    stream = engine.stream(ids(8), greedy(2))
    with pytest.raises(ClosedError, match="was forked"):
        await anext(stream)
    await engine.close()


@pytest.mark.usefixtures("untraced")
def test_forked_processes_are_refused_by_the_engine_of_their_parent() -> None:
    """Whatever its threads do when the process is forked: locks that they hold are held for ever in the child."""
    engine, is_done = AsyncEngine(engine_without_model(100, 10, runner=Counting())), threading.Event()

    def ask() -> None:
        async def often() -> None:
            while not is_done.is_set():
                await engine.generate([ids(8, seed=at) for at in range(4)], greedy(2))

        asyncio.run(often())

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    ends = []
    for _ in range(10):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                asyncio.run(_refused_in_the_child(engine))
            except BaseException:
                os._exit(1)
            os._exit(0)
        ends.append(os.waitpid(child, 0)[1])
    is_done.set()
    for thread in asking:
        thread.join()
    assert ends == [0] * 10
    assert engine.is_running
    asyncio.run(engine.close())
