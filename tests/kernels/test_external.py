"""The adapters to packages that may not be there, with stand-ins in plain torch in the packages' place.

flash-linear-attention's own naive rule is one of them; our Triton kernel is held to it here too.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels import external, reference
from hybrid.kernels.triton import delta_rule
from support.interpreter import interpret_fla
from support.tensors import ints, rows_of, same_bits, starts_of, untouched

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [1, 15, 16, 17, 37]
READS, WRITES = (
    [0, 1, 2, 3, 0],
    [8, 9, 10, 3, 11],
)  # request 3 goes on in its own slot; two begin at the empty state
CAPTURES = [(4, 32, 23), (2, 16, 20), (3, 16, 21), (4, 16, 22)]
CHANNELS = 24


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch.manual_seed(0)
    external._kept.clear()
    yield
    external._imported.cache_clear()


def where(
    lengths: Sequence[int] = LENGTHS,
    reads: Sequence[int] = READS,
    writes: Sequence[int] = WRITES,
    captures: Sequence[tuple[int, int, int]] = CAPTURES,
) -> tuple[Tensor, ...]:
    return tuple(x.to(DEVICE) for x in (starts_of(lengths), ints(reads), ints(writes), rows_of(captures)))


def pool(*shape: int) -> Tensor:
    """A layer of a pool of three: slots 1 to 6 hold numbers, slot 0 zeros, everything else NaN."""
    layer = torch.full((25, 3, *shape), float("nan"), device=DEVICE)[:, 1]
    layer[0] = 0.0
    layer[1:7] = torch.randn(6, *shape).to(DEVICE)
    return layer


def put(monkeypatch: pytest.MonkeyPatch, package: str, function: Callable[..., Any]) -> None:
    """Let a function stand where that of a package is."""
    module = ModuleType(f"stand_in_for_{function.__class__.__name__}")
    module.stand_in = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(external.FUNCTIONS, package, (module.__name__, "stand_in"))
    external._imported.cache_clear()


# FLA's chunk rule


def rule_inputs(count: int) -> tuple[Tensor, ...]:
    """q, k, v, a, b, rate and bias for two value heads on one key head."""
    q, k = torch.randn(2, count, 1, 16)
    v, a, b = torch.randn(count, 2, 24), *2 * torch.randn(2, count, 2)
    return tuple(x.to(DEVICE) for x in (q, k, v, a, b, -torch.rand(2), torch.randn(2)))


class NaiveRule:
    """FLA's chunk rule as its documentation has it, by FLA's naive one."""

    def __init__(self) -> None:
        self.naive = pytest.importorskip("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
        self.calls: list[list[int]] = []

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor,
        output_final_state: bool,
        use_qk_l2norm_in_kernel: bool,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        assert output_final_state
        assert use_qk_l2norm_in_kernel
        assert chunk_size in (16, 32, 64)
        assert cu_seqlens.dtype == torch.int64
        assert cu_seqlens_cpu.device.type == "cpu"
        starts = cu_seqlens.tolist()
        assert starts == cu_seqlens_cpu.tolist()
        assert len(q) == len(k) == len(v) == 1
        assert q.shape[1] == v.shape[1] == starts[-1]
        assert len(initial_state) == len(starts) - 1
        self.calls.append([end - start for start, end in pairwise(starts)])
        group = v.shape[2] // k.shape[2]
        q, k = (reference.l2norm(x.float()).repeat_interleave(group, dim=2) for x in (q, k))
        outputs, finals = [], []
        for row, (start, end) in enumerate(pairwise(starts)):
            part = slice(start, end)
            output, final = self.naive(
                *(x[:, part] for x in (q, k, v, beta, g)),
                initial_state=initial_state[row : row + 1],
                output_final_state=True,
            )
            outputs.append(output)
            finals.append(final)
        return torch.cat(outputs, dim=1).to(v.dtype), torch.cat(finals)


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> NaiveRule:
    naive = NaiveRule()
    put(monkeypatch, external.FLA, naive)
    return naive


def test_fla_gives_every_captured_state_by_calls_that_end_there(rule: NaiveRule) -> None:
    inputs, ours = rule_inputs(sum(LENGTHS)), pool(2, 16, 24)
    before, twins = ours.clone(), ours.clone()
    output = external.fla_chunk_gated_delta_rule(*inputs, ours, *where(), 16)
    expected = reference.chunk_gated_delta_rule(*inputs, twins, *where(), 16)
    written = [*WRITES, *(slot for *_, slot in CAPTURES)]
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[written], twins[written], rtol=1e-5, atol=1e-5)
    assert untouched(before, ours, written)
    # every request's first segment, then the second of those that have one, then the third
    assert rule.calls == [[1, 15, 16, 16, 16], [1, 16], [5]]


@pytest.mark.parametrize("captures", [[], [(1, 16, 20)]])
def test_fla_is_called_once_where_no_capture_is_on_the_way(
    rule: NaiveRule, captures: list[tuple[int, int, int]]
) -> None:
    inputs, ours = rule_inputs(21), pool(2, 16, 24)
    twins = ours.clone()
    places = where([5, 16], [1, 2], [8, 2], captures)
    output = external.fla_chunk_gated_delta_rule(*inputs, ours, *places, 16)
    torch.testing.assert_close(
        output, reference.chunk_gated_delta_rule(*inputs, twins, *places, 16), rtol=1e-5, atol=1e-5
    )
    written = [8, 2, *(slot for *_, slot in captures)]
    torch.testing.assert_close(ours[written], twins[written], rtol=1e-5, atol=1e-5)
    assert rule.calls == [[5, 16]]


def test_our_kernel_agrees_with_fla(rule: NaiveRule) -> None:
    inputs, ours = rule_inputs(21), pool(2, 16, 24)
    theirs = ours.clone()
    places = where([21], [1], [8], [(0, 16, 20)])
    output = delta_rule.chunk_gated_delta_rule(*inputs, ours, *places, 16)
    torch.testing.assert_close(
        output, external.fla_chunk_gated_delta_rule(*inputs, theirs, *places, 16), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(ours[[8, 20]], theirs[[8, 20]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [16, 64])
def test_the_real_chunk_rule_of_fla_gives_what_the_twin_gives(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    pytest.importorskip("fla.ops.gated_delta_rule")
    if DEVICE == "cpu":
        interpret_fla(monkeypatch)
    inputs, ours = rule_inputs(chunk + 9), pool(2, 16, 24)
    before, twins = ours.clone(), ours.clone()
    places = where([chunk + 4, 5], [1, 2], [8, 2], [(0, chunk, 20)])
    output = external.fla_chunk_gated_delta_rule(*inputs, ours, *places, chunk)
    expected = reference.chunk_gated_delta_rule(*inputs, twins, *places, chunk)
    bound = 1e-5 if DEVICE == "cpu" else 2e-2  # on a GPU it multiplies fp32 in tf32
    torch.testing.assert_close(output, expected, rtol=bound, atol=bound)
    torch.testing.assert_close(ours[[8, 2, 20]], twins[[8, 2, 20]], rtol=bound, atol=bound)
    assert untouched(before, ours, [8, 2, 20])


# Causal-conv1d


def naive_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, initial_states: Tensor, activation: str
) -> Tensor:
    """Compute causal-conv1d and check its inputs: channels next to each other in memory, strides in eights."""
    batch, channels, _ = x.shape
    width = weight.shape[1]
    assert activation == "silu"
    assert x.stride(1) == 1
    assert x.stride(2) > 1
    assert x.stride(0) % 8 == x.stride(2) % 8 == channels % 8 == 0
    assert 2 <= width <= 4
    assert initial_states.shape == (batch, channels, width - 1)
    assert initial_states.stride(1) == 1
    assert initial_states.dtype == x.dtype
    extended = torch.cat((initial_states, x), dim=2).float()
    offset = None if bias is None else bias.float()
    mixed = F.silu(F.conv1d(extended, weight.float()[:, None], offset, groups=channels)).to(x.dtype)
    return mixed.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(("width", "has_bias"), [(2, True), (4, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_convolution_goes_on_from_its_windows(
    monkeypatch: pytest.MonkeyPatch, width: int, has_bias: bool, dtype: torch.dtype
) -> None:
    put(monkeypatch, external.CAUSAL_CONV1D, naive_convolution)
    x, weight = torch.randn(sum(LENGTHS), 40).to(DEVICE, dtype)[:, :CHANNELS], torch.randn(CHANNELS, width).to(DEVICE)
    ours = pool(width - 1, CHANNELS).to(dtype)
    before, twins = ours.clone(), ours.clone()
    bias = torch.randn(CHANNELS).to(DEVICE, dtype) if has_bias else None
    output = external.external_causal_conv1d(x, weight.to(dtype), ours, *where(), bias)
    expected = reference.causal_conv1d(x, weight.to(dtype), twins, *where(), bias)
    bound = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(output, expected, rtol=bound, atol=bound)
    assert output.is_contiguous()
    written = [*WRITES, *(slot for *_, slot in CAPTURES)]
    assert same_bits(ours[written], twins[written])
    assert untouched(before, ours, written)


def test_one_request_needs_no_copy_of_its_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, external.CAUSAL_CONV1D, naive_convolution)
    x, weight, ours = torch.randn(2, CHANNELS), torch.randn(CHANNELS, 4), pool(3, CHANNELS)
    x, weight, twins = x.to(DEVICE), weight.to(DEVICE), ours.clone()
    places = where([2], [3], [3], [])
    output = external.external_causal_conv1d(x, weight, ours, *places)
    torch.testing.assert_close(output, reference.causal_conv1d(x, weight, twins, *places), rtol=1e-5, atol=1e-5)
    assert same_bits(ours[3], twins[3])


@pytest.mark.parametrize(("channels", "width"), [(21, 4), (24, 5)])
def test_shapes_that_the_package_does_not_take_go_to_our_kernel(
    monkeypatch: pytest.MonkeyPatch, channels: int, width: int
) -> None:
    put(monkeypatch, external.CAUSAL_CONV1D, naive_convolution)
    x, weight = torch.randn(9, channels).to(DEVICE), torch.randn(channels, width).to(DEVICE)
    ours = pool(width - 1, channels)
    twins, places = ours.clone(), where([9], [1], [8], [])
    output = external.external_causal_conv1d(x, weight, ours, *places)
    torch.testing.assert_close(output, reference.causal_conv1d(x, weight, twins, *places), rtol=1e-5, atol=1e-5)
    assert same_bits(ours[8], twins[8])


# Numbers on the host


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every tensor whose numbers are fetched."""
    fetched: list[Tensor] = []
    tolist = Tensor.tolist

    def counted(x: Tensor) -> Any:
        fetched.append(x)
        return tolist(x)

    monkeypatch.setattr(Tensor, "tolist", counted)
    return fetched


