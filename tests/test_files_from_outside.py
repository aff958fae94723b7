"""Files that come from outside: what one says is compared with what is there, and copied before it is used."""

import json
import os
import re
import sqlite3
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

import hybrid
from hybrid import ArgumentError, CacheConfig, CacheFileError, CheckpointError, Engine
from hybrid.tensor_file import FileBytes, read_header
from hybrid.tiers.archive import Archive, read_archive
from hybrid.tiers.store import DirectoryStore
from support.engines import GRID, answer, cold, engine_on, greedy, ids

PARAMS = greedy(6, logprobs=2)
PROMPT = ids(5 * GRID + 3)


def archive_of(tiny: Engine) -> Archive:
    engine = engine_on(tiny, deterministic=True)
    answer(engine, PROMPT, PARAMS)
    return read_archive(engine.dump([PROMPT]))


def adapter_in(folder: Path, engine: Engine, seed: int = 1, rank: int = 4, **settings: Any) -> Path:
    """An adapter of the projections of feed-forward layers. Files that are there are written over."""
    folder.mkdir(exist_ok=True)
    tensors, rng = {}, torch.Generator().manual_seed(seed)
    for name, module in engine.model.named_modules():
        if name.endswith("mlp.gate_proj"):
            rows, columns = module.weight.shape
            for matrix, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
                tensors[f"base_model.model.{name}.{matrix}.weight"] = torch.randn(shape, generator=rng) * 0.3
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["gate_proj"], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = folder / "adapter_model.safetensors"
    with weights.open("r+b" if weights.exists() else "wb") as file:
        file.write(save(tensors))
    return folder


# Copied


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system tells what is mapped in another way")
def test_no_file_that_was_loaded_is_mapped(tiny: Engine, checkpoint: Path, tmp_path: Path) -> None:
    with Engine.from_pretrained(
        checkpoint, cache=CacheConfig(page_size=GRID, chunk_size=GRID, memory="8MiB")
    ) as engine:
        engine.adapters.load("mine", adapter_in(tmp_path / "adapter", engine))
        archive_of(tiny).write(tmp_path / "a.hybrid")
        held = read_archive(tmp_path / "a.hybrid")
        maps = Path("/proc/self/maps").read_text()
        assert str(checkpoint) not in maps and str(tmp_path) not in maps
    assert len(held.pages)


def test_no_code_maps_a_file_or_has_one_mapped() -> None:
    """What reads tensors is `hybrid.tensor_file`; torch's and safetensors' own readers give views of files."""
    root = Path(hybrid.__file__).parent.parent
    wrong = re.compile(r"fileno\(\), 0|safe_open|torch\.load\(|torch\.from_file|np\.memmap|np\.load\(")
    files = [file for folder in ("hybrid", "models", "kernels") for file in (root / folder).rglob("*.py")]
    assert len(files) > 100
    assert not [file.name for file in files if wrong.search(file.read_text())]


def test_an_adapter_does_not_change_with_its_files(tiny: Engine, tmp_path: Path) -> None:
    engine = engine_on(tiny, pages=16, states=8)
    loaded = engine.adapters.load("mine", adapter_in(tmp_path / "adapter", tiny))
    before = [(weights.a.clone(), weights.b.clone()) for weights in loaded.weights.values()]
    adapter_in(tmp_path / "adapter", tiny, seed=2)
    after = loaded.weights.values()
    assert all(torch.equal(a, w.a) and torch.equal(b, w.b) for (a, b), w in zip(before, after, strict=True))
    os.truncate(tmp_path / "adapter" / "adapter_model.safetensors", 4096)
    assert torch.stack([weights.a.sum() for weights in after]).isfinite().all()


