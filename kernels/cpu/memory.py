"""Rows that are copied: the one before each decoded token, over state slots, those that an index names, and those of
several tensors side by side; numbers of bfloat16 as fp32, and of fp32 as bfloat16; and those that a pass begins
with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.kinds import FLOAT
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.tasks import KINDS, NUMBERS, Task, kind_of, run

MIN_SHARED = 1 << 16
"""Elements that are worth a thread."""

_shift = Compiled(f"{COMPILED}.memory", "shift")
_take = Compiled(f"{COMPILED}.memory", "take")
_copy = Compiled(f"{COMPILED}.memory", "copy")
_fill = Compiled(f"{COMPILED}.memory", "fill")
_widen = Compiled(f"{COMPILED}.memory", "widen")
_narrow = Compiled(f"{COMPILED}.memory", "narrow")


def shift_rows(x: Tensor, state: Tensor, cu_seqlens: Tensor, state_read: Tensor, state_write: Tensor) -> Tensor:
    """`reference.shift_rows`; a token that reads `LEFT_OUT` is not computed."""
    tokens, size = x.shape
    kind = kind_of("shift_rows", x, state, lies_right=x.stride(-1) == 1 and state.stride(-1) == 1)
    output = torch.empty(x.shape, dtype=x.dtype)
    state_read, state_write = state_read.contiguous(), state_write.contiguous()
    addresses = tuple(tensor.data_ptr() for tensor in (x, state, output, state_read, state_write))
    args = (*addresses, x.stride(0), state.stride(0), tokens, size)
    run(_shift, kind, args, size, 16, x.numel() // MIN_SHARED)
    return output


def can_take_rows(x: Tensor, rows: Tensor) -> bool:
    """Tell whether `take_rows` knows the types and shapes of its arguments."""
    is_index = rows.dtype == torch.int64 and rows.dim() == 1 and rows.is_contiguous()
    return is_index and x.dtype in NUMBERS and x.dim() == 2 and x.stride(1) == 1


def take_rows(x: Tensor, rows: Tensor, output: Tensor) -> Tensor:
    """Write the rows of x with these numbers, which are not checked, to `output`, and return it.

    Args:
        x: `[N, size]` fp32 or bfloat16.
        rows: `[S]` int64, below N. That of a negative number stays as it is in `output`.
        output: `[S, size]` in the type of `x`, contiguous.
    """
    args = x.data_ptr(), output.data_ptr(), rows.data_ptr(), x.stride(0), x.shape[1]
    run(_take, KINDS[x.dtype], args, len(rows), 1, output.numel() // MIN_SHARED)
    return output


def can_join(parts: Sequence[Tensor]) -> bool:
    """Tell whether `join` knows the types and shapes of its arguments."""
    rows, dtype = len(parts[0]), parts[0].dtype
    is_like = [part.dim() == 2 and len(part) == rows and part.dtype == dtype for part in parts]
    return dtype in NUMBERS and all(is_like) and all(part.stride(1) == 1 for part in parts)


def join(parts: Sequence[Tensor], output: Tensor) -> Tensor:
    """Write rows of several tensors side by side to `output`, and return it.

    Args:
        parts: `[N, size]` each, with sizes of their own, of one type.
        output: `[N, sum of the sizes]` of that type, contiguous.
    """
    start = 0
    for part in parts:
        args = part.data_ptr(), output[:, start:].data_ptr(), part.stride(0), output.stride(0), part.shape[1]
        run(_copy, KINDS[part.dtype], args, len(part), 1, part.numel() // MIN_SHARED)
        start += part.shape[1]
    return output


def widen(x: Tensor, output: Tensor) -> Tensor:
    """Write bfloat16 rows as fp32 to `output`, and return it.

    Args:
        x: `[N, size]`, each row contiguous.
        output: `[N, size]`, contiguous.
    """
    args = x.data_ptr(), output.data_ptr(), x.stride(0), x.shape[1]
    run(_widen, KINDS[x.dtype], args, len(x), 1, x.numel() // MIN_SHARED)
    return output


def narrow(x: Tensor, output: Tensor) -> Tensor:
    """Write fp32 rows as bfloat16 to `output`, and return it.

    Args:
        x: `[N, size]`, each row contiguous.
        output: `[N, size]`, contiguous.
    """
    args = x.data_ptr(), output.data_ptr(), x.stride(0), x.shape[1]
    run(_narrow, KINDS[output.dtype], args, len(x), 1, x.numel() // MIN_SHARED)
    return output


def fill(numbers: Tensor, target: Tensor, tokens: Tensor | None = None, links: Tensor | None = None) -> Task:
    """Return a task that copies numbers, and then does what `reference.fill_in_tokens` does, if there are links. Its
    tensors must last until then.

    Args:
        numbers: `[N]` int64.
        target: `[N]` int64 or longer.
        tokens, links: of `reference.fill_in_tokens`, contiguous; None: there are none.
    """
    args = numbers.data_ptr(), target.data_ptr(), numbers.numel()
    if tokens is None or links is None:
        return Task(_fill, FLOAT, (*args, 0, 0, 0), 1, 1, 1)
    return Task(_fill, FLOAT, (*args, tokens.data_ptr(), links.data_ptr(), len(links)), 1, 1, 1)
