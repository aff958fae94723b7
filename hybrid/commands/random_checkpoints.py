"""Small random checkpoints of every model family, written by transformers itself. `hybrid parity` runs on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from hybrid.models.transformers_types import is_new_enough

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""All sizes differ, so that a mix-up of two is found. Weights are wide enough for greedy answers to vary."""

GATED_DELTA: dict[str, Any] = {
    **BASE,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}

EXPERTS: dict[str, Any] = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

STATE_SPACE: dict[str, Any] = {
    **BASE,
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "num_key_value_heads": 4,
    "mamba_d_conv": 3,
    "mamba_d_state": 13,  # two states are then slightly smaller than a page of 64 tokens, which packs well
    "mamba_chunk_size": 64,
}

ODD: dict[str, Any] = {
    "vocab_size": 777,
    "hidden_size": 150,
    "intermediate_size": 99,
    "num_attention_heads": 6,
    "head_dim": 40,  # a quarter of it is rotated, in pairs
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 13,
    "linear_value_head_dim": 11,
}
"""Sizes that fill no vector and no cache line: rows are at every alignment."""

ODD_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 27, "shared_expert_intermediate_size": 45}

ODD_STATE_SPACE: dict[str, Any] = {
    "vocab_size": 777,
    "hidden_size": 132,
    "intermediate_size": 99,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_state": 11,
}


WINDOWS: dict[str, Any] = {
    **BASE,
    "head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
    "sliding_window": 47,  # shorter than a chunk; two states then fill three pages of 64 tokens, which packs well
    "query_pre_attn_scalar": 24,
}


SHORT_CONVOLUTION: dict[str, Any] = {
    **BASE,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_hidden_layers": 3,
}

GRANITE: dict[str, Any] = {
    **BASE,
    "embedding_multiplier": 1.3,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.9,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_d_state": 13,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 24,
    "shared_intermediate_size": 40,
}

FALCON: dict[str, Any] = {
    **BASE,
    "num_hidden_layers": 2,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 13,
    "mamba_norm_before_gate": False,
    "head_dim": 12,
    "embedding_multiplier": 1.3,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.8, 1.4],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
}

NEMOTRON: dict[str, Any] = {
    **BASE,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "head_dim": 20,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 13,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.6,
}

OLMO: dict[str, Any] = {  # transformers writes convolutions of queries, keys and values as if they had one size
    **BASE,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 20,
}

LATENT: dict[str, Any] = {
    **BASE,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_experts_per_tok": 3,
    "num_local_experts": 8,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.6,
}

KIMI: dict[str, Any] = {**LATENT, "linear_num_heads": 3, "linear_head_dim": 20}

BAILING: dict[str, Any] = {**LATENT, "head_dim": 20, "num_mtp_layers": 0}

JAMBA: dict[str, Any] = {
    **BASE,
    "num_hidden_layers": 3,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "mamba_d_state": 13,
    "mamba_dt_rank": 5,
}

LIGHTNING: dict[str, Any] = {
    **BASE,
    "initializer_range": 0.4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "head_dim": 20,
    "block_size": 64,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "linear_attn_alpha_factor": 0.9,
    "linear_attn_beta_factor": 1.2,
    "full_attn_alpha_factor": 1.1,
    "full_attn_beta_factor": 0.8,
    "mlp_alpha_factor": 1.3,
    "mlp_beta_factor": 0.7,
}

SINKS: dict[str, Any] = {
    **BASE,
    "head_dim": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
    "sliding_window": 47,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 24,
    "swiglu_limit": 0.9,  # some factors are above it
}

FULL: dict[str, Any] = {**BASE, "num_hidden_layers": 2, "head_dim": 20}


