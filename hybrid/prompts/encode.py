"""From texts, chat messages and images to token ids.

A prompt may come from anybody. Its size is looked at before anything is computed from it: a text's before it is
tokenized, the number of ids before their values, the size of images before they are decoded.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from hybrid.checks import boolean, is_file, is_integer, shown
from hybrid.errors import CheckpointError, PromptError
from hybrid.key import Key
from hybrid.prompts import messages as chat
from hybrid.prompts.breakpoints import Breakpoint, are_in, taken_out, up_to
from hybrid.prompts.images import Image, ImagePrompt, Media, PixelHash

Message = chat.Message

Prompt = str | list[int] | list[Message] | dict[str, Any] | ImagePrompt
"""A text, token ids, chat messages, or token ids with images. As a dict: `{"prompt": text}`, `{"prompt_token_ids":
ids}`, or `{"messages": [...]}` with options of the chat template (`messages.OPTIONS`)."""

SPLIT = "split_special_tokens"
"""Beside the text or the messages of a prompt: the names of control tokens in it are texts, and do not become control
tokens. Those that a chat template writes stay what they are."""

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
"""Keys of which a prompt as a dict has one."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
MAX_TOKENIZER_BYTES = 256 * 2**20
"""Maximum size of each of these files. The largest vocabularies in use take about 40 MiB."""

BYTES_PER_TOKEN = 32
"""The mean number of bytes per token, in UTF-8, that a text may have. In natural language and code it is 1 to 8; only
long runs of spaces or of one sign have more."""


PART_BYTES = 32
"""Bytes of a value in a prompt, such as a token id, beside those of a text."""


