"""Kernels of packages that may not be there, behind the signatures of `hybrid.kernels.reference`: the chunk rule of
flash-linear-attention, and the convolution of Dao-AILab's causal-conv1d.

Neither package knows slots. States are gathered for a call and put back after it, and what the package wants to know
on the host is fetched once per step: all layers of a step pass the same tensors, and the fetched numbers are kept as
long as these tensors are. A GPU is waited for once in a step, then, not once in a layer.

What must stay true:
* Importing this module imports neither package. One that is installed but cannot be imported counts as not there.
* Numbers are kept for tensors in the same memory and of the same version. The version counts what torch writes; it
  does not see what a kernel or the replay of a CUDA graph writes. Inference tensors have none, so nothing is kept for
  them: a step whose tensors are made inside `torch.inference_mode` waits in every layer.
* The bits of a result may depend on the batch, and on what the package's autotuner found.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid.kernels.ops import delta_gates
from hybrid.kernels.triton import convolution

FLA = "flash-linear-attention"
CAUSAL_CONV1D = "causal-conv1d"

FUNCTIONS = {
    FLA: ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    CAUSAL_CONV1D: ("causal_conv1d", "causal_conv1d_fn"),
}
"""Per package the module and the function that is used of it."""


class Found(NamedTuple):
    """A kernel of another package.

    Attributes:
        package: whose it is.
        function: takes what the twin takes.
    """

    package: str
    function: Callable[..., Tensor]


def implementation(name: str) -> Found | str:
    """The kernel that another package has for an operation of ours, or why that package cannot be used. The first call
    imports what there is.

    Args:
        name: "chunk_gated_delta_rule" or "causal_conv1d".
    """
    found = {
        "chunk_gated_delta_rule": Found(FLA, fla_chunk_gated_delta_rule),
        "causal_conv1d": Found(CAUSAL_CONV1D, external_causal_conv1d),
    }[name]
    imported = _imported(found.package)
    return f"{found.package} cannot be used ({imported})" if isinstance(imported, str) else found


@lru_cache
def _imported(package: str) -> Found | str:
    """The package's function, or why it cannot be had."""
    module, name = FUNCTIONS[package]
    try:
        return Found(package, getattr(import_module(module), name))
    except Exception as error:  # a broken installation fails in any way: a missing symbol, a driver, a version
        return f"{type(error).__name__}: {error}"


def _function(package: str) -> Callable[..., Any]:
    found = _imported(package)
    if isinstance(found, str):
        raise ImportError(f"{package} cannot be used ({found}); install it, or use our own kernel of the operation")
    return found.function


def fla_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    chunk_size: int,
) -> Tensor:
    """FLA's chunk rule. Arguments as for `chunk_gated_delta_rule` in `hybrid.kernels.reference`; `state` is written.

    FLA gives the states inside a sequence rounded to the type of k, and only the last one in fp32. So requests are cut
    at their captures: one call takes the first segment of every request, the next one the second of those that have
    one, and so on. Without captures on the way that is one call. FLA's chunk is the largest of 16, 32 and 64 that
    divides `chunk_size`; where none does, results are right but depend on where a prompt was cut.

    Raises:
        ImportError: the package cannot be used.
    """
    rule, gates = _function(FLA), delta_gates(a, b, rate, dt_bias)
    chunk = min(chunk_size & -chunk_size, 64)
    step = _step(cu_seqlens, state_write, captures)
    output: Tensor | None = None
    final = state.new_empty(0)
    for wave in step.waves:
        rows = (q, k, v, *gates) if wave.tokens is None else tuple(x[wave.tokens] for x in (q, k, v, *gates))
        mixed, final = rule(
            *(x.unsqueeze(0) for x in rows),
            initial_state=state[state_read] if wave.resumed is None else final[wave.resumed],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=wave.cu_seqlens,
            cu_seqlens_cpu=wave.cu_seqlens_cpu,
            chunk_size=chunk if chunk >= 16 else 64,
        )
        state[wave.slots] = final[wave.kept]
        if wave.tokens is None:
            return mixed.squeeze(0)
        output = v.new_empty(v.shape) if output is None else output
        output[wave.tokens] = mixed.squeeze(0)
    return v.new_empty(v.shape) if output is None else output


