"""The convolution of prompts as a kernel, held to its twin and to torch's own convolution.

Windows that a call must not read hold NaN; what it must not write is compared bit by bit.
"""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels import reference
from hybrid.kernels.triton.convolution import TILE, causal_conv1d
from support.tensors import ints, rows_of, same_bits, starts_of, untouched

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LENGTHS = [1, 2, TILE, TILE + 1, 2 * TILE + 5, 3]
READS = [0, 1, 2, 3, 6, 3]
WRITES = [8, 1, 10, 9, 6, 11]
"""Requests 1 and 4 go on in their own slots; request 0 begins at the empty state, 3 and 5 share a checkpoint."""
CAPTURES = [(4, TILE, 20), (0, 1, 21), (1, 1, 22), (4, 2 * TILE, 23), (2, TILE, 24), (5, 2, 25)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pool_of(width: int, channels: int, dtype: torch.dtype) -> Tensor:
    """The windows of the second of three layers, slots far apart: 1 to 6 hold something, 0 is empty, the rest NaN."""
    slots = torch.full((28, 3 * (width - 1) * channels + 8), float("nan"))
    slots[0] = 0
    slots[1:7] = torch.randn(6, slots.shape[1])
    slots = slots.to(DEVICE, dtype)
    return slots[:, : 3 * (width - 1) * channels].view(28, 3, width - 1, channels)[:, 1]


def whole(layer: Tensor) -> Tensor:
    """The pool that a layer is a part of."""
    assert layer._base is not None
    return layer._base


def like(windows: Tensor) -> Tensor:
    """The layer's windows in a copy of the pool."""
    return whole(windows).clone().as_strided(windows.shape, windows.stride(), windows.storage_offset())


def run(
    x: Tensor,
    weight: Tensor,
    windows: Tensor,
    lengths: Sequence[int],
    reads: Sequence[int],
    writes: Sequence[int],
    captures: Sequence[tuple[int, int, int]] = (),
    kind: torch.dtype = torch.int64,
    bias: Tensor | None = None,
) -> Tensor:
    """The kernel, with indices made of lists."""
    where = (starts_of(lengths), ints(reads), ints(writes), rows_of(captures))
    return causal_conv1d(x, weight, windows, *(index.to(DEVICE, kind) for index in where), bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "channels"), [(4, 40), (2, 21), (3, 600)])
def test_outputs_and_windows_are_those_of_the_twin(width: int, channels: int, dtype: torch.dtype) -> None:
    windows = pool_of(width, channels, dtype)
    expected = like(windows)
    x = torch.randn(sum(LENGTHS), channels).to(DEVICE, dtype)
    weight = torch.randn(channels, width).to(DEVICE, dtype)
    bias = torch.randn(channels).to(DEVICE, dtype) if width == 3 else None
    output = run(x, weight, windows, LENGTHS, READS, WRITES, CAPTURES, bias=bias)
    where = (starts_of(LENGTHS), ints(READS), ints(WRITES), rows_of(CAPTURES))
    truth = reference.causal_conv1d(x, weight, expected, *(index.to(DEVICE) for index in where), bias)
    assert output.dtype == dtype
    torch.testing.assert_close(output, truth, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert same_bits(whole(windows), whole(expected))


def test_outputs_are_those_of_torch_in_double_precision() -> None:
    windows, weight = pool_of(4, 24, torch.float32), torch.randn(24, 4).to(DEVICE)
    x = torch.randn(sum(LENGTHS), 24).to(DEVICE)
    inputs = [torch.cat((windows[slot], new)).double() for slot, new in zip(READS, x.split(LENGTHS), strict=True)]
    mixed = [F.conv1d(row.t()[None], weight.double()[:, None], groups=24)[0].t() for row in inputs]
    output = run(x, weight, windows, LENGTHS, READS, WRITES)
    torch.testing.assert_close(output.double(), F.silu(torch.cat(mixed)), rtol=1e-6, atol=1e-6)


def test_inputs_may_be_part_of_a_wider_tensor_the_weight_may_lie_by_taps_and_indices_may_be_short() -> None:
    windows = pool_of(4, 24, torch.float32)
    others = like(windows)
    x, weight = torch.randn(sum(LENGTHS), 24).to(DEVICE), torch.randn(24, 4).to(DEVICE)
    wide = torch.cat((x + 1, x, x + 2), dim=1)
    output = run(x, weight, windows, LENGTHS, READS, WRITES, CAPTURES)
    by_taps = weight.t().contiguous().t()
    again = run(wide[:, 24:48], by_taps, others, LENGTHS, READS, WRITES, CAPTURES, torch.int32)
    assert same_bits(output, again)
    assert same_bits(windows, others)


def test_a_capture_sees_the_old_window_though_the_request_writes_over_it() -> None:
    windows, x = pool_of(4, 24, torch.float32), torch.randn(2, 24).to(DEVICE)
    old, weight = windows[5].clone(), torch.randn(24, 4).to(DEVICE)
    run(x, weight, windows, [2], [5], [5], [(0, 1, 20), (0, 2, 21)])
    assert same_bits(windows[20], torch.cat((old[1:], x[:1])))
    assert same_bits(windows[21], torch.cat((old[2:], x)))
    assert same_bits(windows[5], windows[21])


@pytest.mark.parametrize("dtype", DTYPES[-1:])
def test_a_request_gives_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    windows, weight = pool_of(4, 24, dtype), torch.randn(24, 4).to(DEVICE, dtype)
    before, x = like(windows), torch.randn(sum(LENGTHS), 24).to(DEVICE, dtype)
    together = run(x, weight, windows, LENGTHS, READS, WRITES).split(LENGTHS)
    for row, new in enumerate(x.split(LENGTHS)):
        alone = like(before)
        assert same_bits(run(new, weight, alone, [len(new)], READS[row : row + 1], [20]), together[row])
        assert same_bits(alone[20], windows[WRITES[row]])


@pytest.mark.parametrize("cut", [1, 5, TILE, TILE + 1])
def test_a_prompt_gives_the_same_bits_wherever_it_is_cut(cut: int) -> None:
    length = TILE + 5
    windows, weight = pool_of(4, 24, torch.float32), torch.randn(24, 4).to(DEVICE)
    x = torch.randn(length, 24).to(DEVICE)
    whole = run(x, weight, windows, [length], [1], [8], [(0, cut, 20)])
    first = run(x[:cut], weight, windows, [cut], [1], [9])
    assert same_bits(windows[9], windows[20])
    rest = run(x[cut:], weight, windows, [length - cut], [9], [9])
    assert same_bits(torch.cat((first, rest)), whole)
    assert same_bits(windows[9], windows[8])


def test_a_window_that_is_not_the_requests_own_is_only_read() -> None:
    windows, weight = pool_of(4, 24, torch.float32), torch.randn(24, 4).to(DEVICE)
    before, x = windows.clone(), torch.randn(6, 24).to(DEVICE)
    run(x, weight, windows, [3, 1, 2], [4, 4, 4], [8, 9, 10])
    assert untouched(before, windows, [8, 9, 10])
    assert same_bits(windows[8], x[:3])
    assert same_bits(windows[9], torch.cat((before[4, 1:], x[3:4])))
