"""The parts of layers that model families share, those that see one token at a time: products, norms, activations.

Parameters have the names of the checkpoint. A part works on the rows of a packed batch and knows no requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.kernels import ops as kernels
from hybrid.kernels.ops import linear
from hybrid.kernels.packed_weights import is_packed_weight, steps, unpack
from hybrid.kernels.reference import elementwise


@dataclass(frozen=True)
class Rotary:
    """The angles of a step.

    Attributes:
        cos, sin: `[T, rotary_dim]`, in the dtype of the model.
        windows: those of layers with a sliding window; None: the same.
    """

    cos: Tensor
    sin: Tensor
    windows: "Rotary | None" = None


def weight(*shape: int) -> nn.Parameter:
    """Make a parameter, to be filled by the loader."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Linear(nn.Module):
    """A matrix product. Its weight may have another type than the rows.

    Args:
        inputs, outputs: sizes of a row before and after.

    Attributes:
        shape: of the weight, `(outputs, inputs)`, however it is stored.
        scale: `[outputs]` fp32, what the rows of an int8 weight are multiplied by; of a weight of four bits its scales
            and minimums (`hybrid.kernels.packed_weights`); None: the weight is not quantized.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.shape: tuple[int, int] = (outputs, inputs)
        self.weight = weight(outputs, inputs)
        self.bias = weight(outputs) if bias else None
        self.scale: Tensor | None = None

    @property
    def scales(self) -> dict[str, Tensor]:
        """`scale` by the name of its weight; empty where that is not quantized."""
        return {} if self.scale is None else {"weight": self.scale}

    def set_quantized(self, name: str, weight: Tensor, scale: Tensor) -> None:
        """Take a quantized weight, whose name is `weight`, in place of the one there is."""
        self.weight, self.scale = nn.Parameter(weight, requires_grad=False), scale

    def numbers(self, name: str = "weight") -> Tensor:
        """The weight, `[outputs, inputs]`, or what a quantized one stands for, in fp32."""
        if self.scale is None:
            return self.weight
        if is_packed_weight(self.weight):
            return unpack(self.weight, self.scale, self.shape[1])
        return self.weight * self.scale.unsqueeze(1)

    def steps(self, name: str = "weight") -> Tensor:
        """How far the numbers are apart that a quantized weight can have, for each of its numbers, in fp32."""
        assert self.scale is not None
        if is_packed_weight(self.weight):
            return steps(self.scale, self.shape[1])
        return self.scale.unsqueeze(1).expand(self.shape)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Multiply rows `[T, inputs]`; returns `[T, outputs]`."""
        return self.complete(linear(x, self.weight, batch.decode_start, self.scale), x, batch)

    def complete(self, y: Tensor, x: Tensor, batch: Batch) -> Tensor:
        """Add what adapters and the bias contribute to the product `y` of rows `x`; `y` may be written."""
        for adapted in batch.adapted:
            weights = adapted.weights.get(self)
            if weights is not None:  # single rows one by one: the bits of a row do not depend on who else is adapted
                low = linear(x[adapted.rows], weights.a, adapted.decode_start)
                y[adapted.rows] += linear(low, weights.b, adapted.decode_start)
        return y if self.bias is None else y + self.bias


