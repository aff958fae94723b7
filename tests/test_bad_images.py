"""Broken, huge and ragged images: each gets an error of ours that says what is wrong, and nothing is held."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from hybrid import ArgumentError, CacheConfig, CheckpointError, Engine, Image, ImagePrompt
from support.bad_input import assert_clear, label
from support.engines import assert_nothing_held, greedy
from support.vision import chat, picture, vision_model, write_vision_checkpoint

GRID = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("vision"), vision_model("Qwen3_5"), tokenizer)


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return Engine.from_pretrained(path, device="cpu", cache=CacheConfig(memory="32MiB", page_size=GRID))


def cut_file(kind: str, size: int) -> Pillow.Image:
    """An image whose file ends after `size` bytes: Pillow finds that when it decodes the pixels."""
    file = io.BytesIO()
    Pillow.fromarray(picture(0, 64, 64)).save(file, kind)
    return Pillow.open(io.BytesIO(file.getvalue()[:size]))


def closed() -> Pillow.Image:
    image = Pillow.fromarray(picture(0))
    image.close()
    return image


class Odd(Pillow.Image):
    """An image whose decoder fails in a way that nobody foresaw."""

    def convert(self, *arguments: Any, **options: Any) -> Any:
        raise KeyError("palette")


def odd() -> Odd:
    image = Odd()
    image._size = (8, 8)
    return image


FORM = ("Pillow image", "[height, width, 3]")
IMAGES: list[tuple[str, Callable[[], Any], tuple[str, ...]]] = [
    ("a file that ends early, PNG", lambda: cut_file("PNG", 3000), ("64 x 64", "truncated")),
    ("a file that ends early, JPEG", lambda: cut_file("JPEG", 700), ("64 x 64", "truncated")),
    ("a file that ends early, GIF", lambda: cut_file("GIF", 1500), ("64 x 64", "whole")),
    ("a file that ends early, BMP", lambda: cut_file("BMP", 1500), ("64 x 64", "truncated")),
    ("closed", closed, ("cannot be used",)),
    ("a decoder that fails", odd, ("8 x 8", "palette")),
    ("huge", lambda: np.broadcast_to(np.zeros(3, np.uint8), (2**14, 2**13, 3)), ("16384 x 8192", "thumbnail")),
    ("huge, of Pillow", lambda: Pillow.new("1", (2**14, 2**13)), ("8192 x 16384", "thumbnail")),
    ("a line", lambda: np.zeros((2, 4000, 3), np.uint8), ("2 x 4000",)),
    ("no pixels", lambda: np.zeros((0, 8, 3), np.uint8), (*FORM, "(0, 8, 3)")),
    ("ragged lists", lambda: [[[1, 2, 3]], [[1, 2, 3], [4, 5, 6]]], (*FORM, "list")),
    ("ragged arrays", lambda: np.array([[1], [1, 2]], dtype=object), (*FORM, "object")),
    ("grey", lambda: np.zeros((8, 8), np.uint8), (*FORM, "(8, 8)")),
    ("four channels", lambda: np.zeros((8, 8, 4), np.uint8), (*FORM, "(8, 8, 4)")),
    ("channels first", lambda: torch.zeros(3, 8, 8, dtype=torch.uint8), (*FORM, "(3, 8, 8)")),
    ("a batch", lambda: np.zeros((1, 8, 8, 3), np.uint8), (*FORM, "(1, 8, 8, 3)")),
    ("NaN", lambda: np.full((8, 8, 3), np.nan), (*FORM, "float64")),
    ("floats", lambda: torch.zeros(8, 8, 3), (*FORM, "float32")),
    ("bytes of a file", lambda: b"\x89PNG", (*FORM, "bytes")),
    ("a path", lambda: Path("a.png"), ("path", "load_image")),
    ("a number", lambda: 7, (*FORM, "int")),
]


@pytest.mark.parametrize(("make", "words"), [case[1:] for case in IMAGES], ids=[name for name, *_ in IMAGES])
def test_a_bad_image_is_refused(engine: Engine, make: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        engine.generate([chat(picture(1), make())], greedy(2), progress=False)
    assert_clear(caught.value, *words)
    assert_nothing_held(engine)


ZEROS = torch.zeros(2, 64)
EMBEDDED: list[tuple[ImagePrompt, tuple[str, ...]]] = [
    (ImagePrompt([1, 2, 3], [Image(0, torch.zeros(2, 63))]), ("[positions, 64]", "(2, 63)")),
    (ImagePrompt([1, 2, 3], [Image(0, ZEROS.long())]), ("floating point", "int64")),
    (ImagePrompt([1, 2, 3], [Image(0, ZEROS * torch.nan)]), ("position 0", "NaN")),
    (ImagePrompt([1, 2, 3], [Image(0, [[0.0] * 64])]), ("tensor", "list")),  # type: ignore[arg-type]
    (ImagePrompt([1, 2, 3], [Image(2, ZEROS)]), ("[2, 4)", "3 tokens")),
    (ImagePrompt([1, 2, 3], [Image(-1, ZEROS)]), ("[-1, 1)",)),
    (ImagePrompt([1, 2, 3], [Image(0.5, ZEROS)]), ("position", "0.5")),  # type: ignore[arg-type]
    (ImagePrompt([1, 2, 3], [Image(0, ZEROS), Image(1, ZEROS)]), ("overlaps",)),
    (ImagePrompt([1, 2, 3], [Image(0, ZEROS, 7)]), ("content", "int")),  # type: ignore[arg-type]
    (ImagePrompt([1, 2, 3], [Image(0, ZEROS)], torch.zeros(3, 2)), ("[3, 3]", "(3, 2)")),
    (ImagePrompt([1, 2, 3], [Image(0, ZEROS)], torch.zeros(3, 3)), ("integers", "float32")),
    (ImagePrompt([1, 2, 3], [Image(0, ZEROS)], torch.full((3, 3), -1)), ("from 0",)),
    (ImagePrompt([1, 2, 999], [Image(0, ZEROS)]), ("999", "vocabulary")),
]


@pytest.mark.parametrize(("prompt", "words"), EMBEDDED, ids=label)
def test_bad_embeddings_are_refused(engine: Engine, prompt: ImagePrompt, words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        engine.generate([prompt], greedy(2), progress=False)
    assert_clear(caught.value, *words)
    assert_nothing_held(engine)


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"[" * 100_000, "nested"), (b"[1]", "object"), (b'{"size": 7}', "size"), (b'{"size": NaN}', "nan")],
)
def test_a_bad_preprocessor_is_an_error_of_the_checkpoint(
    path: Path, tmp_path: Path, content: bytes, word: str
) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    (copy / "preprocessor_config.json").write_bytes(content)
    engine = Engine.from_pretrained(copy, device="cpu", cache=CacheConfig(memory="32MiB", page_size=GRID))
    with pytest.raises(CheckpointError) as caught:
        engine.generate([chat(picture(0))], greedy(2), progress=False)
    assert_clear(caught.value, "preprocessor_config.json", word)
    assert_nothing_held(engine)


def test_images_still_work_after_all_of_it(engine: Engine) -> None:
    assert len(engine.generate([chat(picture(0))], greedy(2), progress=False)[0].token_ids) == 2
