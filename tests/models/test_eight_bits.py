"""Checkpoints of 8-bit floats, of every family: weights are restored from their values and the factors of blocks."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid.commands.random_checkpoints import FAMILIES, write_random_checkpoint
from hybrid.models.loading import load_model, open_checkpoint
from support.checkpoints import INDEX, edit_config
from support.tensors import CPU

PRODUCT = re.compile(r"proj|\.w[123]\.|_linear\.")
"""Parts of names of matrix products."""

BLOCK = 16
SCALE = "_scale_inv"


def is_product(name: str, tensor: Tensor) -> bool:
    return PRODUCT.search(name) is not None and tensor.dim() >= 2 and not name.endswith("bias")


def parameters(path: Path) -> dict[str, Tensor]:
    return dict(load_model(open_checkpoint(path), torch.float32, CPU, 16, progress=False).named_parameters())


def quantized(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix, or one for each expert, as 8-bit floats; the factor of each block; and what they stand for."""
    if weight.dim() == 3:
        parts = [quantized(expert) for expert in weight]
        return (
            torch.stack([p[0] for p in parts]),
            torch.stack([p[1] for p in parts]),
            torch.stack([p[2] for p in parts]),
        )
    stored, exact = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scale = torch.empty(-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK))
    for i, j in torch.cartesian_prod(torch.arange(scale.shape[0]), torch.arange(scale.shape[1])).tolist():
        at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        scale[i, j] = weight[at].abs().max() / 448
        stored[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
        exact[at] = stored[at].float() * scale[i, j]
    return stored, scale, exact


def write_both(source: Path, short: Path, whole: Path) -> int:
    """Write a checkpoint with 8-bit floats, and one with what they stand for; returns how many weights they are. Where
    there are several files, the factors are in a file of their own."""
    shutil.copytree(source, short)
    shutil.copytree(source, whole)
    files = sorted(source.glob("*.safetensors"))
    scales: dict[str, Tensor] = {}
    for file in files:
        stored = load_file(file)
        restored = dict(stored)
        for name in [name for name, tensor in stored.items() if is_product(name, tensor)]:
            stored[name], scales[name + SCALE], restored[name] = quantized(stored[name].float())
        save_file(stored | (scales if len(files) == 1 else {}), short / file.name, {"format": "pt"})
        save_file(restored, whole / file.name, {"format": "pt"})
    if len(files) > 1:
        save_file(scales, short / "scales.safetensors", {"format": "pt"})
        index = json.loads((short / INDEX).read_text())
        index["weight_map"] |= dict.fromkeys(scales, "scales.safetensors")
        (short / INDEX).write_text(json.dumps(index))
    edit_config(short, quantization_config={"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})
    return len(scales)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_of_every_family_are_restored(name: str, tmp_path: Path) -> None:
    count = write_both(write_random_checkpoint(tmp_path / "made", name), tmp_path / "short", tmp_path / "whole")
    assert count > 10
    found, expected = parameters(tmp_path / "short"), parameters(tmp_path / "whole")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    made = parameters(tmp_path / "made")
    assert sum(not torch.equal(found[key], made[key]) for key in made) > 5  # 8 bits are not the weights before
