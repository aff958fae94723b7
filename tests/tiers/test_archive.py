"""Archives: what was written is what is read, to the bit, or it is refused with a reason."""

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

from hybrid.errors import CacheFileError
from hybrid.tiers.archive import Archive, ArchivedNode, read_archive
from hybrid.tiers.fingerprint import Fingerprint, digest_of_model

FINGERPRINT = Fingerprint(
    model="m", page_size=2, chunk_size=2, page="kv", checkpoint="state", deterministic=True, sums="", version="1"
)


def archive(after: int = 0) -> Archive:
    """Two prompts that share four tokens."""
    nodes = (
        ArchivedNode(-1, "", 0, 4, "branch"),
        ArchivedNode(0, "", 4, 6, "turn_end", turn=2),
        ArchivedNode(0, "", 4, 8),
        ArchivedNode(2, "", 8, 10, "user", priority=3),
        ArchivedNode(-1, "other", 0, 2, "branch"),
    )
    num_tokens = sum(node.end - node.start for node in nodes)
    num_pages = sum(max(0, node.end - max(node.start, after)) // 2 for node in nodes)
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 99, (num_tokens,), dtype=torch.int32, generator=rng).numpy().tobytes()
    pages = torch.randint(0, 256, (num_pages, 12), generator=rng).to(torch.uint8)
    checkpoints = torch.randint(0, 256, (4, 20), generator=rng).to(torch.uint8)
    return Archive(FINGERPRINT, nodes, ids, pages, checkpoints, after)


def same(one: Archive, other: Archive) -> bool:
    tensors = torch.equal(one.pages, other.pages) and torch.equal(one.checkpoints, other.checkpoints)
    return tensors and (one.fingerprint, one.nodes, one.ids, one.after) == (
        other.fingerprint,
        other.nodes,
        other.ids,
        other.after,
    )


@pytest.mark.parametrize("after", [0, 4])
def test_what_was_written_is_read(tmp_path: Path, after: int) -> None:
    made = archive(after)
    made.write(tmp_path / "a.hybrid")
    assert same(read_archive(tmp_path / "a.hybrid"), made)
    assert same(read_archive(made.to_bytes()), made)


def test_an_empty_archive_is_one_too(tmp_path: Path) -> None:
    nothing = torch.empty(0, 0, dtype=torch.uint8)
    Archive(FINGERPRINT, (), b"", nothing, nothing).write(tmp_path / "a")
    assert read_archive(tmp_path / "a").nodes == ()


def test_a_path_has_the_ids_pages_and_checkpoint_of_its_edges() -> None:
    made = archive()
    path = made.path(3)
    assert path == [0, 2, 3]
    assert len(made.ids_of(path)) == 10 * 4
    assert made.ids_of(path)[16:32] == made.ids[24:40]
    assert torch.equal(torch.stack(made.pages_of(path)), made.pages[[0, 1, 3, 4, 5]])
    assert torch.equal(made.checkpoint_of(3), made.checkpoints[2])
    assert [*made.leaves()] == [1, 3, 4]


def test_pages_that_the_reader_has_are_left_out() -> None:
    made = archive(after=4)
    assert [made.num_pages(node) for node in made.nodes] == [0, 1, 2, 1, 0]
    assert len(made.pages_of(made.path(3))) == 3


def test_only_the_owner_may_read_a_file(tmp_path: Path) -> None:
    archive().write(tmp_path / "a")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive().write(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheFileError, match=r"a cannot be written: .*No space left"):
        archive(4).write(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before
    assert [*tmp_path.iterdir()] == [tmp_path / "a"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match="missing/a cannot be written"):
        archive().write(tmp_path / "missing" / "a")
    with pytest.raises(CacheFileError, match="there is no such file"):
        read_archive(tmp_path / "b")
    with pytest.raises(CacheFileError, match="it is a folder, a device or a pipe"):
        read_archive(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_not_a_file_is_not_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "there")
    before = (tmp_path / "there").lstat()
    with pytest.raises(CacheFileError, match="it is a folder, a device or a pipe"):
        archive().write(tmp_path / "there")
    assert (tmp_path / "there").lstat() == before and len([*tmp_path.iterdir()]) == 1


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """In the payload, the ids, the digests, the manifest and the header."""
    whole, rng = archive().to_bytes(), Random(0)
    for at in range(0, len(whole), 7):
        broken = bytearray(whole)
        broken[at] ^= 1 << rng.randrange(8)
        try:
            read = read_archive(bytes(broken))
        except CacheFileError:
            continue
        assert same(read, archive()), f"byte {at}"  # white space of the header


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    whole = archive().to_bytes()
    for length in (0, 1, 7, 8, 9, 100, 900, len(whole) - 1):
        (tmp_path / "a").write_bytes(whole[:length])
        with pytest.raises(CacheFileError):
            read_archive(tmp_path / "a")
        with pytest.raises(CacheFileError):
            read_archive(whole[:length])


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(2)}, tmp_path / "a")
    with pytest.raises(CacheFileError, match="another kind of safetensors file"):
        read_archive(tmp_path / "a")


