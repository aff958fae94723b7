"""The chunk rule in Triton against the recurrence itself in fp64 and against its twin.

Without a GPU the kernels are interpreted. A fixture makes Triton's interpreter multiply bfloat16, so that its
path is checked there too. State slots that hold no state are full of NaN, and slots that are not written are compared
bit by bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hybrid.kernels import reference
from hybrid.kernels.triton import delta_rule
from support.interpreter import multiply_bfloat16
from support.tensors import ints, raw_gates, rows_of, same_bits, starts_of, untouched

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = (torch.float16, torch.bfloat16)
CHUNK = 16
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5]
READS, WRITES = (
    [0, 1, 2, 3, 0],
    [8, 9, 10, 3, 11],
)  # request 3 goes on in its own slot; two begin at the empty state
CAPTURES = [(2, CHUNK, 20), (3, CHUNK, 21), (4, CHUNK, 22), (4, 2 * CHUNK, 23)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        multiply_bfloat16(monkeypatch)


@pytest.fixture
def large_fp32_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fp32 go through chunks as large as those of bfloat16 where it is interpreted; to compile it takes minutes."""
    if DEVICE == "cpu":
        monkeypatch.setitem(delta_rule.TILES, torch.float32, delta_rule.TILES[torch.bfloat16]._replace(split=False))


