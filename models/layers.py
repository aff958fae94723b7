"""The layers that model families share.

Parameter names are the checkpoint's. A layer works on the rows of a packed batch and knows nothing of requests.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.kernels import ops as kernels
from hybrid.kernels.batch_invariant import ALIGNMENT, ONE_BY_ONE, Products, choose, linear

Chosen = dict[tuple[object, ...], Products]
"""Products per kind of weight: its role, type, shape, strides and alignment."""


@dataclass(frozen=True)
class Rotary:
    """The angles of a step: `[T, rotary_dim]` each."""

    cos: Tensor
    sin: Tensor


class Linear(nn.Module):
    """A matrix product whose weight may be in memory by columns, and which can be made batch invariant."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        self.takes_chunks = True
        self.products: Products = ONE_BY_ONE

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = linear(x, self.weight, batch.blocks, self.products)
        return y if self.bias is None else y + self.bias

    def matrix(self) -> Tensor:
        """What the rows are multiplied with, `[outputs, inputs]`."""
        return self.weight

    def make_batch_invariant(self, chunk_size: int, chosen: Chosen) -> None:
        """Choose products whose rows have the same bits in every batch.

        Args:
            chosen: products of other weights; each kind is tried once.
        """
        weight = self.matrix()
        role = "linear" if self.takes_chunks else "single rows"
        kind = (role, weight.dtype, tuple(weight.shape), weight.stride(), weight.data_ptr() % ALIGNMENT)
        if kind not in chosen:
            chosen[kind] = choose(weight, chunk_size, self.takes_chunks)
        self.products = chosen[kind]


class RMSNorm(nn.Module):
    """Root-mean-square norm: `x / rms(x) * (offset + weight)`, in fp32. Qwen's weights lie around 0, with an offset of
    1."""

    def __init__(self, size: int, eps: float, offset: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.offset = offset
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.factor(), self.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`x + residual`, and its norm."""
        return kernels.add_rms_norm(x, residual, self.factor(), self.eps)

    def factor(self) -> Tensor:
        """`offset + weight` in fp32, made once."""
        if self.scale is None:
            self.scale = self.offset + self.weight.float()
        return self.scale


class GatedRMSNorm(nn.Module):
    """Root-mean-square norm, then times silu of a gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return kernels.gated_rms_norm(x, gate, self.weight, self.eps)


class DepthwiseWeight(nn.Module):
    """The weight of the causal convolution, `[channels, 1, width]` as the checkpoint has it."""

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False) if bias else None


class MLP(nn.Module):
    """A gated feed-forward part."""

    def __init__(self, size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(size, intermediate_size, bias)
        self.up_proj = Linear(size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, size, bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.down_proj(kernels.silu_and_mul(self.gate_proj(x, batch), self.up_proj(x, batch)), batch)


class ResidualLayer(nn.Module):
    """One layer of a model: a mixer, then a feed-forward part, each behind a norm and added to what came in.

    Families name these parts as their checkpoints do, and hand them over in `parts`: the norm before the mixer, the
    mixer, the norm before the feed-forward part, and that.
    """

    is_linear: bool
    parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module]

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        batch: Batch,
        rotary: Rotary,
        kv: Tensor,
        state: dict[str, Tensor],
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        """What goes into the layer is `x + residual`, and likewise what comes out: the next norm adds them."""
        norm, mixer, second_norm, feed_forward = self.parts
        if residual is None:
            residual, y = x, norm(x)
        else:
            residual, y = norm.of_sum(x, residual)
        y = mixer(y, batch, state, chunk_size) if self.is_linear else mixer(y, batch, rotary, kv, chunk_size)
        residual, y = second_norm.of_sum(y, residual)
        return feed_forward(y, batch), residual
