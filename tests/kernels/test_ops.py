"""The operations as torch sees them: what they write, what they would give, who computes them."""

import inspect
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid import CacheConfig, Engine, SamplingParams
from hybrid.commands.random_checkpoints import FAMILIES, random_model
from hybrid.kernels import external, ops, reference
from support.program_order import RANDOM
from support.tensors import ints, starts_of

TOKENS, HEADS, KV_HEADS, DIM, PAGE = 5, 4, 2, 16, 8
STARTS, LENGTHS = starts_of([3, 2]), [11, 10]


def pages() -> torch.Tensor:
    return torch.randn(6, 2, PAGE, KV_HEADS, DIM)


def rule_arguments() -> tuple[Any, ...]:
    """Return arguments of the chunk rule: two requests, key heads half as many as value heads, one capture."""
    q, k, v = torch.randn(40, 2, DIM), torch.randn(40, 2, DIM), torch.randn(40, 4, DIM)
    where = (starts_of([32, 8]), ints([0, 1]), ints([2, 3]), ints([0, 16, 4]).view(1, 3))
    gates = (*torch.randn(2, 40, 4), -torch.rand(4), torch.randn(4))
    return q, k, v, *gates, torch.randn(6, 4, DIM, DIM), *where, 16


def step_arguments() -> tuple[Any, ...]:
    channels, heads = 2 * 2 * DIM + 4 * DIM, 4
    pools = torch.randn(6, 3, channels), torch.randn(6, heads, DIM, DIM)
    own = (torch.randn(channels, 4), -torch.rand(heads), torch.randn(heads))
    return (
        *(torch.randn(2, size) for size in (channels, heads, heads)),
        *own,
        *pools,
        starts_of([1, 1]),
        ints([0, 1]),
        ints([2, 1]),
    )


ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "add_shared": lambda: (torch.randn(5, 24), torch.randn(5, 24), torch.randn(5, 1)),
    "add_rms_norm": lambda: (torch.randn(5, 24), torch.randn(5, 24), torch.rand(24), 1e-6),
    "causal_conv1d": lambda: (
        torch.randn(TOKENS, 24),
        torch.randn(24, 4),
        torch.randn(6, 3, 24),
        STARTS,
        ints([0, 1]),
        ints([2, 1]),
        ints([0, 2, 4]).view(1, 3),
    ),
    "chunk_gated_delta_rule": rule_arguments,
    "combine_experts": lambda: (torch.randn(6, 24), ints([[0, 3], [1, 4], [2, 5]]), torch.rand(3, 2)),
    "delta_gates": lambda: (torch.randn(5, 12)[:, :4], torch.randn(5, 12)[:, 8:], -torch.rand(4), torch.randn(4)),
    "expert_linear": lambda: (
        torch.randn(3, 24),
        torch.randn(4, 8, 24),
        ints([0, 1, 3, 2, 4, 5]),
        ints([[1, 1, 2, 2], [3, 5, 6, 6]]),
        2,
        2,
    ),
    "route_experts": lambda: (torch.randn(3, 8), 2, True),
    "sort_by_expert": lambda: (ints([[0, 2], [1, 0], [1, 2]]), 4, 1),
    "copy_states": lambda: (
        torch.randint(0, 255, (8, 64), dtype=torch.uint8),
        ints([1, 2]),
        ints([5, 6]),
    ),
    "fill_in_tokens": lambda: (torch.arange(20), ints([7, -1, 5]), ints([[2, 0, 4, 8, 12], [1, 3, 7, 11, 15]])),
    "gated_delta_step": step_arguments,
    "gated_rms_norm": lambda: (torch.randn(5, 2, 24), torch.randn(5, 2, 24), torch.rand(24), 1e-6),
    "batch_invariant_linear": lambda: (torch.randn(5, 24), torch.randn(32, 24), 3),
    "norm_rotate_store": lambda: (
        torch.randn(TOKENS, HEADS, 2 * DIM)[..., :DIM],
        torch.randn(TOKENS, KV_HEADS, DIM),
        torch.randn(TOKENS, KV_HEADS, DIM),
        torch.rand(DIM),
        torch.rand(DIM),
        1e-6,
        torch.randn(TOKENS, DIM // 2),
        torch.randn(TOKENS, DIM // 2),
        pages(),
        ints([0, 1, -1, 9, 17]),
    ),
    "paged_attention": lambda: (
        torch.randn(TOKENS, HEADS, DIM),
        pages(),
        ints([[0, 1], [2, 3]]),
        STARTS,
        ints(LENGTHS),
        0.25,
        16,
        None,
        1,
    ),
    "rms_norm": lambda: (torch.randn(5, 2, 24), torch.rand(24), 1e-6),
    "shift_rows": lambda: (torch.randn(3, 24), torch.randn(6, 24), ints([0, 2, 3]), ints([1, -1, 2]), ints([-1, 1, 3])),
    "sigmoid_and_mul": lambda: (torch.randn(5, 2, 24), torch.randn(5, 2, 48)[..., 24:]),
    "silu_and_mul": lambda: (torch.randn(5, 24), torch.randn(5, 24)),
    "store_kv": lambda: (torch.randn(3, KV_HEADS, DIM), torch.randn(3, KV_HEADS, DIM), pages(), ints([0, -1, 9])),
}
EXTERNAL = [op.name for op in ops.OPS.values() if op.external]
NAMES = [*ops.OPS, *(ops.BATCH_DEPENDENT + name for name in EXTERNAL)]


def op(name: str) -> Any:
    return getattr(torch.ops.hybrid, name).default


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_writes_what_it_says_and_its_fake_has_the_right_shape(name: str) -> None:
    arguments = ARGUMENTS[name.removeprefix(ops.BATCH_DEPENDENT)]()
    results = torch.library.opcheck(op(name), arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu_an_operation_is_its_twin(name: str) -> None:
    """Bit by bit, unless it is compiled: then to rounding."""
    plain = name.removeprefix(ops.BATCH_DEPENDENT)
    ours = ARGUMENTS[plain]()
    theirs = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in ours)
    got, expected = op(name)(*ours), getattr(reference, plain)(*theirs)
    tolerance = 1e-5 if ops.OPS[plain].compiled_function() is not None else 0.0
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def layer(x: torch.Tensor, scale: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A piece of a model: a norm, a write into the pages, attention over them."""
    y = ops.rms_norm(x, scale, 1e-6)
    ops.store_kv(y[:, :KV_HEADS], y[:, KV_HEADS:], cache, slots)
    return ops.paged_attention(y, cache, ints([[0, 1]]), starts_of([3]), ints([3]), 0.25, 16)


def test_torch_compile_sees_through_the_operations_and_their_writes() -> None:
    arguments = torch.randn(3, HEADS, DIM), torch.rand(DIM), pages(), ints([0, 1, 2])
    copies = tuple(arg.clone() for arg in arguments)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), layer(*copies))
    torch.testing.assert_close(arguments, copies)


def test_torch_export_keeps_the_operations() -> None:
    class Layer(torch.nn.Module):
        def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
            return layer(*arguments)

    arguments = torch.randn(3, HEADS, DIM), torch.rand(DIM), pages(), ints([0, 1, 2])
    program = torch.export.export(Layer(), arguments)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"hybrid.rms_norm.default", "hybrid.store_kv.default", "hybrid.paged_attention.default"} <= called
    copies = tuple(arg.clone() for arg in arguments)
    torch.testing.assert_close(program.module()(*arguments), layer(*copies))


# Who computes them


def test_on_a_gpu_every_operation_has_a_kernel_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", "triton")
    for name, op in ops.OPS.items():
        function = ops.implementation(name, torch.device("cuda"))
        assert function.__name__ == name
        assert function.__module__ == f"hybrid.kernels.{'triton' if op.has_kernel else 'reference'}.{op.file}"
    assert [name for name, op in ops.OPS.items() if not op.has_kernel] == ["add_shared"]


def public_functions(module: Any) -> dict[str, inspect.Signature]:
    """Functions that a module defines for others."""
    return {
        name: inspect.signature(value)
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


FOLDER = Path(ops.__file__).parent


@pytest.mark.parametrize("file", sorted({op.file for op in ops.OPS.values()}))
def test_a_kernel_has_its_twin_in_the_file_of_the_same_name_with_the_same_signature(file: str) -> None:
    kernels, twins = (
        public_functions(import_module(f"hybrid.kernels.{folder}.{file}")) for folder in ("triton", "reference")
    )
    here = {op.name for op in ops.OPS.values() if op.file == file and op.has_kernel}
    for name in here:
        assert kernels[name] == twins[name]


def test_a_compiled_operation_has_the_signature_of_its_twin() -> None:
    compiled = {name: op.compiled_function() for name, op in ops.OPS.items() if op.compiled}
    assert compiled
    for name, function in compiled.items():
        assert function is not None
        assert inspect.signature(function) == inspect.signature(ops.OPS[name].twin)


def test_every_operation_is_in_both_folders() -> None:
    files = {op.file for op in ops.OPS.values()}
    kernels, twins = ({path.stem for path in FOLDER.glob(f"{folder}/[!_]*.py")} for folder in ("triton", "reference"))
    assert kernels - files == {"interpreter", "packed_kv", "ragged"}  # what several kernels share
    assert files <= kernels & twins


def test_the_twins_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", "reference")
    for name in ops.OPS:
        assert ops.implementation(name, torch.device("cuda")) is getattr(reference, name)


def test_what_is_not_invariant_may_be_another_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", "auto")
    gpu = torch.device("cuda")
    for name in EXTERNAL:
        assert ops.implementation(name, gpu).__module__ == f"hybrid.kernels.triton.{ops.OPS[name].file}"
        assert ops.implementation(ops.BATCH_DEPENDENT + name, gpu).__module__ in (
            f"hybrid.kernels.triton.{ops.OPS[name].file}",
            "hybrid.kernels.external",
        )


def test_a_wrong_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", "fast")
    with pytest.raises(ValueError, match="auto, triton, reference; got 'fast'"):
        ops.implementation("rms_norm", torch.device("cpu"))


def test_triton_on_a_cpu_without_its_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        ops.implementation("rms_norm", torch.device("cpu"))


@pytest.mark.parametrize(
    ("setting", "choice"), [("reference", "the twin in plain torch"), ("auto", "compiled for this CPU")]
)
def test_the_choice_is_told_once(
    setting: str, choice: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", setting)
    call = ops.choose_at_first_call("rms_norm")
    with caplog.at_level(logging.INFO, logger="hybrid.kernels.ops"):
        for _ in range(3):
            call(torch.randn(2, 8), torch.ones(8), 1e-6)
    assert caplog.messages == [f"rms_norm on cpu: {choice}"]


def test_why_another_package_is_not_used_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", "auto")
    monkeypatch.setattr(external, "implementation", lambda name: "a-package cannot be used (it is not there)")
    with caplog.at_level(logging.INFO, logger="hybrid.kernels.ops"):
        ops.implementation("batch_dependent_causal_conv1d", torch.device("cuda"))
    assert caplog.messages == ["causal_conv1d on cuda: our Triton kernel: a-package cannot be used (it is not there)"]


PROMPTS = [list(range(5, 27)), [*range(5, 21), 7]]
"""Short ones: interpreted programs take milliseconds each."""
Told = list[list[list[object]]]


def answers(checkpoint: str, deterministic: bool) -> Told:
    """Tokens, cached tokens and log-probabilities of two prompts, asked twice in deterministic mode."""
    config = CacheConfig(page_size=16, chunk_size=16, memory="8MiB", deterministic=deterministic)
    engine = Engine.from_pretrained(checkpoint, device="cpu", dtype="float32", cache=config)
    tensors = engine.cache.state_tensors.values()
    for memory in (engine.cache.kv, *tensors):  # which share their bytes: free memory may hold any
        memory.fill_(float("nan"))
    for tensor in tensors:
        tensor[0] = 0  # the empty state
    params = SamplingParams(max_new_tokens=2, ignore_eos=True, logprobs=1)
    told = []
    for _ in range(2 if deterministic else 1):
        outputs = engine.generate(PROMPTS, params, progress=False)
        told.append([[output.token_ids, output.usage.cached_tokens, repr(output.logprobs)] for output in outputs])
        engine.cache.audit()
    return told


def watched_answers(checkpoint: str, deterministic: bool, seed: int) -> Told:
    """The same on interpreted kernels, whose launches are watched."""
    from support.watched_launch import Watch, watched

    with watched(Watch(RANDOM, seed)) as watch:
        told = answers(checkpoint, deterministic)
    assert watch.take() == []
    return told


def test_an_engine_runs_on_interpreted_kernels(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every kernel of ours in its place (the family has layers of all kinds, experts, too): the twins' answers, and in
    deterministic mode hits that equal cold runs bit by bit."""
    checkpoint = tmp_path / "checkpoint"
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    family = FAMILIES["qwen3_next"]
    random_model(replace(family, settings={**family.settings, **layers})).save_pretrained(checkpoint)
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    seed = request.config.option.program_seed
    program = (
        f"import json, sys; sys.path[:0] = {paths!r}; import test_ops as test; "
        f"print(json.dumps([test.watched_answers({str(checkpoint)!r}, mode, {seed}) for mode in (False, True)]))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "HYBRID_KERNELS": "triton", "TRITON_INTERPRET": "1"},
        check=False,
    )
    assert found.returncode == 0, found.stderr
    for deterministic, ours in enumerate(json.loads(found.stdout)):
        twins = answers(str(checkpoint), bool(deterministic))
        for mine, expected in zip(ours, twins, strict=True):
            assert [answer[:2] for answer in mine] == [answer[:2] for answer in expected]
    cold, warm = ours
    assert all(answer[1] >= 16 for answer in warm)
    assert [answer[2] for answer in warm] == [answer[2] for answer in cold]


class OnAnotherGpu(torch.Tensor):
    """A tensor that says that it is on the second GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


def test_a_kernel_is_launched_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which is the first one unless somebody has said otherwise."""
    current, used = [0], list[int]()

    @contextmanager
    def device(other: torch.device) -> Iterator[None]:
        current.append(int(other.index))
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(ops, "implementation", lambda name, device: lambda *args: used.append(current[-1]))
    call = ops.choose_at_first_call("rms_norm")
    for _ in range(2):
        call(torch.zeros(2).as_subclass(OnAnotherGpu))
    call(torch.zeros(2))
    assert (used, current) == ([1, 1, 0], [0])