def test_the_digest_of_an_adapter_is_of_what_was_parsed(
    tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are written anew after each of them was read."""
    engine = engine_on(tiny, pages=16, states=8)
    folder, read = adapter_in(tmp_path / "adapter", tiny), FileBytes.read_into

    def overwritten(file: FileBytes, start: int, buffer: memoryview) -> None:
        read(file, start, buffer)
        adapter_in(folder, tiny, seed=2)

    expected = engine.adapters.load("before", folder)
    monkeypatch.setattr(FileBytes, "read_into", overwritten)
    meanwhile = engine.adapters.load("meanwhile", folder)
    monkeypatch.undo()
    other = engine.adapters.load("after", folder)
    pairs = zip(expected.weights.values(), meanwhile.weights.values(), strict=True)
    assert all(torch.equal(one.a, two.a) for one, two in pairs)
    assert meanwhile.digest == expected.digest != other.digest


def test_an_archive_that_is_cut_off_or_overwritten_meanwhile_is_refused_or_as_it_was(
    tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, read, path = archive_of(tiny), FileBytes.read_into, tmp_path / "a.hybrid"
    whole = made.to_bytes()
    outcomes = set()
    for change in ("cut off", "overwritten"):
        for number in range(4):  # length, header, contents; after all of it
            left = [number]
            path.write_bytes(whole)

            def changed(
                file: FileBytes, start: int, buffer: memoryview, change: str = change, left: list[int] = left
            ) -> None:
                if left[0] == 0 and change == "cut off":
                    os.truncate(path, 3000)
                elif left[0] == 0:
                    with path.open("r+b") as target:
                        target.seek(len(whole) // 2)
                        target.write(os.urandom(len(whole) // 4))
                left[0] -= 1
                read(file, start, buffer)

            monkeypatch.setattr(FileBytes, "read_into", changed)
            try:
                assert torch.equal(read_archive(path).pages, made.pages)
                outcomes.add("as it was")
            except CacheFileError:
                outcomes.add("refused")
    assert outcomes == {"as it was", "refused"}


# Bounded


class Short:
    """A store with few bytes."""

    def __init__(self, contents: bytes) -> None:
        self.contents = contents

    def contains(self, name: str) -> bool:
        return True

    def put_from(self, name: str, parts: Sequence[Any]) -> None: ...

    def delete(self, name: str) -> None: ...

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        if start + len(buffer) > len(self.contents):
            raise EOFError(f"{name} is cut off")
        buffer[:] = self.contents[start : start + len(buffer)]


def file_of(header: Any, contents: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + contents


def sparse(num_bytes: int) -> dict[str, Any]:
    return {"pages": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}


HOSTILE = {
    "3 GiB that are not there": file_of(sparse(3 * 2**30)),
    "an exbibyte": file_of(sparse(2**60)),
    "more than an integer": file_of(sparse(10**30)),
    "a negative length": file_of(sparse(-8)),
    "a header of 90 MB that is not there": (90_000_000).to_bytes(8, "little"),
    "a header of an exbibyte": (2**60).to_bytes(8, "little") + b"{}",
    "nested lists": file_of(b"[" * 100_000),
    "nested objects": file_of(b'{"a":' * 100_000),
    "nested metadata": file_of(b'{"__metadata__":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "no types": file_of({"a": {"data_offsets": [0, 8]}}),
    "a type that is a list": file_of({"a": {"dtype": [], "shape": [1], "data_offsets": [0, 1]}}, b"a"),
    "metadata of numbers": file_of({"__metadata__": {"hybrid": 5}}),
    "nothing": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_memory_is_allocated_for_what_is_there(what: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(HOSTILE[what])
    store: Any = Short(HOSTILE[what])
    for read in (
        lambda: read_archive(HOSTILE[what]),
        lambda: read_archive(tmp_path / "a"),
        lambda: read_archive("a", DirectoryStore(tmp_path)),
        lambda: read_archive("a", store),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(CacheFileError, match=r"usable file of cached prefixes|cannot be read from the store"):
                read()
            assert tracemalloc.get_traced_memory()[1] < 40 * len(HOSTILE[what]) + 2**20
        finally:
            tracemalloc.stop()


def test_a_header_of_random_changes_is_refused_or_means_the_same(tiny: Engine) -> None:
    """Numbers, texts and objects of a header, and of the manifest in it, become others."""
    made, rng = archive_of(tiny), Random(3)
    whole = made.to_bytes()
    length = int.from_bytes(whole[:8], "little")
    odd = [0, -1, 1, 2**31, 2**63, 10**30, 1.5, "", "x", None, True, [], {}, [[]], "U8", "F64"]

    def changed(value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.8):
            name = rng.choice([*value])
            return {**value, name: changed(value[name], depth + 1)}
        if isinstance(value, list) and value and rng.random() < 0.8:
            at = rng.randrange(len(value))
            return [*value[:at], changed(value[at], depth + 1), *value[at + 1 :]]
        return rng.choice(odd)

    refused = 0
    for _ in range(300):
        broken = file_of(changed(json.loads(whole[8 : 8 + length])), whole[8 + length :])
        try:
            read = read_archive(broken)
            assert read.nodes == made.nodes and torch.equal(read.pages, made.pages)
        except CacheFileError:
            refused += 1
    assert refused > 250


def test_a_header_is_read_from_a_file_and_its_tensors_are_where_it_says(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2], dtype=torch.int8)}
    save_file(tensors, tmp_path / "file", {"name": "value"})
    file = FileBytes(tmp_path / "file")
    header = read_header(file.read, file.num_bytes, 1000)
    assert header.metadata == {"name": "value"} and header.num_bytes == file.num_bytes
    for name, expected in load_file(tmp_path / "file").items():
        dtype, shape, start, end = header.tensors[name]
        assert torch.equal(torch.frombuffer(file.read(start, end - start), dtype=dtype).view(shape), expected)


# Compared with the model and the memory


def with_ids(made: Archive, token: int) -> Archive:
    changed = np.frombuffer(made.ids, np.int32).copy()
    changed[-1] = token
    return replace(made, ids=changed.tobytes())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda made: with_ids(made, 1024), "hold the token id 1024; the model has ids up to 1023"),
        (lambda made: with_ids(made, 2**31 - 1), "hold the token id 2147483647"),
        (lambda made: replace(made, pages=made.pages[:, :-4].contiguous()), "a page of these prefixes has"),
        (lambda made: replace(made, checkpoints=torch.cat([made.checkpoints] * 2, 1)), "a checkpoint of these"),
        (lambda made: replace(made, nodes=(replace(made.nodes[0], priority=10**30), *made.nodes[1:])), "out of bounds"),
        (lambda made: replace(made, nodes=(replace(made.nodes[0], turn=10**30), *made.nodes[1:])), "out of bounds"),
    ],
)
def test_an_archive_that_no_cache_has_written_is_refused(
    tiny: Engine, change: Callable[[Archive], Archive], why: str
) -> None:
    engine = engine_on(tiny, deterministic=True)
    with pytest.raises(CacheFileError, match=why):
        engine.load(change(archive_of(tiny)).to_bytes())
    assert engine.cache.stats().pages_cached == 0 and engine.cache.tree.policy_failure is None


def test_the_largest_priority_that_may_be_asked_for_is_loaded(tiny: Engine) -> None:
    made = archive_of(tiny)
    engine = engine_on(tiny, pages=12, states=6, deterministic=True)
    engine.load(replace(made, nodes=tuple(replace(node, priority=2**63 - 1) for node in made.nodes)).to_bytes())
    for seed in range(4):
        answer(engine, ids(6 * GRID, seed=seed), PARAMS)
    assert engine.cache.tree.policy_failure is None


def test_a_copy_on_disk_that_is_larger_than_a_page_is_left_out(tiny: Engine, tmp_path: Path) -> None:
    """An index that names 3 GiB of a sparse file."""
    settings: dict[str, Any] = {"disk": 2**26, "directory": tmp_path, "deterministic": True}
    with engine_on(tiny, pages=16, states=8, **settings) as engine:
        for seed in range(4):
            answer(engine, ids(9 * GRID, seed=seed), PARAMS)
    with sqlite3.connect(tmp_path / "manifest.sqlite") as manifest:
        (count,) = manifest.execute("SELECT count(*) FROM copies").fetchone()
        assert count
        manifest.execute("UPDATE segments SET bytes = ?", (2**32,))
        manifest.execute("UPDATE copies SET bytes = ?", (3 * 2**30,))
    for file in tmp_path.glob("*.safetensors"):
        os.truncate(file, 2**32)
    with engine_on(tiny, pages=16, states=8, **settings) as engine:
        assert engine.cache.stats().disk_checkpoints == 0
        warm, expected = answer(engine, ids(9 * GRID, seed=0), PARAMS), cold(tiny, ids(9 * GRID, seed=0), PARAMS)
        assert (warm.token_ids, warm.logprobs) == (expected.token_ids, expected.logprobs)


# Adapters

SLOW = "(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)" + "".join(rf"\{at}" for at in range(3, 15)) + "[XY]"
"""A pattern that matches in many ways, and tries all of them."""


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"alpha_pattern": {"[": 1.0}}, "is not a regular expression"),
        ({"alpha_pattern": {"a" * 2000: 1.0}}, "is not a regular expression"),
        ({"alpha_pattern": {"(" * 450 + ")" * 450: 1.0}}, "is not a regular expression"),
        ({"alpha_pattern": {SLOW: 1.0}}, "takes more than"),
        ({"alpha_pattern": ["x"]}, "must be numbers"),
        ({"rank": 0}, "rank 0"),
        ({"lora_alpha": 1e300}, "is beyond torch"),
        ({"lora_alpha": 10**30}, "at most"),
    ],
)
def test_a_hostile_adapter_is_refused_soon(tiny: Engine, tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    engine = engine_on(tiny, pages=16, states=8)
    folder = adapter_in(tmp_path / "adapter", tiny, **settings)
    with pytest.raises(CheckpointError, match=why):
        engine.adapters.load("mine", folder)


@pytest.mark.parametrize("path", [None, 5, "", b"folder"])
def test_a_path_of_an_adapter_is_a_path(tiny: Engine, path: Any) -> None:
    with pytest.raises(ArgumentError, match="the path of an adapter"):
        engine_on(tiny, pages=16, states=8).adapters.load("mine", path)
