"""What the benchmarks of models on a CPU share: random models, random prompts, and what is timed."""

from __future__ import annotations

import random
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybrid import Engine, SamplingParams
from hybrid.commands.random_checkpoints import FAMILIES
from hybrid.commands.random_checkpoints import random_model as random_checkpoint
from hybrid.models.moe import Experts
from hybrid.models.torch_functions import use_torch_functions

VOCAB = 8192

SIZES: dict[str, int] = {
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""Of the model: 51M parameters."""

LINEAR = [*["linear_attention"] * 3, "full_attention"] * 2
STATE_SPACE = {"mamba_n_heads": 20, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_d_state": 64}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 896}
FULL = {name: SIZES[name] for name in [*SIZES][:6]}
LATENT = {
    **FULL,
    "num_key_value_heads": 8,
    "layer_types": LINEAR,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "mlp_layer_types": [*["dense"] * 4, *["sparse"] * 4],
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 896,
    "n_group": 1,
    "topk_group": 1,
}

OF_FAMILIES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": LATENT,
    "bamba": {**FULL, **STATE_SPACE, "attn_layer_indices": [3, 7]},
    "falcon_h1": {**FULL, **STATE_SPACE, "num_hidden_layers": 6, "mamba_d_ssm": 1280},
    "gemma3_text": {**FULL, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2, "sliding_window": 512},
    "gpt_oss": {
        **FULL,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "sliding_window": 128,
        "intermediate_size": 896,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
    "granitemoehybrid": {
        **FULL,
        **STATE_SPACE,
        "layer_types": LINEAR,
        "num_local_experts": 0,
        "shared_intermediate_size": 1792,
    },
    "jamba": {
        **FULL,
        "attn_layer_period": 4,
        "attn_layer_offset": 3,
        "intermediate_size": 896,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "mamba_d_state": 16,
        "mamba_dt_rank": 40,
    },
    "kimi_linear": {**LATENT, "linear_num_heads": 10, "linear_head_dim": 64},
    "lfm2": {**FULL, "layer_types": [*["conv"] * 3, "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**FULL, **EXPERTS, "layer_types": [*["conv"] * 3, "full_attention"] * 2, "num_dense_layers": 2},
    "llama": FULL,
    "minimax": {
        **FULL,
        "layer_types": LINEAR,
        "intermediate_size": 896,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
    "nemotron_h": {
        **FULL,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 3,
        "mamba_num_heads": 20,
        "mamba_head_dim": 64,
        "n_groups": 1,
        "ssm_state_size": 64,
        "n_routed_experts": 16,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 896,
        "moe_shared_expert_intermediate_size": 896,
    },
    "olmo_hybrid": {**SIZES, "layer_types": LINEAR, "linear_num_key_heads": 10, "linear_num_value_heads": 10},
    "qwen3": FULL,
    "qwen3_5_moe_text": {**SIZES, **EXPERTS, "layer_types": LINEAR, "shared_expert_intermediate_size": 896},
    "qwen3_5_text": {**SIZES, "layer_types": LINEAR},
    "qwen3_next": {**SIZES, **EXPERTS, "layer_types": LINEAR, "shared_expert_intermediate_size": 896},
    "recurrent_gemma": {
        **FULL,
        "intermediate_size": 3584,  # of gate and up together
        "num_key_value_heads": 1,
        "block_types": ["recurrent", "recurrent", "attention"],
        "lru_width": 640,
        "attention_window_size": 512,
    },
}
"""Sizes of models of about as many parameters, by the names of `hybrid.commands.random_checkpoints.FAMILIES`."""

RNG = random.Random(1)


@contextmanager
def random_model(args: Namespace, **sizes: int) -> Iterator[tuple[Path, Any]]:
    """A folder with a random Qwen3.5, and transformers' model of it. torch gets the threads that were asked for."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), save_random_model(Path(folder), **sizes)


def save_random_model(path: Path, **sizes: int) -> Any:
    """A random Qwen3.5, by default of 51M parameters, saved by transformers; returns transformers' model."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    sizes = {**SIZES, **sizes}
    config = Qwen3_5TextConfig(vocab_size=VOCAB, tie_word_embeddings=True, initializer_range=0.05, **sizes)
    model = Qwen3_5ForCausalLM(config).eval()
    use_torch_functions(model)
    model.save_pretrained(path)
    return model


def save_random_family(path: Path, name: str) -> Path:
    """A random model of a family, saved by transformers."""
    family = FAMILIES[name]
    sizes = {**OF_FAMILIES[name], "vocab_size": VOCAB, "initializer_range": 0.05, "tie_word_embeddings": True}
    random_checkpoint(replace(family, settings={**family.settings, **sizes})).save_pretrained(path)
    return path


def bytes_of_a_token(engine: Engine) -> float:
    """Bytes of weights that a decoded token reads: of the experts as many as it is routed to."""
    total = 0.0
    for module in engine.model.modules():
        share = 1.0
        if isinstance(module, Experts):
            share = engine.model.config.num_experts_per_tok / len(module.down_proj)
        if not isinstance(module, torch.nn.Embedding):
            total += share * sum(own.nbytes for own in module.parameters(recurse=False))
            scale = getattr(module, "scale", None)  # of a weight in bytes; of attention it is a number
            total += scale.nbytes if isinstance(scale, torch.Tensor) else 0
            if isinstance(module, Experts):
                total += share * sum(own.nbytes for own in module.scales.values())
    return total


def ids(count: int) -> list[int]:
    """A random prompt: two of them share nothing."""
    return RNG.choices(range(3, VOCAB), k=count)


def greedy(count: int) -> SamplingParams:
    """Exactly `count` tokens."""
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


def first_token(engine: Engine, prompt: list[int]) -> float:
    """Seconds to the first token of an answer."""
    seconds = engine.generate([prompt], greedy(1), progress=False)[0].time_to_first_token
    assert seconds is not None
    return seconds


def decode_step(engine: Engine, requests: int, length: int, steps: int) -> float:
    """Median seconds of a step in which requests with prompts of a length decode together."""
    outputs = engine.generate([ids(length) for _ in range(requests)], greedy(steps), progress=False)
    return 1 / statistics.median(output.tokens_per_second or 0.0 for output in outputs)
