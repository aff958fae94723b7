"""From the cache to archives of prefixes, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hybrid.cache.allocator import Allocator
from hybrid.cache.config import CacheConfig
from hybrid.cache.fingerprints import fingerprint_named
from hybrid.cache.restorer import Boundary, RestoreOutcome, Restorer
from hybrid.cache.tiers import Tiers
from hybrid.checks import integer, shown
from hybrid.errors import ArgumentError, CacheFileError, PromptError
from hybrid.key import Key
from hybrid.memory.copies import Contents
from hybrid.memory.memory import CacheMemory
from hybrid.tiers.archive import Archive, ArchivedNode, read_archive
from hybrid.tiers.fingerprint import Fingerprint
from hybrid.tiers.transfer import Transfer
from hybrid.tree.node import Kind, Node, StateLock
from hybrid.tree.tree import Tree

Only = Literal["deepest"]
"""The checkpoints that are saved, where not all are."""


class Archives:
    """Copies prefixes of a cache into archives, and brings those of archives into the cache.

    Args:
        tree: what is cached.
        memory: the contents. Where they cannot be read and written both methods raise ArgumentError.
        config: of the cache: a part of the fingerprint of what it holds.
        allocator: locks what was loaded until the rest is.
        restorer: writes contents into the memory, and inserts them.
        tiers: keep what the device has no memory for; None: there are none.
    """

    def __init__(
        self,
        tree: Tree,
        memory: CacheMemory,
        config: CacheConfig,
        allocator: Allocator,
        restorer: Restorer,
        tiers: Tiers | None,
    ) -> None:
        self._tree = tree
        self._memory = memory
        self._config = config
        self._allocator = allocator
        self._restorer = restorer
        self._tiers = tiers

    def collect(
        self,
        keys: Iterable[Key] | None,
        namespace: str | None,
        model: str | Fingerprint,
        after: int = 0,
        only: Only | None = None,
    ) -> Archive:
        """Copy prefixes up to their last checkpoints. Changes nothing.

        Args:
            keys: prompts; None: everything, or everything of `namespace`.
            model: a name for the model and its weights, or a whole fingerprint.
            after: leave out the pages of the first `after` tokens, rounded down to whole pages.
            only: "deepest": leave out checkpoints but the last of each prompt, or of each path where there are none.

        Raises:
            PromptError: nothing is cached of one of the prompts, or in the namespace.
            ArgumentError: `after` is not a number of tokens, `only` is something else, or there are no contents that
                can be read.
        """
        fingerprint = fingerprint_named(self._memory, self._config, model)
        tree, contents = self._tree, self._memory.contents
        contents.check_writable()
        after = integer("after", after, 0)
        after -= after % tree.page_size
        if only not in (None, "deepest"):
            raise ArgumentError(f"only must be 'deepest', or None; got {shown(only)}")
        ends = _ends(tree, keys, namespace)
        wanted = {node for end in ends for node in _path(end)}
        if only is not None and keys is None:
            ends -= {above for end in ends for above in _path(end) if above is not end}
        places: dict[Node, int] = {}
        nodes, ids = [], []
        pages: list[Contents] = []
        checkpoints: list[Contents] = []
        for name, node in tree.nodes():  # parents first
            if node not in wanted:
                continue
            assert node.parent is not None
            usage = node.usage
            has_checkpoint = node.slot is not None and (only is None or node in ends)
            kind = usage.kind.value if has_checkpoint else None
            parent = places.get(node.parent, -1)
            nodes.append(ArchivedNode(parent, name, node.start, node.end, kind, usage.turn, usage.priority))
            places[node] = len(places)
            ids.append(node.edge)
            skipped = max(0, after - node.start) // tree.page_size
            pages += [contents.read_page(page) for page in node.pages[skipped:]]
            if has_checkpoint:
                assert node.slot is not None
                checkpoints.append(contents.read_checkpoint(node.slot))
        return Archive(fingerprint, (*nodes,), b"".join(ids), _rows(pages), _rows(checkpoints), after)

    def load(
        self, source: str | Path | Contents | Archive, model: str | Fingerprint, vocab_size: int | None = None
    ) -> Transfer:
        """Bring the prefixes of an archive into the cache, each boundary whole or not at all.

        What is loaded is not evicted for what is loaded after it: when the memory is full, the rest goes to the tiers,
        or is skipped.

        Args:
            source: an archive, its bytes, or the path of its file.
            model: a name for the model and its weights, or a whole fingerprint.
            vocab_size: token ids are smaller than this; None: whatever is in the archive is one.

        Raises:
            CacheFileError: it is damaged, or was made by another model, or with other settings. Nothing was changed.
            ArgumentError: there are no contents that can be written.
        """
        self._memory.contents.check_writable()
        here = fingerprint_named(self._memory, self._config, model)
        archive = source if isinstance(source, Archive) else read_archive(source)
        differences = here.differences(archive.fingerprint)
        if differences:
            raise CacheFileError("these prefixes cannot be used here: " + "; ".join(differences))
        _check_nodes(archive)
        _check_ids(archive, vocab_size)
        self._check_sizes(archive)
        return self._bring_in(archive)

    def _check_sizes(self, archive: Archive) -> None:
        """Refuse rows that are not as long as pages and checkpoints are here.

        Raises:
            CacheFileError: they are not.
        """
        here = self._memory.contents.num_bytes
        if here is None:
            return
        found = (archive.pages, archive.checkpoints)
        for what, rows, num_bytes in zip(("page", "checkpoint"), found, here, strict=True):
            if len(rows) and rows.shape[1] != num_bytes:
                raise CacheFileError(f"a {what} of these prefixes has {rows.shape[1]} bytes, and {num_bytes} here")

    def _bring_in(self, archive: Archive) -> Transfer:
        tree, done, locks = self._tree, Transfer(), list[StateLock]()
        try:
            for index, node in enumerate(archive.nodes):
                if node.kind is None:
                    continue
                boundary = _boundary(archive, index)
                if node.end % tree.grid or boundary.key.whole(node.end, 1) != node.end:
                    done.skipped[f"it is not at a multiple of {tree.grid} tokens"] += 1
                    continue
                outcome, num_pages = self._restorer.restore(boundary)
                if outcome in (RestoreOutcome.RESTORED, RestoreOutcome.PRESENT):
                    owner = tree.peek(boundary.key, node.end).checkpoint
                    if owner is not None and owner.end == node.end:
                        locks.append(self._allocator.lock_state(owner))
                if outcome is RestoreOutcome.RESTORED:
                    done.checkpoints += 1
                    done.pages += num_pages
                    done.num_bytes += len(boundary.checkpoint) + num_pages * archive.pages.shape[1]
                elif outcome is RestoreOutcome.PRESENT:
                    done.present += 1
                elif outcome is RestoreOutcome.NO_MEMORY and self._keep(archive, index, boundary):
                    done.copies += 1
                else:
                    done.skipped[outcome.value] += 1
        finally:
            for lock in locks:
                self._allocator.unlock(lock)
        return done

    def _keep(self, archive: Archive, index: int, boundary: Boundary) -> bool:
        """Have the tiers keep copies of a boundary: of the pages that the device lacks, and of the checkpoint. False:
        there are no tiers, or the pages are not all there."""
        if self._tiers is None:
            return False
        tree, page_size = self._tree, self._tree.page_size
        num_known = min(tree.peek(boundary.key, boundary.num_tokens).num_page_tokens, boundary.num_tokens) // page_size
        num_missing = boundary.num_tokens // page_size - num_known
        if num_missing > len(boundary.pages):
            return False
        above = [archive.nodes[at].end for at in archive.path(index)[:-1] if archive.nodes[at].kind is not None]
        pages = boundary.pages[len(boundary.pages) - num_missing :] if num_missing else []
        return self._tiers.offloader.keep(replace(boundary, pages=pages), boundary.num_tokens - max(above, default=0))


def _ends(tree: Tree, keys: Iterable[Key] | None, namespace: str | None) -> set[Node]:
    """Find the nodes with the last checkpoints of prompts; of None, all that have one."""
    if keys is None:
        ends = {node for name, node in tree.nodes() if node.slot is not None and namespace in (None, name)}
        if namespace is not None and not ends:
            raise PromptError(f"there is no checkpoint in the cache in namespace {namespace!r:.100}")
    else:
        ends = set()
        for number, key in enumerate(keys):
            node = tree.peek(key, len(key)).checkpoint
            if node is None:
                raise PromptError(
                    f"prompt {number} of {len(key)} tokens has no checkpoint in the cache in namespace "
                    f"{key.namespace!r:.100}: generate with it first, or leave it out"
                )
            ends.add(node)
    return ends


def _path(node: Node | None) -> Iterator[Node]:
    """Yield a node and those above it, without the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def _rows(contents: list[Contents]) -> Tensor:
    """`[len(contents), bytes of each]` uint8."""
    num_bytes = len(contents[0]) if contents else 0
    if not num_bytes:  # also of a model without states
        return torch.empty(len(contents), 0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8).view(-1, num_bytes)


