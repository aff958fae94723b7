"""Images in prompts: their embeddings, their positions, and the key by which the cache finds them again.

The cache compares token ids, and every position of every image has the same placeholder. So each image is a unit of the
key, with a hash of its content: an equal image is found again, another one is not, and no text equals one. No match
ends inside an image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hybrid.checks import is_integer
from hybrid.errors import PromptError
from hybrid.key import Key, PagedUnits, Unit


@dataclass(frozen=True)
class PixelHash:
    """A hash of an image's pixels, computed by an image encoder. No name that a caller gives to an image equals it.

    Attributes:
        digest: at least 16 bytes.
    """

    digest: bytes


@dataclass(frozen=True, eq=False)
class Image:
    """An image in a prompt.

    Attributes:
        start: its first position.
        embeddings: `[N, hidden_size]`, used in its N positions instead of embedded tokens.
        content: the caller's name for its content: images of one name must be equal. None: its embeddings identify it.
    """

    start: int
    embeddings: Tensor
    content: bytes | str | PixelHash | None = None

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
        images: in the order of their positions.
        positions: `[3, T]` int64 rotary positions of the prompt, on the host.
        units: the parts of the prompt that token ids do not describe.
        prompt: the prompt's ids and units, as the cache compares them.
    """

    images: tuple[Image, ...]
    positions: Tensor
    units: tuple[Unit, ...]
    prompt: PagedUnits

    @classmethod
    def of(cls, prompt: ImagePrompt, hidden_size: int, page_size: int) -> Media:
        """The images of a prompt. Its tensors are copied: what their owner writes into them later is not part of it.

        Args:
            prompt: its token ids are those of a vocabulary.
            hidden_size: of the embeddings.
            page_size: of the cache.

        Raises:
            PromptError: images overlap or are outside the prompt, a tensor has a wrong shape or dtype, or embeddings
                are not finite.
        """
        num_tokens = len(prompt.token_ids)
        for image in prompt.images:
            _check_embeddings(image, hidden_size)
        own = (replace(image, embeddings=image.embeddings.detach().clone()) for image in prompt.images)
        images, end = tuple(sorted(own, key=lambda image: image.start)), 0
        for image in images:
            if not end <= image.start < image.end <= num_tokens:
                raise PromptError(
                    f"an image at [{image.start}, {image.end}) overlaps another one or is outside the prompt of "
                    f"{num_tokens} tokens"
                )
            end = image.end
        positions = _checked_positions(prompt.positions, num_tokens)
        units = (*_image_units(images, positions), *_position_units(prompt.token_ids, images, positions))
        return cls(images, positions, units, PagedUnits(prompt.token_ids, units, page_size))

    @cached_property
    def shift(self) -> int:
        """Rotary position minus position, for tokens after the prompt."""
        return int(self.positions.max()) + 1 - self.positions.shape[1]

    def key(self, ids: Sequence[int], namespace: str) -> Key:
        """The key of the prompt and the tokens after it.

        Args:
            ids: those of the prompt, placeholders included, and of the answer up to now.
            namespace: of the cache.
        """
        return self.prompt.key(ids, namespace)

    def rotary_positions(self, start: int, end: int) -> Tensor:
        """`[3, end - start]` rotary positions of tokens in and after the prompt."""
        num_tokens = self.positions.shape[1]
        after = torch.arange(max(start, num_tokens), max(end, num_tokens)) + self.shift
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


def _check_embeddings(image: Image, hidden_size: int) -> None:
    if not is_integer(image.start):
        raise PromptError(f"an image must start at a position, an integer; got {image.start!r:.100}")
    embeddings = image.embeddings
    if not isinstance(embeddings, Tensor):
        raise PromptError(f"the embeddings of an image must be a tensor; got {type(embeddings).__name__}")
    if embeddings.dim() != 2 or embeddings.shape[1] != hidden_size or not embeddings.is_floating_point():
        raise PromptError(
            f"the embeddings of an image must be [positions, {hidden_size}] floating point, got "
            f"{tuple(embeddings.shape)} {embeddings.dtype}"
        )
    if not bool(torch.isfinite(embeddings).all()):
        raise PromptError(
            f"the embeddings of the image at position {image.start} contain NaN or infinity; compute them again"
        )
    if not isinstance(image.content, bytes | str | PixelHash | None):
        raise PromptError(
            f"the content of an image must be bytes, a text or None; got {type(image.content).__name__}. Give a hash "
            "of its pixels"
        )


def _checked_positions(positions: Tensor | None, num_tokens: int) -> Tensor:
    """The rotary positions of a prompt, on the host."""
    if positions is None:
        return torch.arange(num_tokens).expand(3, -1)
    if not isinstance(positions, Tensor) or positions.shape != (3, num_tokens):
        got = tuple(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
        raise PromptError(f"positions must be [3, {num_tokens}], got {got}")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise PromptError(f"positions must be integers, got {positions.dtype}")
    positions = positions.detach().to("cpu", torch.int64, copy=True)
    if num_tokens and (int(positions.min()) < 0 or int(positions.max()) >= 2**31):
        raise PromptError("positions must be from 0 to 2**31 - 1")
    return positions


def _digest(domain: bytes, *parts: bytes) -> bytes:
    """256 bits of hash. Two calls agree only when the domain and all parts do."""
    digest = hashlib.blake2b(digest_size=32, person=domain)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _content_digest(image: Image) -> bytes:
    """Identify the content of an image. Pixels, callers' names and embeddings are domains of their own."""
    content = image.content
    if isinstance(content, PixelHash):
        return _digest(b"hybrid pixels", content.digest)
    if isinstance(content, str):
        return _digest(b"hybrid text name", content.encode("utf-8", "surrogatepass"))
    if content is not None:
        return _digest(b"hybrid name", content)
    values = image.embeddings.detach().float().cpu().contiguous().numpy()
    return _digest(b"hybrid embedding", np.array(values.shape, "<i8").tobytes(), values.tobytes())


def _image_units(images: Sequence[Image], positions: Tensor) -> list[Unit]:
    """One unit per image: its content, and its rotary positions relative to its first one."""
    units = []
    for image in images:
        own = positions[:, image.start : image.end]
        relative = (own - own[:, :1]).contiguous().numpy().astype("<i8").tobytes()
        units.append(Unit(image.start, image.end, _digest(b"hybrid image", _content_digest(image), relative)))
    return units


def _position_units(ids: Sequence[int], images: Sequence[Image], positions: Tensor) -> list[Unit]:
    """Units for tokens whose rotary positions do not follow from those before them.

    A text counts up by one in all three rows, and an image and the text after it begin one after the largest position
    before them. Tokens of which this does not hold are other tokens than those of the same ids elsewhere.
    """
    if not len(ids):
        return []
    rows = positions.numpy()
    expected = np.concatenate(([0], np.maximum.accumulate(rows.max(axis=0))[:-1] + 1))
    differs = (rows != expected).any(axis=0)
    for image in images:
        differs[image.start + 1 : image.end] = False  # within an image, positions are part of its own unit
    changes = np.flatnonzero(np.diff(differs.astype(np.int8), prepend=0, append=0)).tolist()
    units = []
    for start, end in zip(changes[::2], changes[1::2], strict=True):
        part = (rows[:, start:end] - expected[start:end]).astype("<i8").tobytes()
        tokens = np.array(ids[start:end], "<i8").tobytes()
        units.append(Unit(start, end, _digest(b"hybrid position", tokens, part)))
    return units
