"""GGUF files, as llama.cpp reads them: one file with weights, metadata and the tokenizer.

Names and values are those of llama.cpp's converter, which this undoes tensor by tensor while it is read: names by the
package `gguf`, rows and columns that were reordered, norms that were stored with 1 added, a decay instead of its
logarithm. Quantized numbers are restored to floats, the blocks of some rows at a time. The configuration and the
tokenizer come from the metadata, by transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.checks import is_file
from hybrid.errors import CheckpointError, UnsupportedModelError
from hybrid.models.weights import Stored
from hybrid.tensor_file import HeldBytes

SUFFIX = ".gguf"

ARCHITECTURES = {"lfm2": "lfm2", "llama": "llama", "qwen3": "qwen3", "qwen3_5_text": "qwen35"}
"""The model types that are read, and their names in GGUF."""


def is_gguf(path: Path) -> bool:
    """Tell whether a path is that of a GGUF file."""
    return path.suffix == SUFFIX and is_file(path)


@dataclass(frozen=True)
class GGUFTensor(Stored):
    """A tensor in a GGUF file. `dtype` is that of what is read: bfloat16 numbers stay such, all others are fp32.

    Attributes:
        data: the bytes, or the numbers, of its rows.
        kind: how they are quantized.
        rows: for each row its place in the file; None: as they are. Of a vector each number is a row.
        columns: for each column its place in the file.
        change: what is done with the numbers.
    """

    data: Any = None
    kind: Any = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    change: Callable[[Tensor], Tensor] | None = None

    def part(self, first: int, shape: tuple[int, ...] | list[int] | torch.Size, buffer: Tensor) -> Tensor:  # type: ignore[override]
        """Read consecutive elements; the buffer is not used."""
        from gguf import dequantize

        count, width = prod(shape), self._width
        begin, end = first // width, -(-(first + count) // width)
        rows: Any = slice(begin, end) if self.rows is None else self.rows[begin:end].numpy()
        matrix = self.data.reshape(prod(self.shape) // width, -1)
        numbers = torch.from_numpy(dequantize(matrix[rows], self.kind).copy())
        if self.columns is not None:
            numbers = numbers[:, self.columns]
        if self.change is not None:
            numbers = self.change(numbers)
        own = numbers.flatten()[first - begin * width :][:count]
        return own.to(self.dtype).view(tuple(shape))

    @property
    def _width(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1


def read_config(path: Path) -> Any:
    """The configuration of a file.

    Raises:
        CheckpointError: it cannot be read. UnsupportedModelError: its architecture is not supported, or the packages
            that read it are not installed.
    """
    from transformers import AutoConfig

    reader = _open(path)
    architecture = _field(reader, "general.architecture")
    if architecture not in ARCHITECTURES.values():
        known = ", ".join(sorted(ARCHITECTURES.values()))
        raise UnsupportedModelError(f"{path} is a GGUF file of {architecture!r:.50}; supported are: {known}")
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(
            f"{path}: its metadata cannot be read: {error}; a newer transformers may know it, or use the checkpoint "
            "that the file was made from"
        ) from error
    head_dim = _field(reader, f"{architecture}.attention.key_length")
    if head_dim is not None:
        config.head_dim = int(head_dim)
    return config


def read_tokenizer(path: Path) -> Any | None:
    """The tokenizer of a file, its chat template included; None when it has none: prompts are token ids then.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not {"tokenizer.ggml.merges", "tokenizer.ggml.scores"} & _open(path).fields.keys():
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(f"the tokenizer of {path} cannot be read: {error}") from error


def read_tensors(path: Path, config: Any, names: set[str]) -> dict[str, Stored]:
    """The tensors of a file, by their names in transformers' checkpoints.

    Args:
        config: of the model.
        names: those that the model may have. What has none of them keeps its name in the file.
    """
    import gguf

    reader = _open(path)
    architecture = ARCHITECTURES[config.model_type]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    mapping = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    own: dict[str, str] = {}
    for name in names:
        known = name.replace(".dt_bias", ".dt_proj.bias")  # as older names of the same tensor
        in_file = mapping.get_name(known, try_suffixes=(".weight", ".bias"))
        if in_file is not None:
            own[in_file] = name
    predictor = f"blk.{config.num_hidden_layers}."
    found: dict[str, Stored] = {}
    for tensor in reader.tensors:
        if tensor.name.startswith(predictor):  # for multi-token prediction
            continue
        name = own.get(tensor.name, tensor.name)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if name.endswith((".conv.conv.weight", ".conv1d.weight")) and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        is_half = tensor.tensor_type == gguf.GGMLQuantizationType.BF16
        dtype = torch.bfloat16 if is_half else torch.float32
        rows, columns, change = _undone(name, config)
        found[name] = GGUFTensor(
            HeldBytes(b""),
            path,
            name,
            dtype,
            shape,
            0,
            None,
            (1, 1),
            tensor.data,
            tensor.tensor_type,
            rows,
            columns,
            change,
        )
    return found


def _undone(name: str, config: Any) -> tuple[Tensor | None, Tensor | None, Callable[[Tensor], Tensor] | None]:
    """What the converter did with a tensor: the places of rows and of columns, and a change of values."""
    if config.model_type == "llama":
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if f".self_attn.{part}." in name:  # pairs that are rotated lie side by side
                places = torch.arange(heads * config.head_dim).view(heads, config.head_dim // 2, 2)
                return places.transpose(1, 2).flatten(), None, None
    if config.model_type != "qwen3_5_text":
        return None, None, None
    keys, values, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    heads_ = torch.arange(values).view(values // keys, keys).t().flatten()  # those of all keys one after another
    wide = (heads_.unsqueeze(1) * size + torch.arange(size)).flatten()
    before = 2 * keys * config.linear_key_head_dim
    mixed = torch.cat((torch.arange(before), before + wide))
    ends: dict[str, tuple[Tensor | None, Tensor | None, Callable[[Tensor], Tensor] | None]] = {
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
        raise CheckpointError(f"{path} is damaged or truncated: {error}; copy it again") from error


def _field(reader: Any, name: str) -> Any:
    field = reader.fields.get(name)
    return None if field is None else field.contents()