GRIFFIN: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 192,  # of gates and values together
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "block_types": ["recurrent", "attention"],
    "lru_width": 72,
    "attention_window_size": 47,
    "w_init_variance_scale": 1.0,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint.

    Attributes:
        config, model: names of transformers' classes.
        settings: arguments of the configuration class.
        fused: experts are stored together, as transformers keeps them in memory; else one by one, as it writes them.
        max_shard_size: largest size of one file; larger checkpoints are split into several.
    """

    config: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = False
    max_shard_size: str = "1GB"


ALL_FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family(
        "BailingHybridConfig", "BailingHybridForCausalLM", {**BAILING, "tie_word_embeddings": False}
    ),
    "bailing_hybrid, odd sizes, softplus, fused": Family(
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {
            **BAILING,
            "vocab_size": 777,
            "hidden_size": 75,
            "intermediate_size": 99,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 11,
            "kv_lora_rank": 21,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 13,
            "v_head_dim": 11,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 27,
            "kda_safe_gate": False,
            "attention_bias": True,
        },
        fused=True,
    ),
    "bamba": Family("BambaConfig", "BambaForCausalLM", {**STATE_SPACE, "tie_word_embeddings": False}),
    "bamba, biases, tied": Family(
        "BambaConfig",
        "BambaForCausalLM",
        {
            **STATE_SPACE,
            "tie_word_embeddings": True,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_d_state": 12,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "bamba, odd sizes": Family(
        "BambaConfig", "BambaForCausalLM", {**STATE_SPACE, **ODD_STATE_SPACE, "tie_word_embeddings": False}
    ),
    "falcon_h1": Family("FalconH1Config", "FalconH1ForCausalLM", {**FALCON, "tie_word_embeddings": False}),
    "falcon_h1, odd sizes, tied, norm": Family(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **FALCON,
            "vocab_size": 777,
            "hidden_size": 75,
            "intermediate_size": 99,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 26,
            "mamba_d_ssm": 66,
            "mamba_n_groups": 3,
            "mamba_d_state": 11,
            "mamba_rms_norm": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": Family("Gemma3TextConfig", "Gemma3ForCausalLM", {**WINDOWS, "tie_word_embeddings": False}),
    "gemma3_text, odd sizes, tied, scaled": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **WINDOWS,
            "vocab_size": 777,
            "hidden_size": 150,
            "intermediate_size": 99,
            "num_attention_heads": 6,
            "head_dim": 26,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 125,  # longer than a chunk
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gpt_oss": Family("GptOssConfig", "GptOssForCausalLM", {**SINKS, "tie_word_embeddings": False}),
    "gpt_oss, odd sizes, tied": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **SINKS,
            "vocab_size": 777,
            "hidden_size": 75,
            "intermediate_size": 27,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 26,
            "sliding_window": 125,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", {**GRANITE, "tie_word_embeddings": True}
    ),
    "granitemoehybrid, odd sizes, dense": Family(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE,
            "vocab_size": 777,
            "hidden_size": 75,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "mamba_n_heads": 6,
            "mamba_n_groups": 3,
            "mamba_d_state": 11,
            "num_local_experts": 0,
            "shared_intermediate_size": 99,
            "attention_bias": True,
            "mamba_proj_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "granitemoehybrid, attention alone, fused": Family(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE,
            "layer_types": ["full_attention"] * 2,
            "num_hidden_layers": 2,
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        fused=True,
    ),
    "jamba": Family("JambaConfig", "JambaForCausalLM", {**JAMBA, "tie_word_embeddings": False}),
    "jamba, odd sizes, tied, biases, fused": Family(
        "JambaConfig",
        "JambaForCausalLM",
        {
            **JAMBA,
            "vocab_size": 777,
            "hidden_size": 75,
            "intermediate_size": 99,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "mamba_expand": 1,
            "mamba_d_state": 11,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 7,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
        fused=True,
    ),
    "kimi_linear": Family("KimiLinearConfig", "KimiLinearForCausalLM", {**KIMI, "tie_word_embeddings": False}),
    "kimi_linear, odd sizes, low rank, fused": Family(
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            **KIMI,
            "vocab_size": 777,
            "hidden_size": 75,
            "intermediate_size": 99,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "linear_num_heads": 5,
            "linear_head_dim": 11,
            "q_lora_rank": 13,
            "kv_lora_rank": 21,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 13,
            "v_head_dim": 11,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 27,
            "attention_bias": True,
        },
        fused=True,
    ),
    "lfm2": Family(
        "Lfm2Config", "Lfm2ForCausalLM", {**SHORT_CONVOLUTION, "block_multiple_of": 48, "tie_word_embeddings": True}
    ),
    "lfm2, odd sizes, untied": Family(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            **SHORT_CONVOLUTION,
            "vocab_size": 777,
            "hidden_size": 150,
            "intermediate_size": 99,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "conv_L_cache": 4,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2_moe": Family(
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {
            **SHORT_CONVOLUTION,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.6,
        },
    ),
    "llama": Family("LlamaConfig", "LlamaForCausalLM", {**FULL, "tie_word_embeddings": False}),
    "minimax": Family("MiniMaxConfig", "MiniMaxForCausalLM", {**LIGHTNING, "tie_word_embeddings": False}),
    "minimax, odd sizes, tied, fused": Family(
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {
            **LIGHTNING,
            "vocab_size": 777,
            "hidden_size": 75,
            "intermediate_size": 99,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 26,
            "tie_word_embeddings": True,
        },
        fused=True,
    ),
    "nemotron_h": Family("NemotronHConfig", "NemotronHForCausalLM", {**NEMOTRON, "tie_word_embeddings": False}),
    "nemotron_h, odd sizes, latent, fused": Family(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **NEMOTRON,
            "vocab_size": 777,
            "hidden_size": 75,
            "intermediate_size": 99,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "mamba_head_dim": 11,
            "n_groups": 3,
            "ssm_state_size": 11,
            "n_group": 1,
            "topk_group": 1,
            "moe_latent_size": 45,
            "moe_intermediate_size": 27,
            "mlp_bias": True,
            "use_bias": True,
        },
        fused=True,
    ),
    "olmo_hybrid": Family("OlmoHybridConfig", "OlmoHybridForCausalLM", {**OLMO, "tie_word_embeddings": False}),
    "olmo_hybrid, odd sizes, tied, rotary, fused": Family(
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {
            **OLMO,
            "vocab_size": 777,
            "hidden_size": 150,
            "intermediate_size": 99,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 13,
            "linear_value_head_dim": 11,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "tie_word_embeddings": True,
        },
        fused=True,
    ),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {**FULL, "tie_word_embeddings": False}),
    "qwen3, odd sizes, tied": Family(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {
            **FULL,
            "vocab_size": 777,
            "hidden_size": 75,
            "intermediate_size": 99,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 26,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_text": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**GATED_DELTA, "tie_word_embeddings": True}),
    "qwen3_5_text, untied, sharded": Family(
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {**GATED_DELTA, "tie_word_embeddings": False},
        max_shard_size="150KB",
    ),
    "qwen3_5_text, odd sizes": Family(
        "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**GATED_DELTA, **ODD, "tie_word_embeddings": False}
    ),
    "qwen3_5_moe_text": Family("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**GATED_DELTA, **EXPERTS}),
    "qwen3_5_moe_text, fused, tied": Family(
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**GATED_DELTA, **EXPERTS, "tie_word_embeddings": True},
        fused=True,
    ),
    "qwen3_5_moe_text, odd sizes": Family(
        "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**GATED_DELTA, **EXPERTS, **ODD, **ODD_EXPERTS}
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**GATED_DELTA, **EXPERTS, "mlp_only_layers": [1]},
        max_shard_size="300KB",
    ),
    "qwen3_next, fused, probabilities": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**GATED_DELTA, **EXPERTS, "norm_topk_prob": False},
        fused=True,
    ),
    "qwen3_next, odd sizes": Family(
        "Qwen3NextConfig", "Qwen3NextForCausalLM", {**GATED_DELTA, **EXPERTS, **ODD, **ODD_EXPERTS}
    ),
    "recurrent_gemma": Family(
        "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", {**GRIFFIN, "tie_word_embeddings": False}
    ),
    "recurrent_gemma, odd sizes, tied, biases": Family(
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {
            **GRIFFIN,
            "vocab_size": 777,
            "hidden_size": 132,  # heads of 44, of which half is rotated
            "intermediate_size": 198,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "num_hidden_layers": 3,
            "block_types": ["recurrent", "recurrent", "attention"],
            "lru_width": 51,
            "conv1d_width": 3,
            "attention_window_size": 101,
            "attention_bias": True,
            "logits_soft_cap": 7.0,
            "tie_word_embeddings": True,
        },
    ),
}
"""By name, which begins with the model type of config.json."""

FAMILIES = {name: family for name, family in ALL_FAMILIES.items() if is_new_enough(name.partition(",")[0])}
"""Those that the installed transformers has."""


def is_comparable(name: str) -> bool:
    """Tell whether the transformers that is installed computes a family as its models were trained, and with the
    settings of its random checkpoint: before 5.23 it normalises the groups of a Bamba all together, and 5.16 rotates
    whole heads of a RecurrentGemma, not half of each one; before 5.19 the bound of gpt-oss's gates is 7."""
    settings, installed = FAMILIES[name].settings, Version(version("transformers"))
    is_other = settings.get("mamba_n_groups", 1) > 1 or name.startswith("recurrent_gemma")
    return installed >= Version("5.23" if is_other else "5.19" if "swiglu_limit" in settings else "0")


