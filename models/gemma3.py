"""Gemma 3, the text model: sliding-window attention in most layers, full attention in the rest. There is no recurrent
state: what the windows hold is the state of a sequence (`models/attention.py`).

On a GPU, window layers run in plain torch on prompts; on a CPU, and for decoded tokens and full attention, by the
kernels of all families.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.models.attention import Attention, Heads, WindowAttention, rings
from hybrid.models.causal_lm import CausalLM, angles, rotary_frequencies, unsupported_rotary
from hybrid.models.layers import (
    MLP,
    RMSNorm,
    Rotary,
    gelu_and_mul,
)
from hybrid.spec import HybridSpec, TokenTensor

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class TwoRotaries(Rotary):
    """The angles of a step: those of full attention, and of the windows.

    Attributes:
        windows: of the window layers.
    """

    windows: Rotary


class Gemma3Layer(nn.Module):
    """One layer: attention, then a feed-forward part, each between two norms. Its parts have the names of the
    checkpoint.

    Attributes:
        is_linear: its keys and values are state: it has a window.
        parts: the norm before attention, attention, the norm before the feed-forward part, the feed-forward part.
    """

    def __init__(self, config: Any, layer_type: str, index_of_type: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_linear: bool = layer_type == SLIDING
        kind = WindowAttention if self.is_linear else Attention
        self.self_attn: Heads = kind(config, index_of_type, config.head_dim)
        self.self_attn.scale = config.query_pre_attn_scalar**-0.5
        self.mlp = MLP(size, config.intermediate_size, activation=gelu_and_mul)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.input_layernorm,
            self.self_attn,
            self.pre_feedforward_layernorm,
            self.mlp,
        )

    @property
    def linear(self) -> Heads | None:
        """Attention, where its keys and values are state."""
        return self.self_attn if self.is_linear else None

    @property
    def attention(self) -> Heads | None:
        """Attention, where its keys and values are in pages."""
        return None if self.is_linear else self.self_attn

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        batch: Batch,
        rotary: TwoRotaries,
        kv: Tensor,
        state: dict[str, Tensor],
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on `x + residual`, as `ResidualLayer.forward`."""
        if residual is None:
            residual, y = x, self.input_layernorm(x)
        else:
            residual, y = self.input_layernorm.of_sum(x, residual)
        if self.is_linear:
            y = self.self_attn(y, batch, rotary.windows, state, chunk_size)
        else:
            y = self.self_attn(y, batch, rotary, kv, chunk_size)
        residual, y = self.pre_feedforward_layernorm.of_sum(self.post_attention_layernorm(y), residual)
        return self.post_feedforward_layernorm(self.mlp(y, batch)), residual


class Gemma3ForCausalLM(CausalLM):
    """Gemma 3 text with its head.

    Args:
        config: a `Gemma3TextConfig` of transformers.
        chunk_size: prompts are computed in chunks of this many tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    waits_for_device: bool = True  # the rings are read and written on the host's word
    rotary_layers: str | None = FULL

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        kinds = config.layer_types
        layers = (Gemma3Layer(config, kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds))
        super().__init__(config, chunk_size, config.head_dim, layers, RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.window_frequencies: Tensor
        self.window_rotary_scale: float
        self.window_frequencies, self.window_rotary_scale = rotary_frequencies(config, config.head_dim, SLIDING)
        size, types = config.hidden_size, (torch.float32, torch.bfloat16, torch.float16)
        self.roots: dict[torch.dtype, float] = {
            dtype: torch.tensor(size**0.5, dtype=dtype, device="cpu").item() for dtype in types
        }

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

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> TwoRotaries:
        """The angles of a step's tokens, at positions `[T]`, or `[3, T]` with images: the family has one position for
        each token, so that the rows are equal."""
        self.window_frequencies = self.window_frequencies.to(positions.device)
        full = super().rotary(positions, dtype)
        own = positions if positions.dim() == 1 else positions[0]
        windows = angles(own.unsqueeze(-1), self.window_frequencies, self.window_rotary_scale, dtype)
        return TwoRotaries(full.cos, full.sin, windows)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        kinds, heads = config.layer_types, config.num_key_value_heads
        return HybridSpec(
            tokens=(TokenTensor.kv(kinds.count(FULL), heads, config.head_dim, dtype),),
            state=(rings(kinds.count(SLIDING), config.sliding_window, heads, config.head_dim, dtype),),
        )
