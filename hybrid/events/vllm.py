"""Changes in vLLM's wire format of KV events, for routers that read it, and back: batches in MessagePack over ZeroMQ.

Pages are blocks of group 0, "full_attention", and checkpoints blocks of group 1, "mamba", as vLLM has them. The hash of
a block is our digest. A reader that drops the group sees pages first and last of each prefix, and a checkpoint as a
block that it knows.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from hybrid.events.change import CHECKPOINT, DEVICE, DISK, EVERYTHING, HOST, PAGES, Change
from hybrid.events.wire import WireError
from hybrid.key import NAME_BYTES, joined_names, name_of_namespace, names_after

PAGES_GROUP, STATES_GROUP = 0, 1
KINDS = {
    "full_attention": PAGES,
    "mla_attention": PAGES,
    "sink_full_attention": PAGES,
    "mamba": CHECKPOINT,
    "linear_attention": CHECKPOINT,
}
"""What blocks are, by kinds of groups. Of windows nothing is read. Without kinds, group 0 has pages."""

MEDIA = {DEVICE: "GPU", HOST: "CPU", DISK: "STORAGE"}
TIERS = {"GPU": DEVICE, "CPU": HOST, "CPU_TIER1": HOST, "STORAGE": DISK, "DISK": DISK, None: DEVICE}

_Place = tuple[int | None, str]

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
        root: the digest of the empty namespace (`hybrid.key.name_of_namespace`).
        rank: of the replica, in vLLM's field for data parallel ranks.
    """
    events = [_event(change, page_size, root) for change in changes if change.tier in MEDIA]
    return _encode([time.time(), events, rank])


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

    A prefix is in the namespace of its LoRA adapter and its salt (`namespace_of`). A hybrid model has several groups of
    layers; pages, and checkpoints, are there where all groups of their kind have the block.

    Attributes:
        num_unknown: blocks that continue one that is not known, and are left out.
    """

    def __init__(self) -> None:
        self.num_unknown: int = 0
        self._known: dict[Any, tuple[bytes, int]] = {}  # by their hash: our name, and the tokens up to there
        self._places: dict[Any, set[_Place]] = {}  # groups and tiers that have a block; without any it is forgotten
        self._groups: dict[int | None, str] = {}  # what the blocks of a group are

    @property
    def num_blocks(self) -> int:
        """Blocks that are there."""
        return len(self._places)

    def read(self, content: bytes) -> list[Change]:
        """The changes of a batch.

        Raises:
            WireError: it is none.
        """
        try:
            events = [_named(event) for event in _decode(content)[1]]
            self._name(events)
            return [change for at, event in enumerate(events) for change in self._changes(event, events[at + 1 :])]
        except (msgspec.MsgspecError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise WireError(f"no batch of KV events: {error!r:.200}") from None
        except RecursionError as error:
            raise WireError(f"no batch of KV events: {error!r:.200}") from None

    def everything(self) -> Iterator[Change]:
        """All that is there, as births."""
        for block, places in self._places.items():
            name, num_tokens = self._known[block]
            for tier in {tier for _, tier in places}:
                for kind in (PAGES, CHECKPOINT):
                    if self._is_whole(block, kind, tier):
                        yield Change(True, kind, name, num_tokens, tier)

    def clear(self) -> list[Change]:
        """Forget all that is there; the change that says so."""
        self._known.clear()
        self._places.clear()
        return [Change(False, EVERYTHING, b"", 0)]

    def _changes(self, event: dict[str, Any], later: list[dict[str, Any]]) -> list[Change]:
        if event["type"] == "AllBlocksCleared":
            gone = self.clear()
            self._name(later)
            return gone
        tier = TIERS.get(event.get("medium"), HOST)
        if event["type"] == "BlockRemoved":
            return self._removed(event, tier)
        kind = self._kind(event)
        if kind is None:
            return []
        if any(block not in self._known for block in event["block_hashes"]):  # it went in this batch, and is back
            self._name([event, *later])
        blocks = [block for block in event["block_hashes"] if block in self._known]
        self.num_unknown += len(event["block_hashes"]) - len(blocks)
        group = event.get("group_idx")
        self._groups[group] = kind
        for block in blocks:
            self._places.setdefault(block, set()).add((group, tier))
        blocks = [block for block in blocks if self._is_whole(block, kind, tier)]
        found = [self._known[block] for block in blocks]
        if kind == CHECKPOINT:
            return [Change(True, CHECKPOINT, name, num_tokens, tier) for name, num_tokens in found]
        if not found:
            return []
        ids = array("i", event["token_ids"]).tobytes()
        names = b"".join(name for name, _ in found)
        return [Change(True, PAGES, names, found[-1][1], tier, parent=self._before(event), ids=ids)]

    def _kind(self, event: dict[str, Any]) -> str | None:
        """What the blocks of an event are; None: nothing that is read."""
        kind = event.get("kv_cache_spec_kind")
        if kind is not None:
            return KINDS.get(kind)
        return PAGES if event.get("group_idx") in (None, PAGES_GROUP) else None

    def _name(self, events: list[dict[str, Any]]) -> None:
        """Name the blocks that came with all of their tokens. States come before the pages that name them, and with
        the tokens of blocks that have none."""
        for event in events:
            if event["type"] != "BlockStored" or (kind := self._kind(event)) is None:
                continue
            hashes, size = event["block_hashes"], int(event["block_size"])
            ids = array("i", event.get("token_ids") or ())
            if len(ids) != len(hashes) * size:
                if kind == PAGES:
                    raise WireError(f"{len(hashes)} blocks of {size} with {len(ids)} tokens")
                continue
            parent = event["parent_block_hash"]
            if parent is not None and parent not in self._known:
                continue
            num_tokens = self._known[parent][1] if parent is not None else 0
            names = names_after(self._before(event), ids.tobytes(), size * ids.itemsize)
            for block, name in zip(hashes, names, strict=True):
                num_tokens += size
                self._known[block] = name, num_tokens

    def _before(self, event: dict[str, Any]) -> bytes:
        """The name of the prefix before the blocks of an event."""
        parent = event["parent_block_hash"]
        return name_of_namespace(_namespace(event)) if parent is None else self._known[parent][0]

    def _is_whole(self, block: Any, kind: str, tier: str) -> bool:
        """Tell whether all groups of a kind have a block."""
        groups = [group for group, own in self._groups.items() if own == kind]
        return bool(groups) and self._places.get(block, set()).issuperset((group, tier) for group in groups)

    def _removed(self, event: dict[str, Any], tier: str) -> list[Change]:
        group = event.get("group_idx")
        changes = []
        for block in event["block_hashes"]:
            places = self._places.get(block)
            if places is None:
                continue
            name, num_tokens = self._known[block]
            if group is None:  # where no groups are sent, states are with their pages
                kinds = [PAGES, CHECKPOINT]
                places.clear()
            else:
                kinds = [kind for kind in (PAGES, CHECKPOINT) if self._is_whole(block, kind, tier)]
                places.discard((group, tier))
                kinds = [kind for kind in kinds if not self._is_whole(block, kind, tier)]
            changes += [Change(False, kind, name, num_tokens, tier) for kind in kinds]
            if not places:
                del self._places[block], self._known[block]
        return changes


def _named(event: Any) -> dict[str, Any]:
    """An event with the names of its fields."""
    if isinstance(event, dict):
        return event
    return {"type": event[0]} | dict(zip(FIELDS[event[0]], event[1:], strict=False))


def _namespace(event: dict[str, Any]) -> str:
    lora = event.get("lora_name") or ""
    keys = event.get("extra_keys")
    own = [*keys[0]] if keys and keys[0] else []
    if lora and own[:1] == [lora]:
        del own[0]
    return namespace_of(lora, *(key if isinstance(key, str) else repr(key) for key in own))


def namespace_of(lora: str, *keys: str) -> str:
    """The namespace of prefixes with a LoRA adapter, and with keys of their first block: a salt. Empty without both."""
    return joined_names(lora, *keys) if lora or keys else ""
