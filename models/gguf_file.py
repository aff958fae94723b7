"""GGUF files, as llama.cpp reads them: weights, metadata and the tokenizer, in one file or split into several.

Names and values are those of llama.cpp's converter, which this undoes tensor by tensor while it is read: names by the
package `gguf`, rows and columns that were reordered, matrices that were cut in two, norms that were stored with 1
added, a decay instead of its logarithm. Numbers of four bits stay as they are where products of them are compiled;
others are restored to floats, the blocks of some rows at a time. The configuration comes from the metadata, by
transformers where it knows the architecture, and the tokenizer by transformers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid.checks import is_file
from hybrid.errors import CheckpointError, UnsupportedModelError
from hybrid.kernels.packed_weights import from_groups
from hybrid.models.weights import Layouts, Quantization, RestoredTensor, Source, Stored

log: logging.Logger = logging.getLogger(__name__)

SUFFIX = ".gguf"

ARCHITECTURES = {
    "falcon-h1": "falcon_h1",
    "granite": "granitemoehybrid",
    "granitehybrid": "granitemoehybrid",
    "lfm2": "lfm2",
    "llama": "llama",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "qwen3": "qwen3",
    "qwen35": "qwen3_5_text",
}
"""The architectures that are read, and their model types."""

IN_PAIRS = ("granitemoehybrid", "llama", "nemotron_h")
"""Model types of which the converter reorders queries and keys: numbers that are rotated together lie side by side."""

PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "granitemoehybrid": {
        "shared_mlp.input_linear.weight": ("ffn_gate{shared}", "ffn_up{shared}"),
        "shared_mlp.output_linear.weight": ("ffn_down{shared}",),
        "block_sparse_moe.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    },
    "nemotron_h": {"mixer.experts.up_proj": ("ffn_up_exps",), "mixer.experts.down_proj": ("ffn_down_exps",)},
}
"""For parameters of a layer, by model type, the tensors in the file that make them up, one below the other, where the
package `gguf` does not know their names. `{shared}` is empty where there are no experts."""

VECTORS = (".A_log", ".D", ".mamba.norm.weight", ".mixer.norm.weight")
"""Ends of names of vectors that are stored as matrices."""

SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""The name of a part of a split file."""

VISION = "mmproj"
"""Part of the names of files that hold a vision tower alone."""


def is_gguf(path: Path) -> bool:
    """Tell whether a path is that of a GGUF file."""
    return path.suffix == SUFFIX and is_file(path)


def whole_files(names: Iterable[str]) -> list[str]:
    """Of file names those of GGUF files of language models, in order; of a split file that of its first part."""
    found = (name for name in names if name.endswith(SUFFIX) and VISION not in name.lower())
    return sorted(name for name in found if (part := SPLIT.fullmatch(name)) is None or int(part[2]) == 1)


def parts_of(name: str) -> list[str]:
    """The names of all parts of a split file, by that of any of them; of another file its name alone."""
    part = SPLIT.fullmatch(name)
    if part is None:
        return [name]
    return [f"{part[1]}-{at:05d}-of-{part[3]}{SUFFIX}" for at in range(1, int(part[3]) + 1)]


def chosen_file(names: Iterable[str], choice: str | None, place: object) -> str:
    """The GGUF file that is meant among several names.

    Args:
        choice: its name, or what it is quantized to, such as "Q4_K_M"; None: there must be only one.
        place: what holds them, for the error.

    Raises:
        CheckpointError: none, or several fit; the error names them.
    """
    files = whole_files(names)
    fitting = files
    if choice is not None:
        last = choice.rpartition("/")[2]
        fitting = [name for name in files if choice == name or last in parts_of(name.rpartition("/")[2])]
        kind = re.compile(rf"(?i)(^|[-._/]){re.escape(choice)}([-._/]|$)")
        fitting = fitting or [name for name in files if kind.search(name)]
    if len(fitting) == 1:
        return fitting[0]
    found = ", ".join((fitting or files)[:20]) or "none"
    problem = (
        "has several GGUF files" if choice is None else f"has {len(fitting)} GGUF files that {choice!r:.100} names"
    )
    raise CheckpointError(f"{place} {problem}: {found}; name one, as in 'owner/model:Q4_K_M' or by its path")


