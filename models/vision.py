"""The vision half of Qwen3.5 checkpoints: from pixels to embeddings, with transformers' own tower.

Each image goes through the tower by itself, so that its embeddings are the same bits whatever it is asked with. What
comes before the tower (size, colours, patches) follows transformers' `Qwen2VLImageProcessor`, in plain torch.
"""

import hashlib
import importlib
import json
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import CheckpointError, PromptError
from hybrid.looking import Eyes
from hybrid.models.loading import Checkpoint
from hybrid.models.weights import Loader, Source, stored_tensors

PREFIX = "model.visual."

TOWERS = {
    "qwen3_5": ("transformers.models.qwen3_5.modeling_qwen3_5", "Qwen3_5VisionModel"),
    "qwen3_5_moe": ("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeVisionModel"),
}
"""By model type, where transformers has the tower."""

DEFAULTS: dict[str, Any] = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}
"""What preprocessor_config.json says when it does not."""

KEPT = 32
"""Embeddings of so many images are kept, for the next turn of the same conversation."""


def eyes_of(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Eyes | None:
    """What looks at images for a checkpoint; None: it has no vision tower."""
    if checkpoint.whole.model_type not in TOWERS:
        return None
    return Eyes(VisionTower(checkpoint.path, checkpoint.whole, dtype, device), checkpoint.whole.image_token_id)


class VisionTower:
    """Embeds images.

    Args:
        path: of the checkpoint, whose weights are loaded when the first image comes.
        config: the checkpoint's whole configuration.
    """

    def __init__(self, path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._path, self._config = path, config
        self._dtype, self._device = dtype, device
        self._model: Any = None
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        file = path / "preprocessor_config.json"
        given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        self._settings = {**DEFAULTS, **given}
        vision = config.vision_config
        self._patch, self._merge, self._frames = (
            vision.patch_size,
            vision.spatial_merge_size,
            vision.temporal_patch_size,
        )

    def patches(self, image: Any) -> tuple[Tensor, tuple[int, int]]:
        """An image as the tower takes it.

        Args:
            image: `[height, width, 3]` numbers from 0 to 255, an array, a tensor, or what numpy makes one of (an image
                of Pillow).

        Returns:
            `[rows * columns, values]` fp32, and (rows, columns) of patches.

        Raises:
            PromptError: it is no such image.
        """
        pixels = torch.from_numpy(np.array(image))
        if pixels.dim() != 3 or pixels.shape[2] != 3 or pixels.dtype != torch.uint8 or not min(pixels.shape):
            raise PromptError(
                "an image must be [height, width, 3] of uint8 (for Pillow: image.convert('RGB')); got "
                f"{tuple(pixels.shape)} of {pixels.dtype}"
            )
        height, width = self._fitting(*pixels.shape[:2])
        x = pixels.permute(2, 0, 1).float()
        if (height, width) != tuple(x.shape[1:]):
            x = torch.nn.functional.interpolate(x[None], (height, width), mode="bicubic", antialias=True)[0]
            x = x.round().clamp(0, 255)
        mean, std = (torch.tensor(self._settings[name]).view(3, 1, 1) for name in ("image_mean", "image_std"))
        x = (x / 255 - mean) / std
        patch, merge = self._patch, self._merge
        rows, columns = height // patch, width // patch
        x = x.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        x = x.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        x = x.expand(*x.shape[:5], self._frames, *x.shape[6:])
        return x.reshape(rows * columns, -1), (rows, columns)

    def _fitting(self, height: int, width: int) -> tuple[int, int]:
        """The nearest size in whole merged patches, of an area within the limits (`smart_resize` of transformers)."""
        unit, size = self._patch * self._merge, self._settings["size"]
        if max(height, width) > 200 * min(height, width):
            raise PromptError(f"an image may be 200 times as long as wide at most, got {height} x {width}")
        rows, columns = round(height / unit), round(width / unit)
        least, most = size["shortest_edge"] / unit**2, size["longest_edge"] / unit**2
        if rows * columns > most:
            scale = math.sqrt(height * width / (most * unit**2))
            rows, columns = (max(1, math.floor(side / scale / unit)) for side in (height, width))
        elif rows * columns < least:
            scale = math.sqrt(least * unit**2 / (height * width))
            rows, columns = (math.ceil(side * scale / unit) for side in (height, width))
        return rows * unit, columns * unit

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
