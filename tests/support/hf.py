"""Shared by the tests of `hybrid.hf`: a tiny random model of every kind that transformers has."""

from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid.hf.prefix_cache import PrefixCache
from hybrid.models.torch_functions import use_torch_functions
from hybrid.models.transformers_types import NEEDED

GRID = 16
VOCAB = 128

WITHOUT_ANSWERS = ("branch", "prompt_end", "geometric")
"""Placements of a cache that caches prompts only."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
MAMBA_1 = {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
INDEXED = {
    **LATENT,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 200,  # all: among keys of equal score the choice depends on how a prompt is cut
}
INKLING = {
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    "sliding_window_size": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "d_rel": 4,
    "rel_extent": 64,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
EVERY_SECOND = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
HYBRIDS = ["linear_attention", "hybrid", "linear_attention", "hybrid"]

SUPPORTED: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16, "mlp_only_layers": []},
    "olmo_hybrid": DELTA,
    "qwen4_exp_text": {
        **DELTA,
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "layer_types": DELTA["layer_types"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1, 3],
        "ngram_vocab_size_base": 100,
        "heads_per_ngram": 2,
        "split_ngram_parts": 2,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": DELTA["layer_types"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": HYBRIDS,
        "mamba_d_state": 8,
        "mamba_headdim": 16,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "use_mem_rope": True,
        "num_key_value_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], **EXPERTS, "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"], "sliding_window": 24},
    "kimi_linear": {
        **LATENT,
        "num_hidden_layers": 4,
        "layer_types": EVERY_SECOND,
        "q_lora_rank": None,
        "num_local_experts": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
    },
    "bailing_hybrid": {**LATENT, "num_hidden_layers": 4, "layer_types": EVERY_SECOND, "num_experts": 4},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 24},
    "inkling_text": INKLING,
    "inkling2_text": {**INKLING, "unpadded_vocab_size": VOCAB},
    "lara_mini": {
        **DELTA,
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
        "sliding_window": 24,
    },
    "llama": {},
    "qwen3": {},
    "deepseek_v3": {**LATENT, "n_routed_experts": 4, "n_shared_experts": 1},
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": INDEXED,
    "mistral": {"sliding_window": 24},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""Supported model types, with the settings of a tiny model. docs/transformers.md has the same list."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "jamba": (
        {**MAMBA_1, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4},
        "drops its recurrent states",
    ),
    "zamba": (
        {
            **MAMBA_1,
            "num_hidden_layers": 4,
            "layers_block_type": HYBRIDS,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "num_key_value_heads": 4,
            "n_mamba_heads": 2,
        },
        "drops its recurrent states",
    ),
    "recurrent_gemma": ({"lru_width": 32, "block_types": ["recurrent", "attention"]}, "outside of its cache"),
    "minimax": ({}, "does not run on transformers' DynamicCache"),
    "deepseek_v4": ({}, "DeepseekV4HCACache"),
    "inkling2_loop_text": (
        {
            **{name: value for name, value in INKLING.items() if name not in ("mlp_layer_types", "n_shared_experts")},
            "unpadded_vocab_size": VOCAB,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
            "loop_num_passes": 2,
            "loop_gate_rank": 4,
        },
        "adds layers to its cache",
    ),
    "falcon_mamba": ({"state_size": 8, "time_step_rank": 4}, "none of its layers is attention"),
}
"""Model types that are refused, with settings and a part of the reason."""

NEWER = {name for name, first in NEEDED.items() if Version(transformers.__version__) < Version(first)}
"""Model types that need a newer transformers than the installed one."""


def having(*names: str) -> list[str]:
    """Return those of these model types that the installed version of transformers has."""
    return [name for name in names if name not in NEWER]


for name in NEWER:
    SUPPORTED.pop(name, None)
    REFUSED.pop(name, None)


def tiny_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model. No parameter has its neutral value."""
    settings = SUPPORTED[name] if name in SUPPORTED else REFUSED[name][0]
    config = AutoConfig.for_model(name, **{**COMMON, **settings, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


IMAGE, VIDEO = 5, 6
"""The tokens that stand for a part of an image and of a video, in models of `vision_model`."""


def vision_model(model_type: str = "qwen3_5") -> Any:
    """A tiny random vision model, `qwen3_5` or `qwen3_5_moe`."""
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[model_type]
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    config = getattr(transformers, f"{name}Config")(
        text_config={
            **COMMON,
            **SUPPORTED[f"{model_type}_text"],
            "rope_parameters": {**rope, "mrope_interleaved": True},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    use_torch_functions(model)
    return model


def text(count: int, seed: int = 0, rows: int = 1) -> Tensor:
    """Prompts of `count` tokens without those that stand for images."""
    prompt = ids(count, seed, rows)
    prompt[(prompt == IMAGE) | (prompt == VIDEO)] = 7
    return prompt


def image_prompt(*parts: int | tuple[int, int, int]) -> dict[str, Tensor]:
    """One prompt as a processor returns it: numbers of text tokens, and images as (rows, columns, seed) of tokens."""
    tokens, types, pixels, grids = [], [], [], []
    for at, part in enumerate(parts):
        if isinstance(part, int):
            tokens.append(text(part, at))
            types.append(torch.zeros(1, part, dtype=torch.int))
            continue
        rows, columns, seed = part
        tokens.append(torch.full((1, rows * columns), IMAGE))
        types.append(torch.ones(1, rows * columns, dtype=torch.int))
        generator = torch.Generator().manual_seed(seed)
        pixels.append(torch.randn(4 * rows * columns, 96, generator=generator))
        grids.append(torch.tensor([1, 2 * rows, 2 * columns]))
    found = {"input_ids": torch.cat(tokens, 1), "mm_token_type_ids": torch.cat(types, 1)}
    return {**found, "pixel_values": torch.cat(pixels), "image_grid_thw": torch.stack(grids)} if pixels else found


def cache_on(model: Any, memory: int | str = "4MiB", **options: Any) -> PrefixCache:
    """A cache with chunks of 16 tokens."""
    return PrefixCache(model, memory, chunk_size=GRID, **options)


def ids(count: int, seed: int = 0, rows: int = 1) -> Tensor:
    """Prompts of `count` tokens, none of them special."""
    return torch.randint(3, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def greedy(count: int = 4) -> dict[str, Any]:
    """Options for exactly `count` tokens, with their logits."""
    return {
        "max_new_tokens": count,
        "min_new_tokens": count,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }


def assert_same(one: Any, other: Any) -> None:
    """Two outputs of `generate` are bitwise equal."""
    assert torch.equal(one.sequences, other.sequences)
    for a, b in zip(one.logits, other.logits, strict=True):
        assert torch.equal(a, b)


def assert_close(one: Any, other: Any, tolerance: float = 1e-4) -> None:
    """The logits of the first token agree within rounding, as part of their range."""
    a, b = one.logits[0].float(), other.logits[0].float()
    assert float((a - b).abs().max()) <= tolerance * float(b.abs().max())


def assert_nothing_held(cache: PrefixCache) -> None:
    """The audit passes, and no page or state is held outside of the tree."""
    cache.audit()
    stats = cache.stats()
    assert (stats.pages_private, stats.states_private) == (0, 0)