def external_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Causal-conv1d's convolution. Arguments as for `causal_conv1d` in `hybrid.kernels.reference`; `state` is written.

    One call per request: the package takes packed sequences only where all of them begin at nothing. Shapes that it
    does not take (widths beyond 2 to 4, channels or rows that are not a multiple of 8) go to our own kernel.

    Raises:
        ImportError: the package cannot be used.
    """
    convolve = _function(CAUSAL_CONV1D)
    channels, width = weight.shape
    if not 2 <= width <= 4 or channels % 8 or x.stride(0) % 8:
        return convolution.causal_conv1d(x, weight, state, cu_seqlens, state_read, state_write, captures, bias)
    step = _step(cu_seqlens, state_write, captures)
    before = state[state_read]
    parts = [
        convolve(
            x[start:end].t().unsqueeze(0),  # [1, channels, tokens], channels next to each other in memory
            weight,
            bias,
            initial_states=before[row : row + 1].transpose(1, 2),
            activation="silu",
        )
        .squeeze(0)
        .t()
        for row, (start, end) in enumerate(pairwise(step.starts))
    ]
    places = step.windows(width - 1)
    inside = x[places.tokens]  # [windows, width - 1, channels]
    state[places.slots] = torch.where(places.is_new, inside, before[places.rows, places.offsets])
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


class _Wave(NamedTuple):
    """One segment of every request that has that number of them.

    Attributes:
        tokens: the tokens of the segments; None: all there are, in order.
        cu_seqlens, cu_seqlens_cpu: where each segment begins.
        resumed: for every segment the place of its request in the wave before; None: it is the first.
        kept, slots: the segments whose final states are kept, and where; one may be named twice.
    """

    tokens: Tensor | None
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    resumed: Tensor | None
    kept: Tensor
    slots: Tensor


class _Windows(NamedTuple):
    """The places of the inputs that windows are made of, `[windows, past]` each.

    Attributes:
        slots: `[windows]` where each goes.
        is_new: `[windows, past, 1]` whether an input is one of this batch's tokens.
        tokens: which one, if so.
        rows, offsets: else, whose window it is in, and where.
    """

    slots: Tensor
    is_new: Tensor
    tokens: Tensor
    rows: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class _Step:
    """A batch's numbers on the host, and what follows from them, made when first asked for.

    Attributes:
        starts: where each request's tokens begin, and the end.
        writes: the slot of each request.
        captures: (request, new tokens, slot).
        device: where the tensors belong.
    """

    starts: list[int]
    writes: list[int]
    captures: list[tuple[int, int, int]]
    device: torch.device

    @cached_property
    def waves(self) -> list[_Wave]:
        """The calls that compute the rule and give the state at every capture."""
        slots: dict[tuple[int, int], list[int]] = {}
        for row, slot in enumerate(self.writes):
            slots.setdefault((row, self.starts[row + 1]), []).append(slot)
        for row, count, slot in self.captures:
            slots.setdefault((row, self.starts[row] + count), []).append(slot)
        cuts = [
            [start, *sorted(end for request, end in slots if request == row)]
            for row, start in enumerate(self.starts[:-1])
        ]
        waves: list[_Wave] = []
        previous: list[int] = []
        for index in range(max(map(len, cuts), default=1) - 1):
            rows = [row for row, ends in enumerate(cuts) if len(ends) > index + 1]
            spans = [(cuts[row][index], cuts[row][index + 1]) for row in rows]
            kept = [(place, slot) for place, row in enumerate(rows) for slot in slots[row, spans[place][1]]]
            lengths = torch.tensor([0, *(end - start for start, end in spans)])
            whole = sum(end - start for start, end in spans) == self.starts[-1]
            waves.append(
                _Wave(
                    tokens=None if whole else self._here([at for start, end in spans for at in range(start, end)]),
                    cu_seqlens=lengths.cumsum(0).to(self.device),
                    cu_seqlens_cpu=lengths.cumsum(0),
                    resumed=self._here([previous.index(row) for row in rows]) if index else None,
                    kept=self._here([place for place, _ in kept]),
                    slots=self._here([slot for _, slot in kept]),
                )
            )
            previous = rows
        return waves

    def windows(self, past: int) -> _Windows:
        """The places of the last `past` inputs at the end of every request and at every capture."""
        made = self._windows.get(past)
        if made is None:
            ends = [(row, end - start) for row, (start, end) in enumerate(pairwise(self.starts))]
            ends += [(row, count) for row, count, _ in self.captures]
            rows = self._here([row for row, _ in ends]).unsqueeze(1)
            begin = self._here([self.starts[row] for row, _ in ends]).unsqueeze(1)
            # counted from the request's first token; what lies before it is in the window that was read
            at = self._here([count for _, count in ends]).unsqueeze(1) + torch.arange(-past, 0, device=self.device)
            made = self._windows[past] = _Windows(
                slots=self._here([*self.writes, *(slot for *_, slot in self.captures)]),
                is_new=(at >= 0).unsqueeze(-1),
                tokens=(begin + at).clamp(min=0),
                rows=rows.expand_as(at),
                offsets=(past + at).clamp(max=past - 1),
            )
        return made

    @cached_property
    def _windows(self) -> dict[int, _Windows]:
        return {}

    def _here(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)


_kept: list[tuple[tuple[object, ...], tuple[Tensor, ...], _Step]] = []
"""The last step: what its tensors are known by, the tensors, whose memory is not reused while they are here, and
their numbers."""


def _step(*tensors: Tensor) -> _Step:
    """The numbers of (cu_seqlens, state_write, captures)."""
    seen = not any(x.is_inference() for x in tensors)
    key: tuple[object, ...] = ()
    if seen:
        key = tuple((x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x._version) for x in tensors)
        if _kept and _kept[0][0] == key:
            return _kept[0][2]
    starts, writes, captures = tensors
    flat = torch.cat([x.reshape(-1).to(torch.int64) for x in (starts, writes, captures)]).tolist()
    first, second = starts.numel(), starts.numel() + writes.numel()
    numbers = flat[second:]
    step = _Step(
        starts=flat[:first],
        writes=flat[first:second],
        captures=list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)),
        device=starts.device,
    )
    if seen:
        _kept[:] = [(key, tensors, step)]
    return step
