"""Nemotron-H and Nemotron 3: each layer has one part, which is Mamba-2, full attention without rotary positions, a
dense feed-forward part without a gate, or a mixture of such experts beside a shared one.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.models.attention import PlainAttention, head_dim_of
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import Linear, RMSNorm, Rotary, squared_relu
from hybrid.models.mamba2 import Mamba2, Mamba2Sizes
from hybrid.models.moe import SigmoidRouter, UngatedExperts, expert_layouts
from hybrid.models.weights import Layouts, renamed, with_names
from hybrid.spec import HybridSpec, TokenTensor

NAMES = {
    "model.embed_tokens.": "model.embeddings.",
    "model.norm.": "model.norm_f.",
    ".gate.choice_bias": ".gate.e_score_correction_bias",
}
"""Parts of names, and what they are in transformers. In published checkpoints `model.` is `backbone.`"""


class UngatedMLP(nn.Module):
    """A feed-forward part without a gate."""

    def __init__(self, config: Any, intermediate_size: int) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, intermediate_size, config.mlp_bias)
        self.down_proj = Linear(intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        return self.down_proj(squared_relu(self.up_proj(x, batch)), batch)


class NemotronExperts(nn.Module):
    """Routed experts, which may work on smaller rows, and a shared one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, latent = config.hidden_size, config.moe_latent_size
        self.gate = SigmoidRouter(
            size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            config.routed_scaling_factor,
            has_bias=True,
            least=1e-20,
            groups=config.n_group,
            top_groups=config.topk_group,
        )
        self.experts = UngatedExperts(latent or size, config.moe_intermediate_size, config.n_routed_experts)
        self.shared_experts = UngatedMLP(config, config.moe_shared_expert_intermediate_size)
        if latent is not None:
            self.fc1_latent_proj = Linear(size, latent, config.mlp_bias)
            self.fc2_latent_proj = Linear(latent, size, config.mlp_bias)
        self.has_latent: bool = latent is not None

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        chosen = self.gate.choose(x, batch)
        rows = self.fc1_latent_proj(x, batch) if self.has_latent else x
        y = self.experts(rows, *chosen, batch)
        if self.has_latent:
            y = self.fc2_latent_proj(y, batch)
        return y + self.shared_experts(x, batch)


class NemotronLayer(nn.Module):
    """One layer: a norm and a part, with a residual connection. They have the names of the checkpoint.

    Attributes:
        kind: of its part.
    """

    def __init__(self, config: Any, kind: str, index_of_kind: int) -> None:
        super().__init__()
        self.kind: str = kind
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon, offset=0.0)
        self.mixer: nn.Module
        if kind == "linear_attention":
            self.mixer = Mamba2(sizes_of(config), index_of_kind)
        elif kind == "full_attention":
            self.mixer = PlainAttention(config, index_of_kind)
        else:
            self.mixer = NemotronExperts(config) if kind == "moe" else UngatedMLP(config, config.intermediate_size)

    @property
    def linear(self) -> Any:
        """The part, where its state is in state slots."""
        return self.mixer if self.kind == "linear_attention" else None

    @property
    def attention(self) -> Any:
        """The part, where its keys and values are in pages."""
        return self.mixer if self.kind == "full_attention" else None

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
        """Run the layer on `x + residual`, as `ResidualLayer.forward`."""
        residual, y = self.norm.of_terms(x, residual)
        if self.kind == "linear_attention":
            return self.mixer(y, batch, state, chunk_size), residual
        if self.kind == "full_attention":
            return self.mixer(y, batch, rotary, kv, chunk_size), residual
        return self.mixer(y, batch), residual


def sizes_of(config: Any) -> Mamba2Sizes:
    """The sizes of the linear layers."""
    return Mamba2Sizes(
        size=config.hidden_size,
        heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        groups=config.n_groups,
        state_size=config.ssm_state_size,
        width=config.conv_kernel,
        conv_bias=config.use_conv_bias,
        in_bias=config.use_bias,
        out_bias=config.use_bias,
        limits=(config.time_step_min, float("inf")),  # as transformers has it
        eps=config.layer_norm_epsilon,
    )


class NemotronHForCausalLM(CausalLM):
    """Nemotron-H with its head.

    Args:
        config: a `NemotronHConfig` of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        has_predictor: must be False; the family's layers for multi-token prediction are not supported.
    """

    waits_for_device: bool = True  # the state space rule reads the slots on the host

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        kinds = config.layers_block_type
        layers = (NemotronLayer(config, kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds))
        norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon, offset=0.0)
        super().__init__(config, chunk_size, 0, layers, norm)

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        for name, known in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
            if getattr(config, name) != known:
                return f"{name} {getattr(config, name)!r} is not supported, only {known!r}"
        return super().unsupported(config)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        kinds, heads = config.layers_block_type, config.num_key_value_heads
        return HybridSpec(
            tokens=(TokenTensor.kv(kinds.count("full_attention"), heads, head_dim_of(config), dtype),),
            state=sizes_of(config).states(kinds.count("linear_attention"), dtype),
        )

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        names = {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
        found = expert_layouts(parameter, config.n_routed_experts, config.moe_intermediate_size, names)
        found = found or renamed(parameter, NAMES)
        return (*found, *with_names(found, {"model.": "backbone."}))
