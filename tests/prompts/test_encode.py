"""From prompts of every form to token ids, and what is refused before anything is computed from it."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid.errors import CheckpointError, PromptError
from hybrid.key import Key
from hybrid.prompts.encode import (
    BYTES_PER_TOKEN,
    MAX_TOKENIZER_BYTES,
    PromptEncoder,
    PromptLimits,
    as_prompts,
    encode,
    images_of,
    load_tokenizer,
)
from hybrid.prompts.images import Image, ImagePrompt
from support.lines import counted_lines

LIMITS = PromptLimits.of(max_tokens=1000, vocab_size=500, max_request=640)
PAD = 5
LINES = 100_000


def chat(text: str) -> Any:
    return [{"role": "user", "content": text}]


def refused(call: Callable[[], object], words: str) -> None:
    """Something is refused, however large it is at the cost of a few lines for each byte that a prompt may have."""
    with pytest.raises(PromptError, match=words) as raised, counted_lines(LINES):
        call()
    assert len(str(raised.value)) < 1000


# Forms


def test_prompts_become_token_ids(tokenizer: Any) -> None:
    assert encode(tokenizer, "Größe") == tokenizer("Größe").input_ids
    assert encode(tokenizer, [5, 6]) == [5, 6]
    assert encode(None, [5, 6]) == [5, 6]
    chat_ids = encode(tokenizer, chat("日本"))
    assert tokenizer.decode(chat_ids) == "<|im_start|>user\n日本<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "ids", [[5, 6], np.array([5, 6]), np.array([5, 6], np.uint8), torch.tensor([5, 6]), [np.int64(5), np.int32(6)]]
)
def test_ids_may_be_numbers_of_numpy_and_torch(ids: Any) -> None:
    made = encode(None, ids)
    assert made == [5, 6]
    assert [type(token) for token in made] == [int, int]
    assert [encode(None, prompt) for prompt in as_prompts(ids)] == [[5, 6]]


def test_one_prompt_or_several() -> None:
    image = ImagePrompt([1], [])
    for one in ("a", [1, 2], chat("a"), {"messages": chat("a")}, image):
        assert as_prompts(one) == [one]
        assert as_prompts([one, one]) == [one, one]
    assert as_prompts((1, 2)) == [[1, 2]]
    assert as_prompts([]) == []
    assert [encode(None, prompt) for prompt in as_prompts(np.array([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        5.0,
        b"text",
        [1, "a"],
        [1.0],
        [True],
        [[1], [2]],
        ["a"],
        [1, {"role": "user"}],
        np.array([1.5]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array(["a"]),
    ],
)
def test_another_form_of_prompt_is_refused(prompt: Any, tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="a prompt is a text, a list of token ids, or a list of chat messages"):
        encode(tokenizer, prompt)


@pytest.mark.parametrize("messages", [[{}, 5], [{}, None], [{"role": "user", "content": "a"}, "b"]])
def test_a_chat_of_other_things_than_messages_is_refused(messages: Any, tokenizer: Any) -> None:
    with pytest.raises(PromptError, match=r"message [01] must "):
        encode(tokenizer, messages)


def test_control_tokens_in_a_text_become_control_tokens_unless_they_are_split(tokenizer: Any) -> None:
    name = tokenizer.eos_token
    control = tokenizer.convert_tokens_to_ids(name)
    assert encode(tokenizer, f"a{name}b").count(control) == 1
    whole = {"prompt": f"a{name}b", "split_special_tokens": False}
    assert encode(tokenizer, whole) == encode(tokenizer, f"a{name}b")
    split = encode(tokenizer, {"prompt": f"a{name}b", "split_special_tokens": True})
    assert control not in split
    assert tokenizer.decode(split) == f"a{name}b"
    assert encode(tokenizer, f"a{name}b").count(control) == 1  # the tokenizer is as before


def test_a_content_of_text_parts_is_their_text(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    asked = [{"role": "user", "content": parts}]
    assert encode(tokenizer, asked) == encode(tokenizer, chat("a b"))
    assert asked[0]["content"] is parts


# Sizes


def never(*args: Any, **kwargs: Any) -> Any:
    """A tokenizer that must not be asked."""
    raise AssertionError("tokenized")


never.chat_template = never.apply_chat_template = never  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    ["a" * 4_000_000, " " * 12_000_000, "日" * 2_000_000, "a " * 10_300],
    ids=["letters", "spaces", "kanji", "20 KB"],
)
def test_a_text_is_refused_by_its_bytes_before_it_is_tokenized(text: str) -> None:
    """4 MB took 7 to 30 seconds and 2 GB; 12 MB of spaces raised what no `except Exception` catches."""
    words = r"bytes or more, and this engine takes up to 20480: .* 640 tokens, .* shorten the text, or .*memory=\.\.\."
    refused(lambda: encode(never, text, LIMITS), words)
    refused(lambda: encode(never, chat(text), LIMITS), words)
    refused(lambda: encode(never, {"messages": chat(text)}, LIMITS), words)
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    refused(lambda: encode(never, parts, LIMITS), words)


class Uncopied(str):
    """A text of which no copy is made."""

    def encode(self, *_: Any) -> bytes:
        raise AssertionError("it is too long for that")


def test_a_text_of_more_characters_than_bytes_may_be_is_not_copied() -> None:
    with pytest.raises(PromptError, match="bytes or more"):
        encode(never, Uncopied("a" * 20481), LIMITS)


def test_bytes_count_and_not_characters(tokenizer: Any) -> None:
    limits = PromptLimits(max_text_bytes=9)
    assert encode(tokenizer, "日本語", limits)
    with pytest.raises(PromptError, match="10 bytes"):
        encode(tokenizer, "日本語a", limits)


def test_arguments_of_a_call_that_are_too_long_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[" + "{}," * 20 + "0]"}}
    messages = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    monkeypatch.setattr("hybrid.prompts.messages.json.loads", never)
    with pytest.raises(PromptError, match="bytes or more, and this engine takes up to 40"):
        images_of(messages, PromptLimits(max_text_bytes=40))


def test_a_text_that_a_chat_template_makes_long_is_refused(tokenizer: Any) -> None:
    limits = PromptLimits(max_text_bytes=40)
    with pytest.raises(PromptError, match="bytes or more, and this engine takes up to 40"):
        encode(tokenizer, chat("a" * 30), limits)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}] * 1_000_000,
        chat([{"type": "text", "text": ""}] * 1_000_000),  # type: ignore[arg-type]
        [{"role": "user", "content": "a", "tools": [[[0] * 1000] * 1000] * 10}],
        [{"role": "user", "content": "a"} | {str(number): "" for number in range(1_000_000)}],
    ],
    ids=["messages", "parts", "nested", "keys"],
)
def test_chats_of_many_parts_are_refused_before_the_template_sees_them(messages: Any) -> None:
    encoder = PromptEncoder(never, None, hidden_size=4, page_size=8, limits=LIMITS)
    refused(lambda: encoder.encode(messages), "tokens; this model takes 1000|bytes or more")


def test_a_chat_that_contains_itself_is_refused(tokenizer: Any) -> None:
    messages: list[Any] = chat("a")
    messages[0]["again"] = messages
    refused(lambda: encode(never, messages, LIMITS), "bytes or more")


class Unread(list):  # type: ignore[type-arg]
    """Ids whose values must not be looked at."""

    def __iter__(self) -> Any:
        raise AssertionError("read")


def test_ids_are_refused_by_their_number_before_their_values() -> None:
    words = "1000000 tokens; this model takes 1000, the answer included: shorten the prompt"
    refused(lambda: encode(None, Unread([0] * 1_000_000), LIMITS), words)
    huge = np.broadcast_to(np.int64(3), (10**12,))  # takes no memory
    refused(lambda: encode(None, huge, LIMITS), "1000000000000 tokens")  # type: ignore[arg-type]
    encoder = PromptEncoder(None, None, hidden_size=4, page_size=8, limits=LIMITS)
    refused(lambda: encoder.encode(ImagePrompt(Unread([0] * 1_000_000), [])), words)


def test_the_parts_of_a_message_are_refused_by_their_number_before_they_are_looked_at() -> None:
    encoder = PromptEncoder(never, None, hidden_size=4, page_size=8, limits=LIMITS)
    with pytest.raises(PromptError, match="2000 tokens; this model takes 1000"):
        encoder.encode(chat(Unread([{"type": "text", "text": ""}] * 2000)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [-1, 500, 2**31, -(2**31) - 1, *(pytest.param(10**digits, id=f"{digits} digits") for digits in (400, 5000))],
)
def test_ids_outside_the_vocabulary_are_refused(wrong: int) -> None:
    with pytest.raises(PromptError, match=r"token id .* is outside the vocabulary: ids go from 0 to 499") as raised:
        encode(None, [5, wrong], LIMITS)
    assert len(str(raised.value)) < 200
    encoder = PromptEncoder(None, None, hidden_size=4, page_size=8, limits=LIMITS)
    with pytest.raises(PromptError, match="outside the vocabulary"):
        encoder.encode(ImagePrompt([5, wrong], []))


def test_the_limit_of_a_text_follows_the_smaller_of_model_and_cache() -> None:
    assert PromptLimits.of(1000, 500, 640).max_text_bytes == 640 * BYTES_PER_TOKEN
    assert PromptLimits.of(1000, 500, 6400).max_text_bytes == 1000 * BYTES_PER_TOKEN


# A tokenizer that fails


class PanicException(BaseException):
    """The exception that PyO3 raises where code in Rust panics."""


@pytest.mark.parametrize("error", [PanicException("index out of range"), ValueError("no"), OverflowError("too long")])
def test_whatever_a_tokenizer_raises_is_an_error_of_the_prompt(error: BaseException) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise error

    with pytest.raises(PromptError, match=f"the tokenizer refuses this text: {error}"):
        encode(failing, "a text")


def test_an_interrupt_of_a_tokenizer_is_not_an_error_of_the_prompt() -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(interrupted, "a text")


def test_a_text_that_is_no_unicode_is_refused(tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="a lone surrogate at character 1"):
        encode(tokenizer, "a\ud800b")


# Images


class Eye:
    """An image encoder that counts what it embeds."""

    placeholder = PAD

    def __init__(self, num_positions: int) -> None:
        self.count = num_positions
        self.num_embedded = 0

    def num_positions(self, image: Any) -> int:
        return self.count

    def embed(self, image: Any, namespace: str) -> tuple[torch.Tensor, tuple[int, int], bytes]:
        self.num_embedded += 1
        return torch.full((self.count, 4), float(image)), (1, self.count), bytes(16)


class Words:
    """A tokenizer of which each word is a token; an image is the placeholder."""

    chat_template = "there is one"

    def __call__(self, text: str, add_special_tokens: bool) -> Any:
        class Encoded:
            input_ids = tuple(PAD if word == "[image]" else 9 for word in text.split())

        return Encoded()

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        parts = [part for message in messages for part in message["content"]]
        return " ".join("[image]" if part["type"] == "image" else part["text"] for part in parts)


def looking(*images: Any) -> Any:
    parts: list[Any] = [{"type": "text", "text": "see"}, *({"type": "image", "image": image} for image in images)]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "and tell"}]}]}


def test_each_placeholder_becomes_the_positions_of_its_image() -> None:
    encoder = PromptEncoder(Words(), Eye(3), hidden_size=4, page_size=8, limits=LIMITS)
    encoded = encoder.encode(looking(1, 2))
    assert encoded.ids == [9, *[PAD] * 6, 9, 9]
    assert encoded.media is not None
    assert [image.start for image in encoded.media.images] == [1, 4]
    assert encoded.media.positions.tolist() == [
        [0, 1, 1, 1, 4, 4, 4, 7, 8],
        [0, 1, 1, 1, 4, 4, 4, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
    ]


def test_images_that_do_not_fit_are_refused_before_any_is_embedded() -> None:
    eye = Eye(499)
    encoder = PromptEncoder(Words(), eye, hidden_size=4, page_size=8, limits=LIMITS)
    with pytest.raises(PromptError, match="the prompt has 1001 tokens; this model takes 1000"):
        encoder.encode(looking(1, 2))
    assert eye.num_embedded == 0


def test_embeddings_of_an_image_that_are_not_finite_are_refused() -> None:
    encoder = PromptEncoder(Words(), Eye(3), hidden_size=4, page_size=8, limits=LIMITS)
    with pytest.raises(PromptError, match="NaN or infinity"):
        encoder.encode(looking(1, float("nan")))


def test_a_prompt_without_images_has_the_key_of_its_ids() -> None:
    encoder = PromptEncoder(None, None, hidden_size=4, page_size=8, limits=LIMITS)
    plain = encoder.encode([1, 2, 3] * 9).key("a")
    assert plain == encoder.encode(ImagePrompt([1, 2, 3] * 9, [])).key("a") == Key.of([1, 2, 3] * 9, "a")
    seen = encoder.encode(ImagePrompt([1, 2, 3] * 9, [Image(9, torch.zeros(1, 4))])).key("a")
    assert seen.ids[:32] == plain.ids[:32]
    assert seen.ids[64:] == plain.ids[64:]
    assert seen.units == ((9, 10),)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_a_tokenizer_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with (tmp_path / name).open("ab") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)  # a hole: it takes no space
    with pytest.raises(CheckpointError, match=f"{name} has {MAX_TOKENIZER_BYTES + 1} bytes"):
        load_tokenizer(tmp_path)


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


def test_a_message_of_calls_alone_is_empty_for_a_template_that_knows_none(tokenizer: Any) -> None:
    own = deepcopy(tokenizer)
    own.chat_template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]
    assert own.decode(encode(own, messages)) == "<>"


def test_arguments_of_calls_as_openai_writes_them_are_dicts_for_the_template(tokenizer: Any) -> None:
    template = "{% for c in messages[1].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    for given, seen in (('{"b": 1, "a": [2]}', '{"b": 1, "a": [2]}'), ({"b": 1}, '{"b": 1}'), ("", "{}"), ("{", '"{"')):
        prompt: Any = {"messages": called(given), "chat_template": template}
        assert tokenizer.decode(encode(tokenizer, prompt)) == seen
    deep = "[" * 100_000
    assert tokenizer.decode(encode(tokenizer, {"messages": called(deep), "chat_template": template})) == f'"{deep}"'
