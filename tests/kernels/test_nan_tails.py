"""The bytes after a request's last token in its last page may be anything, NaN of any bits included: pages and states
share the bytes of an arena. No attention over pages lets it change a bit, whoever computes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid.kernels import ops, reference
from hybrid.kernels.triton import attention
from support.tensors import ints, same_bits, starts_of

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 32
BITS = {torch.float32: (0x7FC00000, 0x7F800001, -1), torch.float16: (0x7E00, 0x7C01, -1)}
"""A quiet NaN, a signalling one, and one of all bits."""

PATHS: dict[str, tuple[list[tuple[int, int]], int | None]] = {
    "decode": ([(0, 1), (14, 1), (15, 1), (16, 1), (70, 1)], 1),
    "decode in pieces": ([(5, 1), (200, 1)], 16),
    "decode, as many pieces as keep a device busy": ([(5, 1), (200, 1)], None),
    "prompts": ([(0, 15), (0, 17), (16, 1), (37, 28)], 1),
    "prompts in pieces": ([(200, 5), (3, 40)], None),
}
"""(tokens cached, tokens that come) of each request; pieces."""


def triton(*arguments: Any) -> Tensor:
    return attention.paged_attention(*arguments)


def compiled(*arguments: Any) -> Tensor:
    found: Tensor = ops.compiled_module("attention").paged_attention(*arguments)
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("attend", "dtype"),
    [
        (reference.paged_attention, torch.float32),
        (compiled, torch.float32),
        (triton, torch.float32),
        (triton, torch.float16),
    ],
)
def test_what_follows_the_last_token_of_a_page_changes_no_bit(
    path: str, attend: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    requests, splits = PATHS[path]
    lengths, counts = [sum(request) for request in requests], [new for _, new in requests]
    needed = [-(-length // PAGE) for length in lengths]
    pool = torch.zeros(sum(needed) + 2, 3, 2, PAGE, KV_HEADS, DIM, dtype=dtype)
    pages, order = pool[:, 1], torch.randperm(len(pool)).tolist()
    unused = order.pop()
    table = torch.full((len(requests), max(needed) + 1), unused)
    query = torch.randn(sum(counts), HEADS, DIM).to(dtype)
    free = torch.ones(len(pool), PAGE, dtype=torch.bool)
    for row, length in enumerate(lengths):
        table[row, : needed[row]] = ints([order.pop() for _ in range(needed[row])])
        at = torch.arange(length)
        slots = table[row, at // PAGE] * PAGE + at % PAGE
        free.view(-1)[slots] = False
        reference.store_kv(*(torch.randn(length, KV_HEADS, DIM).to(dtype) for _ in range(2)), pages, slots)
    where = (table, starts_of(counts), ints(lengths), DIM**-0.5, PAGE, splits)
    expected = attend(query, pages, *where)
    assert expected.isfinite().all()
    as_bits = pool.view(torch.int32 if dtype == torch.float32 else torch.int16)
    for bits in BITS[dtype]:
        as_bits[:, 0], as_bits[:, 2] = bits, bits  # other layers
        as_bits[:, 1].transpose(1, 2)[free] = bits
        assert same_bits(attend(query, pages, *where), expected), hex(bits)