def _check_nodes(archive: Archive) -> None:
    """Refuse what no cache has written.

    Raises:
        CacheFileError: a kind of checkpoint is unknown, or a namespace is not a text.
    """
    for index, node in enumerate(archive.nodes):
        try:
            Key(b"", node.namespace)
        except ArgumentError as error:
            raise CacheFileError(f"node {index} of these prefixes cannot be used: {error}") from error
        if node.kind is not None and (node.kind not in [*Kind] or node.kind == Kind.PAGES):
            raise CacheFileError(
                f"node {index} of these prefixes has an unknown kind of checkpoint: {node.kind!r:.100}"
            )


def _check_ids(archive: Archive, vocab_size: int | None) -> None:
    """Refuse ids that no token has: what is cached is proposed as drafts. Those of images are negative, and are not
    computed.

    Raises:
        CacheFileError: there is one.
    """
    ids = np.frombuffer(archive.ids, np.int32)
    if vocab_size is not None and len(ids) and ids.max() >= vocab_size:
        raise CacheFileError(
            f"these prefixes hold the token id {ids.max()}; the model has ids up to {vocab_size - 1}: no cache of it "
            "has written them"
        )


def _boundary(archive: Archive, index: int) -> Boundary:
    node, path = archive.nodes[index], archive.path(index)
    assert node.kind is not None
    return Boundary(
        key=Key(archive.ids_of(path), node.namespace),
        num_tokens=node.end,
        pages=[row.numpy().data for row in archive.pages_of(path)],
        checkpoint=archive.checkpoint_of(index).numpy().data,
        kind=Kind(node.kind),
        turn=node.turn,
        priority=node.priority,
    )