class Projections(nn.Module):
    """Linear layers that multiply the same rows. They can be fused: one product computes all of them. Compiled products
    that are not are computed side by side: rows are arranged once, and in a captured pass threads do not wait between
    products.

    Fused weights are views of one matrix, in the order of the layers, so that every layer keeps its name, its rows and
    its values. To replace a weight afterwards, fuse again; writing to one is fine.

    Args:
        linears: the layers, which belong to another module.
    """

    def __init__(self, *linears: Linear) -> None:
        super().__init__()
        self._linears: tuple[Linear, ...] = linears  # a tuple: they are not submodules of this one
        self._weight: Tensor | None = None

    def forward(self, x: Tensor, batch: Batch, first: int = 0) -> tuple[Tensor, ...]:
        """Multiply rows `[T, inputs]`; returns `[T, outputs]` of each layer, parts of one tensor if they are fused.

        Args:
            first: layers before this one are left out.
        """
        linears = self._linears[first:]
        if self._weight is None:
            tasks: Any = kernels.compiled_for("tasks", x)
            if tasks is None:
                return tuple(each(x, batch) for each in linears)
            rows, start = kernels.compiled_module("matmul").Rows(x), batch.decode_start
            calls = [partial(linear, x, each.weight, start, each.scale, rows) for each in linears]
            products = zip(linears, tasks.side_by_side(calls), strict=True)
            return tuple(each.complete(y, x, batch) for each, y in products)
        weight = self._weight[sum(len(each.weight) for each in self._linears[:first]) :]
        y = linear(x, weight, batch.decode_start)
        parts = y.split([len(each.weight) for each in linears], dim=-1)
        return tuple(each.complete(part, x, batch) for each, part in zip(linears, parts, strict=True))

    def fuse(self) -> None:
        """Compute all of them by one product. Not for weights that are int8, or of types that differ."""
        kinds = {(each.weight.dtype, each.weight.device) for each in self._linears}
        if len(kinds) > 1 or any(each.scale is not None for each in self._linears):
            return
        self._weight = torch.cat([each.weight.detach() for each in self._linears])
        parts = self._weight.split([len(each.weight) for each in self._linears])
        for each, part in zip(self._linears, parts, strict=True):
            each.weight = nn.Parameter(part, requires_grad=False)


def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`gelu(gate) * up` of equal shapes, gelu by its approximation with tanh."""
    compiled: Any = kernels.compiled_for("elementwise", gate)
    y: Tensor = (compiled or elementwise).gelu_and_mul(gate, up)
    return y


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`."""
    compiled: Any = kernels.compiled_for("elementwise", x)
    y: Tensor = (compiled or elementwise).silu(x)
    return y


def squared_relu(x: Tensor) -> Tensor:
    """The square of what is above 0."""
    compiled: Any = kernels.compiled_for("elementwise", x)
    y: Tensor = (compiled or elementwise).squared_relu(x)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of heads `[T, heads, head_dim]`, by angles `[T, rotary_dim]`."""
    compiled: Any = kernels.compiled_for("elementwise", x)
    y: Tensor = (compiled or elementwise).rotate(x, cos, sin)
    return y


class RMSNorm(nn.Module):
    """Root-mean-square norm: `x / rms(x) * (offset + weight)`, in fp32. Qwen3.5 and Gemma have an offset of 1."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = weight(size)
        self.eps: float = eps
        self.offset = offset
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The norm of each row of `[..., size]`."""
        return kernels.rms_norm(x, self.factor(), self.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`x + residual`, and its norm."""
        return kernels.add_rms_norm(x, residual, self.factor(), self.eps)

    def of_terms(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """`of_sum`, also where there is no second term."""
        return (x, self(x)) if residual is None else self.of_sum(x, residual)

    def factor(self) -> Tensor:
        """`offset + weight` in fp32, computed once."""
        if self.scale is None:
            self.scale = self.offset + self.weight.float()
        return self.scale


class GatedRMSNorm(nn.Module):
    """Root-mean-square norm, times silu of a gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = weight(size)
        self.eps: float = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """The norm of each row of `[..., size]`, times silu of the gate's row."""
        return kernels.gated_rms_norm(x, gate, self.weight, self.eps)


class DepthwiseWeight(nn.Module):
    """The weight of the causal convolution, `[channels, 1, width]` as in the checkpoint."""

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = weight(channels, 1, width)
        self.bias = weight(channels) if bias else None

    @property
    def taps(self) -> Tensor:
        """The weight as the kernels take it, `[channels, width]`."""
        return self.weight.squeeze(1)


class MLP(nn.Module):
    """A gated feed-forward part.

    Args:
        size, intermediate_size: of a row, before and after the first products.
        activation: of the gate, times the other product; None: silu.
    """

    def __init__(
        self,
        size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(size, intermediate_size, bias)
        self.up_proj = Linear(size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, size, bias)
        self.inputs = Projections(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        gate, up = self.inputs(x, batch)
        y = kernels.silu_and_mul(gate, up) if self.activation is None else self.activation(gate, up)
        return self.down_proj(y, batch)


def norm_eps(config: Any) -> float:
    """Return what is added to the mean square in norms, by whichever name a configuration has it."""
    names = ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    eps: float = next(found for name in names if (found := getattr(config, name, None)) is not None)
    return eps


def scaled(x: Tensor, factor: float) -> Tensor:
    """Multiply by a number, unless it is 1."""
    return x if factor == 1 else x * factor
