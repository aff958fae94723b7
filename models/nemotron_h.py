"""Nemotron-H and Nemotron 3: each layer has one part, which is Mamba-2, full attention without rotary positions, a
dense feed-forward part without a gate, or a mixture of such experts beside a shared one.
"""

from typing import Any

from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.models.attention import PlainAttention
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import Linear, squared_relu
from hybrid.models.mamba2 import Mamba2, Mamba2Sizes
from hybrid.models.mixers import Block
from hybrid.models.moe import ExpertsOnDisk, MoE, SigmoidRouter, UngatedExperts

IN_MEMORY = {
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


class NemotronExperts(MoE):
    """Routed experts, which may work on smaller rows, and a shared one."""

    def __init__(self, config: Any) -> None:
        size, count, latent = config.hidden_size, config.n_routed_experts, config.moe_latent_size
        experts = UngatedExperts(latent or size, config.moe_intermediate_size, count)
        shared = UngatedMLP(config, config.moe_shared_expert_intermediate_size)
        super().__init__(SigmoidRouter(config, count), experts, shared)
        self.has_latent = latent is not None
        if self.has_latent:
            self.fc1_latent_proj = Linear(size, latent, config.mlp_bias)
            self.fc2_latent_proj = Linear(latent, size, config.mlp_bias)

    def routed(self, x: Tensor, batch: Batch) -> Tensor:
        """Compute what the routed experts give."""
        if not self.has_latent:
            return super().routed(x, batch)
        chosen = self.choose(x, batch)
        return self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x, batch), *chosen, batch), batch)


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
    """Nemotron-H with its head: of a `NemotronHConfig`. Its layers for multi-token prediction are not supported."""

    is_rotated = False
    names_on_disk = (IN_MEMORY, {**IN_MEMORY, "model.": "backbone."})
    parts_on_disk = (
        ExpertsOnDisk(
            "n_routed_experts", "moe_intermediate_size", {"up_proj": ("up_proj",), "down_proj": ("down_proj",)}
        ),
    )

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the part of a layer."""
        if kind == "linear_attention":
            part: nn.Module = Mamba2(sizes_of(config))
        elif kind == "full_attention":
            part = PlainAttention(config)
        else:
            part = NemotronExperts(config) if kind == "moe" else UngatedMLP(config, config.intermediate_size)
        return (Block("norm", mixer=part),)

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        for name, known in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
            if getattr(config, name) != known:
                return f"{name} {getattr(config, name)!r} is not supported, only {known!r}"
        return super().unsupported(config)
