"""LoRA adapters: from a folder of PEFT to low-rank matrices for the matrix products of a model.

An adapter adds `scale * B @ A` to the weight of some matrix products. Its tensors have the names of the model's
modules; where a family stores a weight in another order than the checkpoint (`layouts`), the rows of B are put in that
order too. Merged weights would serve one adapter; applied apart, several serve the rows of one batch.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import LowRank
from hybrid.checks import is_file
from hybrid.errors import CheckpointError, UnsupportedModelError
from hybrid.models.causal_lm import CausalLM
from hybrid.models.json_files import read_config
from hybrid.models.layers import Linear
from hybrid.models.moe import Router
from hybrid.models.weights import FLOATS, Stored, file_tensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

PREFIX = "base_model.model."
"""Prefix of all tensors of an adapter."""

UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Settings of an adapter that change what is computed in a way that is not done here."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter on the device of its model.

    Attributes:
        path: its folder.
        weights: its matrices, by the module of the model that they belong to.
        digest: of its files. Adapters with equal digests compute the same.
    """

    path: Path
    weights: Mapping[nn.Module, LowRank]
    digest: str
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        tensors = [tensor for weights in self.weights.values() for tensor in weights]
        object.__setattr__(self, "num_bytes", sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def load_adapter(path: Path, model: CausalLM) -> Adapter:
    """Load a LoRA adapter, as PEFT's `save_pretrained` writes it.

    Raises:
        CheckpointError: there is none, its files cannot be read, or it does not fit the model.
        UnsupportedModelError: it is an adapter of another kind.
    """
    for name in (CONFIG, WEIGHTS):
        if not is_file(path / name):
            raise CheckpointError(f"{path} is not an adapter: it has no {name}; save it with PEFT's save_pretrained")
    config = read_config(path / CONFIG)
    _refuse_unsupported(config, path)
    stored = {_name_in_model(name): tensor for name, tensor in file_tensors(path / WEIGHTS).items()}
    weights: dict[nn.Module, LowRank] = {}
    used: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module is not model.lm_head and not isinstance(module, Router):
            found = _low_rank(path, config, name, module, model, stored)
            if found is not None:
                weights[module], names = found
                used.update(names)
    unused = sorted(stored.keys() - used)
    if unused or not weights:
        raise CheckpointError(
            f"{path}: these tensors belong to no matrix product that adapters change here: "
            f"{[name[:200] for name in unused[:8]]}; supported are the projections of attention, linear-attention and "
            "dense feed-forward layers"
        )
    digest = hashlib.blake2b(digest_size=16)
    for name in (CONFIG, WEIGHTS):
        digest.update((path / name).read_bytes())
    return Adapter(path, weights, digest.hexdigest())


def _low_rank(
    path: Path, config: dict[str, Any], name: str, module: Linear, model: CausalLM, stored: Mapping[str, Stored]
) -> tuple[LowRank, tuple[str, str]] | None:
    """The matrices of a module and the names of their tensors; None: the adapter does not change it."""
    (layout, *_) = model.layouts(f"{name}.weight", model.config)
    (source,) = layout
    on_disk = source.name.removesuffix(".weight")
    names = f"{on_disk}.lora_A.weight", f"{on_disk}.lora_B.weight"
    known = [stored[tensor] for tensor in names if tensor in stored]
    if not known:
        return None
    if len(known) != 2:
        raise CheckpointError(f"{path}: {on_disk} has only one of lora_A and lora_B")
    weight = module.weight
    a, b = (_tensor(path, tensor) for tensor in known)
    if source.rows is not None and b.shape[0] > int(source.rows.max()):
        b = b[source.rows]
    rank = a.shape[0]
    if a.shape != (rank, weight.shape[1]) or b.shape != (weight.shape[0], rank):
        raise CheckpointError(
            f"{path}: {on_disk} has lora_A {list(known[0].shape)} and lora_B {list(known[1].shape)}, which do not fit "
            f"a weight of {list(weight.shape)}"
        )
    scale = _scale(config, on_disk, rank)
    own = weight.device, model.dtype
    low_rank = LowRank(a.to(*own).contiguous(), (b.float() * scale).to(*own).contiguous())
    return low_rank, names


def _tensor(path: Path, stored: Stored) -> Tensor:
    if stored.dtype not in FLOATS or len(stored.shape) != 2:
        raise CheckpointError(
            f"{path}: {stored.name} is {stored.dtype} {list(stored.shape)}; expected a matrix of floats"
        )
    tensor = stored.tensor()
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{path}: {stored.name} holds NaN or infinity")
    return tensor


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    """The factor of a module's matrices."""
    patterns: dict[str, float] = config.get("alpha_pattern") or {}
    own = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    alpha = float(next(own, config.get("lora_alpha", 8)))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _name_in_model(name: str) -> str:
    return name.removeprefix(PREFIX).replace("model.language_model.", "model.", 1)


def _refuse_unsupported(config: Any, path: Path) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise UnsupportedModelError(f"{path} is an adapter of type {kind!r:.50}; supported is LORA")
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(f"{path}: bias={config['bias']!r:.50} is not supported; train it with bias='none'")
    wanted = next((name for name in UNSUPPORTED if config.get(name)), None)
    if wanted is not None:
        raise UnsupportedModelError(f"{path}: {wanted}={config[wanted]!r:.100} is not supported")
    patterns = config.get("alpha_pattern") or {}
    numbers = [config.get("lora_alpha", 8), *(patterns.values() if isinstance(patterns, dict) else [None])]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise CheckpointError(f"{path / CONFIG}: lora_alpha and alpha_pattern must be numbers; got {numbers!r:.100}")
