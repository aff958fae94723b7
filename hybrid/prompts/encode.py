"""From texts, chat messages and images to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import CheckpointError, PromptError
from hybrid.key import Key
from hybrid.prompts.images import Image, ImagePrompt, Media

Message = dict[str, Any]
"""A chat message, as `{"role": "user", "content": "..."}`."""

Prompt = str | list[int] | list[Message] | dict[str, list[Message]] | ImagePrompt
"""A text, token ids, chat messages (also as `{"messages": [...]}`), or token ids with images."""


class ImageEncoder(Protocol):
    """Turns images into embeddings.

    Attributes:
        placeholder: the token that stands for an image in the output of the chat template.
    """

    @property
    def placeholder(self) -> int: ...

    def embed(self, image: Any) -> tuple[Tensor, tuple[int, int], bytes]:
        """Embed an image.

        Returns:
            `[N, hidden_size]` embeddings, the (rows, columns) of their N positions, and a hash of the image's content.
        """
        ...


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids.

    Attributes:
        ids: its token ids.
        key_ids: its ids as the cache compares them: those of images differ from `ids`.
        media: its images; None: it has none.
    """

    ids: list[int]
    key_ids: list[int]
    media: Media | None = None

    def key(self, namespace: str) -> Key:
        """The key of the prompt in a namespace of the cache."""
        return Key.of(self.key_ids, namespace, self.media.units if self.media is not None else ())


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one or several. A list of ids and a list of messages are one prompt each."""
    if isinstance(prompts, str | dict | ImagePrompt):
        return [prompts]
    many: list[Any] = prompts.tolist() if isinstance(prompts, np.ndarray | torch.Tensor) else list(prompts)
    if many and (all(isinstance(item, int) for item in many) or all(_is_message(item) for item in many)):
        return [many]
    return many


def encode_prompt(
    prompt: Prompt, tokenizer: Any | None, image_encoder: ImageEncoder | None, hidden_size: int
) -> EncodedPrompt:
    """Encode a prompt and the images in it.

    Args:
        tokenizer: of transformers; None: only token ids can be encoded.
        image_encoder: None: chat messages with images are refused.
        hidden_size: the model's; embeddings of images have this size.

    Raises:
        PromptError: the prompt has an unsupported form, or it has images and there is no image encoder.
    """
    if not isinstance(prompt, ImagePrompt):
        if not images_of(prompt):
            ids = encode(tokenizer, prompt)
            return EncodedPrompt(ids, ids)
        if image_encoder is None:
            raise PromptError("this checkpoint has no vision tower; give ImagePrompt with embeddings, or text alone")
        prompt = embed_images(prompt, tokenizer, image_encoder)
    media, key_ids = Media.of(prompt, hidden_size)
    return EncodedPrompt(list(prompt.token_ids), key_ids, media)


def embed_images(prompt: Prompt, tokenizer: Any | None, image_encoder: ImageEncoder) -> ImagePrompt:
    """Encode chat messages with images: each placeholder becomes the positions of its image.

    Rotary positions are those of Qwen's models: a text counts up in all three rows. All positions of an image have the
    same time; its rows and columns count up from where it begins, and the text after it continues after the larger of
    the two.

    Raises:
        PromptError: the template does not make one placeholder per image, or an image has an unsupported form.
    """
    ids, pixels = encode(tokenizer, prompt), images_of(prompt)
    placeholder = image_encoder.placeholder
    if ids.count(placeholder) != len(pixels):
        raise PromptError(
            f"the chat template makes {ids.count(placeholder)} placeholders (token {placeholder}) for {len(pixels)} "
            "images; it must make one for each"
        )
    remaining = iter(pixels)
    tokens: list[int] = []
    images: list[Image] = []
    positions: list[Tensor] = []
    next_position = 0
    for token in ids:
        if token != placeholder:
            tokens.append(token)
            positions.append(torch.full((3, 1), next_position))
            next_position += 1
            continue
        embeddings, (rows, columns), content = image_encoder.embed(next(remaining))
        images.append(Image(len(tokens), embeddings, content))
        tokens += [token] * (rows * columns)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        positions.append(next_position + torch.stack((torch.zeros_like(row), row, column)).flatten(1))
        next_position += max(rows, columns)
    return ImagePrompt(tokens, images, torch.cat(positions, dim=1))


def encode(tokenizer: Any | None, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: a text, token ids as they are, or chat messages through the chat template.

    Raises:
        PromptError: the prompt has another form, or there is no tokenizer or no chat template for it.
    """
    if isinstance(prompt, dict) and isinstance(prompt.get("messages"), list):
        prompt = prompt["messages"]
    if isinstance(prompt, list):
        ids = [token for token in prompt if isinstance(token, int) and not isinstance(token, bool)]
        if len(ids) == len(prompt):
            return ids
    is_chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not is_chat and not isinstance(prompt, str):
        raise PromptError(
            f"a prompt is a text, a list of token ids, or a list of chat messages; got {type(prompt).__name__}"
        )
    if tokenizer is None:
        raise PromptError("this checkpoint has no tokenizer; give the prompt as a list of token ids")
    if isinstance(prompt, str):
        return list(tokenizer(prompt).input_ids)
    if not tokenizer.chat_template:
        raise PromptError("this checkpoint's tokenizer has no chat template; give the prompt as a text")
    try:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything for messages it does not support
        raise PromptError(f"the chat template refuses these messages: {error}") from error
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def images_of(prompt: Prompt) -> list[Any]:
    """The images in chat messages, in order: parts `{"type": "image", "image": ...}` of their contents.

    Raises:
        PromptError: an image is an address or a path. Nothing here opens addresses or files that are named in a prompt,
            which may come from an untrusted client.
    """
    contents = [message.get("content") for message in _messages_of(prompt) or ()]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    images = [part for part in parts if isinstance(part, dict) and part.get("type") == "image"]
    for part in images:
        if isinstance(part.get("image"), str | Path | None):
            raise PromptError(
                f'an image part holds the image itself, under "image", not an address or a path ({sorted(part)}); load '
                "it first: transformers.image_utils.load_image(...)"
            )
    return [part["image"] for part in images]


def load_tokenizer(path: Path) -> Any | None:
    """The tokenizer of a checkpoint; None when it has none: prompts are token ids then.

    Raises:
        CheckpointError: the checkpoint has a tokenizer that cannot be read.
    """
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises many kinds for a malformed tokenizer
        raise CheckpointError(f"the tokenizer of {path} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        raise CheckpointError(f"{path} has no tokenizer.json; save it with a fast tokenizer of transformers first")
    return tokenizer


def _is_message(item: Any) -> bool:
    """Whether an item of a list is a chat message, rather than a prompt by itself."""
    return isinstance(item, dict) and "messages" not in item


def _messages_of(prompt: Prompt) -> list[Message] | None:
    """The chat messages of a prompt; None: it is not a chat."""
    if isinstance(prompt, dict):
        return prompt.get("messages")
    is_chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    return cast("list[Message]", prompt) if is_chat else None
