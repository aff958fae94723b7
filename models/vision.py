"""The vision tower of Qwen3.5 checkpoints: from pixels to embeddings, with the implementation of transformers.

Each image is a batch by itself, so that the bits of its embeddings do not depend on other images. Preprocessing (size,
colours, patches) is the image processor of transformers too: always the one on Pillow, so that the bits do not depend
on which other packages are installed.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid.checks import is_file
from hybrid.errors import CheckpointError, PromptError
from hybrid.models.json_files import read_config
from hybrid.models.loading import CheckpointFolder
from hybrid.models.weights import Loader, Source, stored_tensors

PREFIX = "model.visual."

TOWERS = {
    "qwen3_5": ("transformers.models.qwen3_5.modeling_qwen3_5", "Qwen3_5VisionModel"),
    "qwen3_5_moe": ("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeVisionModel"),
}
"""Module and class of the tower in transformers, by model type."""

MAX_PIXELS = 2**26
"""The largest image: 8192 x 8192 pixels, 192 MiB when it is decoded."""

MAX_KEPT = 32
"""Embeddings of up to this many images are kept, for the next turn of the same conversation."""


def vision_tower(checkpoint: CheckpointFolder, dtype: torch.dtype, device: torch.device) -> VisionTower | None:
    """The vision tower of a checkpoint; None: it has none."""
    if checkpoint.whole.model_type not in TOWERS:
        return None
    return VisionTower(checkpoint.path, checkpoint.whole, dtype, device)


class VisionTower:
    """Embeds images; an `ImageEncoder`.

    Args:
        path: of the checkpoint. Its weights are loaded with the first image.
        config: the whole configuration of the checkpoint.
        dtype, device: of the tower's weights and of the embeddings.

    Attributes:
        placeholder: the token that stands for an image in the output of the chat template.
    """

    def __init__(self, path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._path, self._config = path, config
        self._dtype, self._device = dtype, device
        self._model: Any = None
        self._kept: OrderedDict[tuple[str, bytes], Tensor] = OrderedDict()
        self._processor: Any = None
        self._lock = threading.Lock()  # prompts are encoded in several threads
        self._computing = threading.Lock()
        self.placeholder: int = config.image_token_id
        self._merge = config.vision_config.spatial_merge_size

    def patches(self, image: Any) -> tuple[Tensor, tuple[int, int]]:
        """Preprocess an image for the tower.

        Args:
            image: an image of Pillow, or `[height, width, 3]` uint8 as an array or a tensor.

        Returns:
            `[rows * columns, values]` fp32, and (rows, columns) of patches.

        Raises:
            PromptError: the image has another form or an unsupported size, or Pillow is not installed.
        """
        height, width = _size(image)
        processor = self._preprocessor()
        try:
            pixels = _pixels(image)
            made = processor(images=[pixels], input_data_format="channels_last", return_tensors="pt")
        except Exception as error:  # for a damaged file the decoders of Pillow raise many kinds
            raise PromptError(
                f"an image of {height} x {width} cannot be used: {error or type(error).__name__}; is its file whole?"
            ) from error
        _, rows, columns = made["image_grid_thw"][0].tolist()
        return made["pixel_values"], (rows, columns)

    def num_positions(self, image: Any) -> int:
        """The number of positions of an image, from its size alone: it is not decoded.

        Raises:
            PromptError: the image has another form or an unsupported size, or Pillow is not installed.
        """
        height, width = _size(image)
        processor = self._preprocessor()
        try:
            patches = processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise PromptError(f"an image of {height} x {width} cannot be used: {error}") from error
        return int(patches) // self._merge**2

    def _preprocessor(self) -> Any:
        with self._lock:
            return self._made_preprocessor()

    def _made_preprocessor(self) -> Any:
        if self._processor is None:
            try:
                from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
            except ImportError as error:
                raise PromptError("images need Pillow: pip install pillow") from error
            vision = self._config.vision_config
            shape = {
                "patch_size": vision.patch_size,
                "merge_size": vision.spatial_merge_size,
                "temporal_patch_size": vision.temporal_patch_size,
            }
            file = self._path / "preprocessor_config.json"
            if is_file(file):
                read_config(file)  # within limits
                try:
                    processor = Qwen2VLImageProcessorPil.from_pretrained(self._path, **shape)
                    processor.get_number_of_image_patches(256, 256)  # its sizes are numbers
                except Exception as error:  # transformers raises many kinds for malformed values
                    raise CheckpointError(f"{file} cannot be used: {error}; is its size a pair of numbers?") from error
                self._processor = processor
            else:
                self._processor = Qwen2VLImageProcessorPil(**shape, image_mean=[0.5] * 3, image_std=[0.5] * 3)
        return self._processor

    def embed(self, image: Any, namespace: str) -> tuple[Tensor, tuple[int, int], bytes]:
        """Embed an image.

        Args:
            namespace: embeddings that are kept are used again within it alone: whether another one had the image is
                not seen by the time that this takes.

        Returns:
            `[N, hidden_size]` embeddings, the (rows, columns) of their N positions, and a hash of the image's content.

        Raises:
            PromptError: the image has another form or an unsupported size, or cannot be decoded.
        """
        patches, (rows, columns) = self.patches(image)
        content = hashlib.sha256(patches.numpy().tobytes() + bytes(f"{rows}x{columns}", "ascii")).digest()
        wanted = namespace, content
        with self._lock:
            embeddings = self._kept.get(wanted)
        if embeddings is None:
            grid = torch.tensor([[1, rows, columns]], device=self._device)
            with self._computing, torch.inference_mode():
                embeddings = self._tower()(patches.to(self._device, self._dtype), grid_thw=grid).pooler_output
        with self._lock:
            self._kept[wanted] = embeddings
            self._kept.move_to_end(wanted)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return embeddings, (rows // self._merge, columns // self._merge), content

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


def _is_pillow(image: Any) -> bool:
    """Tell whether an object is an image of Pillow. Where Pillow was not imported there is none."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(image, module.Image)


def _size(image: Any) -> tuple[int, int]:
    """(height, width) of an image, which is not decoded.

    Raises:
        PromptError: it is not an image, or has no pixels or too many.
    """
    if _is_pillow(image):
        width, height = image.size
    elif not isinstance(image, np.ndarray | Tensor):
        raise PromptError(
            f"an image must be a Pillow image, or [height, width, 3] of uint8; got {type(image).__name__}"
        )
    else:
        shape, dtype = tuple(image.shape), image.dtype
        if len(shape) != 3 or shape[2] != 3 or dtype not in (np.uint8, torch.uint8) or not min(shape):
            raise PromptError(
                f"an image must be a Pillow image, or [height, width, 3] of uint8; got {shape} of {dtype}"
            )
        height, width = shape[:2]
    if not 0 < height * width <= MAX_PIXELS:
        raise PromptError(
            f"an image has up to {MAX_PIXELS} pixels; got {height} x {width}. Make it smaller: image.thumbnail(...)"
        )
    return height, width


def _pixels(image: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """`[height, width, 3]` uint8."""
    if isinstance(image, Tensor):
        return image.detach().cpu().numpy()
    return np.array(image.convert("RGB") if _is_pillow(image) else image)
