"""Archives: cached prefixes outside of any cache, in memory or in a file.

An archive is one safetensors file (no pickle). Its tensors are

    ids                  [num_tokens] int32           of the edges of all nodes, one after the other
    pages                [num_pages, page_bytes] uint8
    checkpoints          [num_checkpoints, checkpoint_bytes] uint8
    page_digests, checkpoint_digests    [n, 16] uint8: blake2b of each

and its metadata hold a manifest: the fingerprint, and the nodes of a tree of prefixes, parents first. A seal over the
manifest, the ids and the digests, and so over everything, is part of the metadata. `read_archive` refuses it
if a single bit of it is not what was written. The seal finds damage, not malice: it needs no secret.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from hybrid.checks import MAX_INT, shown
from hybrid.errors import ArgumentError, CacheFileError
from hybrid.key import TOKEN_BYTES
from hybrid.tensor_file import FileBytes, HeldBytes, read_header
from hybrid.tiers.fingerprint import DIGEST_BYTES, FORMAT, Fingerprint, digest, fingerprint_of_json
from hybrid.tiers.store import Store, checked_store, sync_directory
from hybrid.tiers.transfer import Transfer

MAX_HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""

SHAPES = {
    "ids": (torch.int32, 1),
    "pages": (torch.uint8, 2),
    "checkpoints": (torch.uint8, 2),
    "page_digests": (torch.uint8, 2),
    "checkpoint_digests": (torch.uint8, 2),
}
"""Type and number of dimensions of each tensor of an archive."""


@dataclass(frozen=True, slots=True)
class ArchivedNode:
    """An edge of the tree of prefixes, and the checkpoint at its end.

    Attributes:
        parent: index of the node above; -1: none, it begins at the root of its namespace.
        namespace: of its keys.
        start, end: tokens from the root to where the edge begins and ends: whole pages.
        kind: why its checkpoint was put there; None: it has none.
        turn: number of turn ends before it on its path.
        priority: the highest that a request gave its checkpoint.
    """

    parent: int
    namespace: str
    start: int
    end: int
    kind: str | None = None
    turn: int = 0
    priority: int = 0


@dataclass(frozen=True)
class Archive:
    """Cached prefixes.

    Attributes:
        fingerprint: what they were made with.
        nodes: the tree of prefixes, parents first.
        ids: the token ids of all edges, one after the other.
        pages: `[num_pages, page_bytes]` uint8: of all edges in the same order, from token `after` on.
        checkpoints: `[num_checkpoints, checkpoint_bytes]` uint8: of the nodes that have one, in the same order.
        after: the pages of the first `after` tokens of every prefix are left out: the reader has them.
    """

    fingerprint: Fingerprint
    nodes: tuple[ArchivedNode, ...]
    ids: bytes
    pages: Tensor
    checkpoints: Tensor
    after: int = 0

    @cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        """The first of its ids in bytes, the first of its pages, and the checkpoint of each node."""
        places, ids, pages, checkpoints = [], 0, 0, 0
        for node in self.nodes:
            places.append((ids, pages, checkpoints))
            ids += (node.end - node.start) * TOKEN_BYTES
            pages += self.num_pages(node)
            checkpoints += node.kind is not None
        return places

    def num_pages(self, node: ArchivedNode) -> int:
        """Count the pages of an edge that it holds."""
        return max(0, node.end - max(node.start, self.after)) // self.fingerprint.page_size

    def path(self, index: int) -> list[int]:
        """The nodes from the root to a node."""
        path = []
        while index >= 0:
            path.append(index)
            index = self.nodes[index].parent
        return path[::-1]

    def ids_of(self, path: list[int]) -> bytes:
        """The token ids of a path, `TOKEN_BYTES` bytes each."""
        parts = []
        for index in path:
            node, first = self.nodes[index], self._places[index][0]
            parts.append(self.ids[first : first + (node.end - node.start) * TOKEN_BYTES])
        return b"".join(parts)

    def pages_of(self, path: list[int]) -> list[Tensor]:
        """The pages of a path from token `after` on, each `[page_bytes]` uint8."""
        found: list[Tensor] = []
        for index in path:
            first = self._places[index][1]
            found += self.pages[first : first + self.num_pages(self.nodes[index])]
        return found

    def checkpoint_of(self, index: int) -> Tensor:
        """The checkpoint of a node that has one, `[checkpoint_bytes]` uint8."""
        return self.checkpoints[self._places[index][2]]

    def leaves(self) -> Iterator[int]:
        """The nodes below which there are none."""
        parents = {node.parent for node in self.nodes}
        return (index for index in range(len(self.nodes)) if index not in parents)

    def renamed(self, namespace: Callable[[str], str]) -> Archive:
        """The same prefixes in other namespaces, each as a function of its own."""
        return replace(self, nodes=tuple(replace(node, namespace=namespace(node.namespace)) for node in self.nodes))

    @property
    def transfer(self) -> Transfer:
        """The size of its contents."""
        num_bytes = self.pages.numel() + self.checkpoints.numel()
        return Transfer(len(self.checkpoints), len(self.pages), num_bytes)

    # Writing

    def to_bytes(self) -> bytes:
        """The archive as one piece."""
        tensors, metadata = self._content()
        data: bytes = safetensors.torch.save(tensors, metadata)
        return data

    def write(self, path: str | Path, store: Store | None = None) -> None:
        """Write a file, which only its owner may read. One that is there is replaced once all of it is on the disk.

        Args:
            store: where `path` is a name; None: it is a path.

        Raises:
            CacheFileError: it cannot be written. What was there is as it was.
            ArgumentError: it is not a path, or not a name of a store, or `store` is none.
        """
        if not isinstance(path, str | Path) or not str(path):
            raise ArgumentError(f"save: a file needs a path, such as 'support.hybrid'; got {shown(path)}")
        if store is not None:
            store = checked_store(store)
            try:
                store.put_from(str(path), [self.to_bytes()])
            except OSError as error:
                raise CacheFileError(f"{path} cannot be written to the store: {error}") from error
            return
        path = Path(path)
        tensors, metadata = self._content()
        try:
            if path.exists() and not path.is_file():
                raise ValueError("it is a folder, a device or a pipe")
            with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
                part = Path(file.name)  # its permissions are 0600
            try:
                safetensors.torch.save_file(tensors, part, metadata)
                _sync(part)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            sync_directory(path.parent)
        except (OSError, ValueError, safetensors.SafetensorError) as error:  # a ValueError: it can be no file
            raise CacheFileError(f"{path} cannot be written: {error}") from error

    def _content(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and the metadata of a file."""
        tensors = {
            "ids": torch.frombuffer(bytearray(self.ids), dtype=torch.int32)
            if self.ids
            else torch.empty(0, dtype=torch.int32),
            "pages": self.pages.contiguous(),
            "checkpoints": self.checkpoints.contiguous(),
            "page_digests": _digests(self.pages),
            "checkpoint_digests": _digests(self.checkpoints),
        }
        manifest = json.dumps(
            {
                "fingerprint": self.fingerprint.as_json(),
                "after": self.after,
                "nodes": [asdict(node) for node in self.nodes],
            }
        )
        return tensors, {"hybrid": manifest, "seal": _seal(manifest, tensors).hex()}


