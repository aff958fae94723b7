"""Images in the prompts of `hybrid.hf`: from the tensors of transformers' processors to what the cache compares.

An image is found again by its pixels, as in the engine (`hybrid.prompts.images`), and no match ends inside one. Passes
over a prompt with images get embeddings and rotary positions instead of token ids, so that it can be cut anywhere. Each
image is embedded by itself: its bits depend on no other image.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hybrid.errors import ArgumentError, PromptError
from hybrid.hf.pass_model import PassModel
from hybrid.prompts.images import Image, ImagePrompt, Media, PixelHash

MODELS = ("qwen3_5", "qwen3_5_moe")
"""Model types whose images are known to be embeddings and rotary positions, and nothing else."""

IMAGE = 1
"""The number of images in `mm_token_type_ids`; 0 is text."""

MAX_KEPT = 32
"""Embeddings of up to this many images are kept, for the next turn of the same conversation."""


@dataclass(frozen=True)
class ImageInputs:
    """The images of a call, as a processor of transformers returns them.

    Attributes:
        pixel_values: `[patches, values]`, those of all images one after the other.
        image_grid_thw: `[images, 3]`: each image's patches in time, height and width.
        mm_token_type_ids: `[batch, tokens]`, 1 where a token stands for a part of an image.
    """

    pixel_values: Tensor
    image_grid_thw: Tensor
    mm_token_type_ids: Tensor

    @classmethod
    def taken(cls, options: dict[str, Any]) -> ImageInputs | None:
        """Take the images out of the options of a call; None: there are none.

        Raises:
            PromptError: only some of the three tensors are there.
        """
        names = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
        given = {name: options.pop(name, None) for name in names}
        if given["pixel_values"] is None and given["image_grid_thw"] is None:
            types = given["mm_token_type_ids"]
            if types is not None and bool(torch.as_tensor(types).any()):
                raise PromptError("mm_token_type_ids names images or videos, and pixel_values are not given")
            return None
        missing = [name for name, value in given.items() if not isinstance(value, Tensor)]
        if missing:
            raise PromptError(
                f"a prompt with images needs {', '.join(missing)} too, as the processor returns them: call "
                "generate(**processor(...))"
            )
        return cls(**given)


class Images:
    """Reads the images of prompts.

    Args:
        model: embeds them.
    """

    def __init__(self, model: PassModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[bytes, str], Tensor] = OrderedDict()

    @torch.no_grad()
    def read(
        self, inputs: ImageInputs, rows: Sequence[Sequence[int]], pads: Sequence[int], page_size: int, namespace: str
    ) -> tuple[Media | None, ...]:
        """Per prompt its images; None: it has none.

        Args:
            inputs: of the call.
            rows, pads: the prompts' tokens, and the padding before each.
            page_size: of the cache.
            namespace: embeddings that are kept are used again within it alone, and by the same version of the model.

        Raises:
            ArgumentError: the images of this model cannot be cached.
            PromptError: the tensors do not fit each other.
        """
        config = self._model.inner.config
        if config.model_type not in MODELS:
            raise ArgumentError(
                f"images of {config.model_type} cannot be cached: they may be more than embeddings and positions. "
                f"Those of {', '.join(MODELS)} can"
            )
        grids = inputs.image_grid_thw.reshape(-1, 3)
        sizes = grids.prod(-1).tolist()
        if sum(sizes) != len(inputs.pixel_values):
            raise PromptError(
                f"image_grid_thw describes {sum(sizes)} patches, and pixel_values has {len(inputs.pixel_values)}"
            )
        if inputs.mm_token_type_ids.shape != (len(rows), pads[0] + len(rows[0])):
            raise PromptError(
                f"mm_token_type_ids must have the shape of input_ids, got {[*inputs.mm_token_type_ids.shape]}"
            )
        images = zip(inputs.pixel_values.split(sizes), grids, strict=True)
        types = inputs.mm_token_type_ids.tolist()
        space = self._model.versions.current().key_space(namespace)
        media = tuple(
            self._media(list(row), types[at][pads[at] :], images, page_size, space) for at, row in enumerate(rows)
        )
        left = sum(1 for _ in images)
        if left:
            raise PromptError(f"there are {left} more images than places for them in the prompts")
        return media

    def _media(
        self, row: list[int], types: list[int], images: Iterator[tuple[Tensor, Tensor]], page_size: int, key_space: str
    ) -> Media | None:
        """The images of one prompt."""
        inner = self._model.inner
        merged = inner.config.vision_config.spatial_merge_size**2
        embedded: list[Image] = []
        grids: list[Tensor] = []
        start = 0
        for kind, group in groupby(types):
            count = sum(1 for _ in group)
            if kind not in (0, IMAGE):
                raise PromptError(f"mm_token_type_ids: {kind} is neither text nor an image; videos are not cached")
            if kind == IMAGE:
                pixels, grid = next(images, (None, None))
                if pixels is None or grid is None:
                    raise PromptError("the prompts have places for more images than there are in pixel_values")
                if len(pixels) != count * merged:
                    raise PromptError(f"an image of {len(pixels) // merged} tokens has {count} places in the prompt")
                embeddings, digest = self._embed(pixels, grid, key_space)
                embedded.append(Image(start, embeddings, PixelHash(digest)))
                grids.append(grid)
            start += count
        if not embedded:
            return None
        if types[-1] == IMAGE:
            raise PromptError("a prompt must end with text: a pass over its last token says what comes next")
        positions, _ = inner.model.get_rope_index(
            torch.tensor([row]), mm_token_type_ids=torch.tensor([types]), image_grid_thw=torch.stack(grids)
        )
        return Media.of(ImagePrompt(row, embedded, positions[:, 0]), embedded[0].embeddings.shape[1], page_size)

    def _embed(self, pixels: Tensor, grid: Tensor, key_space: str) -> tuple[Tensor, bytes]:
        """An image's embeddings, `[tokens, hidden_size]`, and the hash of its content."""
        shape = f"{pixels.dtype} {[*pixels.shape]} {grid.tolist()}".encode()
        digest = hashlib.sha256(pixels.contiguous().cpu().view(torch.uint8).numpy().tobytes() + shape).digest()
        key = digest, key_space
        with self._lock:
            if key not in self._kept:
                device = self._model.device
                made = self._model.inner.get_image_features(pixels.to(device), grid[None].to(device), return_dict=True)
                dtype = self._model.inner.get_input_embeddings().weight.dtype
                self._kept[key] = torch.cat(tuple(made.pooler_output)).to(dtype)
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key], digest
