"""The vision half of Qwen3.5 checkpoints: from pixels to embeddings, with transformers' own tower.

Each image goes through the tower by itself, so that its embeddings are the same bits whatever it is asked with. What
comes before the tower (size, colours, patches) is transformers' image processor too: the one on Pillow, whatever else
is installed, so that the same image is the same bits everywhere.
"""

from __future__ import annotations

import hashlib
import importlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import CheckpointError, PromptError
from hybrid.models.loading import Checkpoint
from hybrid.models.weights import Loader, Source, stored_tensors

PREFIX = "model.visual."

TOWERS = {
    "qwen3_5": ("transformers.models.qwen3_5.modeling_qwen3_5", "Qwen3_5VisionModel"),
    "qwen3_5_moe": ("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeVisionModel"),
}
"""By model type, where transformers has the tower."""

KEPT = 32
"""Embeddings of so many images are kept, for the next turn of the same conversation."""


def vision_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> VisionTower | None:
    """The tower of a checkpoint; None: it has none."""
    if checkpoint.whole.model_type not in TOWERS:
        return None
    return VisionTower(checkpoint.path, checkpoint.whole, dtype, device)


class VisionTower:
    """Embeds images.

    Args:
        path: of the checkpoint, whose weights are loaded when the first image comes.
        config: the checkpoint's whole configuration.

    Attributes:
        placeholder: the token that stands for an image in the text of a chat.
    """

    def __init__(self, path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._path, self._config = path, config
        self._dtype, self._device = dtype, device
        self._model: Any = None
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._processor: Any = None
        self.placeholder: int = config.image_token_id
        self._merge = config.vision_config.spatial_merge_size

    def patches(self, image: Any) -> tuple[Tensor, tuple[int, int]]:
        """An image as the tower takes it.

        Args:
            image: an image of Pillow, or `[height, width, 3]` of uint8: an array, a tensor.

        Returns:
            `[rows * columns, values]` fp32, and (rows, columns) of patches.

        Raises:
            PromptError: it is no such image, or Pillow is not installed.
        """
        pixels = np.array(image.convert("RGB") if hasattr(image, "convert") else image)
        if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or not min(pixels.shape):
            raise PromptError(
                f"an image must be one of Pillow, or [height, width, 3] of uint8; got {pixels.shape} of {pixels.dtype}"
            )
        try:
            made = self._preprocess(images=[pixels], input_data_format="channels_last", return_tensors="pt")
        except ValueError as error:
            raise PromptError(f"an image of {pixels.shape[0]} x {pixels.shape[1]} cannot be used: {error}") from error
        _, rows, columns = made["image_grid_thw"][0].tolist()
        return made["pixel_values"], (rows, columns)

    def _preprocess(self, **options: Any) -> Any:
        if self._processor is None:
            try:
                from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
            except ImportError as error:
                raise PromptError("images need Pillow: pip install 'hybrid[images]'") from error
            vision = self._config.vision_config
            shape = {
                "patch_size": vision.patch_size,
                "merge_size": vision.spatial_merge_size,
                "temporal_patch_size": vision.temporal_patch_size,
            }
            if (self._path / "preprocessor_config.json").is_file():
                self._processor = Qwen2VLImageProcessorPil.from_pretrained(self._path, **shape)
            else:
                self._processor = Qwen2VLImageProcessorPil(**shape, image_mean=[0.5] * 3, image_std=[0.5] * 3)
        return self._processor(**options)

    def embed(self, image: Any) -> tuple[Tensor, tuple[int, int], bytes]:
        """Embeddings of an image.

        Returns:
            `[positions, hidden_size]`, its (rows, columns) of positions, and a hash of its content.
        """
        patches, (rows, columns) = self.patches(image)
        content = hashlib.sha256(patches.numpy().tobytes() + bytes(f"{rows}x{columns}", "ascii")).digest()
        if content not in self._kept:
            grid = torch.tensor([[1, rows, columns]], device=self._device)
            with torch.inference_mode():
                made = self._tower()(patches.to(self._device, self._dtype), grid_thw=grid)
            self._kept[content] = made.pooler_output
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(content)
        return self._kept[content], (rows // self._merge, columns // self._merge), content

    def _tower(self) -> Any:
        if self._model is None:
            module, name = TOWERS[self._config.model_type]
            tower = getattr(importlib.import_module(module), name)
            model = tower._from_config(self._config.vision_config)
            prefixed = {PREFIX + key: tensor.shape for key, tensor in model.named_parameters()}
            tensors = {key: value for key, value in stored_tensors(self._path).items() if key.startswith(PREFIX)}
            if not tensors:
                raise CheckpointError(f"{self._path} has no weights of a vision tower ({PREFIX}*)")
            loader = Loader(self._path, prefixed, lambda key: ((Source(key),),), self._dtype, self._device)
            parameters = loader.load(tensors, lambda _: None)
            model.load_state_dict({key.removeprefix(PREFIX): value for key, value in parameters.items()}, assign=True)
            self._model = model.to(self._device).eval()
        return self._model
