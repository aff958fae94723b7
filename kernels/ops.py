"""The operations that a model is made of, each by the kernel that suits the device of its tensors: the one place where
that is decided.

Every operation is a `torch.library` op of the namespace `hybrid`, with a fake implementation and the arguments that it
writes named, so that `torch.compile` and `torch.export` see through it. Arguments are those of its twin in
`hybrid.kernels.reference`.

| device | by default                                                                            | `HYBRID_KERNELS=` |
|--------|---------------------------------------------------------------------------------------|-------------------|
| GPU    | our Triton kernels; FLA's chunk rule and causal-conv1d, where they can be imported     | `auto`            |
| GPU    | our Triton kernels alone                                                              | `triton`          |
| any    | the twins                                                                             | `reference`       |
| CPU    | the twins                                                                             | `auto`            |
| CPU    | our Triton kernels, interpreted: `TRITON_INTERPRET=1` must be set; for tests          | `triton`          |

What an engine calls deterministic asks for `batch_invariant`: then FLA's and causal-conv1d's are not used, since what
they give depends on the batch and on what their autotuner found.
"""

import logging
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hybrid.kernels import reference

log = logging.getLogger(__name__)

SETTINGS = ("auto", "triton", "reference")
"""What `HYBRID_KERNELS` may say."""

OWN = {
    "add_rms_norm": "elementwise",
    "causal_conv1d": "convolution",
    "chunk_gated_delta_rule": "delta_rule",
    "combine_experts": "experts",
    "copy_states": "memory",
    "expert_linear": "experts",
    "gated_delta_step": "delta_rule_step",
    "gated_rms_norm": "elementwise",
    "invariant_linear": "matmul",
    "norm_rotate_store": "elementwise",
    "paged_attention": "attention",
    "rms_norm": "elementwise",
    "route_experts": "experts",
    "sigmoid_and_mul": "elementwise",
    "silu_and_mul": "elementwise",
    "sort_by_expert": "experts",
    "store_kv": "memory",
}
"""Every operation, and the module that has our kernel of it."""

WRITES = {
    "causal_conv1d": ("state",),
    "chunk_gated_delta_rule": ("state",),
    "copy_states": ("rows",),
    "gated_delta_step": ("conv", "recurrent"),
    "norm_rotate_store": ("cache",),
    "store_kv": ("cache",),
}
"""The arguments that an operation writes."""

EXTERNAL = ("causal_conv1d", "chunk_gated_delta_rule")
"""Operations for which another package may have a kernel too (`hybrid.kernels.external`)."""

ANY_BATCH = "batch_dependent_"
"""Before the name of an operation: the fastest one there is, whose results may depend on the batch."""


def setting() -> str:
    """What `HYBRID_KERNELS` asks for.

    Raises:
        ValueError: it asks for something that there is not.
    """
    asked = os.environ.get("HYBRID_KERNELS", "auto")
    if asked not in SETTINGS:
        raise ValueError(f"HYBRID_KERNELS must be one of {', '.join(SETTINGS)}; got {asked!r}")
    return asked


def uses_triton(device: torch.device) -> bool:
    """Whether tensors of a device are computed by our Triton kernels."""
    asked = setting()
    return asked == "triton" or (asked == "auto" and device.type == "cuda")


def implementation(name: str, device: torch.device) -> Callable[..., Any]:
    """The function that computes an operation on a device.

    Raises:
        RuntimeError: `HYBRID_KERNELS=triton` on a device for which Triton makes no code.
    """
    fastest = name.startswith(ANY_BATCH)
    name = name.removeprefix(ANY_BATCH)
    if not uses_triton(device):
        return _told(name, device, "the twin in plain torch", getattr(reference, name))
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError(
            "HYBRID_KERNELS=triton runs on a CPU only in Triton's interpreter; set TRITON_INTERPRET=1 before Python "
            "starts, or leave HYBRID_KERNELS out"
        )
    what = "our Triton kernel"
    if fastest and setting() == "auto":
        found = import_module("hybrid.kernels.external").implementation(name)
        if not isinstance(found, str):
            return _told(name, device, found.package, found.function)
        what += f": {found}"
    return _told(name, device, what, getattr(import_module(f"hybrid.kernels.{OWN[name]}"), name))