def rewritten(change: Callable[[dict[str, Any]], None]) -> bytes:
    """An archive whose writer has changed the manifest, with a seal that fits."""
    made = archive()
    manifest = json.loads(json.dumps({"nodes": [node_fields(node) for node in made.nodes], "after": 0}))
    manifest["fingerprint"] = made.fingerprint.as_json()
    change(manifest)
    fingerprint = made.fingerprint
    fingerprint = replace(fingerprint, **manifest["fingerprint"])
    nodes = tuple(ArchivedNode(**node) for node in manifest["nodes"])
    return Archive(fingerprint, nodes, made.ids, made.pages, made.checkpoints, 0).to_bytes()


def node_fields(node: ArchivedNode) -> dict[str, Any]:
    return {name: getattr(node, name) for name in ArchivedNode.__slots__}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: m["fingerprint"].update(format=0), "it has version 0 of the format, and version 2 is read"),
        (lambda m: m["fingerprint"].update(page_size=0), "pages are of 0 tokens"),
        (lambda m: m["fingerprint"].update(model=7), "its fingerprint has other fields"),
        (lambda m: m["nodes"][1].update(parent=1), "node 1 comes before the node above it"),
        (lambda m: m["nodes"][1].update(parent=-2), "node 1 comes before"),
        (lambda m: m["nodes"][1].update(start=0), "node 1 does not continue the node above it"),
        (lambda m: m["nodes"][1].update(end=4), "node 1 does not continue"),
        (lambda m: m["nodes"][1].update(end=7), "node 1 does not continue"),
        (lambda m: m["nodes"][1].update(namespace="other"), "node 1 is in another namespace"),
        (lambda m: m["nodes"][1].update(kind=None), "do not add up"),
        (lambda m: m["nodes"][1].update(end=1 << 40), "do not add up"),
        (lambda m: m["nodes"][1].update(turn="x"), "a field of another type"),
        (lambda m: m["nodes"][1].update(parent=True), "a field of another type"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: Callable[[dict[str, Any]], None], why: str) -> None:
    with pytest.raises(CacheFileError, match=why):
        read_archive(rewritten(change))


def test_a_fingerprint_says_what_differs() -> None:
    other = replace(FINGERPRINT, model="n", page_size=4)
    assert FINGERPRINT.differences(FINGERPRINT) == []
    assert FINGERPRINT.differences(other) == ["model is 'n' there and 'm' here", "page_size is 4 there and 2 here"]


def test_contents_of_cold_runs_can_be_used_everywhere_and_others_not() -> None:
    loose = replace(FINGERPRINT, deterministic=False)
    assert loose.differences(FINGERPRINT) == []
    assert FINGERPRINT.differences(loose) == ["deterministic is False there and True here"]


def test_every_bit_of_a_model_counts_and_the_order_of_its_weights_does_not() -> None:
    weights = [("a", torch.arange(6.0)), ("b", torch.zeros(3, 4, dtype=torch.bfloat16))]
    made = digest_of_model({"layers": 2}, weights)
    assert digest_of_model({"layers": 2}, weights[::-1]) == made
    changed = weights[0][1].clone()
    changed.view(torch.int32)[5] ^= 1
    others = [
        digest_of_model({"layers": 3}, weights),
        digest_of_model({"layers": 2}, [("a", changed), weights[1]]),
        digest_of_model({"layers": 2}, [("c", weights[0][1]), weights[1]]),
        digest_of_model({"layers": 2}, [weights[0], ("b", weights[1][1].view(4, 3))]),
        digest_of_model({"layers": 2}, [weights[0], ("b", weights[1][1].half())]),
    ]
    assert len({made, *others}) == 6
