"""The Triton kernels that take each row by itself, against their twins and against fp64.

They run in Triton's interpreter where there is no GPU. Inputs are views of wider memory that is full of NaN elsewhere,
and memory that must not be written is compared bit by bit.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels import reference
from hybrid.kernels.triton import elementwise as kernels
from support.tensors import same_bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
EPS = 1e-6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def inside(x: Tensor, before: int = 3, after: int = 5) -> Tensor:
    """The same numbers as a part of longer rows, NaN before and after."""
    wide = x.new_full((*x.shape[:-1], before + x.shape[-1] + after), float("nan"))
    view = wide[..., before : before + x.shape[-1]]
    view.copy_(x)
    return view


def assert_close(ours: Tensor, theirs: Tensor, roundings: float = 2) -> None:
    """Equal up to so many roundings to the type of `ours`; in fp32 four times that, for a GPU's fast functions."""
    assert ours.shape == theirs.shape
    step = roundings * torch.finfo(ours.dtype).eps * (4 if ours.dtype == torch.float32 else 1)
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=step, atol=step)


def precise_norm(x: Tensor) -> Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


SHAPES = [(7, 24), (1, 100), (3, 2500), (5, 3, 33), (2, 2, 3, 16), (64,), (3, 4096)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_agrees_with_its_twin_and_with_fp64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, scale = inside(numbers(*shape, dtype=dtype)), numbers(shape[-1]) + 1
    before = x.clone()
    output = kernels.rms_norm(x, scale, EPS)
    assert output.dtype == dtype
    assert output.is_contiguous()
    assert_close(output, reference.rms_norm(x, scale, EPS), 1)
    assert_close(output, precise_norm(x) * scale, 2)
    assert same_bits(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_is_that_of_torch_and_its_norm_that_of_the_rounded_sum(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, residual, scale = inside(numbers(*shape, dtype=dtype)), numbers(*shape, dtype=dtype), numbers(shape[-1]) + 1
    total, output = kernels.add_rms_norm(x, residual, scale, EPS)
    assert same_bits(total, x + residual)
    assert same_bits(output, kernels.rms_norm(total, scale, EPS))
    for ours, theirs in zip((total, output), reference.add_rms_norm(x, residual, scale, EPS), strict=True):
        assert_close(ours, theirs, 1)


def test_the_norm_of_zeros_is_zero_and_that_of_large_numbers_is_finite() -> None:
    x = torch.stack((numbers(40) * 0, numbers(40) * 1e15))
    scale = torch.ones(40, device=DEVICE)
    output = kernels.rms_norm(x, scale, EPS)
    assert output[0].eq(0).all()
    assert_close(output, precise_norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2, 16), (5, 3, 24), (9, 4, 128)], ids=str)
def test_gated_rms_norm_agrees_with_its_twin_and_with_fp64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gate, weight = numbers(*shape, dtype=dtype), inside(3 * numbers(*shape, dtype=dtype)), numbers(shape[-1])
    for kept in (weight.to(dtype), weight):
        output = kernels.gated_rms_norm(x, gate, kept, EPS)
        assert output.dtype == dtype
        assert_close(output, reference.gated_rms_norm(x, gate, kept, EPS), 2)
        assert_close(output, precise_norm(x) * kept * F.silu(gate.double()), 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 24), (3, 5000), (5, 3, 33), (2, 2, 3, 16)], ids=str)
def test_gates_agree_with_their_twins_and_with_fp64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gate = inside(numbers(*shape, dtype=dtype), 2, 2), inside(5 * numbers(*shape, dtype=dtype))
    closed, opened = kernels.silu_and_mul(gate, x), kernels.sigmoid_and_mul(x, gate)
    assert closed.dtype == opened.dtype == dtype
    assert_close(closed, reference.silu_and_mul(gate, x))
    assert_close(opened, reference.sigmoid_and_mul(x, gate))
    assert_close(closed, F.silu(gate.double()) * x.double(), 4)
    assert_close(opened, gate.double().sigmoid() * x.double(), 4)


