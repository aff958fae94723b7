"""Passes that are captured on a CPU: run again they have the bits of the pass itself, whatever its inputs hold."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid import CacheConfig, Engine, EngineConfig, SamplingParams
from hybrid.commands.random_checkpoints import write_random_checkpoint
from hybrid.kernels.cpu import elementwise, matmul, tasks
from hybrid.kernels.cpu.capture import CALLED_AGAIN, CpuCapture, NotCapturedError
from hybrid.kernels.cpu.compiled.vectors import INDEX, numbers
from hybrid.kernels.cpu.kinds import FLOAT
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.team import Team
from support.engines import ids
from support.tensors import same_bits


def count(args: Any, kind: Any, first: int, last: int) -> None:
    counts = numbers(numbers(args, INDEX)[0], INDEX)
    for element in range(first, last):
        counts[element] += 1


def count_late(args: Any, kind: Any, first: int, last: int) -> None:
    """Element 0 takes long."""
    counts = numbers(numbers(args, INDEX)[0], INDEX)
    for element in range(first, last):
        for spins in range(1_000_000 if element == 0 else 1):
            counts[element] += spins % 2 if element == 0 else 1


def copy(args: Any, kind: Any, first: int, last: int) -> None:
    a = numbers(args, INDEX)
    source, target = numbers(a[0], INDEX), numbers(a[1], INDEX)
    for element in range(first, last):
        target[element] = source[element]


def fails(args: Any, kind: Any, first: int, last: int) -> None:
    place = numbers(numbers(args, INDEX)[0], INDEX)
    for element in range(first, last):
        if element == place[0]:
            raise MemoryError


def stop(args: Any, kind: Any, first: int, last: int) -> None:
    """Write 1 once the first count is 3."""
    a = numbers(args, INDEX)
    counts, target = numbers(a[0], INDEX), numbers(a[1], INDEX)
    target[0] = int(counts[0] == 3)


COUNT, COUNT_LATE, COPY, FAILS, STOP = (
    Compiled(__name__, name) for name in ("count", "count_late", "copy", "fails", "stop")
)


def pass_over(x: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Two products with a norm and a gate between them, and operations of torch before and after."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(1100, x.shape[1], generator=generator).to(dtype)
    second = torch.randint(-127, 128, (900, 1100), dtype=torch.int8, generator=generator)
    scale, norm = torch.rand(900, generator=generator), torch.rand(1100, generator=generator)

    def run() -> Tensor:
        y = matmul.multiply(torch.cat((x[:2], x[2:])), first)
        y = elementwise.silu_and_mul(y, elementwise.rms_norm(y, norm, 1e-6))
        return matmul.multiply(y, second, scale).float()

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_run_again_has_the_bits_of_the_pass(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    threads(1)
    x = torch.randn(5, 640).to(dtype)
    run = pass_over(x, dtype)
    again, result = CpuCapture()(run)
    for count in (1, 2, 3, 4):
        x.copy_(torch.randn(5, 640))
        threads(1)
        expected = run()
        threads(count)
        result.fill_(float("nan"))
        again()
        assert same_bits(result, expected)


class Called(TorchDispatchMode):
    """Counts the operations of torch that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_an_operation_of_torch_is_one_call_that_writes_its_result() -> None:
    x, table, rows = torch.randn(4, 6), torch.randn(9, 6), torch.tensor([3, 0, 8, 5])

    def run() -> Tensor:
        angles = rows.unsqueeze(1).float() * x[0]
        parts = [angles.cos(), angles.sin(), torch.nn.functional.embedding(rows, table) + 1, (table.double() * 2)[rows]]
        return torch.cat([part.double() for part in parts], 1)

    again, result = CpuCapture()(run)
    with Called() as called:
        again()
    assert called.count == 12  # rows of the table are taken by a compiled one
    x.copy_(torch.randn(4, 6))
    rows.copy_(torch.tensor([1, 7, 7, 2]))
    again()
    assert same_bits(result, run())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_only_copies_rows_needs_no_torch(dtype: torch.dtype) -> None:
    table, rows = torch.randn(9, 20).to(dtype), torch.tensor([3, 0, 8])

    def run() -> Tensor:
        embedded = torch.nn.functional.embedding(rows, table)
        return torch.cat((embedded, table[rows], table[2:5, :7]), dim=-1)

    again, result = CpuCapture()(run)
    rows.copy_(torch.tensor([5, 5, 1]))
    result.fill_(float("nan"))
    with Called() as called:
        again()
    assert called.count == 0
    assert same_bits(result, run())


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_multiplied_and_scaled_without_torch(dtype: torch.dtype) -> None:
    x, y, row = torch.randn(3, 37).to(dtype), torch.randn(3, 50).to(dtype)[:, 5:42], torch.randn(37).to(dtype)
    again, result = CpuCapture()(lambda: (x * y + row) * 0.7 * row + x * -3)
    x.copy_(torch.randn(3, 37))
    assert set(again.seconds(runs=1)) == {"add", "mul", "scale"}
    assert same_bits(result, (x * y + row) * 0.7 * row + x * -3)


