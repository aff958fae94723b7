"""`hybrid cache`: list what a file or a folder of cached prefixes holds, and check it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hybrid.cache.config import CacheConfig
from hybrid.commands.checkpoints import TOLERANCES
from hybrid.commands.commands import Outcome, refuse_given
from hybrid.engine.adapters import split_namespace
from hybrid.engine.build import DTYPES, build_cache, load
from hybrid.engine.engine import Engine
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import ArgumentError, CacheFileError, PromptError
from hybrid.kernels.cpu.kinds import SCALE_BYTES
from hybrid.kernels.packed_kv import KV_DTYPES, is_packed, unpack
from hybrid.key import Key
from hybrid.tiers.archive import Archive, read_archive
from hybrid.tiers.fingerprint import Fingerprint
from hybrid.tiers.folder import MANIFEST, RECOVERABLE, check_folder, folder_parts

KV_TOLERANCES = {"auto": 0.0, "int8": 0.03, "fp8": 0.13}
"""The same by how keys and values are kept: a value between two codes may be rounded to either, and what is computed
from it follows. The larger one of both is allowed."""

SHOWN_IDS = 8
"""Token ids of a prompt that are shown."""


@dataclass
class Recomputed:
    """The result of `recompute`.

    Attributes:
        checked: checkpoints that were computed again, with all pages before them.
        wrong: what differs.
        unchecked: prefixes that were not computed, and why.
    """

    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def recompute(engine: Engine, archive: Archive) -> Recomputed:
    """Compute every prefix of an archive again, each path once, and compare pages and checkpoints.

    Bit by bit where the archive says that its contents are those of cold runs, else within rounding.

    Args:
        engine: with everything of the archive loaded.
    """
    found, config = Recomputed(), engine.cache.config
    longest = max((node.end for node in archive.nodes), default=0) // config.page_size
    settings = CacheConfig(
        page_size=config.page_size,
        chunk_size=config.chunk_size,
        deterministic=True,
        placement=(),
        kv_dtype=config.kv_dtype,
    )
    cold = engine.with_cache(settings, size=(longest + 2, longest + 6))
    for leaf in archive.leaves():
        path = archive.path(leaf)
        namespace, key_ids = archive.nodes[leaf].namespace, archive.ids_of(path)
        ids = memoryview(key_ids).cast("i").tolist()
        name = f"the prefix of {len(ids)} tokens in namespace {namespace!r:.60}"
        if split_namespace(namespace)[0] is not None:
            found.unchecked.append(f"{name}: it was computed with an adapter")
            continue
        if min(ids) < 0:
            found.unchecked.append(f"{name}: it holds images")
            continue
        ends = [archive.nodes[index].end for index in path if archive.nodes[index].kind is not None]
        cold.cache.clear()
        try:
            cold.generate([[*ids, 0]], SamplingParams(max_new_tokens=1, checkpoint_at=ends), progress=False)
        except PromptError as error:
            found.unchecked.append(f"{name}: {error}")
            continue
        found.checked += len(ends)
        rounding = max(TOLERANCES[engine.model.dtype], KV_TOLERANCES[config.kv_dtype])
        tolerance = 0.0 if archive.fingerprint.deterministic else rounding
        for end in ends:
            for what, there, here in _pairs(engine, Key(key_ids, namespace), cold, Key(key_ids), end):
                if not _same(there, here, tolerance):
                    found.wrong.append(f"{name}: {what} up to {end} differ")
    return found


def _pairs(
    engine: Engine, key: Key, cold: Engine, cold_key: Key, end: int
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield the tensors that both have up to a checkpoint."""
    both = []
    for one, own in ((engine, key), (cold, cold_key)):
        node = one.cache.tree.peek(own, end).checkpoint
        if node is None or node.end != end or node.slot is None:
            yield "the checkpoint", None, None
            return
        both.append((one.cache, node.slot, list(one.cache.tree.pages(node, end))))
    (there, slot, pages), (here, cold_slot, cold_pages) = both
    yield "the keys and values", there.kv[pages], here.kv[cold_pages]
    for name, tensor in there.state_tensors.items():
        yield f"the {name} states", tensor[slot], here.state_tensors[name][cold_slot]


def _same(there: Tensor | None, here: Tensor | None, tolerance: float) -> bool:
    """Tell whether both hold the same: bit by bit where the tolerance is 0, else as far as it allows."""
    if there is None or here is None:
        return False
    if not tolerance:
        return torch.equal(there.contiguous().view(torch.uint8), here.contiguous().view(torch.uint8))
    there, here = _unpacked(there), _unpacked(here)
    return torch.allclose(there, here, rtol=0.0, atol=tolerance * float(here.abs().max()))


def _unpacked(kv: Tensor) -> Tensor:
    """Keys and values as they are computed with."""
    if not is_packed(kv):
        return kv
    return unpack(kv.view(torch.uint8), kv.shape[-1] - SCALE_BYTES, kv.dtype, torch.float32)


