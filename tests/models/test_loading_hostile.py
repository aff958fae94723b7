"""Checkpoints made to exhaust time or memory, or to read other files: each is refused at once, with a clear error."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid
from hybrid.models.loading import load_model, open_checkpoint
from support.checkpoints import INDEX, WEIGHTS, edit_config, edit_weights, shard
from support.lines import counted_lines
from support.tensors import CPU

LINES = 1_000_000


def refused(path: Path, *words: str) -> None:
    with pytest.raises(hybrid.CheckpointError) as raised, counted_lines(LINES):
        load_model(open_checkpoint(path), torch.float32, CPU, 64)
    for word in words:
        assert word in str(raised.value)
    assert len(str(raised.value)) < 6000


# Configurations


@pytest.mark.parametrize("depth", [65, 500, 100_000])
def test_a_configuration_that_is_nested_deeply_is_refused(depth: int, copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type": "qwen3_5_text", "x": ' + "[" * depth + "]" * depth + "}")
    refused(copy, "config.json")


def test_a_configuration_of_many_megabytes_is_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "x": "x" * (17 * 2**20)}))
    refused(copy, "config.json", "bytes")


def test_a_configuration_of_many_values_is_refused(copy: Path) -> None:
    edit_config(copy, x=[0] * 2**17)
    refused(copy, "config.json", "values")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 10**30),
        ("vocab_size", 10**12),
        ("hidden_size", 2**40),
        ("hidden_size", -(2**40)),
        ("intermediate_size", 2**62),
        ("linear_num_value_heads", 10**8),
        ("max_position_embeddings", 2**31),
        ("anything_else", 10**300),
    ],
)
def test_sizes_that_no_model_has_are_refused_by_their_name(name: str, value: int, copy: Path) -> None:
    edit_config(copy, **{name: value})
    refused(copy, "config.json", name)


def test_an_integer_of_more_digits_than_python_reads_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type": "qwen3_5_text", "x": ' + "9" * 5000 + "}")
    refused(copy, "config.json", "JSON")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", ["qwen3_5_text"]),
        ("model_type", {}),
        ("rope_parameters", [1]),
        ("layer_types", 5),
        ("num_key_value_heads", 0),
        ("head_dim", -4),
        ("num_attention_heads", None),
        ("hidden_size", 0.5),
    ],
)
def test_values_of_another_kind_are_refused(name: str, value: Any, copy: Path) -> None:
    edit_config(copy, **{name: value})
    refused(copy)


# Weights


def write_header(path: Path, header: bytes, length: int | None = None, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 10**8])
def test_a_header_longer_than_the_file_is_refused(length: int, copy: Path) -> None:
    write_header(copy / WEIGHTS, b"{}", length)
    refused(copy, WEIGHTS, "header")


def test_a_header_longer_than_any_is_refused_before_it_is_read(copy: Path) -> None:
    with (copy / WEIGHTS).open("wb") as file:  # a file with a hole, which takes no room
        file.write(struct.pack("<Q", 2**29))
        file.truncate(2**29 + 16)
    refused(copy, WEIGHTS, "at most")


def test_a_header_that_is_nested_deeply_is_refused(copy: Path) -> None:
    write_header(copy / WEIGHTS, b"[" * 100_000)
    refused(copy, WEIGHTS, "nested")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [10**300], "data_offsets": [0, 4 * 10**300]},
        {"dtype": "F32", "shape": [1] * 100_000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"dtype": "F4" * 10_000, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        [],
        None,
    ],
)
def test_an_entry_that_describes_no_tensor_of_the_file_is_refused(entry: Any, copy: Path) -> None:
    write_header(copy / WEIGHTS, json.dumps({"model.norm.weight": entry}).encode(), data=bytes(8))
    refused(copy, WEIGHTS, "model.norm.weight")


@pytest.mark.parametrize("header", [b"[]", b"5", b"null", b'"a"'])
def test_a_header_that_is_no_object_is_refused(header: bytes, copy: Path) -> None:
    write_header(copy / WEIGHTS, header)
    refused(copy, WEIGHTS)


def test_thousands_of_unexpected_tensors_are_counted_and_not_listed(copy: Path) -> None:
    edit_weights(copy, lambda tensors: tensors.update({f"extra.{at}": torch.zeros(1) for at in range(3000)}))
    refused(copy, "extra.0", "and 2980 more")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 7, None])
def test_an_index_may_name_files_of_its_own_folder_only(name: Any, copy: Path) -> None:
    shard(copy)
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (copy / INDEX).write_text(json.dumps(index))
    refused(copy, INDEX, "same folder")


def test_an_index_that_is_nested_deeply_or_too_large_is_refused(copy: Path) -> None:
    shard(copy)
    (copy / INDEX).write_text("[" * 100_000)
    refused(copy, INDEX, "nested")
    (copy / INDEX).write_bytes(b" " * (64 * 2**20 + 1))
    refused(copy, INDEX, "bytes")


def test_an_index_of_many_files_is_refused(copy: Path) -> None:
    weight_map = {f"tensor.{at}": f"{at}.safetensors" for at in range(10_001)}
    (copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(copy, INDEX, "10001 files")


# Defaults of sampling


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"do_sample": true, "temperature": 1e400}',
        '{"do_sample": true, "temperature": NaN}',
        '{"do_sample": true, "top_k": ' + "9" * 30 + "}",
        '{"do_sample": true, "top_p": "all"}',
        '{"eos_token_id": {"a": 1}, "x": ' + "9" * 5000 + "}",
        "[]",
    ],
)
def test_defaults_of_sampling_that_are_out_of_range_are_refused(text: str, copy: Path) -> None:
    (copy / "generation_config.json").write_text(text)
    with pytest.raises(hybrid.CheckpointError, match=r"generation_config\.json") as raised:
        hybrid.Engine.from_pretrained(copy, device="cpu", cache=hybrid.CacheConfig(memory="8MiB", page_size=16))
    assert len(str(raised.value)) < 6000