def random_model(family: Family, seed: int = 0) -> Any:
    """transformers' own model with random weights, in which no norm, bias or gate has its neutral initial value."""
    import transformers

    from hybrid.models.torch_functions import use_torch_functions

    torch.manual_seed(seed)
    config = getattr(transformers, family.config)(**family.settings)
    model = getattr(transformers, family.model)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_gate_bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("gate.weight", "router.weight")):
                parameter.copy_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    use_torch_functions(model)
    return model


def write_random_checkpoint(path: Path, name: str, seed: int = 0) -> Path:
    """Write a small random checkpoint of a family."""
    family = FAMILIES[name]
    model = random_model(family, seed)
    model.save_pretrained(path, max_shard_size=family.max_shard_size, save_original_format=not family.fused)
    return path


def add_random_predictor(path: Path) -> Path:
    """Add what published checkpoints keep under `mtp.` to a random one: a layer with the values of its layer of full
    attention (and the experts of the last layer), and random norms and a random product before it."""
    from safetensors.torch import load_file, save_file

    files = sorted(path.glob("*.safetensors"))
    stored: dict[str, torch.Tensor] = {}
    for file in files:
        stored |= load_file(file)
    attention = next(name for name in stored if name.endswith("self_attn.q_proj.weight"))
    layer = attention.removesuffix("self_attn.q_proj.weight")
    own = {name.replace(layer, "mtp.layers.0."): stored[name].clone() for name in stored if name.startswith(layer)}
    last = f"model.layers.{max(int(name.split('.')[2]) for name in stored if name.startswith('model.layers.'))}.mlp."
    parts = {name.replace(last, "mtp.layers.0.mlp."): stored[name] for name in stored if name.startswith(last)}
    if not parts.keys() <= own.keys():  # the layer of full attention has no experts, and the last one has
        own = {name: tensor for name, tensor in own.items() if ".mlp." not in name} | parts
    size = stored[attention].shape[1]
    own["mtp.fc.weight"] = torch.randn(size, 2 * size, dtype=torch.float32)
    own |= {
        f"mtp.{norm}.weight": torch.randn(size, dtype=torch.float32)
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    save_file(load_file(files[-1]) | own, files[-1], {"format": "pt"})
    index = path / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(own, files[-1].name)
        index.write_text(json.dumps(content))
    return path