def read_archive(source: str | Path | bytes | bytearray | memoryview, store: Store | None = None) -> Archive:
    """Read an archive into memory, and check every bit of it there: what happens to its file afterwards, or meanwhile,
    changes nothing that was checked.

    Args:
        store: where `source` is a name; None: it is a path, or the archive itself.

    Raises:
        CacheFileError: it is none, it is damaged, or of another version of the format.
        ArgumentError: it is not a name of a store, or `store` is none.
    """
    name, where = "the archive", ""
    if not isinstance(source, bytes | bytearray | memoryview):
        name, where = str(source), "" if store is None else " from the store"
    try:
        metadata, tensors = _read(source, store)
        if "hybrid" not in metadata:
            raise ValueError("it is another kind of safetensors file")
        _check_tensors(tensors)
        if metadata.get("seal") != _seal(metadata["hybrid"], tensors).hex():
            raise ValueError("it is damaged: its manifest, ids or digests are not what was written")
        archive = _archive(json.loads(metadata["hybrid"]), tensors)
        for what, rows in (("page", "pages"), ("checkpoint", "checkpoints")):
            for index, (row, expected) in enumerate(zip(tensors[rows], tensors[f"{what}_digests"], strict=True)):
                if digest(row.numpy().data) != expected.numpy().tobytes():
                    raise ValueError(f"it is damaged: {what} {index} is not what was written")
        return archive
    except ArgumentError:
        raise
    except (OSError, EOFError) as error:
        raise CacheFileError(f"{name} cannot be read{where}: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, MemoryError) as error:
        wrong = f"{name}{' in the store' if where else ''} is not a usable file of cached prefixes: {error!s:.300}"
        raise CacheFileError(f"{wrong}; make one with `save` of an engine or a cache") from error


def _read(
    source: str | Path | bytes | bytearray | memoryview, store: Store | None
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a copy of an archive, which is made once its length is known to be there."""
    num_bytes: int | None = None
    whole: bytes | bytearray | None = None
    if isinstance(source, bytes | bytearray | memoryview):
        held = HeldBytes(bytearray(source))  # another thread may write there
        read, num_bytes, whole = held.read, held.num_bytes, held.contents
    elif store is not None:
        read = partial(_read_store, checked_store(store), str(source))
    else:
        try:
            file = FileBytes(Path(source))
        except FileNotFoundError:
            raise ValueError("there is no such file") from None
        read, num_bytes = file.read, file.num_bytes
    header = read_header(read, num_bytes, MAX_HEADER_BYTES)
    if whole is None:
        whole = read(0, header.num_bytes)
    tensors = {}
    for name, (dtype, shape, start, end) in header.tensors.items():
        own = torch.frombuffer(whole, dtype=torch.uint8, count=end - start, offset=start) if end > start else _NOTHING
        tensors[name] = own.view(dtype).view(shape)
    return header.metadata, tensors


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _read_store(store: Store, name: str, start: int, count: int) -> bytearray:
    found = bytearray(count)
    store.get_into(name, start, memoryview(found))
    return found


def _check_tensors(tensors: Mapping[str, Tensor]) -> None:
    found = {name: (tensor.dtype, tensor.dim()) for name, tensor in tensors.items()}
    if found != SHAPES:
        raise ValueError("it does not have the tensors of an archive")
    for rows, digests in (("pages", "page_digests"), ("checkpoints", "checkpoint_digests")):
        if tensors[digests].shape != (len(tensors[rows]), DIGEST_BYTES):
            raise ValueError(f"the shapes of {rows} and {digests} disagree")


def _archive(manifest: Any, tensors: Mapping[str, Tensor]) -> Archive:
    """The archive of a manifest and its tensors.

    Raises:
        ValueError: they disagree. Of a hostile file other errors of conversion are possible.
    """
    version = manifest["fingerprint"].get("format")
    if version != FORMAT:
        raise ValueError(f"it has version {version!r:.50} of the format, and version {FORMAT} is read")
    fingerprint, after = fingerprint_of_json(manifest["fingerprint"]), manifest["after"]
    nodes = tuple(ArchivedNode(**node) for node in manifest["nodes"])
    page_size = fingerprint.page_size
    if page_size < 1 or type(after) is not int or after < 0 or after % page_size:
        raise ValueError(f"its pages are of {page_size} tokens, and begin after {after!r}")
    for index, node in enumerate(nodes):
        _check_node(index, node, nodes, page_size)
    ids = tensors["ids"].numpy().tobytes()
    archive = Archive(fingerprint, nodes, ids, tensors["pages"], tensors["checkpoints"], after)
    expected = (
        sum(node.end - node.start for node in nodes),
        sum(map(archive.num_pages, nodes)),
        sum(node.kind is not None for node in nodes),
    )
    if expected != (len(tensors["ids"]), len(tensors["pages"]), len(tensors["checkpoints"])):
        raise ValueError("its nodes do not add up to its ids, pages and checkpoints")
    return archive


def _check_node(index: int, node: ArchivedNode, nodes: tuple[ArchivedNode, ...], page_size: int) -> None:
    numbers = (node.parent, node.start, node.end, node.turn, node.priority)
    if any(type(number) is not int for number in numbers) or not isinstance(node.namespace, str):
        raise ValueError(f"node {index} has a field of another type")
    if not -MAX_INT <= node.priority <= MAX_INT or not 0 <= node.turn <= MAX_INT or node.end > MAX_INT:
        raise ValueError(f"node {index} has a number that is out of bounds")
    if not -1 <= node.parent < index:
        raise ValueError(f"node {index} comes before the node above it")
    above = nodes[node.parent] if node.parent >= 0 else None
    begins = node.start == (above.end if above is not None else 0)
    if not begins or node.end <= node.start or node.end % page_size:
        raise ValueError(f"node {index} does not continue the node above it by whole pages")
    if above is not None and above.namespace != node.namespace:
        raise ValueError(f"node {index} is in another namespace than the node above it")


def _digests(rows: Tensor) -> Tensor:
    whole = bytearray(b"".join(digest(row.numpy().data) for row in rows))
    made = torch.frombuffer(whole, dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8)
    return made.view(-1, DIGEST_BYTES)


def _seal(manifest: str, tensors: Mapping[str, Tensor]) -> bytes:
    sealed = [tensors[name].numpy().tobytes() for name in ("ids", "page_digests", "checkpoint_digests")]
    return digest(b"".join(digest(part) for part in (manifest.encode(), *sealed)))


def _sync(path: Path) -> None:
    """Have what was written on the disk, and not only on its way there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
