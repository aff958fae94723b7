"""Damaged, foreign and unreadable checkpoints: each gets an error of ours that names the file and what is wrong."""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid import CacheConfig, CheckpointError, Engine
from support.bad_input import assert_clear, label

# Checkpoints: (file, its new content or a function of the old one, words)


def changed(**values: Any) -> Callable[[bytes], bytes]:
    """A JSON file with other values."""
    return lambda old: json.dumps({**json.loads(old), **values}).encode()


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """A file of weights with another header."""

    def apply(old: bytes) -> bytes:
        length = int.from_bytes(old[:8], "little")
        entries = json.loads(old[8 : 8 + length])
        change(entries)
        packed = json.dumps(entries).encode()
        return len(packed).to_bytes(8, "little") + packed + old[8 + length :]

    return apply


def first(entries: dict[str, Any]) -> dict[str, Any]:
    return next(value for name, value in entries.items() if name != "__metadata__")


CONFIG, WEIGHTS, GENERATION = "config.json", "model.safetensors", "generation_config.json"
INDEX, TOKENIZER = "model.safetensors.index.json", "tokenizer.json"
DEEP = b"[" * 100_000
CHECKPOINTS: list[tuple[str, Any, tuple[str, ...]]] = [
    (CONFIG, b"", (CONFIG, "JSON")),
    (CONFIG, b"{", (CONFIG, "JSON")),
    (CONFIG, b"[]", ("None", "supported")),
    (CONFIG, b"\xff\xfe", (CONFIG, "JSON")),
    (CONFIG, DEEP, (CONFIG, "nested")),
    (CONFIG, b'{"a":' * 5000 + b"1" + b"}" * 5000, (CONFIG,)),
    (CONFIG, changed(model_type="t5"), ("'t5'", "supported")),
    (CONFIG, changed(model_type=7), ("7", "supported")),
    (CONFIG, changed(vocab_size=-1), (CONFIG, "vocab_size", "-1")),
    (CONFIG, changed(vocab_size=0), (CONFIG, "vocab_size", "0")),
    (CONFIG, changed(hidden_size=-4), (CONFIG, "hidden_size", "-4")),
    (CONFIG, changed(num_hidden_layers=0), (CONFIG, "num_hidden_layers", "0")),
    (CONFIG, changed(num_attention_heads=0), (CONFIG, "num_attention_heads", "0")),
    (CONFIG, changed(vocab_size=10**30), (CONFIG, "vocab_size")),
    (CONFIG, changed(rms_norm_eps=math.nan), (CONFIG, "rms_norm_eps", "nan")),
    (CONFIG, changed(rms_norm_eps=math.inf), (CONFIG, "rms_norm_eps", "inf")),
    (CONFIG, changed(hidden_act="mish", hidden_size=200), ("'mish'", "other shapes")),
    (CONFIG, changed(layer_types=["full_attention"] * 3), ("linear_attention", "layer_types")),
    (GENERATION, b"[1, 2]", (GENERATION, "object", "list")),
    (GENERATION, b"{", (GENERATION, "JSON")),
    (GENERATION, b'{"eos_token_id": "two"}', (GENERATION,)),
    (GENERATION, DEEP, (GENERATION, "nested")),
    (GENERATION, changed(temperature=math.nan), (GENERATION, "temperature", "nan")),
    (CONFIG, changed(rope_parameters={"rope_type": "default", "rope_theta": math.nan}), (CONFIG, "rope_theta", "nan")),
    (GENERATION, b'{"do_sample": true, "temperature": -3}', (GENERATION,)),
    (WEIGHTS, b"", (WEIGHTS, "damaged or truncated")),
    (WEIGHTS, lambda old: old[:-100], (WEIGHTS,)),
    (WEIGHTS, lambda old: b"\xff" * 8 + old[8:], (WEIGHTS, "damaged or truncated")),
    (WEIGHTS, header(lambda entries: first(entries).update(shape=[3, 3])), (WEIGHTS,)),
    (WEIGHTS, header(lambda entries: first(entries).update(dtype="F5")), (WEIGHTS, "F5")),
    (WEIGHTS, header(lambda entries: entries.pop(next(name for name in entries if "weight" in name))), ("weight",)),
    (INDEX, b"[]", ("index", "weight_map")),
    (INDEX, b'{"weight_map": {"a": "../x"}}', ("'a'", "'../x'", "same folder")),
    (INDEX, b'{"weight_map": {"a": 7}}', ("'a'", "7")),
    (INDEX, b'{"weight_map": {"a": "b.safetensors"}}', ("b.safetensors", "missing")),
    (INDEX, b'{"weight_map": {"none": "model.safetensors"}}', ("none", "model.safetensors")),
    (INDEX, DEEP, (INDEX, "nested")),
    (WEIGHTS, lambda old: len(DEEP).to_bytes(8, "little") + DEEP, (WEIGHTS, "nested")),
    (TOKENIZER, b"{}", ("tokenizer",)),
    (TOKENIZER, b"\xff", ("tokenizer",)),
    (TOKENIZER, DEEP, ("tokenizer", "recursion")),
    ("tokenizer_config.json", DEEP, ("tokenizer", "recursion")),
    ("special_tokens_map.json", b"[1]", ("tokenizer",)),
]