class ImageEncoder(Protocol):
    """Turns images into embeddings.

    Attributes:
        placeholder: the token that stands for an image in the output of the chat template.
    """

    @property
    def placeholder(self) -> int: ...

    def num_positions(self, image: Any) -> int:
        """The number of positions of an image, from its size alone: it is not decoded.

        Raises:
            PromptError: it is not an image, or of an unsupported size.
        """
        ...

    def embed(self, image: Any, namespace: str) -> tuple[Tensor, tuple[int, int], bytes]:
        """Embed an image.

        Args:
            namespace: embeddings that are kept are used again within it alone.

        Returns:
            `[N, hidden_size]` embeddings, the (rows, columns) of their N positions, and a hash of the image's content.

        Raises:
            PromptError: it is not an image, of an unsupported size, or cannot be decoded.
        """
        ...


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids.

    Attributes:
        ids: its token ids, with a placeholder at every position of an image.
        media: its images; None: it has none.
        breakpoints: positions up to which it is to be cached, in order.
    """

    ids: list[int]
    media: Media | None = None
    breakpoints: tuple[Breakpoint, ...] = ()

    def key(self, namespace: str) -> Key:
        """The key of the prompt in a namespace of the cache."""
        return Key.of(self.ids, namespace) if self.media is None else self.media.key(self.ids, namespace)


@dataclass(frozen=True, kw_only=True)
class PromptLimits:
    """The sizes up to which prompts are encoded.

    Attributes:
        max_tokens: a prompt has fewer tokens than this: that of the model, the answer included.
        vocab_size: token ids are smaller than this.
        max_text_bytes: bytes of a text, in UTF-8.
        templates: whether a prompt may bring a chat template, which is a program of its sender.
    """

    max_tokens: int = 2**31 - 1
    vocab_size: int = 2**31 - 1
    max_text_bytes: int = 2**31 - 1
    templates: bool = False

    @classmethod
    def of(cls, max_tokens: int, vocab_size: int, max_request: int, templates: bool = False) -> PromptLimits:
        """The limits of an engine. A text has up to `BYTES_PER_TOKEN` bytes for each token of the largest request.

        Args:
            max_tokens: of prompt and answer, for the model.
            vocab_size: of the model.
            max_request: tokens of the largest request that the cache can hold.
            templates: whether a prompt may bring a chat template.
        """
        max_text_bytes = BYTES_PER_TOKEN * min(max_tokens, max_request)
        return cls(max_tokens=max_tokens, vocab_size=vocab_size, max_text_bytes=max_text_bytes, templates=templates)

    def check_tokens(self, num_tokens: int) -> None:
        """Refuse a prompt by its number of tokens."""
        if num_tokens >= self.max_tokens:
            raise PromptError(
                f"the prompt has {num_tokens} tokens; this model takes {self.max_tokens}, the answer included: shorten "
                "the prompt"
            )

    def check_ids(self, ids: list[int]) -> list[int]:
        """Refuse token ids by their number, and then by their values; returns them."""
        self.check_tokens(len(ids))
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            shown = wrong if abs(wrong) < 10**20 else f"of {wrong.bit_length()} bits"
            raise PromptError(f"token id {shown} is outside the vocabulary: ids go from 0 to {self.vocab_size - 1}")
        return ids

    def check_template(self, template: object, own: object) -> None:
        """Refuse a chat template that comes with a prompt, unless it is the name of one of the tokenizer's.

        Args:
            template: of the prompt; None: it brings none.
            own: the tokenizer's, or several by name.
        """
        names = tuple(own) if isinstance(own, Mapping) else ()
        if template is None or self.templates or (isinstance(template, str) and template in names):
            return
        raise PromptError(
            "chat_template: a template is a program, and prompts may come from anyone: it is not run. Leave it out for "
            f"the checkpoint's{', or name one of ' + shown(names) if names else ''}; where only you write prompts, "
            "EngineConfig(prompt_templates=True) allows it"
        )

    def check_text(self, num_bytes: int) -> None:
        """Refuse a text by its size."""
        if num_bytes > self.max_text_bytes:
            raise PromptError(
                f"the text has {num_bytes} bytes or more, and this engine takes up to {self.max_text_bytes}: the "
                f"largest request that it can hold has {self.max_text_bytes // BYTES_PER_TOKEN} tokens, of "
                f"{BYTES_PER_TOKEN} bytes each at most; shorten the text, or give the cache more memory "
                "(CacheConfig(memory=...)) as far as the model's own limit of tokens allows"
            )


NO_LIMITS = PromptLimits(templates=True)
"""Limits only of the types, for prompts of our own."""


class PromptEncoder:
    """Encodes the prompts of one engine.

    Args:
        tokenizer: of transformers; None: only token ids can be encoded.
        image_encoder: None: chat messages with images are refused.
        hidden_size: the model's; embeddings of images have this size.
        page_size: of the cache.
        limits: the sizes up to which prompts are encoded.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        image_encoder: ImageEncoder | None,
        *,
        hidden_size: int,
        page_size: int,
        limits: PromptLimits,
    ) -> None:
        self._tokenizer = tokenizer
        self._image_encoder = image_encoder
        self._hidden_size = hidden_size
        self._page_size = page_size
        self._limits = limits
        self._splitter: Any | None = None  # of its own: tokenizers have a state for this, and others encode meanwhile
        self._splitting = threading.Lock()

    def _ids(self, prompt: Prompt, limits: PromptLimits) -> list[int]:
        if not isinstance(prompt, dict) or not prompt.get(SPLIT):
            return encode(self._tokenizer, prompt, limits)
        with self._splitting:
            if self._splitter is None:
                self._splitter = copy.deepcopy(self._tokenizer)
            return encode(self._splitter, prompt, limits)

    def encode(self, prompt: Prompt, truncate: int | None = None, namespace: str = "") -> EncodedPrompt:
        """Encode a prompt and the images in it.

        Args:
            prompt: in any form.
            truncate: keep this many of the last tokens; None: all.
            namespace: of the cache; what is kept of an image is used again within it alone.

        Raises:
            PromptError: the prompt has an unsupported form, is too large, or has images and there is no image encoder.
        """
        prompt = unwrapped(prompt)
        breakpoints: tuple[Breakpoint, ...] = ()
        if truncate is not None:
            return self._encode_end(prompt, truncate)
        if not isinstance(prompt, ImagePrompt):
            images = images_of(prompt, self._limits)
            if images and self._image_encoder is None:
                raise PromptError(
                    "this checkpoint has no vision tower; give ImagePrompt with embeddings, or text alone"
                )
            prompt, marked, ttls = _without_breakpoints(prompt)
            ids = self._ids(prompt, self._limits)
            ends = [self._num_before(number, marked, ids) for number in range(len(ttls))]
            if not images or self._image_encoder is None:
                return EncodedPrompt(ids, None, _breakpoints(ends, ttls))
            placeholder = self._image_encoder.placeholder
            sizes = [self._image_encoder.num_positions(image) - 1 for image in images]
            ends = [end + sum(sizes[: ids[:end].count(placeholder)]) for end in ends]
            breakpoints = _breakpoints(ends, ttls)
            prompt = embed_images(ids, images, self._image_encoder, self._limits, namespace)
        self._limits.check_tokens(len(prompt.token_ids))
        whole = _integers(prompt.token_ids)
        if whole is None:
            raise PromptError("the token_ids of an ImagePrompt must be integers")
        self._limits.check_ids(whole)
        prompt = ImagePrompt(whole, prompt.images, prompt.positions)
        return EncodedPrompt(whole, Media.of(prompt, self._hidden_size, self._page_size), breakpoints)

    def _num_before(self, number: int, marked: Prompt, ids: list[int]) -> int:
        """The number of tokens of a prompt before its breakpoint of this number.

        Args:
            marked: the prompt with marks at its breakpoints.
        """
        with self._splitting:
            if self._splitter is None:
                self._splitter = copy.deepcopy(self._tokenizer)
            before = encode(self._splitter, marked, self._limits, lambda text: up_to(text, number))
        return next((at for at, pair in enumerate(zip(before, ids, strict=False)) if pair[0] != pair[1]), len(before))

    def encode_turn(self, prompt: dict[str, Any]) -> list[int]:
        """See the function of this name."""
        if images_of(prompt, self._limits):
            raise PromptError("messages with images have no token ids of their own: send the whole chat")
        with self._splitting:
            if self._splitter is None:
                self._splitter = copy.deepcopy(self._tokenizer)
            return encode_turn(self._splitter, prompt, self._limits)

    def _encode_end(self, prompt: Prompt, num_tokens: int) -> EncodedPrompt:
        """Encode a prompt without images, and keep the last `num_tokens` tokens."""
        if isinstance(prompt, ImagePrompt) or images_of(prompt, self._limits):
            raise PromptError("truncate_prompt_tokens: a prompt with images cannot be truncated; shorten its text")
        any_number = replace(self._limits, max_tokens=NO_LIMITS.max_tokens)
        return EncodedPrompt(self._limits.check_ids(self._ids(prompt, any_number)[-num_tokens:]))


