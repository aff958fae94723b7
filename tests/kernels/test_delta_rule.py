"""The gated delta rule in plain torch, in chunks and token by token, against the recurrence itself in fp64.

State slots that hold no state are full of NaN, and slots that are not written are compared bit by bit.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hybrid.kernels import reference as kernels
from hybrid.models.torch_functions import use_torch_functions
from support.tensors import ints, poisoned_states, raw_gates, rows_of, same_bits, starts_of, untouched

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

CHUNK = 16
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 2 * CHUNK]
READS, WRITES = (
    [0, 1, 2, 3, 4, 0],
    [8, 9, 10, 3, 11, 12],
)  # request 3 goes on in its own slot; two begin at the empty state
CAPTURES = [(2, CHUNK, 20), (3, CHUNK, 21), (4, CHUNK, 22), (4, 3 * CHUNK, 23), (5, 2 * CHUNK, 24)]
HEADS = [(2, 2), (2, 4), (1, 3)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@dataclass
class Inputs:
    """The inputs of the rule for T packed tokens.

    Attributes:
        q, k: `[T, key_heads, 12]`.
        v: `[T, value_heads, 20]`.
        g, beta: `[T, value_heads]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @classmethod
    def random(cls, count: int, key_heads: int = 2, value_heads: int = 4) -> "Inputs":
        q, k = torch.randn(2, count, key_heads, 12)
        g = -torch.rand(count, value_heads).pow(3) * 4  # from none to strong decay
        return cls(q, k, torch.randn(count, value_heads, 20), g, torch.rand(count, value_heads))

    def part(self, start: int, end: int) -> "Inputs":
        return Inputs(*(x[start:end] for x in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta


def states_with_content(value_heads: int = 4) -> Tensor:
    """`[25, value_heads, 12, 20]` as in a pool: slots 1 to 6 hold states, slot 0 the empty state, the rest NaN."""
    states = poisoned_states(25, (value_heads, 12, 20))
    states[1:7] = torch.randn(6, value_heads, 12, 20)
    return states


def recurrence(x: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The rule itself, token by token in fp64. Returns the outputs, and the states before the first and after each."""
    q, k, v, g, beta = (tensor.double() for tensor in x.tensors())
    group = v.shape[1] // k.shape[1]
    q, k = (y / (y.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    states, outputs = [state.double()], []
    for token in range(len(v)):
        heads = []
        for head in range(v.shape[1]):
            key, query, old = k[token, head // group], q[token, head // group], states[-1][head] * g[token, head].exp()
            delta = beta[token, head] * (v[token, head] - key @ old)
            heads.append((old + torch.outer(key, delta), query / query.numel() ** 0.5))
        states.append(torch.stack([new for new, _ in heads]))
        outputs.append(torch.stack([query @ new for new, query in heads]))
    return torch.stack(outputs), torch.stack(states)


def in_chunks(
    x: Inputs,
    states: Tensor,
    lengths: Sequence[int],
    reads: Sequence[int],
    writes: Sequence[int],
    captures: Sequence[tuple[int, int, int]] = (),
    chunk: int = CHUNK,
) -> Tensor:
    where = (states, starts_of(lengths), ints(reads), ints(writes), rows_of(captures), chunk)
    return kernels.chunk_gated_delta_rule(x.q, x.k, x.v, *raw_gates(x.g, x.beta), *where)


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(("key_heads", "value_heads"), HEADS)
def test_outputs_and_all_states_are_those_of_the_recurrence(key_heads: int, value_heads: int) -> None:
    x, states = Inputs.random(sum(LENGTHS), key_heads, value_heads), states_with_content(value_heads)
    before = states.clone()
    output = in_chunks(x, states, LENGTHS, READS, WRITES, CAPTURES)
    starts = starts_of(LENGTHS).tolist()
    for row, (start, end) in enumerate(pairwise(starts)):
        outputs, after = recurrence(x.part(start, end), before[READS[row]])
        close(output[start:end], outputs)
        close(states[WRITES[row]], after[-1])
        for _, count, slot in (capture for capture in CAPTURES if capture[0] == row):
            close(states[slot], after[count])
    assert untouched(before, states, [*WRITES, *(slot for *_, slot in CAPTURES)])


def test_the_chunk_size_of_flash_linear_attention_works_as_well() -> None:
    lengths = [63, 64, 65, 129]
    x, states = Inputs.random(sum(lengths)), states_with_content()
    before = states.clone()
    output = in_chunks(x, states, lengths, [1, 2, 3, 4], [8, 9, 10, 11], [(3, 128, 20)], chunk=64)
    for row, (start, end) in enumerate(pairwise(starts_of(lengths).tolist())):
        outputs, after = recurrence(x.part(start, end), before[1 + row])
        close(output[start:end], outputs)
        close(states[8 + row], after[-1])
    close(states[20], after[128])


@pytest.mark.parametrize(("key_heads", "value_heads"), HEADS)
def test_one_token_per_request_is_one_step_of_the_recurrence(key_heads: int, value_heads: int) -> None:
    x, states = Inputs.random(len(READS), key_heads, value_heads), states_with_content(value_heads)
    before = states.clone()
    output = kernels.recurrent_gated_delta_rule(*x.tensors(), states, ints(READS), ints(WRITES))
    for row, slot in enumerate(WRITES):
        outputs, after = recurrence(x.part(row, row + 1), before[READS[row]])
        close(output[row : row + 1], outputs)
        close(states[slot], after[-1])
    assert untouched(before, states, WRITES)


def test_steps_after_a_prompt_go_on_as_the_prompt_would_have() -> None:
    x, states = Inputs.random(2 * CHUNK + 9), states_with_content()
    outputs, after = recurrence(x, states[5])
    in_chunks(x.part(0, CHUNK), states, [CHUNK], [5], [8])
    for token in range(CHUNK, 2 * CHUNK + 9):
        read, write = (8, 9) if token % 2 == 0 else (9, 8)
        step = kernels.recurrent_gated_delta_rule(
            *x.part(token, token + 1).tensors(), states, ints([read]), ints([write])
        )
        close(step[0], outputs[token])
    close(states[write], after[-1])


@pytest.mark.parametrize("length", [1, 17, 64, 130])
def test_transformers_agrees_on_outputs_and_final_states(length: int) -> None:
    modeling = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    use_torch_functions(modeling.Qwen3_5RMSNorm(4))  # any module of that file
    x, states = Inputs.random(length), states_with_content()
    batched = [tensor[None] for tensor in x.tensors()]
    for theirs in (modeling.torch_chunk_gated_delta_rule, modeling.torch_recurrent_gated_delta_rule):
        outputs, final = theirs(
            *batched, initial_state=states[3:4].clone(), output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        close(in_chunks(x, states, [length], [3], [8], chunk=64), outputs[0].double())
        close(states[8], final[0].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, states = Inputs.random(sum(LENGTHS)), states_with_content()
    x.q, x.k, x.v, x.beta = (tensor.to(dtype) for tensor in (x.q, x.k, x.v, x.beta))
    before = states.clone()
    output = in_chunks(x, states, LENGTHS, READS, WRITES, CAPTURES)
    assert output.dtype == dtype
    for row, (start, end) in enumerate(pairwise(starts_of(LENGTHS).tolist())):
        alone = before.clone()
        captures = [(0, count, slot) for request, count, slot in CAPTURES if request == row]
        own = in_chunks(x.part(start, end), alone, [end - start], [READS[row]], [WRITES[row]], captures)
        assert same_bits(own, output[start:end])
        for slot in (WRITES[row], *(slot for *_, slot in captures)):
            assert same_bits(alone[slot], states[slot])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_step_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, states = Inputs.random(len(READS)), states_with_content()
    x.q, x.k, x.v, x.beta = (tensor.to(dtype) for tensor in (x.q, x.k, x.v, x.beta))
    before = states.clone()
    output = kernels.recurrent_gated_delta_rule(*x.tensors(), states, ints(READS), ints(WRITES))
    for row, slot in enumerate(WRITES):
        alone = before.clone()
        where = (alone, ints([READS[row]]), ints([slot]))
        assert same_bits(kernels.recurrent_gated_delta_rule(*x.part(row, row + 1).tensors(), *where)[0], output[row])
        assert same_bits(alone[slot], states[slot])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [1, 2, 4])
def test_resuming_from_a_captured_state_gives_the_same_bits(start: int, dtype: torch.dtype) -> None:
    length = 5 * CHUNK + 7
    x, states = Inputs.random(length), states_with_content()
    x.v = x.v.to(dtype)
    whole = in_chunks(x, states, [length], [2], [8], [(0, start * CHUNK, 20), (0, 5 * CHUNK, 21)])
    captured = states[20].clone()
    rest = in_chunks(
        x.part(start * CHUNK, length), states, [length - start * CHUNK], [20], [9], [(0, (5 - start) * CHUNK, 22)]
    )
    assert same_bits(rest, whole[start * CHUNK :])
    assert same_bits(states[9], states[8])
    assert same_bits(states[22], states[21])
    assert same_bits(states[20], captured)


def test_a_state_is_the_same_whether_captured_on_the_way_or_left_at_the_end() -> None:
    x, states = Inputs.random(3 * CHUNK), states_with_content()
    in_chunks(x, states, [3 * CHUNK], [2], [8], [(0, 2 * CHUNK, 20), (0, 3 * CHUNK, 21)])
    in_chunks(x.part(0, 2 * CHUNK), states, [2 * CHUNK], [2], [9])
    assert same_bits(states[21], states[8])
    assert same_bits(states[20], states[9])


# Hard numbers


def hard(name: str) -> Inputs:
    x = Inputs.random(4 * CHUNK + 3)
    match name:
        case "identical keys":
            x.k[:] = x.k[0]
        case "identical keys, nothing forgotten, all replaced":
            x.k[:] = x.k[0]
            x.g.zero_()
            x.beta.fill_(1.0)
        case "beta next to zero":
            x.beta.mul_(1e-6)
        case "beta zero":
            x.beta.zero_()
        case "beta next to one":
            x.beta.mul_(-1e-6).add_(1.0)
        case "no decay":
            x.g.zero_()
        case "everything is forgotten":
            x.g.fill_(-300.0)
        case "large inputs":
            x.q, x.k, x.v = 1e4 * x.q, 1e4 * x.k, 1e4 * x.v
        case "zero keys and queries":
            x.q[::3] = 0.0
            x.k[::2] = 0.0
        case "tiny inputs":
            x.q, x.k, x.v = 1e-4 * x.q, 1e-4 * x.k, 1e-4 * x.v
    return x


@pytest.mark.parametrize(
    "name",
    [
        "identical keys",
        "identical keys, nothing forgotten, all replaced",
        "beta next to zero",
        "beta zero",
        "beta next to one",
        "no decay",
        "everything is forgotten",
        "large inputs",
        "zero keys and queries",
        "tiny inputs",
    ],
)
def test_hard_numbers_stay_right(name: str) -> None:
    x, states = hard(name), states_with_content()
    outputs, after = recurrence(x, states[1])
    scale = max(1.0, float(after.abs().max()))
    output = in_chunks(x, states, [len(x.v)], [1], [8])
    torch.testing.assert_close(output.double(), outputs, rtol=1e-4, atol=1e-5 * scale)
    torch.testing.assert_close(states[8].double(), after[-1], rtol=1e-4, atol=1e-5 * scale)
    for token in range(len(x.v)):
        own = (states, ints([1 if token == 0 else 9]), ints([9]))
        step = kernels.recurrent_gated_delta_rule(*x.part(token, token + 1).tensors(), *own)
        torch.testing.assert_close(step[0].double(), outputs[token], rtol=1e-4, atol=1e-5 * scale)


def test_a_token_that_forgets_everything_disturbs_its_chunk_by_no_more_than_the_sums_of_g_are_rounded() -> None:
    """A chunk takes its decays as differences of sums of g, so each is off by the rounding of such a sum."""
    x, states = Inputs.random(2 * CHUNK), states_with_content()
    x.g[5::7] = -60.0
    outputs, after = recurrence(x, states[1])
    largest_sum = 60.0 * 3  # of g in a chunk
    bound = CHUNK * largest_sum * 2**-24
    torch.testing.assert_close(in_chunks(x, states, [2 * CHUNK], [1], [8]).double(), outputs, rtol=bound, atol=bound)
    torch.testing.assert_close(states[8].double(), after[-1], rtol=bound, atol=bound)
