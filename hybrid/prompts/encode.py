"""From chat messages with images to a prompt that the model can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid.errors import PromptError
from hybrid.key import Key
from hybrid.prompts.images import Image, ImagePrompt, Media
from hybrid.prompts.text import Prompt, encode, images_of


class Tower(Protocol):
    """Embeds an image: `[N, hidden_size]`, (rows, columns) of its N positions, and a hash of its content."""

    def embed(self, image: Any) -> tuple[Tensor, tuple[int, int], bytes]: ...


@dataclass(frozen=True)
class Eyes:
    """What an engine needs to look at images.

    Attributes:
        placeholder: the token that stands for an image in the text of a chat.
    """

    tower: Tower
    placeholder: int

    def look(self, tokenizer: Any | None, prompt: Prompt) -> ImagePrompt:
        """Encode chat messages with images: each placeholder becomes the positions of its image.

        Rotary positions as Qwen's models have them: text counts on in all three rows; an image stands still in time,
        its rows and columns count from where it begins, and the text behind it goes on after the longer of the two.

        Raises:
            PromptError: the template has not one placeholder for each image, or an image is none.
        """
        ids, pixels = encode(tokenizer, prompt), images_of(prompt)
        if ids.count(self.placeholder) != len(pixels):
            raise PromptError(
                f"the chat template makes {ids.count(self.placeholder)} placeholders (token {self.placeholder}) of "
                f"{len(pixels)} images; it must make one of each"
            )
        waiting = iter(pixels)
        tokens: list[int] = []
        images: list[Image] = []
        positions: list[Tensor] = []
        at = 0
        for token in ids:
            if token != self.placeholder:
                tokens.append(token)
                positions.append(torch.full((3, 1), at))
                at += 1
                continue
            embeddings, (rows, columns), content = self.tower.embed(next(waiting))
            images.append(Image(len(tokens), embeddings, content))
            tokens += [token] * (rows * columns)
            row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            positions.append(at + torch.stack((torch.zeros_like(row), row, column)).flatten(1))
            at += max(rows, columns)
        return ImagePrompt(tokens, images, torch.cat(positions, dim=1))


@dataclass(frozen=True)
class Understood:
    """A prompt in numbers.

    Attributes:
        ids: its token ids.
        known: its ids as the cache knows them: those of images are others.
        media: its images.
    """

    ids: list[int]
    known: list[int]
    media: Media | None = None

    def key(self, namespace: str) -> Key:
        return Key.of(self.known, namespace, self.media.units if self.media is not None else ())


def understand(prompt: Prompt, tokenizer: Any | None, eyes: Eyes | None, config: Any) -> Understood:
    """Encode a prompt, and look at its images.

    Args:
        config: the model's; asked for `hidden_size` where there are images.

    Raises:
        PromptError: the prompt is of a form that does not run here, or it has images and there is nothing to look with.
    """
    if not isinstance(prompt, ImagePrompt):
        if not images_of(prompt):
            ids = encode(tokenizer, prompt)
            return Understood(ids, ids)
        if eyes is None:
            raise PromptError("this checkpoint has no vision tower; give ImagePrompt with embeddings, or text alone")
        prompt = eyes.look(tokenizer, prompt)
    media, known = Media.of(prompt, config.hidden_size)
    return Understood(list(prompt.token_ids), known, media)
