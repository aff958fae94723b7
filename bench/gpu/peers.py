"""Kernels of other packages, called on the same work. A package that is not installed raises when it is asked for."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from gpu.harness import Call
from torch import Tensor

Contiguous = tuple[Tensor, Tensor, Tensor]
"""q `[R, heads, tokens, head_dim]`, k and v `[R, kv_heads, keys, head_dim]`, each in one piece."""


def _only(backend: str) -> Any:
    """One kernel of torch's; on a CPU the plain one, since a rehearsal proves the call alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    asked = getattr(SDPBackend, backend)
    return sdpa_kernel(asked if torch.cuda.is_available() else SDPBackend.MATH)


def sdpa_decode(sets: Sequence[Contiguous], scale: float, backend: str, grouped: bool) -> list[Call]:
    """torch's SDPA on one token of each request.

    Args:
        backend: a name of `torch.nn.attention.SDPBackend`.
        grouped: heads that share keys are given as tokens, which reads every key once.
    """

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        asked = q.view(q.shape[0], k.shape[1], -1, q.shape[-1]) if grouped else q
        with _only(backend):
            return F.scaled_dot_product_attention(asked, k, v, scale=scale, enable_gqa=not grouped).view(q.shape)

    return [lambda x=x: call(*x) for x in sets]


def with_keys_repeated(sets: Sequence[Contiguous]) -> list[Contiguous]:
    """The same with keys and values of their own for every head, for kernels that share none."""
    return [(q, *(x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))) for q, k, v in sets]


def sdpa_extend(sets: Sequence[Contiguous], scale: float) -> list[Call]:
    """torch's flash kernel on new tokens after a prefix: the mask is aligned to the last key."""
    from torch.nn.attention.bias import causal_lower_right

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = q.shape[1] != k.shape[1]
        if q.shape[2] == k.shape[2]:
            with _only("FLASH_ATTENTION"):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
        # takes the flash kernel wherever that can run; within `_only` it would ask for more than it needs
        mask = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)

    return [lambda x=x: call(*x) for x in sets]


def fla_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, read: Tensor, write: Tensor
) -> Callable[[], Tensor]:
    """FLA's recurrent rule on one token of each request: states gathered from the pool and scattered back. Shapes are
    those of `reference.recurrent_gated_delta_rule`."""
    rule: Any = import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    q, k, v, g, beta = (x.unsqueeze(1) for x in (q, k, v, g, beta))

    def call() -> Tensor:
        output, state = rule(
            q, k, v, g=g, beta=beta, initial_state=pool[read], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        pool[write] = state
        return output.squeeze(1)

    return call


def fla_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Callable[[], tuple[Tensor, Tensor]]:
    """FLA's chunk rule on R prompts of T tokens in its fastest form: inputs `[R, T, ...]`, states in one piece."""
    rule: Any = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def call() -> tuple[Tensor, Tensor]:
        return rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return call


def package_convolution(x: Tensor, weight: Tensor, window: Tensor) -> Callable[[], Tensor]:
    """causal-conv1d's convolution on R prompts `[R, T, channels]` with windows `[R, width - 1, channels]`."""
    run: Any = import_module("causal_conv1d").causal_conv1d_fn
    x, window = x.transpose(1, 2), window.transpose(1, 2)  # channels stay innermost in memory, as it wants them
    return lambda: run(x, weight, initial_states=window, activation="silu").transpose(1, 2)