def show(archive: Archive, console: Console) -> Outcome:
    """Print what an archive holds."""
    table = Table("namespace", "tokens", "checkpoints at", "first ids", title=str(archive.transfer))
    for leaf in archive.leaves():
        path = archive.path(leaf)
        ends = [archive.nodes[index].end for index in path if archive.nodes[index].kind is not None]
        ids = memoryview(archive.ids_of(path)).cast("i")[:SHOWN_IDS].tolist()
        positions = ", ".join(map(str, ends if len(ends) < 6 else [*ends[:2], "...", *ends[-2:]]))
        table.add_row(repr(archive.nodes[leaf].namespace), str(archive.nodes[leaf].end), positions, str(ids))
    console.print(table)
    for name, value in archive.fingerprint.as_json().items():
        console.print(f"{name:>14}: {value}", markup=False, soft_wrap=True)
    result = {
        "fingerprint": archive.fingerprint.as_json(),
        "after": archive.after,
        "nodes": [asdict(node) for node in archive.nodes],
        "checkpoints": archive.transfer.checkpoints,
        "pages": archive.transfer.pages,
        "bytes": archive.transfer.num_bytes,
    }
    return Outcome(True, result)


def show_folder(path: Path, console: Console) -> Outcome:
    """Print what a folder of copies holds. Changes nothing, and takes part in nothing.

    Raises:
        CacheFileError: its manifest cannot be read.
    """
    with _reading(path):
        parts, prefixes = folder_parts(path), Table("namespace", "tokens", "first ids")
        for part in parts:
            for namespace, prefix in part.prefixes:
                ids = memoryview(prefix).cast("i").tolist()
                prefixes.add_row(repr(namespace), str(len(ids)), str(ids[:SHOWN_IDS]))
    found = [
        {
            "fingerprint": part.fingerprint,
            "checkpoints": part.checkpoints,
            "pages": part.pages,
            "files": part.files,
            "bytes": part.num_bytes,
        }
        for part in parts
    ]
    for counts in found:
        for name, value in counts.items():
            console.print(f"{name:>14}: {value}", markup=False, soft_wrap=True)
    if prefixes.row_count:
        console.print(prefixes)
    return Outcome(True, {"contents": found})


def check_copies(path: Path, fix: bool, console: Console) -> Outcome:
    """Compare every copy of a folder with its checksum, and print what is wrong.

    Args:
        fix: drop it.

    Raises:
        CacheFileError: its manifest cannot be read.
    """
    with _reading(path):
        num_right, wrong = check_folder(path, fix)
    for line in wrong:
        console.print(line, markup=False, soft_wrap=True)
    done = "" if not wrong else "; it was dropped" if fix else "; --fix drops it"
    console.print(f"{num_right} copies are what was written; {len(wrong)} things are wrong{done}")
    return Outcome(fix or not wrong, {"right": num_right, "wrong": wrong, "fixed": fix})


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (*RECOVERABLE, ValueError, TypeError) as error:
        raise CacheFileError(f"{path} is not a usable folder of cached prefixes: {error}") from error


def _kv_dtype(page: str) -> Literal["auto", "int8", "fp8"]:
    """Return how a file keeps keys and values, by the tensors of its pages (`Fingerprint.page`)."""
    for name in ("int8", "fp8"):
        if f"kv {KV_DTYPES[name]} ".replace("torch.", "") in page:
            return name
    return "auto"


def _dtype(made_with: Fingerprint) -> str | None:
    """The type of the model that made a file: that of its keys and values, or of the convolution's windows where keys
    and values are kept in a byte. None: neither says it."""
    found = re.search(rf"\b(?:kv|conv) ({'|'.join(DTYPES)}) ", f"{made_with.page}; {made_with.checkpoint}")
    return found[1] if found is not None else None


def check(archive: Archive, args: argparse.Namespace, console: Console) -> Outcome:
    """Compute an archive again, and print what differs."""
    made_with = archive.fingerprint
    config = CacheConfig(
        page_size=made_with.page_size,
        chunk_size=made_with.chunk_size,
        deterministic=made_with.deterministic,
        kv_dtype=_kv_dtype(made_with.page),
    )
    loaded = load(args.model, None, args.dtype or _dtype(made_with), config.chunk_size)
    size = len(archive.pages) + 2, len(archive.checkpoints) + 4
    with Engine(loaded, build_cache(loaded, config, size)) as engine:
        skipped = engine.load(args.file).skipped
        found = Recomputed(unchecked=[f"{count} checkpoints: {reason}" for reason, count in skipped.items()])
        if not skipped:
            found = recompute(engine, archive)
    passed = not found.wrong and (found.checked > 0 or not found.unchecked)
    console.print(f"{found.checked} checkpoints computed again: {len(found.wrong)} differences")
    for line in (*found.wrong, *(f"not checked: {line}" for line in found.unchecked)):
        console.print(line, markup=False, soft_wrap=True)
    return Outcome(passed, asdict(found))


# The command


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Read the file, or the folder of copies, and list or check it."""
    path = Path(args.file)
    is_folder = (path / MANIFEST).is_file()
    if args.fix and not (is_folder and args.action == "check"):
        raise ArgumentError("hybrid cache: --fix drops wrong copies of a disk tier: it needs 'check' and its folder")
    if args.dtype is not None and (is_folder or args.action == "show"):
        raise ArgumentError("hybrid cache: --dtype is the type that a file is computed again in: it needs 'check'")
    if is_folder or args.action == "show":
        refuse_given(args, "a model runs only where a file is checked", model="tiny")
    if is_folder:
        return show_folder(path, console) if args.action == "show" else check_copies(path, args.fix, console)
    archive = read_archive(args.file)
    if args.action == "show":
        return show(archive, console)
    return check(archive, args, console)
