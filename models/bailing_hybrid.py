"""Ling 3.0 (`bailing_hybrid`): the layers of Kimi Linear, with decays that have a bound, rotary positions and a gate in
latent attention, and experts in groups. Layers for multi-token prediction are left out.
"""

from typing import Any

from hybrid.models.kda import KimiDeltaAttention, kda_layouts
from hybrid.models.kimi_linear import KimiLinearForCausalLM
from hybrid.models.latent_attention import LatentAttention, latent_layouts
from hybrid.models.layers import Linear
from hybrid.models.mixers import Mixer
from hybrid.models.moe import ExpertsOnDisk

PUBLISHED = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.": ".attention.",
    ".gate.choice_bias": ".gate.expert_bias",
}
"""Parts of names, and what they are in published checkpoints."""


class BailingHybridForCausalLM(KimiLinearForCausalLM):
    """Ling 3.0 with its head: of a `BailingHybridConfig`."""

    names_on_disk = (
        {".choice_bias": ".e_score_correction_bias"},
        PUBLISHED,
        {**PUBLISHED, ".o_proj.": ".dense."},  # of latent attention
    )
    parts_on_disk = (
        ExpertsOnDisk("num_local_experts", "moe_intermediate_size"),
        kda_layouts,
        latent_layouts,
    )

    @classmethod
    def linear(cls, config: Any) -> Mixer:
        """Make the mixer of a linear-attention layer."""
        size, heads = config.hidden_size, config.linear_num_heads
        decay, gate = ({f"{name}_proj": Linear(size, heads * config.linear_head_dim)} for name in "fg")
        lowest = config.kda_lower_bound if config.kda_safe_gate else None
        return KimiDeltaAttention(config, decay, gate, (heads,), lowest)

    @classmethod
    def attention(cls, config: Any) -> Mixer:
        """Make the mixer of a full-attention layer."""
        return LatentAttention(config, gated=True)

    @classmethod
    def rotated_dim(cls, config: Any) -> int:
        """Return the size of what is rotated of a head."""
        size: int = config.qk_rope_head_dim
        return size

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        if (config.rope_parameters or {}).get("mscale_all_dim"):
            return "mscale_all_dim in rope_parameters is not supported"
        if getattr(config, "q_lora_rank", None) or getattr(config, "use_kda_lora", False):
            return "q_lora_rank and use_kda_lora are not supported, only projections of full rank"
        if (gate := getattr(config, "gated_attention_proj_granularity_type", "head_wise")) != "head_wise":
            return f"gated_attention_proj_granularity_type {gate!r} is not supported, only 'head_wise'"
        return super().unsupported(config)

    @staticmethod
    def ignores(name: str, config: Any) -> bool:
        """Tell whether a tensor on disk is not used: layers for multi-token prediction come after the others."""
        layer = name.removeprefix("model.layers.").partition(".")[0]
        return layer.isdigit() and int(layer) >= config.num_hidden_layers