@dataclass(frozen=True)
class GGUFTensor(RestoredTensor):
    """A tensor in a GGUF file. `dtype` is that of what is read: bfloat16 numbers stay such, all others are fp32.

    Attributes:
        data: the bytes, or the numbers, of its rows.
        kind: how they are quantized.
        order: for each row its place in the file; None: as they are. Of a vector each number is a row.
        columns: for each column its place in the file.
        change: what is done with the numbers.
    """

    data: Any = None
    kind: Any = None
    order: Tensor | None = None
    columns: Tensor | None = None
    change: Callable[[Tensor], Tensor] | None = None

    @property
    def is_quantized(self) -> bool:
        """Tell whether the file has fewer bits than floats have."""
        return self.kind.name not in ("F64", "F32", "F16", "BF16")

    @property
    def form(self) -> Quantization | None:
        """The form of four bits that keeps its numbers exactly."""
        is_kept = self.kind.name in FOUR_BITS and len(self.shape) > 1 and self.change is None
        return Quantization(32, torch.float32) if is_kept and self._groups() is not None else None

    def rows(self, begin: int, end: int) -> Tensor:
        """The numbers of rows from `begin` to `end`."""
        from gguf import dequantize

        numbers = torch.from_numpy(dequantize(self._bytes(begin, end), self.kind).copy())
        if self.columns is not None:
            numbers = numbers[:, self.columns]
        return numbers if self.change is None else self.change(numbers)

    def packed(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The rows from `begin` to `end` in four bits, and their scales."""
        data = np.ascontiguousarray(self._bytes(begin, end))
        q, scale, minimum = (torch.from_numpy(part) for part in FOUR_BITS[self.kind.name](data))
        groups = self._groups()
        if self.columns is not None and groups is not None:
            q, scale, minimum = q[:, self.columns], scale[:, groups], minimum[:, groups]
        return from_groups(q, scale, minimum, 32)

    def _bytes(self, begin: int, end: int) -> Any:
        rows: Any = slice(begin, end) if self.order is None else self.order[begin:end].numpy()
        return self.data.reshape(prod(self.shape) // self.width, -1)[rows]

    def _groups(self) -> Tensor | None:
        """For each group of 32 columns its place in the file; None: the order of columns tears groups apart."""
        columns = torch.arange(self.width) if self.columns is None else self.columns
        if self.width % 32:
            return None
        grouped = columns.view(-1, 32)
        starts = grouped[:, 0]
        whole = bool((grouped == starts.unsqueeze(1) + torch.arange(32)).all()) and not bool((starts % 32).any())
        return starts // 32 if whole else None


Parts = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]


def _halves(low_then_high: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`[..., 2 n]` numbers of four bits of `[..., n]` bytes: all low halves, then all high ones."""
    return np.concatenate((low_then_high & 15, low_then_high >> 4), axis=-1)


def _half_floats(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`[..., 1]` fp32 of `[..., 2]` bytes."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _q4_0(data: np.ndarray[Any, Any]) -> Parts:
    """`d * (q - 8)` of blocks of 32 numbers: q uint8, scales and minimums of the rows of a matrix."""
    blocks = data.reshape(len(data), -1, 18)
    scale = _half_floats(blocks[..., :2])[..., 0]
    return _halves(blocks[..., 2:]).reshape(len(data), -1), scale, -8 * scale


def _q4_1(data: np.ndarray[Any, Any]) -> Parts:
    """`d * q + m` of blocks of 32 numbers."""
    blocks = data.reshape(len(data), -1, 20)
    scale, minimum = (_half_floats(blocks[..., at : at + 2])[..., 0] for at in (0, 2))
    return _halves(blocks[..., 4:]).reshape(len(data), -1), scale, minimum


def _q4_k(data: np.ndarray[Any, Any]) -> Parts:
    """`d * s * q - e * m` of blocks of 256 numbers, where s and m have six bits for each 32 of them."""
    from gguf.quants import Q4_K

    blocks = data.reshape(-1, 144)
    d, e = (_half_floats(blocks[:, at : at + 2]) for at in (0, 2))
    scale, minimum = (part.astype(np.float32) for part in Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16])))
    q = _halves(blocks[:, 16:].reshape(-1, 4, 32))
    shape = len(data), -1
    return q.reshape(shape), (d * scale).reshape(shape), (-e * minimum).reshape(shape)


