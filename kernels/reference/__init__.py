"""The kernels in plain torch: correct on every device, fast enough to be the CPU path, and the results that faster
kernels are tested against.

Each is the *twin* of the kernel of the same name and signature in `hybrid.kernels.triton`, in the file of the same
name. What has no counterpart there runs in plain torch on every device but CPUs, whose operations are compiled
(`state_space`).

Packed batches: the new tokens of all requests are concatenated along one dimension without padding, and `cu_seqlens`
`[R + 1]` holds the offset of each request's first token. Pools are addressed by page ids (`block_table`) and by state
slots (`state_read`, `state_write`, `[R]`); a request reads one slot and writes another, and the two may be equal only
for its own slot.

The chunks of every request are computed in products of their own, whose shapes do not depend on the rest of the batch.
"""

from hybrid.kernels.reference.attention import paged_attention
from hybrid.kernels.reference.convolution import causal_conv1d, causal_conv1d_update
from hybrid.kernels.reference.delta_rule import (
    chunk_gated_delta_rule,
    delta_gates,
    gated_delta_step,
    recurrent_gated_delta_rule,
)
from hybrid.kernels.reference.elementwise import (
    add_rms_norm,
    gated_rms_norm,
    l2norm,
    norm_rotate_store,
    rms_norm,
    rotate,
    sigmoid,
    sigmoid_and_mul,
    silu,
    silu_and_mul,
    softplus,
)
from hybrid.kernels.reference.experts import add_shared, combine_experts, expert_linear, route_experts, sort_by_expert
from hybrid.kernels.reference.matmul import batch_invariant_linear
from hybrid.kernels.reference.memory import copy_states, fill_in_tokens, shift_rows, store_kv

__all__ = [
    "add_rms_norm",
    "add_shared",
    "batch_invariant_linear",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "combine_experts",
    "copy_states",
    "delta_gates",
    "expert_linear",
    "fill_in_tokens",
    "gated_delta_step",
    "gated_rms_norm",
    "l2norm",
    "norm_rotate_store",
    "paged_attention",
    "recurrent_gated_delta_rule",
    "rms_norm",
    "rotate",
    "route_experts",
    "shift_rows",
    "sigmoid",
    "sigmoid_and_mul",
    "silu",
    "silu_and_mul",
    "softplus",
    "sort_by_expert",
    "store_kv",
]
