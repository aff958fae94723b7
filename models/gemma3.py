"""Gemma 3, the text model: sliding-window attention in most layers, full attention in the rest. There is no recurrent
state: what the windows hold is the state of a sequence (`models/attention.py`).

On a GPU, window layers run in plain torch on prompts; on a CPU, and for decoded tokens and full attention, by the
kernels of all families.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybrid.models.attention import Attention, WindowAttention
from hybrid.models.causal_lm import CausalLM, angles, rotary_frequencies, unsupported_rotary
from hybrid.models.layers import MLP, Rotary, gelu_and_mul
from hybrid.models.mixers import Block

FULL, SLIDING = "full_attention", "sliding_attention"


class Gemma3ForCausalLM(CausalLM):
    """Gemma 3 text with its head: of a `Gemma3TextConfig`."""

    norm_offset = 1.0
    rotary_layers = FULL

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        super().__init__(config, chunk_size, has_predictor)
        self.window_frequencies, self.window_rotary_scale = rotary_frequencies(config, config.head_dim, SLIDING)
        size, types = config.hidden_size, (torch.float32, torch.bfloat16, torch.float16)
        self.roots: dict[torch.dtype, float] = {
            dtype: torch.tensor(size**0.5, dtype=dtype, device="cpu").item() for dtype in types
        }

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer."""
        attention = WindowAttention(config, config.sliding_window) if kind == SLIDING else Attention(config)
        attention.scale = config.query_pre_attn_scalar**-0.5
        mlp = MLP(config.hidden_size, config.intermediate_size, activation=gelu_and_mul)
        return (
            Block("input_layernorm", "post_attention_layernorm", self_attn=attention),
            Block("pre_feedforward_layernorm", "post_feedforward_layernorm", mlp=mlp),
        )

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        if config.hidden_activation != "gelu_pytorch_tanh":
            return f"hidden_activation {config.hidden_activation!r} is not supported, only 'gelu_pytorch_tanh'"
        for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
            if getattr(config, name):
                return f"{name}={getattr(config, name)!r} is not supported, only null"
        if not isinstance(config.sliding_window, int) or config.sliding_window < 1:
            return f"sliding_window {config.sliding_window!r} is not a number of tokens"
        for kind in (SLIDING, FULL):
            if kind not in config.layer_types:
                return f"no {kind} layer in layer_types; this package runs models with windows and full attention"
            if (message := unsupported_rotary(config.rope_parameters[kind])) is not None:
                return message
        return None

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embeddings of tokens, times the root of their size."""
        x = super().embed(token_ids)
        return x * self.roots[x.dtype]

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """The angles of a step's tokens, at positions `[T]`, or `[3, T]` with images: the family has one position for
        each token, so that the rows are equal."""
        self.window_frequencies = self.window_frequencies.to(positions.device)
        own = positions if positions.dim() == 1 else positions[0]
        windows = angles(own.unsqueeze(-1), self.window_frequencies, self.window_rotary_scale, dtype)
        return replace(super().rotary(positions, dtype), windows=windows)
