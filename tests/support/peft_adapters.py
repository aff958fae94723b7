"""Random LoRA adapters, made by PEFT."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

TARGETS = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_a",
    "out_proj",
    "gate_proj",
    "down_proj",
]


def make_adapter(model: Any, folder: Path, seed: int, targets: Sequence[str] = TARGETS, **settings: Any) -> Path:
    """A random adapter of PEFT; both of its matrices are far from zero."""
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": [*targets], "task_type": "CAUSAL_LM", **settings})
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.15)
    adapted.save_pretrained(folder)
    return folder