def num_bytes(prompt: Any, limit: int) -> int:
    """Bytes that a prompt takes about, or more than `limit`: from lengths alone, its texts and pixels are not read."""
    counted, parts = 0, [prompt]
    while parts and counted <= limit:
        part = parts.pop()
        counted += PART_BYTES
        if isinstance(part, str | bytes | bytearray):
            counted += len(part)
        elif isinstance(part, np.ndarray | Tensor):
            counted += part.nbytes
        elif isinstance(part, ImagePrompt):
            parts += [part.token_ids, *(image.embeddings for image in part.images)]
        elif isinstance(part, dict):
            parts += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            counted += PART_BYTES * len(part)
            parts += [item for item in part if not isinstance(item, int | float)] if counted <= limit else ()
        elif isinstance(size := getattr(part, "size", None), tuple) and len(size) == 2:  # an image of Pillow
            counted += 3 * int(size[0]) * int(size[1])
    return counted


def chat_prompt(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The prompt of a chat.

    Args:
        messages: that were said.
        tools: that the answer may call.
        chat_template_kwargs: variables of the template; None: none.
    """
    prompt: dict[str, Any] = {"messages": list(messages)}
    if tools:
        prompt["tools"] = [dict(tool) for tool in tools]
    if chat_template_kwargs:
        prompt["chat_template_kwargs"] = dict(chat_template_kwargs)
    return prompt


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one or several.

    A list of ids and a list of messages are one prompt each, as their first item shows, and so is an array of one
    dimension.

    Raises:
        PromptError: it is neither.
    """
    if isinstance(prompts, str | bytes | dict | ImagePrompt):
        return [cast("Prompt", prompts)]
    if isinstance(prompts, np.ndarray | Tensor):
        return [cast("Prompt", prompts)] if prompts.ndim == 1 else list(cast("Any", prompts))
    if not isinstance(prompts, list | tuple):
        raise PromptError(
            f"a prompt is a text, a list of token ids, or a list of chat messages, and prompts are a list of them; got "
            f"{type(prompts).__name__} {shown(prompts)}{_remedy(prompts)}"
        )
    many: list[Any] = list(prompts)
    return [many] if many and (is_integer(many[0]) or _is_message(many[0])) else many


def embed_images(
    ids: list[int], images: list[Any], image_encoder: ImageEncoder, limits: PromptLimits, namespace: str
) -> ImagePrompt:
    """Embed images: each placeholder in the ids becomes the positions of its image.

    Rotary positions are those of Qwen's models: a text counts up in all three rows. All positions of an image have the
    same time; its rows and columns count up from where it begins, and the text after it continues after the larger of
    the two.

    Raises:
        PromptError: the ids do not have one placeholder per image, there are too many positions, or an image has an
            unsupported form.
    """
    placeholder = image_encoder.placeholder
    if ids.count(placeholder) != len(images):
        raise PromptError(
            f"the chat template makes {ids.count(placeholder)} placeholders (token {placeholder}) for {len(images)} "
            "images; it must make one for each"
        )
    limits.check_tokens(len(ids) - len(images) + sum(image_encoder.num_positions(image) for image in images))
    tokens: list[int] = []
    embedded: list[Image] = []
    positions: list[Tensor] = []
    read, next_position = 0, 0
    for image in (*images, None):
        end = ids.index(placeholder, read) if image is not None else len(ids)
        tokens += ids[read:end]
        positions.append(torch.arange(next_position, next_position + end - read).expand(3, -1))
        next_position, read = next_position + end - read, end + 1
        if image is not None:
            embeddings, (rows, columns), content = image_encoder.embed(image, namespace)
            embedded.append(Image(len(tokens), embeddings, PixelHash(content)))
            tokens += [placeholder] * (rows * columns)
            row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            positions.append(next_position + torch.stack((torch.zeros_like(row), row, column)).flatten(1))
            next_position += max(rows, columns)
    return ImagePrompt(tokens, embedded, torch.cat(positions, dim=1))


def _without_breakpoints(prompt: Prompt) -> tuple[Prompt, Prompt, list[float]]:
    """A prompt without breakpoints, the same with a mark at each of them, and the time to live of each."""
    messages = _messages_of(prompt)
    if messages is None or not are_in(messages):
        return prompt, prompt, []
    plain, marked, ttls = taken_out(messages)
    if isinstance(prompt, dict):
        return {**prompt, "messages": plain}, {**prompt, "messages": marked}, ttls
    return plain, marked, ttls


def _breakpoints(ends: list[int], ttls: list[float]) -> tuple[Breakpoint, ...]:
    return tuple(Breakpoint(end, ttl) for end, ttl in zip(ends, ttls, strict=True) if end)


def encode(
    tokenizer: Any | None,
    prompt: Prompt,
    limits: PromptLimits = NO_LIMITS,
    cut: Callable[[str], str] | None = None,
) -> list[int]:
    """Token ids of a prompt: a text, token ids as they are, or chat messages through the chat template.

    Args:
        cut: what is kept of the text that the chat template makes; None: all.

    Raises:
        PromptError: the prompt has another form or is too large, or there is no tokenizer or no chat template for it.
    """
    prompt, split = unwrapped(prompt), False
    if isinstance(prompt, dict) and SPLIT in prompt:
        split = boolean(SPLIT, prompt[SPLIT])
        if "messages" not in prompt:
            prompt = cast("Prompt", prompt["prompt"])
            if not isinstance(prompt, str):
                raise PromptError(f"{SPLIT} is for a text; got {type(prompt).__name__} {shown(prompt)}")
    messages = _messages_of(prompt)
    if messages is None and not isinstance(prompt, str):
        ids = None
        if isinstance(prompt, list) or (isinstance(prompt, np.ndarray | Tensor) and prompt.ndim == 1):
            limits.check_tokens(len(prompt))
            ids = _integers(cast("list[int]", prompt))
        if ids is None:
            hint = "; decode them first" if isinstance(prompt, bytes | bytearray) else ""
            raise PromptError(
                "a prompt is a text, a list of token ids, or a list of chat messages; got "
                f"{type(prompt).__name__} {shown(prompt)}{hint}"
            )
        return limits.check_ids(ids)
    if tokenizer is None:
        raise PromptError("this checkpoint has no tokenizer; give the prompt as a list of token ids")
    if isinstance(prompt, str):
        more = {"split_special_tokens": True} if split else {}
        return _tokenize(prompt, limits, lambda text: tokenizer(text, add_special_tokens=True, **more).input_ids)
    return _encode_chat(tokenizer, messages, prompt, limits, split, cut)


ANSWER = "\ue000\ue001\ue000"
"""In the place of an answer whose text does not matter: characters that Unicode leaves to private use."""


def encode_turn(tokenizer: Any | None, prompt: dict[str, Any], limits: PromptLimits = NO_LIMITS) -> list[int]:
    """Token ids of what follows an answer in a chat, from the end of its content on: the end of its message, and the
    messages of the prompt, in the form of the chat template.

    Raises:
        PromptError: as for `encode`, or the template does not show what an assistant said as it is.
    """
    if tokenizer is None:
        raise PromptError("this checkpoint has no tokenizer; give the prompt as a list of token ids")
    before: list[Message] = [{"role": "user", "content": "."}, {"role": "assistant", "content": ANSWER}]
    split = boolean(SPLIT, prompt.get(SPLIT, False))
    return _encode_chat(tokenizer, [*before, *prompt["messages"]], prompt, limits, split, _after_answer)


def _after_answer(text: str) -> str:
    if text.count(ANSWER) != 1:
        raise PromptError("this chat template does not show an answer once and as it is: send the whole chat")
    return text.partition(ANSWER)[2]


def _encode_chat(
    tokenizer: Any,
    messages: list[Message] | None,
    prompt: Any,
    limits: PromptLimits,
    split: bool,
    cut: Callable[[str], str] | None,
) -> list[int]:
    """Token ids of messages, by the chat template and with the options of their prompt.

    Args:
        split: the names of control tokens in the messages are text.
        cut: what is kept of the rendered text; None: all.
    """
    if not tokenizer.chat_template:
        raise PromptError("this checkpoint's tokenizer has no chat template; give the prompt as a text")
    options = chat.template_options(prompt)
    limits.check_template(options.get("chat_template"), tokenizer.chat_template)
    limits.check_text(chat.num_characters([messages, options], limits.max_text_bytes))
    messages = chat.checked(cast("list[Any]", messages))
    if "tool_calls" not in str(tokenizer.chat_template):  # it would write "None" for a message that is calls alone
        messages = [one if one.get("content") is not None else one | {"content": ""} for one in messages]
    control, marks = (chat.ControlTokens(tokenizer) if split else None), {}
    try:
        if control is not None:
            messages, own = chat.joined(messages), options.pop("chat_template", None)
            marks = control.marks([messages, options])
            messages, options = chat.marked(messages, marks), chat.marked(options, marks)
            options |= {} if own is None else {"chat_template": own}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template may raise anything for messages it does not support
        raise PromptError(f"the chat template refuses these messages: {error}") from error
    if cut is not None:
        text = cut(text)
    if control is not None and marks:
        return _tokenize(text, limits, lambda text: control.tokenize(text, marks))
    return _tokenize(text, limits, lambda text: tokenizer(text, add_special_tokens=False).input_ids)


def images_of(prompt: Prompt, limits: PromptLimits = NO_LIMITS) -> list[Any]:
    """The images in chat messages, in order: parts `{"type": "image", "image": ...}` of their contents.

    Raises:
        PromptError: an image is an address or a path. Nothing here opens addresses or files that are named in a prompt,
            which may come from an untrusted client. Or there is more than a prompt has room for.
    """
    messages = _messages_of(prompt)
    if messages is None:
        return []
    limits.check_tokens(len(messages))  # each becomes a token or more
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    limits.check_tokens(sum(len(content) for content in contents if isinstance(content, list)))
    limits.check_text(chat.num_characters(messages, limits.max_text_bytes))  # before texts are read as JSON
    contents = [message.get("content") for message in chat.checked(messages)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if part["type"] == "image"]


def unwrapped(prompt: Prompt) -> Prompt:
    """The text or the ids of a prompt given as `{"prompt": ...}` or `{"prompt_token_ids": ...}`; others as they are.

    Raises:
        PromptError: a dict with other keys, or with several prompts.
    """
    if not isinstance(prompt, dict):
        return prompt
    kinds = [kind for kind in PROMPT_KEYS if kind in prompt]
    known = {*kinds, *(("chat_template_kwargs", *chat.OPTIONS) if kinds == ["messages"] else ())}
    known |= {SPLIT} if kinds in (["prompt"], ["messages"]) else set()
    unknown = [key for key in prompt if key not in known]
    if len(kinds) != 1 or unknown:
        raise PromptError(
            f"a prompt as a dict has exactly one of the keys {', '.join(PROMPT_KEYS)}; got the keys {_names(prompt)}. "
            "With messages it may have options of the chat template (chat_template_kwargs, "
            f"{', '.join(chat.OPTIONS)}), with prompt or messages {SPLIT}"
        )
    return prompt if kinds == ["messages"] or SPLIT in prompt else cast("Prompt", prompt[kinds[0]])


def spellings(tokenizer: Any, word: str) -> list[list[int]]:
    """The token ids of a word at the beginning of a text, and of the word after a space.

    Raises:
        PromptError: the tokenizer refuses it.
    """
    alone, after_space = (
        _tokenize(text, NO_LIMITS, lambda text: tokenizer(text, add_special_tokens=False).input_ids)
        for text in (word, " " + word.lstrip())
    )
    return [ids for ids in (alone, after_space if after_space != alone else []) if ids]


def load_tokenizer(path: Path) -> Any | None:
    """The tokenizer of a checkpoint; None when it has none: prompts are token ids then.

    Raises:
        CheckpointError: the checkpoint has a tokenizer that cannot be read, or with a file that is too large for one.
    """
    files = [path / name for name in TOKENIZER_FILES if is_file(path / name)]
    if not any(file.name in ("tokenizer.json", "tokenizer_config.json") for file in files):
        return None
    for file in files:
        if file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes, and a tokenizer's file at most {MAX_TOKENIZER_BYTES}: it is "
                "not read; is it another file under this name?"
            )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except BaseException as error:  # transformers raises many kinds for a malformed tokenizer
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise CheckpointError(f"the tokenizer of {path} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        raise CheckpointError(f"{path} has no tokenizer.json; save it with a fast tokenizer of transformers first")
    return tokenizer


def _tokenize(text: str, limits: PromptLimits, to_ids: Callable[[str], Sequence[int]]) -> list[int]:
    limits.check_text(len(text))  # characters: each has a byte or more
    try:
        limits.check_text(len(text.encode()))
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text has a lone surrogate at character {error.start}, {text[error.start]!r}; decode bytes with the "
            "right encoding, or with errors='replace'"
        ) from None
    try:
        ids = list(to_ids(text))
    except PromptError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise PromptError(f"the tokenizer refuses this text: {error!s:.500}") from error
    return limits.check_ids(ids)