FOUR_BITS: dict[str, Callable[[np.ndarray[Any, Any]], Parts]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
"""For kinds of four bits what reads q, scales and minimums of rows."""


class GGUFFile:
    """A file, or all parts of a split one.

    Args:
        path: of the file, or of any of the parts.

    Attributes:
        path: of the file, or of the first part, which has the metadata.
        architecture: as the file names it.

    Raises:
        CheckpointError: it is damaged, or a part is missing. UnsupportedModelError: its architecture is not supported,
            it has a type that is not known, or the package that reads it is not installed.
    """

    def __init__(self, path: Path) -> None:
        paths = [path.parent / name for name in parts_of(path.name)]
        missing = [each.name for each in paths if not is_file(each)]
        if missing:
            raise CheckpointError(f"{path} is a part of a split file, of which {', '.join(missing[:5])} are missing")
        self.path: Path = paths[0]
        self._readers: list[Any] = [_open(each) for each in paths]
        parts = self.field("split.count")
        if parts is not None and parts > 1 and parts != len(paths):
            raise CheckpointError(
                f"{path} is one of {parts} parts of a split file; keep their names, which end with "
                f"-00001-of-{parts:05d}{SUFFIX}, and give the first"
            )
        self.architecture: str = self.field("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise UnsupportedModelError(f"{path} is a GGUF file of {self.architecture!r:.50}; supported are: {known}")
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._tensors()}

    def _tensors(self) -> Iterator[Any]:
        for reader in self._readers:
            yield from reader.tensors

    def field(self, name: str) -> Any:
        """A value of the metadata; None: there is none. Floats are the shortest that are stored as these."""
        field = self._readers[0].fields.get(name)
        if field is None:
            return None
        value = field.contents()
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def own(self, name: str, default: Any = None) -> Any:
        """A value of the metadata of its architecture.

        Raises:
            CheckpointError: there is none, and no default.
        """
        value = self.field(f"{self.architecture}.{name}")
        if value is None and default is None:
            raise CheckpointError(f"{self.path} has no {self.architecture}.{name} in its metadata")
        return default if value is None else value

    def rows(self, *ends: str) -> int:
        """The size of the last dimension but one of the first tensor that has one of these names in a layer; 0: there
        is none."""
        for name, tensor in self.tensors.items():
            if name.startswith("blk.") and name.split(".", 2)[2] in ends:
                return int(tensor.shape[1]) if len(tensor.shape) > 1 else int(tensor.shape[0])
        return 0

    def has(self, *ends: str) -> bool:
        """Tell whether a layer has a tensor of one of these names."""
        return self.rows(*ends) > 0


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UnsupportedModelError(
            f"{path} needs the package gguf: pip install 'hybrid-prefix-cache[gguf]'"
        ) from error
    try:
        return GGUFReader(path)
    except Exception as error:  # of a file that is cut off, or is none: whatever the reader meets
        if "GGMLQuantizationType" in str(error):
            raise UnsupportedModelError(
                f"{path} has tensors of a type that the installed package gguf does not know: {error}; a newer gguf "
                "may know it, or use a file of another type"
            ) from error
        raise CheckpointError(f"{path} is damaged or truncated: {error}; copy it again") from error


def read_config(path: Path) -> Any:
    """The configuration of a file.

    Raises:
        CheckpointError: it cannot be read. UnsupportedModelError: its architecture is not supported, or the packages
            that read it are not installed.
    """
    from transformers import AutoConfig

    file = GGUFFile(path)
    try:
        if file.architecture in CONFIGS:
            config = CONFIGS[file.architecture](file)
        else:
            config = AutoConfig.from_pretrained(file.path.parent, gguf_file=file.path.name)
            head_dim = file.own("attention.key_length", 0)
            if head_dim:
                config.head_dim = int(head_dim)
    except (CheckpointError, UnsupportedModelError):
        raise
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(
            f"{path}: its metadata cannot be read: {error}; a newer transformers may know it, or use the checkpoint "
            "that the file was made from"
        ) from error
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        config.vocab_size = int(embedding.shape[1])
        config.tie_word_embeddings = "output.weight" not in file.tensors
    config.dtype = _dtype(file)
    _scale_rotations(file, config)
    return config


def _dtype(file: GGUFFile) -> torch.dtype:
    """The type that most numbers of a file have: those that are quantized count as bfloat16."""
    counts: dict[torch.dtype, int] = {}
    for tensor in file.tensors.values():
        kinds = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16}
        dtype = kinds.get(tensor.tensor_type.name, torch.bfloat16)
        counts[dtype] = counts.get(dtype, 0) + int(tensor.n_elements)
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def _scale_rotations(file: GGUFFile, config: Any) -> None:
    """State in a configuration how rotary positions are scaled.

    Raises:
        UnsupportedModelError: they are scaled otherwise than is known here.
    """
    kind = file.own("rope.scaling.type", "none")
    scaling: dict[str, Any] = {}
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": file.own("rope.scaling.factor")}
        if kind == "yarn":
            before = file.own("rope.scaling.original_context_length", config.max_position_embeddings)
            scaling["original_max_position_embeddings"] = before
    elif kind != "none":
        raise UnsupportedModelError(
            f"{file.path} has rotary positions scaled by {kind!r:.50}; linear, yarn and llama3 are supported: use the "
            "checkpoint that the file was made from"
        )
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:  # for each pair what its frequency is divided by
        divisors = torch.from_numpy(np.array(factors.data, dtype=np.float32))
        scaling = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if not scaling:
        return
    config.rope_parameters = {**config.rope_parameters, **scaling}
    if factors is not None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        found, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(found)) / len(found))
        if len(divisors) != len(found) or not torch.allclose(found, plain / divisors, rtol=1e-3):
            raise UnsupportedModelError(
                f"{file.path} has factors of rotary frequencies (rope_freqs.weight) that are not those of Llama 3: use "
                "the checkpoint that the file was made from"
            )


