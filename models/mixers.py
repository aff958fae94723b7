"""Mixers, the parts of layers that see other tokens, and the layers that they stand in.

A mixer says what it keeps of other tokens in one layer: keys and values in pages, or the state of a sequence in a state
slot. The model counts the layers and gives each mixer its row (`hybrid.models.causal_lm`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, Group, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference import convolution
from hybrid.models.layers import DepthwiseWeight, RMSNorm, Rotary, scaled
from hybrid.spec import StateTensor, TokenTensor


@dataclass(frozen=True, slots=True)
class Context:
    """What all layers of a pass are given.

    Attributes:
        batch: the plan of the step.
        rotary: the angles of its tokens.
        kv: the pages of all layers; written.
        state: the state pool's tensors by name; written.
        chunk_size: chunk of the linear layers, in tokens.
    """

    batch: Batch
    rotary: Rotary
    kv: Tensor
    state: dict[str, Tensor]
    chunk_size: int


class Mixer(nn.Module, ABC):
    """A part of a layer that sees other tokens than its own.

    Attributes:
        row: of its layer in the tensors that it keeps. The model sets it.
        waits_for_device: on a GPU a decode step reads a result of the device on the host, so that it cannot be
            captured.
    """

    row: int = 0
    waits_for_device: bool = False

    @abstractmethod
    def kept(self, dtype: torch.dtype) -> tuple[TokenTensor | StateTensor, ...]:
        """Return what it keeps, as the tensors of a model that has this layer alone.

        Args:
            dtype: of the model.
        """

    @abstractmethod
    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Mix normalised rows `[T, hidden_size]`, and keep what is to be seen of them."""


