"""The operations that a model is made of, each computed by the kernel that suits the device of its tensors: the one
place where that is decided.

`OPS` has one row per operation. Each is a `torch.library` op of the namespace `hybrid`, with a fake implementation and
the arguments that it writes named, so that `torch.compile` and `torch.export` see through it. Its arguments are those
of its twin in `hybrid.kernels.reference`.

| device | by default                                                                         | `HYBRID_KERNELS=` |
|--------|------------------------------------------------------------------------------------|-------------------|
| GPU    | our Triton kernels; FLA's chunk rule and causal-conv1d, where they can be imported  | `auto`            |
| GPU    | our Triton kernels alone                                                           | `triton`          |
| any    | the twins                                                                          | `reference`       |
| CPU    | compiled code (`hybrid.kernels.cpu`); twins where numbers are only moved           | `auto`            |
| CPU    | our Triton kernels, interpreted: `TRITON_INTERPRET=1` must be set; for tests       | `triton`          |

Deterministic mode asks for `batch_invariant`: kernels of FLA and causal-conv1d are not used then, since their results
depend on the batch and on what their autotuner found.
"""

import logging
import os
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid.kernels.packed_weights import SLICE, is_packed_weight, unpack

log: logging.Logger = logging.getLogger(__name__)

INSTALL_GPU = 'pip install "hybrid-prefix-cache[gpu]"'
"""Command that installs Triton and flash-linear-attention."""

SETTINGS = ("auto", "triton", "reference")
"""The values of `HYBRID_KERNELS`."""

BATCH_DEPENDENT = "batch_dependent_"
"""Prefix of an operation's variant that uses the fastest kernel available, whose results may depend on the batch."""

Fake = Callable[..., Any]