def _is_panic(error: BaseException) -> bool:
    """Tell whether an error is a failed assertion of code in Rust, which is not an `Exception` in Python."""
    return type(error).__name__ == "PanicException"


def _integers(values: Sequence[int] | np.ndarray[Any, Any] | Tensor) -> list[int] | None:
    """Values as a list of integers that a key can hold. None if some are not."""
    if isinstance(values, np.ndarray | Tensor):
        values = cast("list[int]", values.tolist())
    if not all(type(value) is int for value in values):
        if not all(is_integer(value) for value in values):
            return None
        values = [int(value) for value in values]
    return list(values)


def _names(part: dict[Any, Any]) -> str:
    """The first keys of a part, for an error."""
    return ", ".join(f"{key!r:.40}" for key in list(part)[:8])


def _remedy(prompts: Any) -> str:
    """Say what to give instead of what a tokenizer returns."""
    return "; give its input_ids as a list" if isinstance(prompts, Mapping) and "input_ids" in prompts else ""


def _is_message(item: Any) -> bool:
    """Tell whether an item of a list is a chat message, rather than a prompt by itself."""
    return isinstance(item, dict) and not any(key in item for key in PROMPT_KEYS)


def _messages_of(prompt: Prompt) -> list[Message] | None:
    """The chat messages of a prompt. None if it is not a chat.

    Raises:
        PromptError: `messages` is not a list.
    """
    if isinstance(prompt, dict) and "messages" in prompt:
        messages = prompt["messages"]
        if not isinstance(messages, list):
            raise PromptError(f"messages must be a list of {{'role': ..., 'content': ...}}; got {shown(messages)}")
        return messages
    return cast("list[Message]", prompt) if isinstance(prompt, list) and prompt and _is_message(prompt[0]) else None