def convolve(places: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """(outputs, windows) of the adapter, checked against the twin."""
    tokens = int(places[0][-1])
    x, weight, ours = torch.randn(tokens, CHANNELS).to(DEVICE), torch.randn(CHANNELS, 4).to(DEVICE), pool(3, CHANNELS)
    twins = ours.clone()
    output = external.external_causal_conv1d(x, weight, ours, *places)
    expected = reference.causal_conv1d(x, weight, twins, *(y.clone() for y in places))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, twins, rtol=0, atol=0, equal_nan=True)
    return output, ours


def test_the_layers_of_a_step_fetch_its_numbers_once(
    monkeypatch: pytest.MonkeyPatch, rule: NaiveRule, fetches: list[Tensor]
) -> None:
    put(monkeypatch, external.CAUSAL_CONV1D, naive_convolution)
    monkeypatch.setattr(rule, "naive", lambda q, k, v, *_, initial_state, **__: (v, initial_state))
    starts, reads, writes, captures = where()
    x, weight, windows = (
        torch.randn(sum(LENGTHS), CHANNELS).to(DEVICE),
        torch.randn(CHANNELS, 4).to(DEVICE),
        pool(3, 24),
    )
    inputs, states = rule_inputs(sum(LENGTHS)), pool(2, 16, 24)
    for _ in range(3):  # every layer makes views of its own
        places = (starts[:], reads[:], writes[:], captures[:])
        external.external_causal_conv1d(x, weight, windows, *places)
        external.fla_chunk_gated_delta_rule(*inputs, states, *places, 16)
    by_stand_in = 2 * len(rule.calls)
    assert len(fetches) - by_stand_in == 1