@torch.inference_mode()
def test_bfloat16_becomes_fp32_and_fp32_bfloat16_without_torch() -> None:
    x = torch.randn(3, 37)
    again, result = CpuCapture()(lambda: x.to(torch.bfloat16))
    x[0, :4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e38])
    assert list(again.seconds()) == ["narrow"]
    assert same_bits(result.float().nan_to_num(7.0), x.to(torch.bfloat16).float().nan_to_num(7.0))
    x = x.to(torch.bfloat16)
    again, result = CpuCapture()(lambda: x.to(torch.float32))
    x[0, :4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-40])
    assert list(again.seconds()) == ["widen"]
    assert same_bits(result, x.to(torch.float32))


def test_captures_share_their_memory() -> None:
    capture = CpuCapture()
    passes = [capture(pass_over(torch.randn(rows, 640), torch.float32)) for rows in (3, 5)]
    assert passes[0][1].untyped_storage().data_ptr() == passes[1][1].untyped_storage().data_ptr()


def test_the_cost_of_every_operation_is_measured_and_changes_no_result() -> None:
    run = pass_over(torch.randn(5, 640), torch.float32)
    expected = run()
    again, result = CpuCapture()(run)
    found = again.seconds(runs=3)
    assert set(found) == {"torch", "multiply", "rms_norm", "silu_and_mul"}
    assert found["multiply"] == max(found.values())
    result.fill_(float("nan"))
    again()
    assert same_bits(result, expected)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.topk(2).indices,
        lambda x: x.add_(1),
        lambda x: x * x.max().item(),
        lambda x: x[x > 0],
        lambda x: torch.zeros(3),
    ],
    ids=["not known to be a function of contents alone", "writes", "reads on the host", "shape", "contents"],
)
def test_what_cannot_be_run_again_is_refused(operation: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 8)
    with pytest.raises(NotCapturedError, match="cannot be a part of a captured pass"):
        CpuCapture()(lambda: operation(x))
    assert tasks.recorder.get() is None


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    """A new team, whose threads have not been started."""
    new = Team(2)
    monkeypatch.setattr(tasks, "team", lambda: new)
    yield new
    new.close()


def of_team() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "hybrid-cpu"}