def _told(name: str, device: torch.device, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    log.info("%s on %s: %s", name, device.type, what)
    return function


def _chosen_at_first_call(name: str) -> Callable[..., Any]:
    """Chooses per kind of device when it is first needed there: a GPU kernel's module is not imported without a GPU."""
    chosen: dict[str, Callable[..., Any]] = {}

    def call(*args: Any) -> Any:
        device = next(arg for arg in args if isinstance(arg, Tensor)).device
        function = chosen.get(device.type)
        if function is None:
            function = chosen[device.type] = implementation(name, device)
        return function(*args)

    return call


def _like(at: int) -> Callable[..., Tensor]:
    """A fake result of the shape and type of an argument."""
    return lambda *args: args[at].new_empty(args[at].shape)


FAKES: dict[str, Callable[..., Any]] = {
    "add_rms_norm": lambda x, *rest: (x.new_empty(x.shape), x.new_empty(x.shape)),
    "causal_conv1d": _like(0),
    "chunk_gated_delta_rule": _like(2),
    "combine_experts": lambda y, places, weights: y.new_empty(places.shape[0], y.shape[1]),
    "copy_states": lambda *args: None,
    "expert_linear": lambda x, weight, order, *rest: x.new_empty(order.shape[0], weight.shape[1]),
    "gated_delta_step": lambda mixed, *rest: mixed.new_empty(mixed.shape[0], rest[6].shape[1], rest[6].shape[3]),
    "gated_rms_norm": _like(0),
    "invariant_linear": lambda x, weight, _: x.new_empty(x.shape[0], weight.shape[0]),
    "norm_rotate_store": _like(0),
    "paged_attention": _like(0),
    "rms_norm": _like(0),
    "route_experts": lambda logits, top_k, normalise: (
        logits.new_empty(logits.shape[0], top_k),
        logits.new_empty(logits.shape[0], top_k, dtype=torch.int64),
    ),
    "sigmoid_and_mul": _like(0),
    "silu_and_mul": _like(0),
    "sort_by_expert": lambda experts, num_experts, decode_start: (
        experts.new_empty(experts.numel()),
        experts.new_empty(experts.shape),
        experts.new_empty(2, num_experts),
    ),
    "store_kv": lambda *args: None,
}

_library = torch.library.Library("hybrid", "DEF")


def _define(name: str) -> Any:
    """Make the operation known to torch; returns it."""
    plain = name.removeprefix(ANY_BATCH)
    schema = torch.library.infer_schema(getattr(reference, plain), mutates_args=WRITES.get(plain, ()))
    _library.define(name + schema)
    _library.impl(name, _chosen_at_first_call(name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybrid::{name}", FAKES[plain], lib=_library)
    return getattr(torch.ops.hybrid, name).default


store_kv = _define("store_kv")
norm_rotate_store = _define("norm_rotate_store")
paged_attention = _define("paged_attention")
gated_delta_step = _define("gated_delta_step")
copy_states = _define("copy_states")
rms_norm = _define("rms_norm")
add_rms_norm = _define("add_rms_norm")
gated_rms_norm = _define("gated_rms_norm")
silu_and_mul = _define("silu_and_mul")
sigmoid_and_mul = _define("sigmoid_and_mul")
invariant_linear = _define("invariant_linear")
route_experts = _define("route_experts")
sort_by_expert = _define("sort_by_expert")
expert_linear = _define("expert_linear")
combine_experts = _define("combine_experts")
_causal_conv1d = {True: _define("causal_conv1d"), False: _define(ANY_BATCH + "causal_conv1d")}
_chunk_rule = {True: _define("chunk_gated_delta_rule"), False: _define(ANY_BATCH + "chunk_gated_delta_rule")}


def causal_conv1d(*args: Any, batch_invariant: bool) -> Tensor:
    """`reference.causal_conv1d`; unless `batch_invariant`, by the fastest kernel there is."""
    return _causal_conv1d[batch_invariant](*args)


def chunk_gated_delta_rule(*args: Any, batch_invariant: bool) -> Tensor:
    """`reference.chunk_gated_delta_rule`; unless `batch_invariant`, by the fastest kernel there is."""
    return _chunk_rule[batch_invariant](*args)
