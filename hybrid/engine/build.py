"""What a device, a checkpoint and a call leave to be settled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.disabled import make_cache
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import ArgumentError
from hybrid.memory.device import free_memory
from hybrid.memory.memory import CacheMemory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def settle_dtype(dtype: str | torch.dtype | None, config: Any, device: torch.device) -> torch.dtype:
    """The type to run in: the one asked for; else the checkpoint's on a GPU, float32 on a CPU.

    Raises:
        ArgumentError: there is no such type here.
    """
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ArgumentError(f"dtype must be one of {', '.join(DTYPES)}, or None; got {dtype!r}")
        return DTYPES[dtype]
    if dtype is not None:
        return dtype
    stored = getattr(config, "dtype", None)
    return stored if device.type != "cpu" and isinstance(stored, torch.dtype) else torch.float32


def generation_defaults(path: Path, config: Any) -> tuple[frozenset[int], SamplingParams]:
    """End tokens and default sampling of a checkpoint, from generation_config.json, else from config.json."""
    from transformers import GenerationConfig

    has_file = (path / "generation_config.json").is_file()
    generation = (
        GenerationConfig.from_pretrained(path) if has_file else GenerationConfig(eos_token_id=config.eos_token_id)
    )
    end = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    end_tokens = frozenset([end] if isinstance(end, int) else end or ())
    if not generation.do_sample:
        return end_tokens, SamplingParams()
    return end_tokens, SamplingParams(
        temperature=1.0 if generation.temperature is None else generation.temperature,
        top_k=generation.top_k or 0,
        top_p=1.0 if generation.top_p is None else generation.top_p,
        min_p=generation.min_p or 0.0,
    )


def furnish(
    model: Any, config: CacheConfig, device: torch.device, room: tuple[int, int] | None
) -> tuple[HybridCache, bool]:
    """A cache for a model, and whether the model runs in deterministic mode; it is made ready for that.

    Args:
        room: (pages, state slots) of the cache, instead of `config.memory`.
    """
    deterministic = config.deterministic
    if deterministic is None:
        deterministic = device.type == "cpu" and config.state_dtype == "float32"
    if deterministic:
        model.make_batch_invariant()
    spec = model.spec(model.config, model.lm_head.weight.dtype)
    if room is not None:
        memory = CacheMemory.fixed(spec, config.page_size, *room, device)
    else:
        memory = CacheMemory.for_spec(
            spec,
            config.memory_bytes(free_memory(device), device.type == "cuda"),
            device,
            page_size=config.page_size,
            state_share=config.state_share,
            state_dtype=config.state_dtype,
        )
    return make_cache(memory, config), deterministic