class Op(NamedTuple):
    """An operation.

    Attributes:
        name: of the function, in both modules.
        file: the module of `hybrid.kernels.reference` and of `hybrid.kernels.triton` that has the function.
        fake: makes results of the right shape and type from the arguments, and computes nothing.
        writes: the arguments that it writes.
        external: another package may compute it too, where results may depend on the batch
            (`hybrid.kernels.external`).
        compiled: `hybrid.kernels.cpu` computes it on a CPU.
        has_kernel: `hybrid.kernels.triton` has it; where not, its twin runs on a GPU, too.
    """

    name: str
    file: str
    fake: Fake
    writes: tuple[str, ...] = ()
    external: bool = False
    compiled: bool = False
    has_kernel: bool = True

    @property
    def twin(self) -> Callable[..., Any]:
        """The function in plain torch."""
        return self._function("reference")

    @property
    def kernel(self) -> Callable[..., Any]:
        """Our Triton kernel, or the twin where there is none. The first use imports Triton."""
        return self._function("triton" if self.has_kernel else "reference")

    def compiled_function(self) -> Callable[..., Any] | None:
        """The function that is compiled for this CPU; None: the twin is asked for, or it moves numbers alone."""
        is_compiled = self.compiled and setting() == "auto"
        return vars(compiled_module(self.file))[self.name] if is_compiled else None

    def _function(self, folder: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(import_module(f"hybrid.kernels.{folder}.{self.file}"), self.name)
        return function


@lru_cache
def compiled_module(file: str) -> ModuleType:
    """A module of `hybrid.kernels.cpu`."""
    return import_module(f"hybrid.kernels.cpu.{file}")


def compiled_for(file: str, x: Tensor) -> ModuleType | None:
    """A module of `hybrid.kernels.cpu`, if its functions compute what follows from a tensor: on a CPU, where no tracer
    follows it. None: torch computes it."""
    if type(x) not in PLAIN or x.device.type != "cpu" or torch.compiler.is_compiling() or setting() != "auto":
        return None
    return compiled_module(file)


PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that no tracer follows."""


def _like(index: int) -> Fake:
    """A fake result of the shape and type of an argument."""
    return lambda *args: args[index].new_empty(args[index].shape)


def _nothing(*args: Any) -> None:
    """The fake result of an operation that only writes."""


def _fake_add_rms_norm(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_combine_experts(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return y.new_empty(places.shape[0], y.shape[1])


def _fake_expert_linear(x: Tensor, weight: Tensor, order: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(order.shape[0], weight.shape[1])


def _fake_gated_delta_step(mixed: Tensor, *rest: Any) -> Tensor:
    recurrent = rest[6]
    return mixed.new_empty(mixed.shape[0], recurrent.shape[1], recurrent.shape[3])


def _fake_delta_gates(a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape, dtype=torch.float32), b.new_empty(b.shape)


def _fake_linear(x: Tensor, weight: Tensor, decode_start: int) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_route_experts(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def _fake_sort_by_expert(experts: Tensor, num_experts: int, decode_start: int) -> tuple[Tensor, Tensor, Tensor]:
    return experts.new_empty(experts.numel()), experts.new_empty(experts.shape), experts.new_empty(2, num_experts)


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("add_rms_norm", "elementwise", _fake_add_rms_norm, compiled=True),
        Op("add_shared", "experts", _like(0), compiled=True, has_kernel=False),
        Op("batch_invariant_linear", "matmul", _fake_linear),
        Op("causal_conv1d", "convolution", _like(0), writes=("state",), external=True, compiled=True),
        Op("chunk_gated_delta_rule", "delta_rule", _like(2), writes=("state",), external=True, compiled=True),
        Op("combine_experts", "experts", _fake_combine_experts, compiled=True),
        Op("copy_states", "memory", _nothing, writes=("rows",)),
        Op("delta_gates", "delta_rule", _fake_delta_gates, compiled=True),
        Op("expert_linear", "experts", _fake_expert_linear, compiled=True),
        Op("fill_in_tokens", "memory", _nothing, writes=("numbers",)),
        Op("gated_delta_step", "delta_rule", _fake_gated_delta_step, writes=("conv", "recurrent"), compiled=True),
        Op("gated_rms_norm", "elementwise", _like(0), compiled=True),
        Op("norm_rotate_store", "elementwise", _like(0), writes=("cache",), compiled=True),
        Op("paged_attention", "attention", _like(0), compiled=True),
        Op("rms_norm", "elementwise", _like(0), compiled=True),
        Op("route_experts", "experts", _fake_route_experts, compiled=True),
        Op("shift_rows", "memory", _like(0), writes=("state",), compiled=True),
        Op("sigmoid_and_mul", "elementwise", _like(0), compiled=True),
        Op("silu_and_mul", "elementwise", _like(0), compiled=True),
        Op("sort_by_expert", "experts", _fake_sort_by_expert, compiled=True),
        Op("store_kv", "memory", _nothing, writes=("cache",)),
    )
}
"""Every operation, by name."""


def setting() -> str:
    """The value of `HYBRID_KERNELS`.

    Raises:
        ValueError: it is not one of `SETTINGS`.
    """
    asked = os.environ.get("HYBRID_KERNELS", "auto")
    if asked not in SETTINGS:
        raise ValueError(f"HYBRID_KERNELS must be one of {', '.join(SETTINGS)}; got {asked!r}")
    return asked


def uses_triton(device: torch.device) -> bool:
    """Tell whether operations on tensors of a device are computed by our Triton kernels."""
    asked = setting()
    return asked == "triton" or (asked == "auto" and device.type == "cuda")


@lru_cache
def has_triton() -> bool:
    """Tell whether Triton is installed. Where it is not, the log says so once."""
    try:
        found = find_spec("triton") is not None
    except ImportError:  # a finder of modules refuses it
        found = False
    if not found:
        log.info("the kernels for GPUs are not installed, and nothing on a CPU needs them; for a GPU: %s", INSTALL_GPU)
    return found


def check_kernels(device: torch.device) -> None:
    """Check that the kernels of a device are installed, and that a CPU is one that they can be compiled for.

    Raises:
        RuntimeError: operations on the device are computed by Triton kernels, and Triton is not installed.
        ValueError: `HYBRID_KERNELS` has no such value, or `HYBRID_CPU_LEVEL` names what this CPU lacks.
    """
    if is_compiled(device):
        compiled_module("target")
    if not has_triton() and uses_triton(device):
        raise RuntimeError(
            f"the kernels for {device.type} need Triton, which is not installed: {INSTALL_GPU}, or run on the CPU "
            "(device='cpu')"
        )


def implementation(name: str, device: torch.device) -> Callable[..., Any]:
    """The function that computes an operation on a device. The choice is logged.

    Args:
        name: of a row of `OPS`, or that with the prefix `BATCH_DEPENDENT`.

    Raises:
        RuntimeError: `HYBRID_KERNELS=triton` on a device that Triton does not compile for, or Triton is needed and not
            installed.
    """
    op = OPS[name.removeprefix(BATCH_DEPENDENT)]
    check_kernels(device)
    if not uses_triton(device) or not op.has_kernel:
        found = op.compiled_function() if device.type == "cpu" else None
        if found is not None:
            return _logged(op, device, "compiled for this CPU", found)
        return _logged(op, device, "the twin in plain torch", op.twin)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "HYBRID_KERNELS=triton runs on a CPU only in Triton's interpreter; set TRITON_INTERPRET=1 before Python "
            "starts, or leave HYBRID_KERNELS out"
        )
    what = "our Triton kernel"
    if name.startswith(BATCH_DEPENDENT) and setting() == "auto":
        other = import_module("hybrid.kernels.external").implementation(op.name)
        if not isinstance(other, str):
            return _logged(op, device, other.package, other.function)
        what += f": {other}"
    return _logged(op, device, what, op.kernel)


def _logged(op: Op, device: torch.device, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    log.info("%s on %s: %s", op.name, device.type, what)
    return function


_choices: list[dict[str, Callable[..., Any]]] = []
"""Functions chosen for each operation, by type of device."""


def is_compiled(device: torch.device) -> bool:
    """Tell whether the operations on tensors of a device are compiled for the CPU at hand."""
    return device.type == "cpu" and setting() == "auto"


def prefers_bfloat16() -> bool:
    """Tell whether compiled operations on bfloat16 are faster than those on float32 at the level of this CPU."""
    return setting() == "auto" and bool(compiled_module("target").PREFERS_BFLOAT16)


def choose_again() -> None:
    """Choose implementations anew at the next calls: `HYBRID_KERNELS` has changed."""
    for chosen in _choices:
        chosen.clear()


def choose_at_first_call(name: str) -> Callable[..., Any]:
    """A function that computes an operation and chooses the implementation per type of device at the first call there:
    the module of a GPU kernel is not imported without a GPU. Triton launches on the current device, which every thread
    has one of: it is that of the tensors for the call."""
    chosen: dict[str, Callable[..., Any]] = {}
    _choices.append(chosen)

    def call(*args: Any) -> Any:
        device = next(arg for arg in args if isinstance(arg, Tensor)).device
        function = chosen.get(device.type)
        if function is None:
            function = chosen[device.type] = implementation(name, device)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return function(*args)
        return function(*args)

    return call


_library = torch.library.Library("hybrid", "DEF")


def _define(name: str) -> Callable[..., Any]:
    """Register the operation with torch; returns it."""
    op = OPS[name.removeprefix(BATCH_DEPENDENT)]
    _library.define(name + torch.library.infer_schema(op.twin, mutates_args=op.writes))
    direct = choose_at_first_call(name)
    _library.impl(name, direct, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybrid::{name}", op.fake, lib=_library)
    defined: Callable[..., Any] = getattr(torch.ops.hybrid, name).default

    def call(*args: Any) -> Any:
        # torch's dispatcher takes longer than a small operation on a CPU; only who traces needs it
        is_plain = type(args[0]) in PLAIN and args[0].device.type == "cpu" and not torch.compiler.is_compiling()
        return direct(*args) if is_plain else defined(*args)

    return call


add_rms_norm: Callable[..., Any] = _define("add_rms_norm")
add_shared: Callable[..., Any] = _define("add_shared")
batch_invariant_linear: Callable[..., Any] = _define("batch_invariant_linear")
combine_experts: Callable[..., Any] = _define("combine_experts")
copy_states: Callable[..., Any] = _define("copy_states")
delta_gates: Callable[..., Any] = _define("delta_gates")
_expert_linear: Callable[..., Any] = _define("expert_linear")
fill_in_tokens: Callable[..., Any] = _define("fill_in_tokens")
gated_delta_step: Callable[..., Any] = _define("gated_delta_step")
gated_rms_norm: Callable[..., Any] = _define("gated_rms_norm")
norm_rotate_store: Callable[..., Any] = _define("norm_rotate_store")
paged_attention: Callable[..., Any] = _define("paged_attention")
rms_norm: Callable[..., Any] = _define("rms_norm")
route_experts: Callable[..., Any] = _define("route_experts")
shift_rows: Callable[..., Any] = _define("shift_rows")
sigmoid_and_mul: Callable[..., Any] = _define("sigmoid_and_mul")
silu_and_mul: Callable[..., Any] = _define("silu_and_mul")
sort_by_expert: Callable[..., Any] = _define("sort_by_expert")
store_kv: Callable[..., Any] = _define("store_kv")
_causal_conv1d = {True: _define("causal_conv1d"), False: _define(BATCH_DEPENDENT + "causal_conv1d")}
_chunk_rule = {True: _define("chunk_gated_delta_rule"), False: _define(BATCH_DEPENDENT + "chunk_gated_delta_rule")}


def causal_conv1d(*args: Any, batch_invariant: bool) -> Tensor:
    """`reference.causal_conv1d`; unless `batch_invariant`, by the fastest kernel available."""
    return _causal_conv1d[batch_invariant](*args)


def chunk_gated_delta_rule(*args: Any, batch_invariant: bool) -> Tensor:
    """`reference.chunk_gated_delta_rule`; unless `batch_invariant`, by the fastest kernel available."""
    return _chunk_rule[batch_invariant](*args)


def linear(
    x: Tensor, weight: Tensor, decode_start: int | None = None, scale: Tensor | None = None, rows: Any = None
) -> Tensor:
    """`x @ weight.T`.

    A BLAS picks its algorithm by the number of rows, and on some CPUs by a row's place among them and by addresses, and
    a row's bits change with it. So products are computed by code of ours, whose outputs are summed one by one in a
    fixed order: compiled for the CPU at hand, in fast mode, too, since it is the fastest there, and on a GPU in
    deterministic mode by a kernel whose tiles have a fixed shape. What traces a model, and `HYBRID_KERNELS=reference`,
    get products of torch, which promise nothing about batches.

    Args:
        x: `[rows, in]`.
        weight: `[out, in]`.
        decode_start: the number of rows of prompts, where rows must not depend on the batch: those from it on are one
            token each. None: on a GPU the fastest product is taken. On a CPU rows never depend on others.
        scale: `[out]` fp32 of the rows of a weight that is int8; of one of four bits scales and minimums
            (`hybrid.kernels.packed_weights`).
        rows: those of x as compiled products have them (`hybrid.kernels.cpu.matmul.Rows`), where they meet several
            weights; None: they meet this one.

    Returns:
        `[rows, out]` in the type of `x`.
    """
    if is_packed_weight(weight):
        assert scale is not None
        packed: Any = compiled_for("packed_weights", x)
        if packed is not None:
            product: Tensor = packed.multiply_packed(x, weight, scale, rows)
            return product
        return _linear_of_packed(x, weight, decode_start, scale)
    compiled: Any = compiled_for("matmul", x)
    if compiled is not None:
        y: Tensor = compiled.multiply(x, weight, scale, rows)
        return y
    if decode_start is not None and uses_triton(x.device):
        return batch_invariant_linear(x, weight, decode_start)
    y = torch.nn.functional.linear(x, weight.to(x.dtype))
    return y if scale is None else (y.float() * scale).to(x.dtype)


def expert_linear(
    x: Tensor,
    weight: Tensor,
    order: Tensor,
    ends: Tensor,
    top_k: int,
    num_prompt: int,
    scales: Tensor | None = None,
) -> Tensor:
    """`reference.expert_linear`.

    Args:
        scales: `[experts, ...]` of weights of four bits, scales and minimums of each (`hybrid.kernels.packed_weights`).
    """
    if scales is not None:
        compiled: Any = compiled_for("experts", x)
        if compiled is not None:
            y: Tensor = compiled.packed_expert_linear(x, weight, scales, order, ends, top_k)
            return y
        weight = unpack(weight, scales, x.shape[1]).to(x.dtype)
    product: Tensor = _expert_linear(x, weight, order, ends, top_k, num_prompt)
    return product


def _linear_of_packed(x: Tensor, weight: Tensor, decode_start: int | None, scales: Tensor) -> Tensor:
    """`linear` with a weight of four bits, some rows of it unpacked at a time."""
    step = max(1, SLICE // x.shape[1])
    parts = []
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        parts.append(linear(x, unpack(weight[rows], scales[rows], x.shape[1]).to(x.dtype), decode_start))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
