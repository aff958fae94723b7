"""The decode of a linear-attention layer as one kernel, held to its twin and to flash-linear-attention's plain rule.

Slots that a call must not read hold NaN; what it must not write is compared bit by bit.
"""

import random
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels import reference
from hybrid.kernels.triton import delta_rule
from support.tensors import ints, same_bits, starts_of

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
SLOTS = 40
NAMED = 8
"""Slots 1 to 7 hold states, slot 0 the empty one, the rest NaN."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pool_of(shape: Sequence[int], dtype: torch.dtype, slots: int = SLOTS) -> Tensor:
    """One layer of a pool with three, its slots further apart than their size."""
    size = 3 * torch.Size(shape).numel()
    pool = torch.full((slots, size + 16), float("nan"))
    pool[0] = 0
    pool[1:NAMED] = torch.randn(NAMED - 1, size + 16)
    return pool.to(DEVICE, dtype)[:, :size].view(slots, 3, *shape)[:, 1]


def whole(layer: Tensor) -> Tensor:
    """The pool that a layer is a part of."""
    assert layer._base is not None
    return layer._base


@dataclass
class Layer:
    """A layer's weights and its two pools.

    Attributes:
        heads: of keys, of values.
        dims: of a key, of a value.
    """

    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype = torch.float32
    width: int = 4

    def __post_init__(self) -> None:
        (key_heads, value_heads), (key_dim, value_dim) = self.heads, self.dims
        self.channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.weight = torch.randn(self.channels, self.width).to(DEVICE, self.dtype)
        self.rate = -torch.rand(value_heads).to(DEVICE) * 4
        self.dt_bias = torch.randn(value_heads).to(DEVICE, self.dtype)
        self.conv = pool_of((self.width - 1, self.channels), self.dtype)
        self.recurrent = pool_of((value_heads, key_dim, value_dim), torch.float32)

    def tokens(self, count: int) -> tuple[Tensor, ...]:
        """Return the inputs with so many tokens: (mixed, a, b)."""
        a, b = 3 * torch.randn(2, count, self.heads[1])
        return tuple(x.to(DEVICE, self.dtype) for x in (torch.randn(count, self.channels), a, b))

    def copies(self) -> tuple[Tensor, ...]:
        """The layer's windows and states in copies of the pools."""
        pools = (self.conv, self.recurrent)
        return tuple(whole(x).clone().as_strided(x.shape, x.stride(), x.storage_offset()) for x in pools)

    def run(
        self,
        tokens: tuple[Tensor, ...],
        pools: tuple[Tensor, ...],
        lengths: Sequence[int],
        reads: Sequence[int],
        writes: Sequence[int],
        kind: torch.dtype = torch.int64,
    ) -> Tensor:
        """The kernel."""
        where = (starts_of(lengths), ints(reads), ints(writes))
        return delta_rule.gated_delta_step(
            *tokens, self.weight, self.rate, self.dt_bias, *pools, *(index.to(DEVICE, kind) for index in where)
        )

    def check(
        self,
        tokens: tuple[Tensor, ...],
        lengths: Sequence[int],
        reads: Sequence[int],
        writes: Sequence[int],
    ) -> None:
        """The kernel does to the pools what its twin does, and gives the same outputs."""
        ours, expected = self.copies(), self.copies()
        output = self.run(tokens, ours, lengths, reads, writes)
        where = (starts_of(lengths), ints(reads), ints(writes))
        truth = reference.gated_delta_step(
            *tokens, self.weight, self.rate, self.dt_bias, *expected, *(index.to(DEVICE) for index in where)
        )
        assert output.dtype == self.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(output, truth, rtol=tolerance, atol=tolerance)
        kept = sorted({slot for slot in writes if slot >= 0})
        torch.testing.assert_close(ours[1][kept], expected[1][kept], rtol=tolerance, atol=tolerance)
        expected[1][kept] = ours[1][kept]
        assert all(same_bits(whole(x), whole(y)) for x, y in zip(ours, expected, strict=True))


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [
        ((2, 2), (16, 16), torch.float32),
        ((1, 3), (32, 24), torch.float32),
        ((1, 1), (128, 128), torch.float32),
        *(((2, 4), (24, 48), dtype) for dtype in DTYPES),
    ],
)
def test_one_token_of_each_request_is_a_step_of_the_twin(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    layer = Layer(heads, dims, dtype)
    layer.check(layer.tokens(3), [1] * 3, [5, 0, 3], [5, 8, 9])


@pytest.mark.parametrize("width", [2, 3])
def test_windows_may_be_of_any_width(width: int) -> None:
    layer = Layer((1, 2), (16, 16), width=width)
    layer.check(layer.tokens(2), [1, 1], [5, 3], [5, 9])
    layer.check(layer.tokens(5), [3, 2], [5, -1, -1, 3, -1], [9, -1, 5, -1, 10])


def test_a_row_that_is_no_request_writes_nothing() -> None:
    layer = Layer((1, 2), (16, 16))
    layer.check(layer.tokens(3), [1] * 3, [5, 0, 0], [5, -1, -1])
    layer.check(layer.tokens(5), [3, 1, 1], [5, -1, -1, 0, 0], [-1, -1, 5, -1, -1])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_chains_of_any_length_are_those_of_the_twin_whatever_is_kept(dtype: torch.dtype) -> None:
    layer = Layer((1, 2), (16, 16), dtype)
    reads = [5, -1, -1, -1, -1, 0, 3, -1, -1, 4, -1, -1, -1, -1, -1, -1, -1]
    writes = [5, -1, -1, 9, 10, 11, -1, -1, -1, -1, -1, -1, 12, -1, -1, -1, 4]
    layer.check(layer.tokens(17), [5, 1, 3, 8], reads, writes)


@pytest.mark.parametrize("keep", [False, True])
def test_a_chain_gives_the_bits_of_its_tokens_one_by_one(keep: bool) -> None:
    layer = Layer((1, 1), (16, 16))
    lengths = [1, 2, 8] if keep else [3, 5]
    tokens = layer.tokens(sum(lengths))
    chains, steps = layer.copies(), layer.copies()
    reads, writes, start = [], [], 0
    for row, length in enumerate(lengths):
        reads += [1 + row] + [-1] * (length - 1)
        writes += [10 + start + at if keep else -1 for at in range(length - 1)] + [1 + row]
        start += length
    outputs = layer.run(tokens, chains, lengths, reads, writes).split(lengths)
    start = 0
    for row, length in enumerate(lengths):
        for at in range(length):
            one = tuple(x[start + at : start + at + 1] for x in tokens)
            assert same_bits(layer.run(one, steps, [1], [1 + row], [1 + row]), outputs[row][at : at + 1])
            if keep and at + 1 < length:
                assert all(same_bits(x[10 + start + at], y[1 + row]) for x, y in zip(chains, steps, strict=True))
        assert all(same_bits(x[1 + row], y[1 + row]) for x, y in zip(chains, steps, strict=True))
        start += length


def test_every_path_of_a_tree_of_drafts_is_a_chain() -> None:
    """Token 0 is the root, which has two children and then a third; the tree reads slot 5 and keeps every state.

    0 ─ 1 ─ 3 ─ 6
    │   └── 4
    ├── 2 ─ 5
    └── 7
    """
    parents = [-1, 0, 0, 1, 1, 2, 3, 0]
    layer = Layer((1, 2), (16, 16))
    tokens, tree = layer.tokens(8), layer.copies()
    reads = [5 if parent < 0 else 10 + parent for parent in parents]
    output = layer.run(tokens, tree, [8], reads, [10 + token for token in range(8)])
    for leaf in (4, 5, 6, 7):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = layer.copies()
        reads = [5] + [-1] * (len(path) - 1)
        along = layer.run(tuple(x[path] for x in tokens), chain, [len(path)], reads, [-1] * (len(path) - 1) + [20])
        assert same_bits(along, output[path])
        assert all(same_bits(x[20], y[10 + leaf]) for x, y in zip(chain, tree, strict=True))
    assert all(same_bits(x[5], y[5]) for x, y in zip(tree, (layer.conv, layer.recurrent), strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_slots_are_read_and_written_in_the_order_of_the_tokens(seed: int) -> None:
    """Any order: a slot is written twice, read before and after, and written over while a window still needs it."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 8) for _ in range(3)]
    reads, writes = [], []
    for row, length in enumerate(lengths):
        own = [2 * row + 1, 2 * row + 2, 10 + row]
        readable = [0, 7, 2 * row + 1, 2 * row + 2]
        for at in range(length):
            reads.append(-1 if at and draw.random() < 0.5 else draw.choice(readable))
            writes.append(draw.choice([-1, *own]))
            readable += [writes[-1]] * (writes[-1] >= 0)
    layer = Layer((1, 1), (16, 16))
    layer.check(layer.tokens(sum(lengths)), lengths, reads, writes)


def test_a_request_gives_the_same_bits_alone_and_in_any_batch() -> None:
    layer = Layer((1, 1), (16, 40))
    lengths = [1, 3, 1, 2]
    tokens, together = layer.tokens(7), layer.copies()
    reads, writes = [5, 3, -1, -1, 0, 4, -1], [5, -1, 9, 10, 11, -1, 4]
    outputs = layer.run(tokens, together, lengths, reads, writes).split(lengths)
    for row, start in enumerate(starts_of(lengths)[:-1].tolist()):
        own, alone = slice(start, start + lengths[row]), layer.copies()
        part = tuple(x[own] for x in tokens)
        assert same_bits(layer.run(part, alone, lengths[row : row + 1], reads[own], writes[own]), outputs[row])
        kept = [slot for slot in writes[own] if slot >= 0]
        assert all(same_bits(x[kept], y[kept]) for x, y in zip(alone, together, strict=True))


@pytest.mark.parametrize("lengths", [[1, 1], [2, 1]])
def test_bits_do_not_depend_on_how_many_tiles_a_program_has(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer((1, 1), (16, 128))
    tokens, one_each, all_in_one = layer.tokens(sum(lengths)), layer.copies(), layer.copies()
    reads, writes = ([5, 3], [5, 9]) if len(tokens[0]) == 2 else ([5, -1, 3], [-1, 5, 9])
    output = layer.run(tokens, one_each, lengths, reads, writes)
    monkeypatch.setattr(delta_rule, "ENOUGH_PROGRAMS", 1)
    assert same_bits(layer.run(tokens, all_in_one, lengths, reads, writes), output)
    assert all(same_bits(x, y) for x, y in zip(one_each, all_in_one, strict=True))


def test_inputs_may_be_parts_of_a_wider_tensor_the_weight_may_lie_by_taps_and_indices_may_be_short() -> None:
    layer = Layer((1, 2), (16, 16))
    tokens, pools, others = layer.tokens(3), layer.copies(), layer.copies()
    output = layer.run(tokens, pools, [1, 2], [5, 3, -1], [5, -1, 9])
    mixed, a, b = (part.as_strided(part.shape, part.stride()) for part in tokens)
    wide = torch.cat((b, mixed, a), dim=1)
    parts = (wide[:, 2 : 2 + layer.channels], wide[:, -2:], wide[:, :2])
    layer.weight = layer.weight.t().contiguous().t()
    assert same_bits(layer.run(parts, others, [1, 2], [5, 3, -1], [5, -1, 9], torch.int32), output)
    assert all(same_bits(x, y) for x, y in zip(pools, others, strict=True))


@pytest.mark.parametrize("shift", [-100.0, -12.0, 19.9, 20.1, 100.0])
def test_gates_stay_right_at_the_ends_of_their_range(shift: float) -> None:
    layer = Layer((1, 1), (16, 16))
    mixed, a, b = layer.tokens(2)
    layer.check((mixed, a + shift, b * 30), [1, 1], [5, 3], [5, 9])


def test_the_rule_is_that_of_flash_linear_attention() -> None:
    found = find_spec("fla")
    if found is None or found.origin is None:
        pytest.skip("flash-linear-attention is not installed")
    naive = runpy.run_path(str(Path(found.origin).parent / "ops" / "gated_delta_rule" / "naive.py"))
    layer = Layer((2, 4), (24, 24))
    mixed, a, b = layer.tokens(5)
    inputs = torch.cat((layer.conv[5], mixed)).double()
    x = F.silu(F.conv1d(inputs.t()[None], layer.weight.double()[:, None], groups=layer.channels))[0].t()
    q, k, v = (part.unflatten(-1, (-1, 24)) for part in x.split((48, 48, 96), dim=-1))
    q, k = (F.normalize(part, dim=-1).repeat_interleave(2, dim=1) for part in (q, k))
    g = layer.rate.double() * F.softplus(a.double() + layer.dt_bias.double())
    rule = [part[None] for part in (q, k, v, b.double().sigmoid(), g)]
    truth, final = naive["naive_recurrent_gated_delta_rule"](
        *rule, initial_state=layer.recurrent[5:6], output_final_state=True
    )
    pools = layer.copies()
    output = layer.run((mixed, a, b), pools, [5], [5, -1, -1, -1, -1], [-1, -1, -1, -1, 9])
    torch.testing.assert_close(output, truth[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pools[1][9], final[0], rtol=1e-5, atol=1e-5)
    assert same_bits(pools[0][9], mixed[-3:])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: programs that run at the same time")
def test_windows_that_many_programs_read_are_written_after_all_have_read() -> None:
    layer = Layer((16, 32), (128, 128), torch.bfloat16)
    count = 48
    layer.conv = pool_of((3, layer.channels), layer.dtype, count + NAMED)
    layer.recurrent = pool_of((32, 128, 128), torch.float32, count + NAMED)
    slots = [*range(NAMED, count + NAMED)]
    layer.conv[slots], layer.recurrent[slots] = 0, 0
    expected = layer.copies()
    where = (starts_of([1] * count).to(DEVICE), ints(slots).to(DEVICE), ints(slots).to(DEVICE))
    gates = (layer.weight, layer.rate, layer.dt_bias)
    for step in range(20):
        tokens = layer.tokens(count)
        output = layer.run(tokens, (layer.conv, layer.recurrent), [1] * count, slots, slots)
        truth = reference.gated_delta_step(*tokens, *gates, *expected, *where)
        torch.testing.assert_close(output, truth, rtol=4e-2, atol=4e-2)
        assert same_bits(layer.conv[slots], expected[0][slots]), step
        expected[1].copy_(layer.recurrent)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: graphs")
def test_a_graph_replays_with_other_slots_and_with_rows_that_are_no_requests() -> None:
    layer = Layer((2, 4), (128, 128), torch.bfloat16)
    tokens = layer.tokens(4)
    pools, expected = layer.copies(), layer.copies()
    where = [starts_of([1] * 4).to(DEVICE), ints([0] * 4).to(DEVICE), ints([-1] * 4).to(DEVICE)]
    gates = (layer.weight, layer.rate, layer.dt_bias)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="must run once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        delta_rule.gated_delta_step(*tokens, *gates, *pools, *where)
    delta_rule.gated_delta_step(*tokens, *gates, *pools, *where)
    with torch.cuda.graph(graph):
        output = delta_rule.gated_delta_step(*tokens, *gates, *pools, *where)
    for reads, writes in (
        ([1, 2, 3, 0], [1, 9, 10, -1]),
        ([9, 0, 0, 0], [9, -1, -1, -1]),
        ([1, 9, 10, 2], [1, 9, 10, 2]),
    ):
        where[1].copy_(ints(reads))
        where[2].copy_(ints(writes))
        graph.replay()
        truth = reference.gated_delta_step(*tokens, *gates, *expected, *where)
        torch.testing.assert_close(output, truth, rtol=4e-2, atol=4e-2)
        assert same_bits(pools[0], expected[0])
        expected[1].copy_(pools[1])
