"""What a device, a checkpoint and a call leave to be settled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from hybrid.errors import ArgumentError
from hybrid.sampling import SamplingParams
from hybrid.text import Prompt

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def free_memory(device: torch.device) -> int:
    """Bytes that a device can give."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several. A list of ids and a list of messages are one prompt each."""
    if isinstance(prompts, str):
        return [prompts]
    many: list[Any] = prompts.tolist() if isinstance(prompts, np.ndarray | torch.Tensor) else list(prompts)
    if many and (all(isinstance(item, int) for item in many) or all(isinstance(item, dict) for item in many)):
        return [many]
    return many


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