def _tokens(file: GGUFFile) -> dict[str, Any]:
    """The tokens that a configuration names."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: file.field(f"tokenizer.ggml.{own}_token_id") for name, own in names.items()}


def _common(file: GGUFFile) -> dict[str, Any]:
    """What configurations of all families have."""
    kv_heads = file.own("attention.head_count_kv")
    heads = file.own("attention.head_count")
    return {
        "hidden_size": file.own("embedding_length"),
        "max_position_embeddings": file.own("context_length"),
        "num_attention_heads": max(heads) if isinstance(heads, list) else heads,
        "num_key_value_heads": max(kv_heads) if isinstance(kv_heads, list) else kv_heads,
        "attention_bias": file.has("attn_q.bias"),
        **_tokens(file),
    }


def _rotations(file: GGUFFile) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": file.own("rope.freq_base", 10000.0)}


def _granite_config(file: GGUFFile) -> Any:
    """Granite 4, and dense models of Granite 3, which are Granite 4 with attention alone."""
    from transformers import GraniteMoeHybridConfig

    common, layers, experts = _common(file), file.own("block_count"), file.own("expert_count", 0)
    head_dim = common["hidden_size"] // common["num_attention_heads"]
    if experts and not file.has("ffn_gate_shexp.weight"):
        raise UnsupportedModelError(f"{file.path} has experts and no shared one beside them, which is not supported")
    if file.own("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path} rotates parts of its heads, which is not supported for this family")
    kinds = [
        "linear_attention" if f"blk.{at}.ssm_in.weight" in file.tensors else "full_attention" for at in range(layers)
    ]
    linear: dict[str, Any] = {"mamba_n_heads": 1, "mamba_expand": 1}
    if "linear_attention" in kinds:
        linear = {
            "mamba_n_heads": file.own("ssm.time_step_rank"),
            "mamba_expand": file.own("ssm.inner_size") // common["hidden_size"],
            "mamba_n_groups": file.own("ssm.group_count"),
            "mamba_d_state": file.own("ssm.state_size"),
            "mamba_d_conv": file.own("ssm.conv_kernel"),
            "mamba_conv_bias": file.has("ssm_conv1d.bias"),
            "mamba_proj_bias": file.has("ssm_in.bias"),
        }
    return GraniteMoeHybridConfig(
        **common,
        **linear,
        num_hidden_layers=layers,
        layer_types=kinds,
        intermediate_size=file.rows("ffn_gate_exps.weight") or file.own("feed_forward_length"),
        shared_intermediate_size=file.rows("ffn_gate_shexp.weight", "ffn_gate.weight"),
        num_local_experts=experts,
        num_experts_per_tok=file.own("expert_used_count", 0),
        rms_norm_eps=file.own("attention.layer_norm_rms_epsilon"),
        rope_parameters=_rotations(file),
        position_embedding_type="rope" if file.own("rope.scaling.finetuned", True) else None,
        embedding_multiplier=file.own("embedding_scale", 0.0) or 1.0,
        residual_multiplier=file.own("residual_scale", 0.0) or 1.0,
        logits_scaling=file.own("logit_scale", 0.0) or 1.0,
        attention_multiplier=file.own("attention.scale", 0.0) or head_dim**-0.5,
    )


def _falcon_config(file: GGUFFile) -> Any:
    """Falcon-H1. The factors of its parts are multiplied into the weights of the file."""
    from transformers import FalconH1Config

    return FalconH1Config(
        **_common(file),
        num_hidden_layers=file.own("block_count"),
        intermediate_size=file.own("feed_forward_length"),
        head_dim=file.own("attention.key_length"),
        rms_norm_eps=file.own("attention.layer_norm_rms_epsilon"),
        rope_parameters=_rotations(file),
        mamba_d_ssm=file.own("ssm.inner_size"),
        mamba_n_heads=file.own("ssm.time_step_rank"),
        mamba_n_groups=file.own("ssm.group_count"),
        mamba_d_state=file.own("ssm.state_size"),
        mamba_d_conv=file.own("ssm.conv_kernel"),
        mamba_conv_bias=file.has("ssm_conv1d.bias"),
        mamba_proj_bias=file.has("ssm_in.bias"),
        mamba_rms_norm=file.has("ssm_norm.weight"),
        mamba_norm_before_gate=False,
        projectors_bias=file.has("ssm_out.bias"),
        mlp_bias=file.has("ffn_up.bias"),
    )


def _nemotron_config(file: GGUFFile) -> Any:
    """Nemotron-H and Nemotron 3."""
    from transformers import NemotronHConfig

    kinds = {
        "ssm_in.weight": "linear_attention",
        "attn_q.weight": "full_attention",
        "ffn_gate_inp.weight": "moe",
        "ffn_up.weight": "mlp",
    }
    layers: list[str] = []
    for at in range(file.own("block_count") - file.own("nextn_predict_layers", 0)):
        kind = next((kind for name, kind in kinds.items() if f"blk.{at}.{name}" in file.tensors), None)
        if kind is None:
            raise CheckpointError(f"{file.path}: layer {at} has none of {', '.join(kinds)}; copy it again")
        layers.append(kind)
    groups = file.own("expert_group_count", 1)
    top_groups = file.own("expert_group_used_count", 1 if groups == 1 else 0)
    if groups > 1 and not top_groups:
        raise UnsupportedModelError(
            f"{file.path} has {groups} groups of experts and does not say from how many of them experts are chosen: "
            "use the checkpoint that the file was made from"
        )
    heads = file.own("ssm.time_step_rank")
    return NemotronHConfig(
        **_common(file),
        layers_block_type=layers,
        head_dim=file.own("attention.key_length"),
        intermediate_size=file.rows("ffn_up.weight") or 1,
        layer_norm_epsilon=file.own("attention.layer_norm_rms_epsilon", 0.0)
        or file.own("attention.layer_norm_epsilon"),
        mamba_num_heads=heads,
        mamba_head_dim=file.own("ssm.inner_size") // heads,
        n_groups=file.own("ssm.group_count"),
        ssm_state_size=file.own("ssm.state_size"),
        conv_kernel=file.own("ssm.conv_kernel"),
        use_conv_bias=file.has("ssm_conv1d.bias"),
        use_bias=file.has("ssm_in.bias"),
        mlp_bias=file.has("ffn_up.bias", "ffn_up_shexp.bias"),
        n_routed_experts=file.own("expert_count", 1),
        num_experts_per_tok=file.own("expert_used_count", 1),
        n_group=groups,
        topk_group=top_groups,
        moe_intermediate_size=file.rows("ffn_up_exps.weight") or 1,
        moe_shared_expert_intermediate_size=file.rows("ffn_up_shexp.weight") or 1,
        moe_latent_size=file.own("moe_latent_size", 0) or None,
        norm_topk_prob=bool(file.own("expert_weights_norm", True)),
        routed_scaling_factor=file.own("expert_weights_scale", 1.0),
    )


CONFIGS: dict[str, Callable[[GGUFFile], Any]] = {
    "falcon-h1": _falcon_config,
    "granite": _granite_config,
    "granitehybrid": _granite_config,
    "nemotron_h": _nemotron_config,
    "nemotron_h_moe": _nemotron_config,
}
"""What makes the configuration of architectures that transformers does not read."""


def read_tokenizer(path: Path) -> Any | None:
    """The tokenizer of a file, its chat template included; None when it has none: prompts are token ids then.

    Raises:
        CheckpointError: it cannot be read.
    """
    file = GGUFFile(path)
    if all(file.field(f"tokenizer.ggml.{name}") is None for name in ("merges", "scores")):
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    maker = PreTrainedTokenizerFast if file.architecture in CONFIGS else AutoTokenizer
    try:
        return maker.from_pretrained(file.path.parent, gguf_file=file.path.name)
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(f"the tokenizer of {path} cannot be read: {error}") from error


def layouts(parameter: str, config: Any, of_family: Callable[[str, Any], Layouts]) -> Layouts:
    """The tensors that make up a parameter, by their names in transformers' checkpoints, or in the file.

    Args:
        of_family: the layouts of the checkpoints of its family.
    """
    place = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", parameter)
    parts = PARTS.get(config.model_type, {}).get(place[2]) if place is not None else None
    if place is None or parts is None:
        return of_family(parameter, config)
    shared = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    names = [f"blk.{place[1]}.{part.format(shared=shared)}.weight" for part in parts]
    if len(names) == 1:
        return ((Source(names[0]),),)
    is_expert = "experts" in place[2]
    size = config.intermediate_size if is_expert else config.shared_intermediate_size
    before: tuple[slice, ...] = (slice(None),) if is_expert else ()
    return (tuple(Source(name, at=(*before, slice(at * size, (at + 1) * size))) for at, name in enumerate(names)),)


def read_tensors(path: Path, config: Any, names: set[str]) -> dict[str, Stored]:
    """The tensors of a file, by their names in transformers' checkpoints.

    Args:
        config: of the model.
        names: those that the model may have. What has none of them keeps its name in the file.

    Raises:
        UnsupportedModelError: a tensor has a type that the package `gguf` does not restore.
    """
    import gguf

    file = GGUFFile(path)
    layers = len(config.layers_block_type) if config.model_type == "nemotron_h" else config.num_hidden_layers
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    mapping = gguf.get_tensor_name_map(arch, layers)
    own: dict[str, str] = {}
    for name in sorted(names):
        known = name.replace(".dt_bias", ".dt_proj.bias")  # as older names of the same tensor
        known = known.replace("e_score_correction_bias", "e_score_correction.bias")
        in_file = mapping.get_name(known, try_suffixes=(".weight", ".bias"))
        if in_file is not None:
            own.setdefault(in_file, name)
    found: dict[str, Stored] = {}
    known_kinds: set[Any] = set()
    for tensor in file.tensors.values():
        # a block for multi-token prediction, and factors that the configuration has
        if tensor.name.startswith(f"blk.{layers}.") or tensor.name == "rope_freqs.weight":
            continue
        if tensor.tensor_type not in known_kinds:
            _check_kind(path, tensor)
            known_kinds.add(tensor.tensor_type)
        name = own.get(tensor.name, tensor.name)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if name.endswith((".conv.conv.weight", ".conv1d.weight")) and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        elif name.endswith(VECTORS):
            shape = (prod(shape),)
        is_half = tensor.tensor_type == gguf.GGMLQuantizationType.BF16
        dtype = torch.bfloat16 if is_half else torch.float32
        order, columns, change = _undone(name, config)
        data, kind = tensor.data, tensor.tensor_type
        found[name] = GGUFTensor(file.path, name, dtype, shape, data, kind, order, columns, change)
    return found


def _check_kind(path: Path, tensor: Any) -> None:
    """Refuse a tensor of a type that cannot be restored."""
    import gguf

    kind = tensor.tensor_type
    size = gguf.GGML_QUANT_SIZES[kind][1]
    try:
        gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{path}: {tensor.name} is of type {kind.name}, which the package gguf does not restore; use a file of "
            "another type, such as Q4_K_M or Q8_0"
        ) from error


Undone = tuple[Tensor | None, Tensor | None, Callable[[Tensor], Tensor] | None]


def _undone(name: str, config: Any) -> Undone:
    """What the converter did with a tensor: the places of rows and of columns, and a change of values."""
    if name.endswith(".A_log") and config.model_type != "qwen3_5_text":
        return None, None, lambda decay: (-decay).log()
    if config.model_type in IN_PAIRS:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if f".{part}." in name:
                places = torch.arange(heads * head_dim).view(heads, head_dim // 2, 2)
                return places.transpose(1, 2).flatten(), None, None
    if config.model_type != "qwen3_5_text":
        return None, None, None
    keys, values, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    heads_ = torch.arange(values).view(values // keys, keys).t().flatten()  # those of all keys one after another
    wide = (heads_.unsqueeze(1) * size + torch.arange(size)).flatten()
    before = 2 * keys * config.linear_key_head_dim
    mixed = torch.cat((torch.arange(before), before + wide))
    ends: dict[str, Undone] = {
        "linear_attn.A_log": (heads_, None, lambda decay: (-decay).log()),
        "linear_attn.dt_bias": (heads_, None, None),
        "linear_attn.in_proj_a.weight": (heads_, None, None),
        "linear_attn.in_proj_b.weight": (heads_, None, None),
        "linear_attn.in_proj_z.weight": (wide, None, None),
        "linear_attn.in_proj_qkv.weight": (mixed, None, None),
        "linear_attn.conv1d.weight": (mixed, None, None),
        "linear_attn.out_proj.weight": (None, wide, None),
        "linear_attn.norm.weight": (None, None, None),
    }
    for end, undone in ends.items():
        if name.endswith(end):
            return undone
    return None, None, (lambda weight: weight - 1) if name.endswith("norm.weight") else None
