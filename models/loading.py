"""From a checkpoint in Hugging Face form to a model, parameter by parameter."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from hybrid.errors import CheckpointError, UnsupportedModelError
from hybrid.models.qwen3_5 import Linear, Qwen3_5ForCausalLM

ARCHITECTURES = {"qwen3_5_text": Qwen3_5ForCausalLM, "qwen3_5": Qwen3_5ForCausalLM}
"""Model types of config.json that run here. `qwen3_5` is the vision-language layout, of which the language part is
taken."""

TINY = Path(__file__).parent / "tiny"
"""The checkpoint that the package carries."""

IGNORED_PREFIXES = ("model.visual.", "visual.", "mtp.")
FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.json"]


@dataclass(frozen=True)
class Checkpoint:
    """Where a checkpoint lies, and its configuration.

    Attributes:
        path: its folder.
        model_type: as config.json says.
        config: the text configuration, a `PretrainedConfig` of transformers.
    """

    path: Path
    model_type: str
    config: Any


def open_checkpoint(name: str | Path) -> Checkpoint:
    """Find a checkpoint and read its configuration.

    Args:
        name: a folder, the id of a repository on the Hugging Face hub, or "tiny" for the one inside the package.

    Raises:
        CheckpointError: there is none.
        UnsupportedModelError: its architecture does not run here.
    """
    path = _locate(name)
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
        model_type = raw.get("model_type") if isinstance(raw, dict) else None
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'} is no valid JSON: {error}") from error
    if model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} is a {model_type!r} model; supported are: {', '.join(sorted(ARCHITECTURES))}"
        )
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
    except Exception as error:  # transformers raises many kinds for a malformed configuration
        raise CheckpointError(f"{path / 'config.json'} cannot be read: {error}") from error
    # the vision-language layout says it outside of the text model's part, inside, or both
    config.tie_word_embeddings = bool(config.tie_word_embeddings or raw.get("tie_word_embeddings"))
    _refuse_unsupported(config, path)
    return Checkpoint(path, model_type, config)


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, chunk_size: int) -> Qwen3_5ForCausalLM:
    """Build the model and load its weights, one tensor at a time from the mapped files: there is no second copy in
    memory.

    Raises:
        CheckpointError: weights are missing, unexpected, truncated or of another shape.
    """
    with torch.device("meta"):
        model = ARCHITECTURES[checkpoint.model_type](checkpoint.config, chunk_size)
    wanted = dict(model.named_parameters())
    # few rows times a weight that lies by columns is up to 1.7 times as fast on a CPU
    on_cpu = device.type == "cpu"
    by_columns = {f"{name}.weight" for name, module in model.named_modules() if on_cpu and isinstance(module, Linear)}
    if checkpoint.config.tie_word_embeddings:
        by_columns.discard("lm_head.weight")
        wanted.pop("lm_head.weight", None)
    unexpected = []
    for name, tensor in _tensors(checkpoint.path):
        if name == "lm_head.weight" and checkpoint.config.tie_word_embeddings:
            continue
        if name not in wanted:
            unexpected.append(name)
            continue
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{checkpoint.path}: {name} has shape {tuple(tensor.shape)}, expected {tuple(wanted[name].shape)}"
            )
        del wanted[name]
        if name in by_columns:
            tensor = tensor.t().to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format).t()
        else:
            tensor = tensor.to(device=device, dtype=dtype, copy=True)
        _assign(model, name, tensor)
    if wanted or unexpected:
        raise CheckpointError(
            f"{checkpoint.path} does not fit its config.json: missing {sorted(wanted) or 'nothing'}, "
            f"unexpected {unexpected or 'nothing'}"
        )
    if checkpoint.config.tie_word_embeddings:
        model.tie_head()
    return model.eval()


def _locate(name: str | Path) -> Path:
    path = TINY if name == "tiny" and not Path(name).exists() else Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} is no checkpoint: it has no config.json")
        return path
    if path.exists() or path.is_absolute() or str(name).count("/") != 1 or str(name).startswith("."):
        raise CheckpointError(
            f"{name} is no checkpoint: give a folder with config.json and *.safetensors, "
            "or a hub id as 'Qwen/Qwen3.5-0.8B'"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=FILES))
    except Exception as error:  # the hub's client raises many kinds: no network, no such repository, no access
        raise CheckpointError(
            f"{name} is no folder here, and the hub did not give it: {type(error).__name__}: {error}"
        ) from error


def _refuse_unsupported(config: Any, path: Path) -> None:
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type != "default":
        raise UnsupportedModelError(f"{path}: rope_type {rope_type!r} is not supported, only 'default'")
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"{path}: hidden_act {config.hidden_act!r} is not supported, only 'silu'")
    for kind in ("linear_attention", "full_attention"):
        if kind not in config.layer_types:
            raise UnsupportedModelError(f"{path}: no {kind} layer in layer_types; this package runs hybrid models")


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of every weight of the text model, from one file or several."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is no index of weights: it needs a weight_map of names to files") from error
    else:
        files = ["model.safetensors"]
    for file in files:
        if not (path / file).is_file():
            raise CheckpointError(f"{path} has no weights: {file} is missing")
        try:
            with safe_open(path / file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                    if not name.startswith(IGNORED_PREFIXES):
                        yield name.replace("model.language_model.", "model.", 1), tensors.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path / file} is damaged or truncated: {error}") from error


def _assign(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False))