def test_numbers_written_in_place_are_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, external.CAUSAL_CONV1D, naive_convolution)
    places = where([5, 4], [1, 2], [8, 9], [(0, 4, 20)])
    convolve(places)
    places[0].copy_(starts_of([2, 7]))
    places[2].copy_(ints([10, 2]))
    places[3].copy_(rows_of([(1, 6, 21)]))
    convolve(places)


def test_numbers_of_inference_tensors_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, external.CAUSAL_CONV1D, naive_convolution)
    with torch.inference_mode():
        places = where([5, 4], [1, 2], [8, 9], [])
        convolve(places)
        places[0].copy_(starts_of([2, 7]))
        convolve(places)


# What is there


def test_a_package_that_is_not_there_or_broken_is_not_available(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_package_of_a_test.py").write_text('raise OSError("undefined symbol: _ZN3c104cuda")')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(external.FUNCTIONS, external.FLA, ("broken_package_of_a_test", "f"))
    monkeypatch.setitem(external.FUNCTIONS, external.CAUSAL_CONV1D, ("no_package_of_a_test", "f"))
    external._imported.cache_clear()
    assert external.implementation("chunk_gated_delta_rule") == (
        "flash-linear-attention cannot be used (OSError: undefined symbol: _ZN3c104cuda)"
    )
    assert external.implementation("causal_conv1d") == (
        "causal-conv1d cannot be used (ModuleNotFoundError: No module named 'no_package_of_a_test')"
    )
    with pytest.raises(ImportError, match=r"flash-linear-attention cannot be used \(OSError: undefined symbol"):
        external.fla_chunk_gated_delta_rule(*rule_inputs(1), pool(2, 16, 24), *where([1], [1], [8], []), 16)


def test_what_is_there_is_found_by_the_name_of_the_operation(rule: NaiveRule) -> None:
    found = external.implementation("chunk_gated_delta_rule")
    assert found == (external.FLA, external.fla_chunk_gated_delta_rule)


def test_the_module_imports_no_other_package() -> None:
    code = "import sys, hybrid.kernels.external; assert not {'fla', 'causal_conv1d', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