class StateMixer(Mixer):
    """A mixer whose states are in state slots. Most of them read on the host which slots those are."""

    waits_for_device: bool = True

    @abstractmethod
    def prefill(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """Compute the tokens of prompts.

        Args:
            inputs: `[N, ...]` what the states after them are computed from.
        """

    @abstractmethod
    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """Compute decoded tokens.

        Args:
            inputs: `[N, ...]` what the states after them are computed from.
            steps: where states are read and written.
            state: the state pool's tensors by name; written.
        """

    def mix(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """Compute the tokens of a batch from their `inputs`, one row each. Those of decoded tokens go to the batch's
        log if it has one."""
        batch, parts = context.batch, []
        if (prompts := batch.prefills) is not None:
            parts.append(self.prefill(_rows(inputs, prompts.rows), context))
        if (decodes := batch.decodes) is not None:
            own = _rows(inputs, decodes.rows)
            if batch.log is not None:
                batch.log.append(own)
            parts.append(unrolled(self.step, own, decodes, context.state))
        return joined(parts)


class ConvolvedMixer(StateMixer):
    """A causal convolution, and a rule over what it gives, each with its state in a state slot. A subclass gives the
    rule for prompts and for decoded tokens; without one, the convolution is all.

    Attributes:
        has_silu: the convolution ends with a silu.
        has_kernel: on a GPU the convolution of prompts is computed by a kernel.
        state_shape: of the state of the rule; None: there is no rule.
        parts: of each input of the rule that the convolution gives its heads, and the size of one; empty: it gives one
            input, without heads.
        conv1d: the weight of the convolution.
        A_log: the logarithm of what `decays` are computed from, if the rule has them.
        rate: what `decays` returns, once it is computed.
    """

    has_silu: bool = True
    has_kernel: bool = False
    state_shape: tuple[int, ...] | None = None
    parts: tuple[tuple[int, int], ...] = ()
    conv1d: DepthwiseWeight
    A_log: nn.Parameter
    rate: Tensor | None = None

    def kept(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the state of the rule, and the window of the convolution."""
        channels, _, width = self.conv1d.weight.shape
        window = StateTensor("conv", (1, width - 1, channels), dtype)
        if self.state_shape is None:
            return (window,)
        return StateTensor("recurrent", (1, *self.state_shape), torch.float32), window

    def rule(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """Compute the rule for prompts.

        Args:
            inputs: what the convolution gives, in its parts, and the other inputs.
        """
        return inputs[0]

    def rule_step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """Compute the rule for decoded tokens, of which `inputs` are the same."""
        return inputs[0]

    def split(self, convolved: Tensor) -> tuple[Tensor, ...]:
        """Split what the convolution gives into the inputs of the rule, `[T, heads, size]`."""
        if not self.parts:
            return (convolved,)
        each = convolved.split([heads * size for heads, size in self.parts], dim=-1)
        return tuple(part.unflatten(-1, shape) for part, shape in zip(each, self.parts, strict=True))

    def prefill(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """Compute the convolution and the rule for prompts: the first of `inputs` is convolved."""
        mixed, *others = inputs
        return self.rule((*self.split(self.convolve(mixed, context)), *others), context)

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """Compute the same for decoded tokens."""
        mixed, *others = inputs
        values = self.split(self.convolve_step((mixed,), steps, state))
        return self.rule_step((*values, *others), steps, state)

    def convolve(self, mixed: Tensor, context: Context) -> Tensor:
        """Compute the convolution for prompts."""
        batch, args = context.batch, (mixed, self.conv1d.taps, self.windows(context.state))
        if self.has_kernel:
            return kernels.causal_conv1d(*args, *batch.prompt_slots, batch_invariant=batch.needs_own_kernels)
        computes = kernels.compiled_for("convolution", mixed) or convolution
        convolved = computes.causal_conv1d if self.has_silu else computes.causal_sums
        y: Tensor = convolved(*args, *batch.prompt_slots, self.conv1d.bias)
        return y.to(mixed.dtype)

    def convolve_step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """Compute the convolution for decoded tokens."""
        (mixed,), windows = inputs, self.windows(state)
        computes = kernels.compiled_for("convolution", mixed) or convolution
        convolved = computes.causal_conv1d_update if self.has_silu else computes.causal_sums_update
        y: Tensor = convolved(mixed, self.conv1d.taps, windows, steps.read, steps.write, self.conv1d.bias)
        return y.to(mixed.dtype)

    def decays(self) -> Tensor:
        """Return `-exp(A_log)` in fp32, computed once."""
        if self.rate is None:
            self.rate = -self.A_log.float().exp()
        return self.rate

    def states(self, state: dict[str, Tensor]) -> Tensor:
        """Return the states of the rule of this layer, `[slots, ...]`."""
        return state["recurrent"][:, self.row]

    def windows(self, state: dict[str, Tensor]) -> Tensor:
        """Return the windows of the convolution of this layer, `[slots, width - 1, channels]`."""
        return state["conv"][:, self.row]


class SelectiveMixer(ConvolvedMixer):
    """A convolved mixer whose rule has further inputs that are made of what comes out of the convolution."""

    @abstractmethod
    def gates(self, convolved: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Make the other inputs of the rule."""

    def mix_convolved(self, mixed: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Compute the tokens of a batch. Returns what comes out of the convolution, and out of the rule."""
        batch, state, parts = context.batch, context.state, []
        prompts, decodes = batch.prefills, batch.decodes
        if prompts is not None:
            parts.append(self.convolve(mixed[prompts.rows], context))
        if decodes is not None:
            parts.append(unrolled(self.convolve_step, (mixed[decodes.rows],), decodes, state))
        convolved = joined(parts)
        inputs, parts = (convolved, *self.gates(convolved, batch)), []
        if prompts is not None:
            parts.append(self.rule(_rows(inputs, prompts.rows), context))
        if decodes is not None:
            own = _rows(inputs, decodes.rows)
            if batch.log is not None:
                batch.log.append((mixed[decodes.rows], *own[1:]))
            parts.append(unrolled(self.rule_step, own, decodes, state))
        return convolved, joined(parts)


def unrolled(
    step: Callable[[tuple[Tensor, ...], StateSteps, dict[str, Tensor]], Tensor],
    inputs: tuple[Tensor, ...],
    decodes: Group,
    state: dict[str, Tensor],
) -> Tensor:
    """Compute a function like `StateMixer.step` for the decoded tokens of a batch, each path of drafts alone."""
    if decodes.unrolled is None:
        return step(inputs, decodes.steps, state)
    rows, places = decodes.unrolled
    return step(_rows(inputs, rows), decodes.steps, state)[places]


def joined(parts: list[Tensor]) -> Tensor:
    """Join the rows of prompts and of decoded tokens, of which a batch may have one kind."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows(inputs: tuple[Tensor, ...], rows: slice | Tensor) -> tuple[Tensor, ...]:
    return tuple(part[rows] for part in inputs)


class Block:
    """Parts of a layer that are given the same rows, and whose results are added to the residual, with the names that
    they have in the checkpoint.

    Args:
        before: name of the norm of what the parts are given; None: there is none.
        after: name of the norm of what they give; None: there is none.
        parts: mixers, and feed-forward parts; None: there is none of this name.
    """

    def __init__(self, before: str | None, after: str | None = None, **parts: nn.Module | None) -> None:
        self.before, self.after = before, after
        self.parts = {name: part for name, part in parts.items() if part is not None}


class Layer(nn.Module):
    """One layer of a model: blocks one after another, each with a residual connection.

    Args:
        norm: makes a norm.
        blocks: of the layer.
        scale: what a block gives is multiplied by it.

    Attributes:
        blocks: of each block the norm before it, its parts and the norm after it.
        mixers: the parts that see other tokens.
    """

    def __init__(self, norm: Callable[[], RMSNorm], *blocks: Block, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.blocks: list[tuple[RMSNorm | None, tuple[nn.Module, ...], RMSNorm | None]] = []
        for block in blocks:
            before, after = (self._add(name, norm) for name in (block.before, block.after))
            for name, part in block.parts.items():
                self.add_module(name, part)
            self.blocks.append((before, (*block.parts.values(),), after))
        self.mixers = [part for _, parts, _ in self.blocks for part in parts if isinstance(part, Mixer)]

    def _add(self, name: str | None, norm: Callable[[], RMSNorm]) -> RMSNorm | None:
        if name is None:
            return None
        made = norm()
        self.add_module(name, made)
        return made

    def forward(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """Run the layer on `x + residual`. Returns its output as two such terms, which the next norm adds.

        Args:
            x, residual: `[T, hidden_size]`; None: there is no second term.
        """
        for before, parts, after in self.blocks:
            if before is not None:
                residual, y = before.of_terms(x, residual)
            else:
                residual = y = x if residual is None else residual + x
            x = sum_of(parts, y, context)
            x = scaled(x if after is None else after(x), self.scale)
        assert residual is not None
        return x, residual


def sum_of(parts: Iterable[nn.Module], x: Tensor, context: Context) -> Tensor:
    """Compute the sum of what parts give for the same rows."""
    each = [part(x, context if isinstance(part, Mixer) else context.batch) for part in parts]
    y: Tensor = each[0]
    for other in each[1:]:
        y = y + other
    return y
