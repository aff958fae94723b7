"""The twins of the kernels that take each row by itself, in plain torch.

Where torch's own function gives other bits at the end of a tensor than in its middle (sigmoid, silu, softplus: vector
code and its scalar rest), it is written with `exp`, which does not.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels.reference.memory import store_kv


def sigmoid(x: Tensor) -> Tensor:
    """The logistic function; the same bits for an element wherever it stands."""
    return x.float().neg().exp_().add_(1).reciprocal_().to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x); the same bits for an element wherever it stands."""
    y = x.float()
    return (y / y.neg().exp_().add_(1)).to(x.dtype)


def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`gelu(gate) * up`, gelu by its approximation with tanh; the same bits for an element wherever it stands.

    `(1 + tanh(u)) / 2` is the logistic function of `2 * u`.
    """
    x = gate.float()
    twice = (x + 0.044715 * x * x * x) * (2 * math.sqrt(2 / math.pi))
    return (x / twice.neg_().exp_().add_(1)).to(gate.dtype) * up


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), and x itself beyond 20, as torch has it; the same bits for an element wherever it stands."""
    return torch.where(x > 20, x, x.clamp(max=20).exp_().log1p_())


def l2norm(x: Tensor) -> Tensor:
    """Rows of unit length, as flash-linear-attention has it (epsilon under the root)."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * scale` over the last dimension, in fp32.

    Args:
        x: `[..., size]`.
        scale: `[size]` fp32.
    """
    return F.rms_norm(x.float(), scale.shape, scale, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of two tensors, and its `rms_norm`."""
    total = residual + x
    return total, rms_norm(total, scale, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / rms(x)` over the last dimension, times silu of the gate.

    Args:
        x, gate: `[T, heads, size]`.
        weight: `[size]`, in the type of `x`.
    """
    y = F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)
    return ((weight * y) * silu(gate.float())).to(x.dtype)


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return silu(gate) * up


def squared_relu(x: Tensor) -> Tensor:
    """The square of what is above 0."""
    above = x.clamp(min=0)
    return above * above


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """`cap * tanh(logits / cap)`, which is between `-cap` and `cap`; the same bits for an element wherever it stands.

    Args:
        logits: `[S, size]` fp32.
    """
    share = sigmoid(logits * 2 / cap)
    return cap * (share - (1 - share))


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`."""
    return x * sigmoid(gate)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of the first `rotary_dim` of each head.

    Args:
        x: `[T, heads, head_dim]`.
        cos, sin: `[T, rotary_dim]`.
    """
    size = cos.shape[-1]
    turned, passed = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
    return torch.cat((turned, passed), dim=-1)


def norm_rotate_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Do what comes between projection and attention: normalise and rotate q and k per head, and store k and v.

    Args:
        q: `[T, heads, head_dim]`.
        k, v: `[T, kv_heads, head_dim]`.
        q_scale, k_scale: `[head_dim]` fp32, for `rms_norm`.
        cos, sin: `[T, rotary_dim]`, for `rotate`.
        cache, slot_mapping: as for `store_kv`.

    Returns:
        q, `[T, heads, head_dim]`.
    """
    k = rotate(rms_norm(k, k_scale, eps), cos, sin)
    store_kv(k, v, cache, slot_mapping)
    return rotate(rms_norm(q, q_scale, eps), cos, sin)