def test_threads_that_cannot_be_started_are_done_without(
    threads: Callable[[int], None], team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = pass_over(torch.randn(5, 640), torch.float32), of_team()
    threads(1)
    again, result = CpuCapture()(run)
    expected = run()
    threads(3)
    start = threading.Thread.start
    for count in (0, 1):

        def fails(thread: threading.Thread, count: int = count) -> None:
            if len(of_team() - before) == count:
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            result.fill_(float("nan"))
            again()
        assert same_bits(result, expected)
        assert len(of_team() - before) == count
    assert same_bits(run(), expected)
    assert len(of_team() - before) == 2


def test_threads_that_do_not_begin_are_not_waited_for(
    threads: Callable[[int], None], team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may be busy: what one thread can do is done."""
    threads(1)
    run = pass_over(torch.randn(5, 640), torch.float32)
    again, result = CpuCapture()(run)
    expected = run()
    started: list[threading.Thread] = []

    def waits(thread: threading.Thread) -> None:
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", waits)
    threads(3)
    result.fill_(float("nan"))
    again()
    assert same_bits(result, expected)
    assert same_bits(run(), expected)
    assert started


def test_threads_sleep_where_nothing_follows_and_are_woken(threads: Callable[[int], None], team: Team) -> None:
    run = pass_over(torch.randn(5, 640), torch.float32)
    threads(1)
    expected = run()
    threads(3)
    for _ in range(3):
        assert same_bits(run(), expected)
        deadline = time.monotonic() + 20
        while True:
            before = time.process_time()
            time.sleep(0.05)
            if time.process_time() - before < 0.02:  # nobody looks for anything
                break
            assert time.monotonic() < deadline


def test_a_team_that_was_closed_has_no_threads_and_its_callers_compute_alone(
    threads: Callable[[int], None], team: Team
) -> None:
    run, before = pass_over(torch.randn(5, 640), torch.float32), of_team()
    threads(3)
    expected = run()
    assert len(of_team() - before) == 2
    team.close()
    assert of_team() == before
    assert same_bits(run(), expected)


@pytest.mark.usefixtures("untraced")
def test_a_fork_has_threads_of_its_own(threads: Callable[[int], None]) -> None:
    run = pass_over(torch.randn(5, 640), torch.float32)
    threads(3)
    expected, before = run(), tasks.team()
    child = os.fork()
    if not child:
        os._exit(0 if same_bits(run(), expected) and tasks.team() is not before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tasks.team() is before


@pytest.mark.parametrize("with_torch", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_pass_is_repeated_until_it_says_that_it_is_enough(
    count: int, with_torch: bool, threads: Callable[[int], None]
) -> None:
    threads(count)
    counts, ended, x = torch.zeros(64, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.ones(2, 2)

    def run() -> Tensor:
        tasks.run(COUNT, FLOAT, (counts.data_ptr(),), 64, 1, 64)
        y = x + x if with_torch else x
        tasks.run(STOP, FLOAT, (counts.data_ptr(), ended.data_ptr()), 1, 1, 1)
        return y

    program, _ = CpuCapture()(run)
    for most, expected in ((2, 2), (7, 3)):
        counts.zero_(), ended.zero_()
        program.repeat(most, ended)
        assert counts.tolist() == [expected] * 64


def test_rows_with_given_numbers_are_copied_by_the_program() -> None:
    x, rows, norm = torch.randn(6, 40), torch.tensor([5, 0]), torch.rand(40)
    again, result = CpuCapture()(lambda: elementwise.rms_norm(x[rows], norm, 1e-6))
    assert "take" in again.seconds(runs=1)
    rows.copy_(torch.tensor([3, 3]))
    again()
    assert same_bits(result, elementwise.rms_norm(x[rows], norm, 1e-6))


@pytest.mark.parametrize("elements", [1, 2, 15, 16, 31, 32, 33, 200, 1000])
def test_every_element_is_computed_once(elements: int, threads: Callable[[int], None]) -> None:
    for count, multiple, most in ((2, 1, 99), (3, 1, 5), (4, 12, 99), (4, 1, 99)):
        threads(count)
        counts = torch.zeros(elements, dtype=torch.int64)
        tasks.run(COUNT, FLOAT, (counts.data_ptr(),), elements, multiple, most)
        assert (counts == 1).all()


def test_an_operation_waits_for_all_that_were_computed_side_by_side(threads: Callable[[int], None]) -> None:
    late, soon, copied = (torch.zeros(8, dtype=torch.int64) for _ in range(3))

    def counted(function: Compiled, counts: Tensor) -> Tensor:
        tasks.run(function, FLOAT, (counts.data_ptr(),), 8, 1, 8)
        return counts

    def run() -> Tensor:
        both = tasks.side_by_side([lambda: counted(COUNT_LATE, late), lambda: counted(COUNT, soon)])
        tasks.run(COPY, FLOAT, (both[0].data_ptr(), copied.data_ptr()), 8, 1, 8)
        return copied

    again, _ = CpuCapture()(run)
    for count in (1, 2, 3):
        threads(count)
        again()
        assert torch.equal(copied, late)
    assert soon.tolist() == [4] * 8


@pytest.mark.parametrize("element", [0, 299])
@pytest.mark.parametrize("count", [1, 3])
def test_an_operation_that_fails_in_one_thread_fails_the_pass(
    count: int, element: int, threads: Callable[[int], None]
) -> None:
    threads(1)
    x, number = torch.randn(5, 640), torch.tensor([-1])
    run = pass_over(x, torch.float32)

    def failing() -> Tensor:
        y = run()
        tasks.run(FAILS, FLOAT, (number.data_ptr(),), 300, 1, 3)
        return elementwise.silu_and_mul(y, y)

    again, result = CpuCapture()(failing)
    threads(count)
    again()
    expected = result.clone()
    number[0] = element
    with pytest.raises(MemoryError):
        again()
    with pytest.raises(MemoryError):
        failing()
    number[0] = -1
    again()
    assert same_bits(result, expected)


def test_passes_of_several_callers_at_once(threads: Callable[[int], None]) -> None:
    threads(3)
    wrong: list[int] = []

    def call(number: int) -> None:
        x = torch.randn(3 + number, 640)
        run = pass_over(x, torch.float32)
        expected = run()
        again, result = CpuCapture()(run)
        for _ in range(20):
            again()
            if not same_bits(result, expected):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong and not any(caller.is_alive() for caller in callers)


QWEN = "qwen3_5_text, odd sizes"

CAPTURED = [(QWEN, {}), (QWEN, {"dtype": "bfloat16"}), (QWEN, {"load_dtype": "int8"}), (QWEN, {"load_dtype": "int4"})]
CAPTURED += [("bamba, biases, tied", {}), ("gemma3_text", {"dtype": "bfloat16"}), ("llama", {"load_dtype": "int4"})]
CAPTURED += [
    ("lfm2, odd sizes, untied", {"dtype": "bfloat16"}),
    ("nemotron_h, odd sizes, latent, fused", {}),
    ("falcon_h1", {}),
    ("kimi_linear, odd sizes, low rank, fused", {"dtype": "bfloat16"}),
    ("bailing_hybrid", {}),
    ("gpt_oss, odd sizes, tied", {"dtype": "bfloat16"}),
    ("gpt_oss, odd sizes, tied", {"dtype": "bfloat16", "load_dtype": "int4"}),
    ("qwen3_next, odd sizes", {"load_dtype": "int4:32"}),
    ("recurrent_gemma, odd sizes, tied, biases", {"dtype": "bfloat16"}),
]


@pytest.mark.parametrize(("family", "options"), CAPTURED, ids=str)
def test_answers_of_captured_steps_are_those_of_launched_ones(
    family: str, options: dict[str, str], tmp_path: Path, threads: Callable[[int], None]
) -> None:
    path = write_random_checkpoint(tmp_path, family)
    captured = Engine.from_pretrained(path, cache=CacheConfig(memory="64MiB"), **options)
    launched = Engine.from_pretrained(
        path, cache=CacheConfig(memory="64MiB"), config=EngineConfig(enforce_eager=True), **options
    )
    assert captured.runner.graphs is not None and launched.runner.graphs is None
    vocab = captured.model.config.vocab_size
    prompts = [[token % vocab for token in ids(20 + 30 * n, seed=n)] for n in range(4)]
    params = SamplingParams(max_new_tokens=20, logprobs=2, ignore_eos=True)
    for count in (1, 3):
        threads(count)
        outputs = [engine.generate(prompts, params, progress=False) for engine in (captured, launched)]
        assert [output.token_ids for output in outputs[0]] == [output.token_ids for output in outputs[1]]
        assert [output.logprobs for output in outputs[0]] == [output.logprobs for output in outputs[1]]
    assert captured.runner.graphs.graphs
    replay: Any = captured.runner.graphs.graphs[-1].replay
    called_again = [step.func for step in replay._steps if not isinstance(step, tasks.Task)]
    assert set(called_again) <= {CALLED_AGAIN[torch.ops.aten.fill_.Scalar]}  # new memory, which tests fill with NaN
