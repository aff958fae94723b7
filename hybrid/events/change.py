"""One change of what a cache has."""

from __future__ import annotations

from typing import NamedTuple

from hybrid.key import NAME_BYTES

PAGES, CHECKPOINT, EVERYTHING = "pages", "checkpoint", "everything"
"""Kinds of changes."""

DEVICE, HOST, DISK, STORE = "device", "host", "disk", "store"
"""Tiers whose changes are seen; the store is one that replicas of several machines share."""


class Change(NamedTuple):
    """The birth or the death of consecutive pages, or of one checkpoint; or of everything that there is.

    Attributes:
        born: it is there from now on; False: it has gone.
        kind: "pages", "checkpoint" or "everything".
        names: the digest of the prefix at the end of each page, or at the checkpoint: `NAME_BYTES` each. A digest holds
            the namespace and all tokens before.
        num_tokens: of the prefix at the last of the names.
        tier: "device", "host", "disk" or "store".
        num_bytes: of each page, or of the checkpoint; 0: not known.
        value: of a checkpoint, its rank by the policy when it came: what it is likely to save; None: not known, or not
            asked for.
        parent: the digest of the prefix before the first page: for readers that rebuild the tree.
        ids: token ids of pages that came, as bytes of 32-bit integers; they stay in this process, unless a transport
            for vLLM's readers sends them.
    """

    born: bool
    kind: str
    names: bytes
    num_tokens: int
    tier: str = DEVICE
    num_bytes: int = 0
    value: float | None = None
    parent: bytes = b""
    ids: bytes = b""

    @property
    def each_name(self) -> list[bytes]:
        """The digests, one by one."""
        names = self.names
        return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]
