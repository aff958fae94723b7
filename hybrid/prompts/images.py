"""Images in prompts: their embeddings, their places, and the ids under which the cache knows them.

The cache compares token ids, and every position of every image has the same placeholder. So within a request the ids
of an image's positions are made of a hash of its content, and are negative: the same image is found again, another is
not, and no token of a text is taken for one. An image is one unit: nothing ends inside it.
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
        embeddings: `[N, hidden_size]`, what stands in its N positions instead of embedded tokens.
        content: what tells it from other images, as a hash of its pixels; None: its embeddings do.
    """

    start: int
    embeddings: Tensor
    content: bytes | None = None

    @property
    def end(self) -> int:
        return self.start + self.embeddings.shape[0]


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """A prompt with images whose embeddings are known.

    Attributes:
        token_ids: with a placeholder, whichever, at every position of an image.
        images: in any order.
        positions: `[3, T]` rows of rotary positions (time, height, width) as the model has them (`mrope`); None: each
            position its own number.
    """

    token_ids: Sequence[int]
    images: Sequence[Image]
    positions: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Media:
    """The images of a request.

    Attributes:
        units: `(start, end)` of each.
        images: in the order of their positions.
        positions: `[3, prompt]` on the host.
        shift: what is added to the number of a token behind the prompt to give its rotary position.
    """

    units: tuple[tuple[int, int], ...]
    images: tuple[Image, ...]
    positions: Tensor
    shift: int

    @classmethod
    def of(cls, prompt: ImagePrompt, hidden_size: int) -> tuple[Media, list[int]]:
        """The images of a prompt, and its ids as the cache knows them.

        Raises:
            PromptError: images overlap or lie outside the prompt, or tensors have another shape.
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
                    f"an image at [{image.start}, {image.end}) overlaps another one or lies outside the prompt of "
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
        """`[3, end - start]` rotary positions of tokens of the prompt and behind it."""
        behind = torch.arange(max(start, self.positions.shape[1]), end) + self.shift
        return torch.cat((self.positions[:, start:end], behind.expand(3, -1)), dim=1)

    def embeddings(self, start: int, end: int) -> list[tuple[int, Tensor]]:
        """Of tokens `[start, end)` the pieces that belong to images: the number of the first, counted from `start`, and
        `[N, hidden_size]`."""
        pieces = []
        for image in self.images:
            first, last = max(start, image.start), min(end, image.end)
            if first < last:
                pieces.append((first - start, image.embeddings[first - image.start : last - image.start]))
        return pieces


def _ids_of(image: Image, positions: Tensor) -> list[int]:
    """Negative ids, 31 bits of hash each: of the content, and of how the positions lie to each other."""
    content = image.content
    if content is None:
        content = image.embeddings.detach().float().cpu().contiguous().numpy().tobytes()
    own = positions[:, image.start : image.end]
    shape = (own - own[:, :1]).contiguous().numpy().tobytes()
    stream = hashlib.shake_256(hashlib.sha256(content).digest() + hashlib.sha256(shape).digest())
    numbers = np.frombuffer(stream.digest(4 * (image.end - image.start)), dtype="<u4") | np.uint32(1 << 31)
    return numbers.view(np.int32).tolist()
