"""The grids of launches are those that a GPU takes, however large a batch is: the interpreter takes any."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from hybrid.kernels.ops import OPS

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

LIMITS = (2**31 - 1, 65535, 65535)
"""Programs along each axis, for any CUDA device."""

TOKENS = 1 << 21
REQUESTS = 1 << 15


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


WHERE = (ints(REQUESTS + 1), ints(REQUESTS), ints(REQUESTS), ints(4, 3))

LARGE: dict[str, Callable[[], tuple[Any, ...]]] = {
    "add_rms_norm": lambda: (empty(TOKENS, 64), empty(TOKENS, 64), empty(64), 1e-6),
    "batch_invariant_linear": lambda: (empty(TOKENS, 64), empty(1 << 20, 64), TOKENS - REQUESTS),
    "causal_conv1d": lambda: (empty(TOKENS, 64), empty(64, 4), empty(8, 3, 64), *WHERE),
    "chunk_gated_delta_rule": lambda: (
        *(empty(TOKENS, heads, 16) for heads in (1, 1, 2)),
        *(empty(TOKENS, 2), empty(TOKENS, 2), empty(2), empty(2), empty(8, 2, 16, 16)),
        *(*WHERE, 64),
    ),
    "combine_experts": lambda: (empty(TOKENS, 64), ints(TOKENS // 2, 2), empty(TOKENS // 2, 2)),
    "copy_states": lambda: (empty(REQUESTS, 1 << 26, dtype=torch.uint8), ints(1000), ints(1000)),
    "delta_gates": lambda: (empty(TOKENS, 2), empty(TOKENS, 2), empty(2), empty(2)),
    "expert_linear": lambda: (empty(TOKENS, 64), empty(8, 64, 64), ints(TOKENS), ints(2, 8), 1, TOKENS // 2),
    "fill_in_tokens": lambda: (ints(TOKENS), ints(TOKENS), ints(TOKENS, 5)),
    "gated_delta_step": lambda: (
        *(empty(REQUESTS, 96), empty(REQUESTS, 2), empty(REQUESTS, 2), empty(96, 4), empty(2), empty(2)),
        *(empty(8, 3, 96), empty(8, 2, 32, 16), ints(REQUESTS + 1), ints(REQUESTS), ints(REQUESTS)),
    ),
    "gated_rms_norm": lambda: (empty(TOKENS, 2, 64), empty(TOKENS, 2, 64), empty(64), 1e-6),
    "norm_rotate_store": lambda: (
        *(empty(TOKENS, 2, 64), empty(TOKENS, 1, 64), empty(TOKENS, 1, 64), empty(64), empty(64), 1e-6),
        *(empty(TOKENS, 32), empty(TOKENS, 32), empty(8, 2, 64, 1, 64), ints(TOKENS)),
    ),
    "paged_attention": lambda: (
        *(empty(TOKENS, 16, 64), empty(8, 2, 64, 1, 64), ints(REQUESTS, 64), ints(REQUESTS + 1), ints(REQUESTS)),
        *(0.1, 64, 1),
    ),
    "rms_norm": lambda: (empty(TOKENS, 2, 64), empty(64), 1e-6),
    "route_experts": lambda: (empty(TOKENS, 512), 8, True),
    "shift_rows": lambda: (empty(TOKENS, 64), empty(8, 64), *WHERE[:3]),
    "sigmoid_and_mul": lambda: (empty(TOKENS, 2, 64), empty(TOKENS, 2, 64)),
    "silu_and_mul": lambda: (empty(TOKENS, 1 << 14), empty(TOKENS, 1 << 14)),
    "sort_by_expert": lambda: (ints(TOKENS, 8), 512, TOKENS // 2),
    "store_kv": lambda: (empty(TOKENS, 1, 64), empty(TOKENS, 1, 64), empty(8, 2, 64, 1, 64), ints(TOKENS)),
}
"""The arguments of a large batch."""


@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if op.has_kernel))
def test_a_large_batch_is_launched_in_a_grid_that_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grids: dict[str, tuple[int, ...]] = {}

    def launch(kernel: Any, *_: Any, grid: Any, **__: Any) -> None:
        grids[kernel.__name__] = grid

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    OPS[name].kernel(*LARGE[name]())
    assert grids
    for kernel, grid in grids.items():
        assert all(0 < size <= limit for size, limit in zip(grid, LIMITS, strict=False)), (kernel, grid)