def test_gates_are_right_far_from_zero() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30], device=DEVICE)
    x = torch.ones_like(gate)
    torch.testing.assert_close(kernels.silu_and_mul(gate, x), F.silu(gate), rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(kernels.sigmoid_and_mul(x, gate), gate.sigmoid(), rtol=1e-5, atol=1e-30)


def test_the_halves_of_a_projection_are_read_where_they_lie() -> None:
    projected = numbers(4, 3, 2 * 16)
    first, second = projected.chunk(2, dim=-1)
    assert same_bits(kernels.sigmoid_and_mul(first, second), kernels.sigmoid_and_mul(first.clone(), second.clone()))
    first, second = numbers(4, 60).chunk(2, dim=-1)
    assert same_bits(kernels.silu_and_mul(first, second), kernels.silu_and_mul(first.clone(), second.clone()))
    by_columns = numbers(30, 4).t()
    assert same_bits(kernels.silu_and_mul(by_columns, first), kernels.silu_and_mul(by_columns.contiguous(), first))


class Heads:
    """New tokens between projection and attention, their K and V to go to poisoned pages of the second of three layers.

    q and its gate share a projection, as do k and v; cos and sin lie by columns.
    """

    def __init__(
        self,
        tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        dtype: torch.dtype,
        page_size: int = 16,
    ) -> None:
        self.q = numbers(tokens, heads, 2 * head_dim, dtype=dtype)[..., :head_dim]
        self.k, self.v = numbers(tokens, 2 * kv_heads, head_dim, dtype=dtype).chunk(2, dim=1)
        self.scales = numbers(head_dim) + 1, numbers(head_dim) + 1
        angles = torch.randn(rotary_dim, tokens) * 10
        self.cos, self.sin = (x.to(DEVICE, dtype).t() for x in (angles.cos(), angles.sin()))
        num_pages = tokens // page_size + 4
        self.pool = numbers(num_pages, 3, 2, page_size, kv_heads, head_dim, dtype=dtype).fill_(float("nan"))
        self.slots = torch.randperm(num_pages * page_size)[:tokens].to(DEVICE)

    def run(self, rows: slice = slice(None), slots: Tensor | None = None, module: object = kernels) -> Tensor:
        return module.norm_rotate_store(  # type: ignore[attr-defined]
            *(x[rows] for x in (self.q, self.k, self.v)),
            *self.scales,
            EPS,
            self.cos[rows],
            self.sin[rows],
            self.pool[:, 1],
            self.slots[rows] if slots is None else slots,
        )

    def stored(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(keys, values) in the pages at slots."""
        flat = self.pool[:, 1].transpose(1, 2).flatten(0, 1)
        return flat[slots, 0], flat[slots, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 16, 4), (6, 1, 24, 6), (3, 3, 24, 24), (16, 4, 256, 64), (8, 8, 32, 2), (0, 2, 16, 4)],
)
def test_heads_are_normed_turned_and_stored_as_by_the_twin(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    case = Heads(5, heads, kv_heads, head_dim, rotary_dim, dtype)
    case.slots[2] = -1
    poisoned = case.pool.clone()
    output = case.run()
    ours, case.pool = case.pool, poisoned.clone()
    expected = case.run(module=reference)
    theirs, case.pool = case.pool, ours
    assert output.is_contiguous()
    assert_close(output, expected, 2)
    written = case.slots[case.slots >= 0]
    keys, values = case.stored(written)
    case.pool = theirs
    expected_keys, expected_values = case.stored(written)
    assert_close(keys, expected_keys, 2)
    assert same_bits(values, expected_values)
    for pool in (ours, theirs):  # all else is as it was
        pool[:, 1].transpose(1, 2)[written // 16, written % 16] = float("nan")
    assert same_bits(ours, theirs)
    assert same_bits(ours, poisoned)


def test_turned_heads_agree_with_fp64() -> None:
    case = Heads(4, 3, 1, 24, 8, torch.float32)
    turned, passed = (precise_norm(case.q) * case.scales[0]).split((8, 16), dim=-1)
    cos, sin = case.cos.double().unsqueeze(1), case.sin.double().unsqueeze(1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    assert_close(case.run(), torch.cat((turned, passed), dim=-1), 8)


def test_slots_of_minus_one_store_nothing_and_the_queries_come_all_the_same() -> None:
    case = Heads(6, 4, 2, 24, 8, torch.float32)
    before, expected = case.pool.clone(), case.run()
    case.pool.copy_(before)
    assert same_bits(case.run(slots=torch.full((6,), -1, device=DEVICE)), expected)
    assert same_bits(case.pool, before)


def test_slots_and_angles_may_have_other_types_and_strides() -> None:
    case = Heads(6, 4, 2, 24, 8, torch.float32)
    case.slots[1] = -1
    output, pool = case.run(), case.pool.clone()
    case.pool.fill_(float("nan"))
    case.cos = case.cos.contiguous()
    assert same_bits(case.run(slots=case.slots.int()), output)
    assert same_bits(case.pool, pool)


Function = Callable[[slice], tuple[Tensor, ...]]


def functions(dtype: torch.dtype) -> dict[str, Function]:
    """Every kernel, of some of the rows of a batch of 17."""
    x, residual, scale = numbers(17, 200, dtype=dtype), numbers(17, 200, dtype=dtype), numbers(200)
    heads, gate, weight = numbers(17, 3, 24, dtype=dtype), numbers(17, 3, 24, dtype=dtype), numbers(24, dtype=dtype)
    case = Heads(17, 3, 1, 24, 8, dtype)

    def rotated(rows: slice) -> tuple[Tensor, ...]:
        case.pool.fill_(float("nan"))
        return case.run(rows), *case.stored(case.slots[rows])

    return {
        "rms_norm": lambda rows: (kernels.rms_norm(x[rows], scale, EPS),),
        "rms_norm of heads": lambda rows: (kernels.rms_norm(heads[rows], scale[:24], EPS),),
        "add_rms_norm": lambda rows: kernels.add_rms_norm(x[rows], residual[rows], scale, EPS),
        "gated_rms_norm": lambda rows: (kernels.gated_rms_norm(heads[rows], gate[rows], weight, EPS),),
        "silu_and_mul": lambda rows: (kernels.silu_and_mul(x[rows], residual[rows]),),
        "sigmoid_and_mul": lambda rows: (kernels.sigmoid_and_mul(heads[rows], gate[rows]),),
        "norm_rotate_store": rotated,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", functions(torch.float32))
def test_a_row_gives_the_same_bits_alone_and_among_others(name: str, dtype: torch.dtype) -> None:
    function = functions(dtype)[name]
    together = function(slice(None))
    for rows in (slice(0, 1), slice(16, 17), slice(3, 8), slice(9, 16)):
        for part, whole in zip(function(rows), together, strict=True):
            assert same_bits(part, whole[rows])


@pytest.mark.parametrize("name", functions(torch.float32))
def test_no_rows_are_no_work(name: str) -> None:
    assert all(part.shape[0] == 0 for part in functions(torch.float32)[name](slice(0, 0)))
