"""The twins of the causal convolution over state slots, in plain torch."""

import torch
from torch import Tensor

from hybrid.kernels.reference.elementwise import silu


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Depthwise causal convolution with silu over a packed batch, each request continuing from its window.

    Args:
        x: `[T, channels]`.
        weight: `[channels, width]`.
        state: one layer's windows, `[slots, width - 1, channels]`: the last inputs of a sequence, oldest first;
            written.
        cu_seqlens: `[R + 1]` where each request's tokens begin. A request that keeps no state may have none.
        state_read, state_write: `[R]` slots; -1 in `state_write`: the request keeps no state.
        captures: `[C, 3]` rows of (request, new tokens, slot): the window after `new tokens` goes to the
            slot too. A row of the request -1 is none.
        bias: `[channels]`, added before the silu; None: there is none.

    Returns:
        `[T, channels]`.
    """
    slots = (state, cu_seqlens, state_read, state_write, captures)
    return silu(causal_sums(x, weight, *slots, bias)).to(x.dtype)


def causal_sums(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`causal_conv1d` before the silu, in fp32."""
    past = weight.shape[1] - 1
    starts = cu_seqlens.tolist()
    pieces: list[Tensor] = []
    for row, slot in enumerate(state_read.tolist()):
        pieces += [state[slot], x[starts[row] : starts[row + 1]]]
    extended = torch.cat(pieces)  # request r's tokens begin at starts[r] + (r + 1) * past
    for row, slot in enumerate(state_write.tolist()):
        if slot >= 0:
            end = starts[row + 1] + (row + 1) * past
            state[slot] = extended[end - past : end]
    for row, count, slot in captures.tolist():
        if row >= 0:
            end = starts[row] + (row + 1) * past + count
            state[slot] = extended[end - past : end]
    length = extended.shape[0] - past
    extended, weight = extended.float(), weight.float()
    mixed = extended[:length] * weight[:, 0]
    for tap in range(1, past + 1):
        mixed.add_(extended[tap : tap + length] * weight[:, tap])
    if len(starts) > 2:
        mixed = torch.cat(
            [mixed[starts[row] + row * past : starts[row + 1] + row * past] for row in range(len(starts) - 1)]
        )
    return mixed if bias is None else mixed + bias.float()


def causal_conv1d_update(
    x: Tensor, weight: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor, bias: Tensor | None = None
) -> Tensor:
    """One step of `causal_conv1d`: one new token per request. Slots may be -1, as for `reference.gated_delta_step`.

    Args:
        x: `[R, channels]`.
    """
    return silu(causal_sums_update(x, weight, state, state_read, state_write, bias)).to(x.dtype)


def causal_sums_update(
    x: Tensor, weight: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`causal_conv1d_update` before the silu, in fp32."""
    reads, writes = state_read.tolist(), state_write.tolist()
    if min(reads + writes, default=0) >= 0:
        window = torch.cat((state[state_read], x.unsqueeze(1)), dim=1)
        state[state_write] = window[:, 1:]
    else:
        window = _windows_of_runs(x, weight.shape[1] - 1, state, reads, writes)
    window, weight = window.float(), weight.float()
    mixed = window[:, 0] * weight[:, 0]
    for tap in range(1, window.shape[1]):
        mixed.add_(window[:, tap] * weight[:, tap])
    return mixed if bias is None else mixed + bias.float()


def _windows_of_runs(x: Tensor, past: int, state: Tensor, reads: list[int], writes: list[int]) -> Tensor:
    """The windows `[T, past + 1, channels]` of tokens of which some continue from the one before them. Inputs before a
    token are looked up as of before the call: in `x` where a token of the call wrote the slot, else in the slot."""
    slots = sorted({slot for slot in reads if slot >= 0})
    inputs = torch.cat((state[slots].flatten(0, 1), x))
    before = {slot: list(range(at * past, (at + 1) * past)) for at, slot in enumerate(slots)}
    rows: list[list[int]] = []
    for token, (read, write) in enumerate(zip(reads, writes, strict=True)):
        known = before[read] if read >= 0 else rows[-1][1:]
        rows.append([*known, len(slots) * past + token])
        if write >= 0:
            before[write] = rows[-1][1:]
    window = inputs[torch.tensor(rows, device=x.device)]
    kept = {write: token for token, write in enumerate(writes) if write >= 0}
    if kept:
        state[[*kept]] = window[[*kept.values()], 1:]
    return window