@dataclass
class Inputs:
    """The inputs of the rule for T packed tokens: q, k `[T, key_heads, key_dim]`, v `[T, value_heads, value_dim]`, a
    and b `[T, value_heads]`. q, k and v are views of one tensor, as they come out of the convolution, and so are a and
    b."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    rate: Tensor
    bias: Tensor

    @classmethod
    def random(
        cls,
        count: int,
        heads: tuple[int, int] = (1, 1),
        dims: tuple[int, int] = (16, 16),
        dtype: torch.dtype = torch.float32,
    ) -> "Inputs":
        (key_heads, value_heads), (key_dim, value_dim) = heads, dims
        widths = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim)
        mixed = torch.randn(count, sum(widths)).to(DEVICE, dtype)
        q, k, v = mixed.split(widths, dim=1)
        a, b = (3 * torch.randn(count, 2 * value_heads)).to(DEVICE, dtype).chunk(2, dim=1)
        if DEVICE == "cpu" and dtype == torch.bfloat16:
            b = b.float()  # beta has its type, to which the interpreter would round towards zero
        rate, bias = -torch.rand(value_heads).to(DEVICE), torch.randn(value_heads).to(DEVICE, dtype)
        q, k = q.unflatten(1, (key_heads, key_dim)), k.unflatten(1, (key_heads, key_dim))
        return cls(q, k, v.unflatten(1, (value_heads, value_dim)), a, b, rate, bias)

    def part(self, start: int, end: int) -> "Inputs":
        return Inputs(*(x[start:end] for x in self.tensors()[:5]), self.rate, self.bias)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.a, self.b, self.rate, self.bias

    def gates(self) -> tuple[Tensor, Tensor]:
        """The log of the decay, and beta as it is rounded, both in fp64: from none to strong decay."""
        g = self.rate.double() * torch.nn.functional.softplus(self.a.double() + self.bias.double())
        return g, self.b.double().sigmoid().to(self.b.dtype).double()

    def set_gates(self, g: float | Tensor, beta: float | None = None) -> None:
        """Let all tokens have these gates."""
        given, old = torch.zeros_like(self.a, dtype=torch.float32) + g, self.b
        a, b, self.rate, self.bias = raw_gates(given, torch.full_like(given, 0.5 if beta is None else beta))
        self.a, self.b = a.to(old.dtype), old if beta is None else b.to(old.dtype)


def pool_for(x: Inputs, num_slots: int = 25) -> Tensor:
    """A layer of a pool of three: slots 1 to 6 hold states, slot 0 the empty state, everything else NaN."""
    heads, value_dim = x.v.shape[1:]
    whole = torch.full((num_slots, 3, heads, x.k.shape[2], value_dim), float("nan"), device=DEVICE)
    layer = whole[:, 1]
    layer[0] = 0.0
    layer[1:7] = torch.randn(6, *layer.shape[1:]).to(DEVICE)
    return layer


def recurrence(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule itself, token by token in fp64. Returns the outputs, and the states before the first and after each."""
    q, k, v = (tensor.double() for tensor in (x.q, x.k, x.v))
    g, beta = x.gates()
    group = v.shape[1] // k.shape[1]
    q, k = (y / (y.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(group, dim=1) for y in (q * q.shape[-1] ** -0.5, k))
    states, outputs = [state.double()], []
    for token in range(len(v)):
        old = states[-1] * g[token].exp()[:, None, None]
        seen = torch.einsum("hk,hkv->hv", k[token], old)
        added = beta[token, :, None] * (v[token] - seen)
        states.append(old + k[token, :, :, None] * added[:, None, :])
        outputs.append(torch.einsum("hk,hkv->hv", q[token], states[-1]))
    return torch.stack(outputs), torch.stack(states)


def run(
    x: Inputs,
    pool: Tensor,
    lengths: Sequence[int],
    reads: Sequence[int],
    writes: Sequence[int],
    captures: Sequence[tuple[int, int, int]] = (),
    chunk: int = CHUNK,
) -> Tensor:
    where = (starts_of(lengths), ints(reads), ints(writes), rows_of(captures))
    output = delta_rule.chunk_gated_delta_rule(*x.tensors(), pool, *(y.to(DEVICE) for y in where), chunk)
    assert output.shape == x.v.shape
    assert output.dtype == x.v.dtype
    assert output.isfinite().all()
    return output


def close(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Assert that outputs are right to the rounding of their type, which the interpreter does towards zero in
    bfloat16."""
    bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(ours.double(), expected, rtol=bound, atol=bound)


def close_states(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Assert that states are right: no type of inputs costs them more than the last bits of fp32 or of its sums of
    two."""
    bound = 1e-4 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours.double(), expected, rtol=bound, atol=bound)


def check(
    x: Inputs,
    pool: Tensor,
    lengths: Sequence[int],
    reads: Sequence[int],
    writes: Sequence[int],
    captures: Sequence[tuple[int, int, int]],
    chunk: int,
) -> None:
    """Outputs and all states against the recurrence, and every other slot bit by bit."""
    before, dtype = pool.clone(), x.v.dtype
    output = run(x, pool, lengths, reads, writes, captures, chunk)
    for row, (start, end) in enumerate(pairwise(starts_of(lengths).tolist())):
        outputs, after = recurrence(x.part(start, end), before[reads[row]])
        close(output[start:end], outputs, dtype)
        close_states(pool[writes[row]], after[-1], dtype)
        for _, count, slot in (capture for capture in captures if capture[0] == row):
            close_states(pool[slot], after[count], dtype)
    assert untouched(before, pool, [*writes, *(slot for *_, slot in captures)])


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [
        ((1, 1), (16, 16), torch.float32),
        ((1, 2), (24, 32), torch.float16),
        ((1, 3), (32, 24), torch.bfloat16),
        ((2, 2), (16, 24), torch.bfloat16),
    ],
)
def test_outputs_and_all_states_are_those_of_the_recurrence(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    x = Inputs.random(sum(LENGTHS), heads, dims, dtype)
    check(x, pool_for(x), LENGTHS, READS, WRITES, CAPTURES, CHUNK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [32, 64, 96, 128])
def test_chunks_of_other_sizes(chunk: int, dtype: torch.dtype, large_fp32_chunks: None) -> None:
    lengths = [chunk + 1, min(chunk, 64) - 1]
    x = Inputs.random(sum(lengths), dims=(16, 32), dtype=dtype)
    check(x, pool_for(x), lengths, [1, 2], [8, 2], [(0, chunk, 20)], chunk)


@pytest.mark.parametrize("dtype", NARROW)
def test_heads_of_128(dtype: torch.dtype) -> None:
    x = Inputs.random(70, dims=(128, 128), dtype=dtype)
    check(x, pool_for(x), [70], [1], [8], [(0, 64, 20)], 64)


def test_the_twin_agrees(large_fp32_chunks: None) -> None:
    lengths = [65, 20]
    x = Inputs.random(sum(lengths), (1, 2), (24, 16))
    ours, theirs = (pool.copy_(pool_for(x)) for pool in (pool_for(x), pool_for(x)))
    theirs.copy_(ours)
    output = run(x, ours, lengths, [1, 2], [8, 9], [(0, 64, 20)], 64)
    where = (starts_of(lengths), ints([1, 2]), ints([8, 9]), rows_of([(0, 64, 20)]))
    expected = reference.chunk_gated_delta_rule(*x.tensors(), theirs, *where, 64)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(ours[[8, 9, 20]], theirs[[8, 9, 20]], rtol=1e-5, atol=5e-6)


def test_inputs_and_pools_of_any_strides_and_indices_of_32_bits() -> None:
    x = Inputs.random(20, (1, 2))
    wide = Inputs(
        *(torch.cat((y, torch.full_like(y, float("nan"))), dim=1)[:, : y.shape[1]] for y in x.tensors()[:5]),
        x.rate,
        x.bias,
    )
    pool = pool_for(x)
    padded = torch.full((25, 2, 20, 19), float("nan"), device=DEVICE)
    strided = padded[:, :, :16, :16]
    strided.copy_(pool)
    before = padded.clone()
    where = (starts_of([20]), ints([1]), ints([8]), rows_of([(0, 16, 20)]))
    output = delta_rule.chunk_gated_delta_rule(*x.tensors(), pool, *(y.to(DEVICE) for y in where), CHUNK)
    where = tuple(y.to(DEVICE, torch.int32) for y in where)
    assert same_bits(delta_rule.chunk_gated_delta_rule(*wide.tensors(), strided, *where, CHUNK), output)
    assert same_bits(strided[[8, 20]], pool[[8, 20]])
    before[[8, 20], :, :16, :16] = strided[[8, 20]]
    assert same_bits(padded, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x = Inputs.random(sum(LENGTHS), dtype=dtype)
    pool = pool_for(x)
    before = pool.clone()
    output = run(x, pool, LENGTHS, READS, WRITES, CAPTURES)
    for row, (start, end) in enumerate(pairwise(starts_of(LENGTHS).tolist())):
        alone = before.clone()
        captures = [(0, count, slot) for request, count, slot in CAPTURES if request == row]
        own = run(x.part(start, end), alone, [end - start], [READS[row]], [WRITES[row]], captures)
        assert same_bits(own, output[start:end])
        for slot in (WRITES[row], *(slot for *_, slot in captures)):
            assert same_bits(alone[slot], pool[slot])


@pytest.mark.parametrize(("dtype", "chunk"), [(torch.float32, 16), (torch.bfloat16, 16), (torch.bfloat16, 128)])
def test_resuming_from_a_captured_state_gives_the_same_bits(dtype: torch.dtype, chunk: int) -> None:
    length = 3 * chunk + 7
    x = Inputs.random(length, dtype=dtype)
    pool = pool_for(x)
    captures = [(0, chunk, 20), (0, 2 * chunk, 21), (0, 3 * chunk, 22)]
    whole = run(x, pool, [length], [2], [8], captures, chunk)
    captured = pool[20:23].clone()
    for done in (1, 2):
        start = done * chunk
        rest = run(
            x.part(start, length), pool, [length - start], [19 + done], [9], [(0, (3 - done) * chunk, 23)], chunk
        )
        assert same_bits(rest, whole[start:])
        assert same_bits(pool[9], pool[8])
        assert same_bits(pool[23], pool[22])
    assert same_bits(pool[20:23], captured)


def test_a_state_is_the_same_whether_captured_on_the_way_or_left_at_the_end() -> None:
    x = Inputs.random(2 * CHUNK)
    pool = pool_for(x)
    run(x, pool, [2 * CHUNK], [2], [8], [(0, CHUNK, 20), (0, 2 * CHUNK, 21)])
    run(x.part(0, CHUNK), pool, [CHUNK], [2], [9])
    assert same_bits(pool[21], pool[8])
    assert same_bits(pool[20], pool[9])


# Hard numbers


def hard(name: str, dtype: torch.dtype) -> Inputs:
    x = Inputs.random(70, dtype=dtype)
    match name:
        case "identical keys, nothing forgotten, all replaced":
            x.k[:] = x.k[0].clone()
            x.set_gates(0.0, 1.0)
        case "every token forgets nearly all":
            x.set_gates(-50.0)
        case "decay between none and all":
            x.set_gates(torch.where(torch.arange(70, device=DEVICE) % 7 == 3, -50.0, 0.0)[:, None])
        case "zero keys and queries":
            x.q[::3] = 0.0
            x.k[::2] = 0.0
        case "large inputs":
            for y in (x.q, x.k, x.v):
                y.mul_(1e3)
        case "tiny inputs":
            for y in (x.q, x.k, x.v):
                y.mul_(1e-4)
    return x


@pytest.mark.parametrize(
    "name",
    [
        "identical keys, nothing forgotten, all replaced",
        "every token forgets nearly all",
        "decay between none and all",
        "zero keys and queries",
        "large inputs",
        "tiny inputs",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hard_numbers_stay_right(name: str, dtype: torch.dtype, large_fp32_chunks: None) -> None:
    x = hard(name, dtype)
    pool = pool_for(x)
    outputs, after = recurrence(x, pool[1])
    output = run(x, pool, [70], [1], [8], chunk=64)
    scale = max(1.0, float(after.abs().max()))
    # decays are differences of sums of g over a chunk, and as exact as these sums
    bound = 3e-5 + 64 * float(x.gates()[0][:64].sum().abs()) * 2**-24
    narrow = 8e-3 if dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(output.double() / scale, outputs / scale, rtol=bound + narrow, atol=bound + narrow)
    torch.testing.assert_close(pool[8].double() / scale, after[-1] / scale, rtol=3 * bound, atol=3 * bound)


@pytest.mark.parametrize("chunk_size", [1, 8, 24, 72])
def test_chunks_too_small_for_the_tensor_cores_are_refused(chunk_size: int) -> None:
    x = Inputs.random(5)
    with pytest.raises(ValueError, match=f"multiple of 16, got {chunk_size}; use 64"):
        run(x, pool_for(x), [5], [1], [8], chunk=chunk_size)


def test_a_batch_of_nothing_but_short_requests_has_enough_programs() -> None:
    lengths = [1] * 33  # more requests than what all batches share their compiled code for
    x = Inputs.random(sum(lengths), dtype=torch.bfloat16)
    check(x, pool_for(x, 60), lengths, [1] * 33, [*range(10, 43)], [], CHUNK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (37, 12), (300, 4)])
def test_gates_are_those_of_the_rule(dtype: torch.dtype, tokens: int, heads: int) -> None:
    """Parts of one projection, from tiny softplus to where it is the identity, against fp64."""
    parts = (torch.randn(tokens, 3 * heads) * 8).to(DEVICE, dtype)
    a, b = parts[:, :heads], parts[:, 2 * heads :]
    rate, bias = -torch.rand(heads, device=DEVICE) * 16, torch.randn(heads).to(DEVICE, dtype)
    g, beta = delta_rule.delta_gates(a, b, rate, bias)
    truth = rate.double() * torch.nn.functional.softplus(a.double() + bias.double())
    torch.testing.assert_close(g, truth.float(), rtol=3e-6, atol=1e-10)
    torch.testing.assert_close(beta, b.double().sigmoid().to(dtype))
    assert (g.dtype, beta.dtype) == (torch.float32, dtype)
    twins = reference.delta_gates(a, b, rate, bias)
    torch.testing.assert_close(g, twins[0], rtol=3e-6, atol=1e-10)
    torch.testing.assert_close(beta, twins[1])
