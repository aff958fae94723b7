"""The twin of a linear-attention layer's decode step over state slots, in plain torch."""

import torch
from torch import Tensor

from hybrid.kernels.reference.convolution import causal_conv1d_update
from hybrid.kernels.reference.elementwise import l2norm, sigmoid, softplus


def recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor
) -> Tensor:
    """One step of the gated delta rule per token, one after another. Arguments as for `chunk_gated_delta_rule`; slots
    as for `gated_delta_step`, one each per token."""
    group = v.shape[1] // k.shape[1]
    rows, heads = v.shape[:2]
    unit = l2norm(torch.cat((q, k), dim=1).float())  # [R, 2 * key_heads, key_dim]
    unit = unit.unsqueeze(2).expand(-1, -1, group, -1).reshape(rows, 2, heads, 1, -1)
    q, k = unit[:, 0] * unit.shape[-1] ** -0.5, unit[:, 1]  # [R, value_heads, 1, key_dim]
    values, decay, rate = v.float().unsqueeze(2), g.float().exp()[..., None, None], beta.float()[..., None, None]
    output = torch.empty_like(values)
    current, alone = state[:0], state.new_empty(state.shape[1:])
    for row, (read, write) in enumerate(zip(state_read.tolist(), state_write.tolist(), strict=True)):
        source = state[read] if read >= 0 else current
        current = state[write] if write >= 0 else alone  # changed where it lies: to gather and scatter costs more
        if current.data_ptr() != source.data_ptr():
            current.copy_(source)
        current.mul_(decay[row])
        added = (values[row] - torch.bmm(k[row], current)).mul_(rate[row])
        current.baddbmm_(k[row].transpose(1, 2), added)
        torch.bmm(q[row], current, out=output[row])
    return output.squeeze(2).to(v.dtype)


def gated_delta_step(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    conv: Tensor,
    recurrent: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
) -> Tensor:
    """A linear-attention layer's decode: convolution and delta rule, one to eight tokens of each request, in a row or
    as a tree of drafts.

    The decay of a token is `exp(rate * softplus(a + dt_bias))`, its beta `sigmoid(b)`. Tokens of a request come in
    order, parents first. A slot that a token writes may be read by later ones of the same request, and by no other.

    Args:
        mixed: `[T, channels]`, what goes into the convolution: q, k, v; channels = 2 * key_heads * key_dim +
            value_heads * value_dim.
        a, b: `[T, value_heads]`.
        weight: `[channels, width]`, of the convolution.
        rate: `[value_heads]` fp32, below 0.
        dt_bias: `[value_heads]`.
        conv: one layer's windows, `[slots, width - 1, channels]`; written.
        recurrent: one layer's states, `[slots, value_heads, key_dim, value_dim]` fp32; written.
        cu_seqlens: `[R + 1]` where each request's tokens begin. A request may have none, unless R is T.
        state_read: `[T]` the slot that a token continues from; -1: from the token before it. A request whose first
            token has none keeps nothing, and what is returned for it has no meaning.
        state_write: `[T]` the slot that holds what is after it; -1: it is not kept.

    Returns:
        `[T, value_heads, value_dim]`.
    """
    heads, key_dim, value_dim = recurrent.shape[1:]
    keys = (mixed.shape[1] - heads * value_dim) // 2
    beta, decay = sigmoid(b), rate * softplus(a.float() + dt_bias)
    x = causal_conv1d_update(mixed, weight, conv, state_read, state_write)
    q, k, v = x.split((keys, keys, heads * value_dim), dim=-1)
    q, k, v = q.unflatten(-1, (-1, key_dim)), k.unflatten(-1, (-1, key_dim)), v.unflatten(-1, (heads, value_dim))
    return recurrent_gated_delta_rule(q, k, v, decay, beta, recurrent, state_read, state_write)
