"""Changes in vLLM's wire format of KV events, for routers that read it, and back: batches in MessagePack over ZeroMQ.

Pages are blocks of group 0, "full_attention", and checkpoints blocks of group 1, "mamba", as vLLM has them. The hash of
a block is our digest. A reader that drops the group sees pages first and last of each prefix, and a checkpoint as a
block that it knows.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from hybrid.events.change import CHECKPOINT, DEVICE, EVERYTHING, HOST, NAME_BYTES, PAGES, Change
from hybrid.events.wire import WireError

PAGES_GROUP, STATES_GROUP = 0, 1
STATE_KINDS = ("mamba", "linear_attention")
MEDIA = {DEVICE: "GPU", HOST: "CPU"}
TIERS = {"GPU": DEVICE, "CPU": HOST, "CPU_TIER1": HOST, None: DEVICE}

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Fields by event, in the order in which versions before 0.33 send them without names."""


def encode(changes: Iterable[Change], page_size: int, root: bytes, rank: int | None = None) -> bytes:
    """Encode changes as one batch. The first page of another namespace than the empty one has the digest of it as an
    extra key, as vLLM has salts.

    Args:
        page_size: tokens per page: the size of a block.
        root: the digest of the empty namespace (`hybrid.tiers.tier.of_namespace`).
        rank: of the replica, in vLLM's field for data parallel ranks.
    """
    return _encode([time.time(), [_event(change, page_size, root) for change in changes], rank])


def _event(change: Change, page_size: int, root: bytes) -> dict[str, Any]:
    if change.kind == EVERYTHING:
        return {"type": "AllBlocksCleared"}
    is_pages = change.kind == PAGES
    group = PAGES_GROUP if is_pages else STATES_GROUP
    common = {"block_hashes": change.each_name, "medium": MEDIA[change.tier], "group_idx": group}
    if not change.born:
        return {"type": "BlockRemoved"} | common
    begins = len(change.names) // NAME_BYTES * page_size == change.num_tokens  # after nothing but its namespace
    more = {} if not is_pages or not begins or change.parent == root else {"extra_keys": [[change.parent.hex()]]}
    return {
        "type": "BlockStored",
        "parent_block_hash": None if begins else change.parent or None,
        "token_ids": array("i", change.ids).tolist(),
        "block_size": page_size,
        "lora_id": None,
        "lora_name": None,
        "kv_cache_spec_kind": "full_attention" if is_pages else "mamba",
        **more,
        **common,
    }


class VllmReader:
    """Makes our changes of the batches of one vLLM or SGLang: it names each block by the tokens before it, as our
    prefixes are named, since their hashes are their own.

    A prefix is in the namespace of its LoRA adapter and its salt: `LORA,SALT`, empty without both.

    Args:
        following, of_namespace: name prefixes (`hybrid.tiers.tier`).

    Attributes:
        block_size: tokens per block; 0: none has come.
        num_unknown: blocks that continue one that is not known, and are left out.
    """

    def __init__(
        self,
        following: Callable[[bytes, bytes, int], list[bytes]],
        of_namespace: Callable[[str], bytes],
    ) -> None:
        self.block_size: int = 0
        self.num_unknown: int = 0
        self._following, self._of_namespace = following, of_namespace
        self._known: dict[Any, tuple[bytes, int]] = {}  # by their hash: our name, and the tokens up to there
        self._places: Counter[Any] = Counter()  # groups and tiers that have a block; without any it is forgotten

    @property
    def num_blocks(self) -> int:
        """Blocks that are there."""
        return len(self._known)

    def read(self, content: bytes) -> list[Change]:
        """The changes of a batch.

        Raises:
            WireError: it is none.
        """
        try:
            batch = _decode(content)
            return [change for event in batch[1] for change in self._changes(_named(event))]
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"no batch of KV events: {error!r:.200}") from None

    def _changes(self, event: dict[str, Any]) -> list[Change]:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self._known.clear()
            self._places.clear()
            return [Change(False, EVERYTHING, b"", 0)]
        tier = TIERS.get(event.get("medium"), HOST)
        if kind == "BlockRemoved":
            return self._removed(event, tier)
        if event.get("kv_cache_spec_kind") in STATE_KINDS:
            return self._states(event, tier)
        if event.get("group_idx") not in (None, PAGES_GROUP):
            return []
        return self._pages(event, tier)

    def _pages(self, event: dict[str, Any], tier: str, counts: int = 1) -> list[Change]:
        parent, size = event["parent_block_hash"], int(event["block_size"])
        if parent is None:
            before, num_tokens = self._of_namespace(_namespace(event)), 0
        elif parent in self._known:
            before, num_tokens = self._known[parent]
        else:
            self.num_unknown += len(event["block_hashes"])
            return []
        self.block_size = size
        ids = array("i", event["token_ids"])
        names = self._following(before, ids.tobytes(), size * ids.itemsize)
        hashes = event["block_hashes"]
        if len(names) != len(hashes):
            raise WireError(f"{len(hashes)} blocks of {size} with {len(ids)} tokens")
        for block, name in zip(hashes, names, strict=True):
            num_tokens += size
            self._known[block] = name, num_tokens
            self._places[block] += counts
        return [Change(True, PAGES, b"".join(names), num_tokens, tier, parent=before, ids=ids.tobytes())]

    def _states(self, event: dict[str, Any], tier: str) -> list[Change]:
        if event.get("token_ids"):
            self._pages(event, tier, counts=0)  # names them; of pages there is an event besides
        found = [self._known[block] for block in event["block_hashes"] if block in self._known]
        self.num_unknown += len(event["block_hashes"]) - len(found)
        self._places.update(block for block in event["block_hashes"] if block in self._known)
        return [Change(True, CHECKPOINT, name, num_tokens, tier) for name, num_tokens in found]

    def _removed(self, event: dict[str, Any], tier: str) -> list[Change]:
        group = event.get("group_idx")
        changes = []
        for block in event["block_hashes"]:
            if (found := self._known.get(block)) is None:
                continue
            if group in (None, PAGES_GROUP):
                changes.append(Change(False, PAGES, found[0], found[1], tier))
            if group != PAGES_GROUP:
                changes.append(Change(False, CHECKPOINT, found[0], found[1], tier))
            self._places[block] -= 1
            if group is None or self._places[block] <= 0:
                del self._known[block], self._places[block]
        return changes


def _named(event: Any) -> dict[str, Any]:
    """An event with the names of its fields."""
    if isinstance(event, dict):
        return event
    return {"type": event[0]} | dict(zip(FIELDS[event[0]], event[1:], strict=False))


def _namespace(event: dict[str, Any]) -> str:
    keys = event.get("extra_keys")
    salt = ""
    if keys and keys[0]:
        salt = next((key for key in keys[0] if isinstance(key, str) and key != event.get("lora_name")), "")
    lora = event.get("lora_name") or ""
    return f"{lora},{salt}" if lora or salt else ""
