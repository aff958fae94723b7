"""Images in prompts: their embeddings, their positions, and the ids by which the cache compares them.

The cache compares token ids, and every position of every image has the same placeholder. So the ids of an image's
positions are derived from a hash of its content, and are negative: an equal image is found again, another one is not,
and no token of a text equals one. An image is one unit: no match ends inside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import PromptError


@dataclass(frozen=True, eq=False)
class Image:
    """An image in a prompt.

    Attributes:
        start: its first position.
        embeddings: `[N, hidden_size]`, used in its N positions instead of embedded tokens.
        content: identifies the image, as a hash of its pixels; None: its embeddings do.
    """

    start: int
    embeddings: Tensor
    content: bytes | None = None

    @property
    def end(self) -> int:
        """The position after its last one."""
        return self.start + self.embeddings.shape[0]


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with images whose embeddings are known.

    Attributes:
        token_ids: with any placeholder at every position of an image.
        images: in any order.
        positions: `[3, T]` rotary positions (time, height, width) of the model's `mrope`; None: position i is i in all
            three.
    """

    token_ids: Sequence[int]
    images: Sequence[Image]
    positions: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Media:
    """The images of a request.

    Attributes:
        units: the positions `[start, end)` of each.
        images: in the order of their positions.
        positions: `[3, T]` int64 rotary positions of the prompt, on the host.
        shift: rotary position minus position, for tokens after the prompt.
    """

    units: tuple[tuple[int, int], ...]
    images: tuple[Image, ...]
    positions: Tensor
    shift: int

    @classmethod
    def of(cls, prompt: ImagePrompt, hidden_size: int) -> tuple[Media, list[int]]:
        """The images of a prompt, and its ids as the cache compares them.

        Raises:
            PromptError: images overlap or are outside the prompt, or a tensor has a wrong shape.
        """
        ids, end = list(prompt.token_ids), 0
        images = tuple(sorted(prompt.images, key=lambda image: image.start))
        for image in images:
            if image.embeddings.dim() != 2 or image.embeddings.shape[1] != hidden_size:
                raise PromptError(
                    f"the embeddings of an image must be [positions, {hidden_size}], got "
                    f"{tuple(image.embeddings.shape)}"
                )
            if not end <= image.start < image.end <= len(ids):
                raise PromptError(
                    f"an image at [{image.start}, {image.end}) overlaps another one or is outside the prompt of "
                    f"{len(ids)} tokens"
                )
            end = image.end
        positions = prompt.positions
        if positions is None:
            positions = torch.arange(len(ids)).expand(3, -1)
        if positions.shape != (3, len(ids)):
            raise PromptError(f"positions must be [3, {len(ids)}], got {tuple(positions.shape)}")
        positions = positions.to("cpu", torch.int64)
        for image in images:
            ids[image.start : image.end] = _ids_of(image, positions)
        shift = int(positions.max()) + 1 - len(ids)
        return cls(tuple((image.start, image.end) for image in images), images, positions, shift), ids

    def rotary_positions(self, start: int, end: int) -> Tensor:
        """`[3, end - start]` rotary positions of tokens in and after the prompt."""
        after = torch.arange(max(start, self.positions.shape[1]), end) + self.shift
        return torch.cat((self.positions[:, start:end], after.expand(3, -1)), dim=1)

    def embeddings(self, start: int, end: int) -> list[tuple[int, Tensor]]:
        """The embeddings within tokens `[start, end)`: for each image the offset of its first row from `start`, and
        `[N, hidden_size]`."""
        pieces = []
        for image in self.images:
            first, last = max(start, image.start), min(end, image.end)
            if first < last:
                pieces.append((first - start, image.embeddings[first - image.start : last - image.start]))
        return pieces


def _ids_of(image: Image, positions: Tensor) -> list[int]:
    """Negative ids, 31 bits of hash each: of the content, and of the rotary positions relative to the first."""
    content = image.content
    if content is None:
        content = image.embeddings.detach().float().cpu().contiguous().numpy().tobytes()
    own = positions[:, image.start : image.end]
    shape = (own - own[:, :1]).contiguous().numpy().tobytes()
    stream = hashlib.shake_256(hashlib.sha256(content).digest() + hashlib.sha256(shape).digest())
    numbers = np.frombuffer(stream.digest(4 * (image.end - image.start)), dtype="<u4") | np.uint32(1 << 31)
    ids: list[int] = numbers.view(np.int32).tolist()
    return ids
