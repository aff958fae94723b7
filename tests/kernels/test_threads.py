"""Torch computes small operations on one thread, and no other thread notices."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid import CacheConfig, Engine, SamplingParams
from hybrid.kernels.cpu.threads import num_threads, setters, torch_on_one_thread
from hybrid.speculation.config import SpeculationConfig
from support.engines import engine_on, ids

COUNT = 3


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(COUNT)
    yield
    torch.set_num_threads(before)
    setters.cache_clear()


def of_torch() -> int:
    """The number of threads of the calling thread, after it used torch."""
    torch.ones(4).sum()
    return torch.get_num_threads()


def in_another_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_torch_is_on_one_thread_and_compiled_operations_are_not() -> None:
    with torch_on_one_thread():
        with pytest.raises(ValueError, match=f"1 {COUNT}"), torch_on_one_thread():
            raise ValueError(f"{torch.get_num_threads()} {num_threads()}")
        assert (torch.get_num_threads(), num_threads()) == (1, COUNT)
    assert torch.get_num_threads() == num_threads() == COUNT


def test_a_thread_that_starts_meanwhile_has_all_threads() -> None:
    with torch_on_one_thread():
        assert in_another_thread(of_torch) == in_another_thread(num_threads) == COUNT
    assert in_another_thread(of_torch) == COUNT


@pytest.mark.parametrize("order", ["AABB", "ABAB", "ABBA", "BAAB", "BABA", "BBAA"])
@pytest.mark.parametrize("counts", [(3, 3), (3, 2), (1, 3)], ids=str)
def test_callers_in_two_threads_leave_every_number_as_it_was(order: str, counts: tuple[int, int]) -> None:
    """The first time that a letter occurs its thread enters, the second time it leaves."""
    with ThreadPoolExecutor(1) as a, ThreadPoolExecutor(1) as b:
        threads, own = {"A": a, "B": b}, dict(zip("AB", counts, strict=True))
        for name, count in own.items():
            threads[name].submit(of_torch).result()  # until then it has no number of its own
            threads[name].submit(torch.set_num_threads, count).result()
        torch.set_num_threads(COUNT)
        inside: dict[str, ExitStack] = {}
        for name in order:
            if name not in inside:
                inside[name] = ExitStack()
                threads[name].submit(inside[name].enter_context, torch_on_one_thread()).result()
                assert threads[name].submit(torch.get_num_threads).result() == 1
            else:
                threads[name].submit(inside[name].close).result()
                assert threads[name].submit(torch.get_num_threads).result() == own[name]
            assert {name: thread.submit(num_threads).result() for name, thread in threads.items()} == own
            assert of_torch() == in_another_thread(of_torch) == COUNT


class _Paused(TorchDispatchMode):
    """Waits in the first operation that torch computes on one thread, after it has said so."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_there, self.goes_on = threading.Event(), threading.Event()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.get_num_threads() == 1:
            self.is_there.set()
            assert self.goes_on.wait(60)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", ["AABB", "ABAB", "ABBA"])
def test_two_engines_in_two_threads_leave_every_number_as_it_was(tiny: Engine, order: str) -> None:
    """Captured steps of two engines, of which each is in the middle of one while the other starts or ends one."""

    def run(paused: _Paused) -> int:
        engine = engine_on(tiny)
        engine.generate([ids(20)], SamplingParams(max_new_tokens=4, ignore_eos=True), progress=False)
        engine.add_request(ids(20), SamplingParams(max_new_tokens=4, ignore_eos=True))
        engine.step()
        with paused:
            engine.step()
        return of_torch()

    pauses = {"A": _Paused(), "B": _Paused()}
    with ThreadPoolExecutor(2) as pool:
        running = {}
        for name in order:
            if name not in running:
                running[name] = pool.submit(run, pauses[name])
                assert pauses[name].is_there.wait(60)
            else:
                pauses[name].goes_on.set()
                assert running[name].result(60) == COUNT
            assert of_torch() == in_another_thread(of_torch) == COUNT


def test_no_library_of_torch_uses_other_threads() -> None:
    """MKL has a number of its own."""
    x, y = torch.rand(400, 400), torch.rand(1 << 20)
    with torch_on_one_thread():
        time.sleep(0.05)  # what threads of OpenMP did before ends
        process, thread = time.process_time(), time.thread_time()
        while time.thread_time() < thread + 0.1:
            x @ x, y.exp(), y.sin(), y.sum(), y.view(32, -1).log_softmax(-1)
        own = time.thread_time() - thread
        others = time.process_time() - process - own
    assert others < 0.1 * own


def test_a_number_that_is_set_meanwhile_stays() -> None:
    with torch_on_one_thread():
        torch.set_num_threads(2)
    assert of_torch() == num_threads() == in_another_thread(of_torch) == 2


class _Threads(TorchDispatchMode):
    """Notes the number of threads with which torch computes something of at least `size` elements."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[int] = set()
        self._size = size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and any(isinstance(arg, Tensor) and arg.numel() >= self._size for arg in args):
            self.found.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


def test_steps_leave_no_thread_of_torch_behind(tiny: Engine) -> None:
    """They would wait actively, and take the cores of the next compiled operation. Steps with a prompt, captured ones,
    and ones with drafts."""
    params = SamplingParams(max_new_tokens=12, logprobs=2, temperature=0.7, top_p=0.9, ignore_eos=True)
    for speculation in (None, SpeculationConfig(adaptive=False)):
        engine = tiny.with_cache(tiny.cache.config, size=(128, 32), speculation=speculation)
        with _Threads(engine.model.config.vocab_size) as noted:
            engine.generate([ids(200), ids(20, 1)], params, progress=False)
            engine.generate([ids(200)], params, progress=False)
        assert noted.found == {1}


def test_torch_has_its_threads_where_it_computes_the_products(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", "reference")
    engine = Engine.from_pretrained("tiny", cache=CacheConfig(memory="64MiB"))
    with _Threads(engine.model.config.vocab_size) as noted:
        engine.generate([ids(200)], SamplingParams(max_new_tokens=1), progress=False)
    assert COUNT in noted.found


class _Foreign(dict[str, Callable[..., int]]):
    """A library of OpenMP that torch does not use."""

    def __init__(self) -> None:
        super().__init__(omp_set_num_threads=self.set, omp_get_max_threads=lambda: self.number)
        self.number = 5

    def set(self, number: int) -> int:
        self.number = number
        return 0


class _Other:
    """A library of something else."""

    def __getitem__(self, name: str) -> Any:
        raise AttributeError(name)


def test_torch_keeps_its_threads_where_its_library_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = _Foreign()
    for found in (lambda name: foreign, lambda name: _Other()):
        with monkeypatch.context() as patch:
            setters.cache_clear()
            patch.setattr(ctypes, "PyDLL", found)
            with torch_on_one_thread():
                assert torch.get_num_threads() == num_threads() == COUNT
            assert setters() is None
            assert torch.get_num_threads() == num_threads() == COUNT
            assert foreign.number == 5


def test_a_library_that_cannot_be_opened_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every system lets the names be looked up that the whole process sees."""
    library = ctypes.PyDLL
    for refused in (None, torch._C.__file__):
        setters.cache_clear()

        def opened(name: str | None, refused: str | None = refused) -> Any:
            if name == refused:
                raise OSError("refused")
            return library(name)

        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "PyDLL", opened)
            with torch_on_one_thread():
                assert (torch.get_num_threads(), num_threads()) == (1, COUNT)
        assert torch.get_num_threads() == COUNT
