"""From prompts to token ids, and from token ids to text as they come."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from tokenizers.decoders import DecodeStream

from hybrid.errors import CheckpointError, PromptError
from hybrid.prompts.images import ImagePrompt

Message = dict[str, Any]
Prompt = str | list[int] | list[Message] | dict[str, list[Message]] | ImagePrompt
"""A text, token ids, chat messages (also as `{"messages": [...]}`), or token ids with images."""


class TextStream:
    """The text of an answer, token by token, cut at the first stop text.

    Attributes:
        text: what is certain of the answer.
        stopped: a stop text came.
        num_kept: tokens of the answer that lie before the stop text.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._ids: list[int] = []
        self._ends: list[int] = []  # length of the text after each token
        self._seen = ""
        self.text = ""
        self.stopped = False
        self.num_kept = 0

    def append(self, token: int) -> bool:
        """Take a token; True when a stop text came with it."""
        self._ids.append(token)
        before = len(self._seen)
        self._seen += self._stream.step(self._backend, token) or ""
        self._ends.append(len(self._seen))
        return self._look(before)

    def finish(self) -> None:
        """No more tokens come: what was held back is certain now."""
        if self.stopped:
            return
        whole = self._backend.decode(self._ids, skip_special_tokens=True)  # with a last character that is incomplete
        before = len(self._seen)
        self._seen = whole if whole.startswith(self._seen) else self._seen
        if not self._look(before):
            self.text = self._seen

    def _look(self, before: int) -> bool:
        longest = max((len(stop) for stop in self._stop), default=0)
        first = max(0, before - longest)
        found = [(at + len(stop), at) for stop in self._stop if (at := self._seen.find(stop, first)) >= 0]
        if found:  # the one that is complete first, character by character: tokens may bring several at once
            self.text = self._seen[: min(found)[1]]
            self.stopped = True
            # a token that tells nothing yet is the beginning of a character, and goes where the character goes
            ends = enumerate(pairwise([0, *self._ends]), start=1)
            self.num_kept = max((n for n, (start, end) in ends if start < end <= len(self.text)), default=0)
            return True
        held = max((n for stop in self._stop for n in range(1, len(stop)) if self._seen.endswith(stop[:n])), default=0)
        self.text = self._seen[: len(self._seen) - held]
        return False


def load_tokenizer(path: Path) -> Any | None:
    """The tokenizer of a checkpoint; None when it has none: prompts are token ids then.

    Raises:
        CheckpointError: it has one that cannot be read.
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


def is_message(item: Any) -> bool:
    """Whether an item of a list is a chat message, and not a prompt of its own."""
    return isinstance(item, dict) and "messages" not in item


def messages_of(prompt: Prompt) -> list[Message] | None:
    """The chat messages of a prompt; None: it has none."""
    if isinstance(prompt, dict):
        return prompt.get("messages")
    is_chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    return cast("list[Message]", prompt) if is_chat else None


def images_of(prompt: Prompt) -> list[Any]:
    """The images in chat messages, in order: parts `{"type": "image", "image": ...}` of their contents.

    Raises:
        PromptError: an image is to be fetched from somewhere. Nothing here opens addresses or files that stand in a
            prompt: it may come from anybody.
    """
    contents = [message.get("content") for message in messages_of(prompt) or ()]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    images = [part for part in parts if isinstance(part, dict) and part.get("type") == "image"]
    for part in images:
        if isinstance(part.get("image"), str | Path | None):
            raise PromptError(
                f'an image part holds the image itself, under "image", not an address or a path ({sorted(part)}); load '
                "it first: transformers.image_utils.load_image(...)"
            )
    return [part["image"] for part in images]


def encode(tokenizer: Any | None, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: a text, token ids as they are, or chat messages through the chat template.

    Raises:
        PromptError: the prompt is of another form, or there is no tokenizer or no template for it.
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
    except Exception as error:  # a template may raise anything about messages it does not understand
        raise PromptError(f"the chat template refuses these messages: {error}") from error
    return list(tokenizer(text, add_special_tokens=False).input_ids)