@pytest.mark.parametrize(("name", "content", "words"), CHECKPOINTS, ids=label)
def test_a_damaged_checkpoint_is_refused(copy: Path, name: str, content: Any, words: tuple[str, ...]) -> None:
    file = copy / name
    file.write_bytes(content(file.read_bytes()) if callable(content) else content)
    assert_not_loaded(copy, *words)


def assert_not_loaded(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Engine.from_pretrained(path, device="cpu", cache=CacheConfig(memory="64MiB"))
    assert_clear(caught.value, *words)


# Files that are there and cannot be read: (file, how it is made so, words)

UNREADABLE: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    (name, make, (name, word))
    for name in (CONFIG, WEIGHTS, GENERATION, INDEX, TOKENIZER, "tokenizer_config.json")
    for make, word in (
        (lambda file: file.mkdir(), "folder"),
        (lambda file: file.symlink_to(file.name), "symbolic links"),
        (lambda file: file.symlink_to("deleted"), "'deleted'"),
        (lambda file: os.mkfifo(file), "pipe"),
    )
]


@pytest.mark.parametrize(("name", "make", "words"), UNREADABLE, ids=[" ".join(words) for _, _, words in UNREADABLE])
def test_something_else_than_a_file_is_not_taken_for_a_file_that_is_missing(
    copy: Path, name: str, make: Callable[[Path], object], words: tuple[str, ...]
) -> None:
    (copy / name).unlink(missing_ok=True)
    make(copy / name)
    assert_not_loaded(copy, *words)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, GENERATION, TOKENIZER])
def test_a_file_that_may_not_be_read_is_refused(copy: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The opening of the file is refused, as permissions do it for others than root."""
    opened = Path.open

    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert_not_loaded(copy, name, "Permission denied")


def test_a_folder_that_may_not_be_searched_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Path.stat

    def refuse(self: Path, **options: Any) -> Any:
        if self.parent == copy:
            raise PermissionError(13, "Permission denied", str(self))
        return found(self, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    assert_not_loaded(copy, CONFIG, "Permission denied")


def test_a_tensor_in_two_files_is_refused(copy: Path) -> None:
    shutil.copy(copy / WEIGHTS, copy / "again.safetensors")
    header_length = int.from_bytes((copy / WEIGHTS).read_bytes()[:8], "little")
    names = [name for name in json.loads((copy / WEIGHTS).read_bytes()[8 : 8 + header_length]) if name[0] != "_"]
    weight_map = {name: WEIGHTS if at else "again.safetensors" for at, name in enumerate(names)}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError) as caught:
        Engine.from_pretrained(copy, device="cpu", cache=CacheConfig(memory="64MiB"))
    assert_clear(caught.value, "again.safetensors", WEIGHTS)
