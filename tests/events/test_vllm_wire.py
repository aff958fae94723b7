"""Our changes in vLLM's wire format, and batches of vLLM and SGLang as our changes."""

from __future__ import annotations

from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="the extra 'events' is not installed")

from hybrid.events import Change  # noqa: E402
from hybrid.events.vllm import VllmReader, encode  # noqa: E402
from hybrid.events.wire import WireError  # noqa: E402
from hybrid.key import Key, name_of_namespace, names_of  # noqa: E402

PAGE = 4
IDS = [*range(100, 112)]
NAMES = names_of(Key.of(IDS).ids, "", PAGE * 4)


def reader() -> VllmReader:
    return VllmReader()


def stored(ids: list[int], hashes: list[Any], parent: Any = None, **more: Any) -> dict[str, Any]:
    common = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": ids}
    return common | {"block_size": PAGE, "lora_id": None, "medium": "GPU", "lora_name": None} | more


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.0, [*events], 0])


def test_what_we_send_is_read_back_the_same() -> None:
    changes = [
        Change(True, "pages", b"".join(NAMES[:2]), 8, parent=name_of_namespace(""), ids=Key.of(IDS[:8]).ids),
        Change(True, "checkpoint", NAMES[1], 8),
        Change(True, "pages", NAMES[2], 12, parent=NAMES[1], ids=Key.of(IDS[8:]).ids),
        Change(True, "checkpoint", NAMES[1], 8, "host"),
        Change(True, "checkpoint", NAMES[1], 8, "disk"),
        Change(False, "checkpoint", NAMES[1], 8),
        Change(False, "checkpoint", NAMES[1], 8, "host"),
        Change(False, "pages", NAMES[2], 12),
        Change(False, "checkpoint", NAMES[1], 8, "disk"),
        Change(False, "everything", b"", 0),
    ]
    content = encode(changes, PAGE, name_of_namespace(""))
    first = msgspec.msgpack.decode(content)[1][0]
    assert (first["type"], first["token_ids"], first["block_hashes"]) == ("BlockStored", IDS[:8], NAMES[:2])
    assert (first["group_idx"], first["kv_cache_spec_kind"], first["medium"]) == (0, "full_attention", "GPU")
    back = reader().read(content)
    assert [one._replace(ids=b"", parent=b"") for one in back] == [one._replace(ids=b"", parent=b"") for one in changes]


def test_blocks_of_others_get_our_names_by_their_tokens() -> None:
    own = reader()
    found = own.read(
        batch(
            stored(IDS[:8], [11, 12], group_idx=0, kv_cache_spec_kind="full_attention"),
            stored(IDS[4:8], [12], 11, group_idx=1, kv_cache_spec_kind="mamba"),
            stored(IDS[8:], [13], 12, group_idx=0, kv_cache_spec_kind="full_attention"),
            stored(IDS[8:], [14], 99, group_idx=0, kv_cache_spec_kind="full_attention"),
        )
    )
    assert [(one.kind, one.each_name, one.num_tokens) for one in found] == [
        ("pages", NAMES[:2], 8),
        ("checkpoint", [NAMES[1]], 8),
        ("pages", [NAMES[2]], 12),
    ]
    assert own.num_unknown == 1
    gone = own.read(batch({"type": "BlockRemoved", "block_hashes": [12, 7], "medium": "GPU", "group_idx": 1}))
    assert [(one.born, one.kind, one.each_name) for one in gone] == [(False, "checkpoint", [NAMES[1]])]
    assert own.num_blocks == 3  # the page of 12 is there
    own.read(batch({"type": "BlockRemoved", "block_hashes": [13, 12, 11], "medium": "GPU", "group_idx": 0}))
    assert own.num_blocks == 0


def test_a_hybrid_model_of_vllm_sends_its_states_first_and_without_the_blocks_that_have_none() -> None:
    own = reader()
    states = [stored(IDS, [13], group_idx=group, kv_cache_spec_kind="mamba") for group in (0, 1)]
    pages = stored(IDS, [11, 12, 13], group_idx=2, kv_cache_spec_kind="full_attention")
    found = own.read(batch(*states, pages))
    assert {(one.kind, *one.each_name) for one in found} == {("checkpoint", NAMES[2]), ("pages", *NAMES)}
    assert {(one.kind, one.names) for one in own.everything()} == {
        ("checkpoint", NAMES[2]),
        *(("pages", name) for name in NAMES),
    }

    def gone(block: int, group: int) -> list[tuple[bool, str, list[bytes]]]:
        event = {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": group}
        return [(one.born, one.kind, one.each_name) for one in own.read(batch(event))]

    assert gone(13, 1) == [(False, "checkpoint", [NAMES[2]])]  # a state of which one group is missing is none
    assert gone(13, 0) == []
    assert own.read(batch(states[0])) == []
    assert [one.kind for one in own.read(batch(states[1]))] == ["checkpoint"]
    assert gone(12, 2) == [(False, "pages", [NAMES[1]])]
    removed = {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": 2}
    back = own.read(batch(removed, stored(IDS[:4], [11], group_idx=2, kv_cache_spec_kind="full_attention")))
    assert [(one.born, one.each_name) for one in back] == [(False, [NAMES[0]]), (True, [NAMES[0]])]
    assert own.num_unknown == 0


def test_events_without_names_of_their_fields_as_older_versions_send_them_and_without_groups_as_sglang() -> None:
    found = reader().read(batch(["BlockStored", [5, 6], None, IDS[:8], PAGE, None, "GPU"], ["AllBlocksCleared"]))
    assert [(one.kind, one.each_name) for one in found] == [("pages", NAMES[:2]), ("everything", [])]
    own = reader()
    own.read(batch(stored(IDS[:8], [5, 6])))
    gone = own.read(batch({"type": "BlockRemoved", "block_hashes": [6]}))
    assert [(one.kind, one.each_name) for one in gone] == [("pages", [NAMES[1]]), ("checkpoint", [NAMES[1]])]


def test_adapters_and_salts_are_namespaces() -> None:
    own = reader()
    plain = own.read(batch(stored(IDS[:4], [1])))[0].names
    salted = own.read(batch(stored(IDS[:4], [2], extra_keys=[["salt"]])))[0].names
    tuned = own.read(batch(stored(IDS[:4], [3], lora_name="ann", extra_keys=[["ann"]])))[0].names
    assert len({plain, salted, tuned}) == 3


def test_a_namespace_is_a_part_of_what_we_send() -> None:
    def sent(namespace: str) -> bytes:
        names = names_of(Key.of(IDS[:4]).ids, namespace, PAGE * 4)
        change = Change(True, "pages", names[0], 4, parent=name_of_namespace(namespace), ids=Key.of(IDS[:4]).ids)
        return reader().read(encode([change], PAGE, name_of_namespace("")))[0].names

    assert sent("") == NAMES[0]
    assert len({sent(""), sent("ann"), sent("bob")}) == 3


@pytest.mark.parametrize(
    "content",
    [b"", b"\x90", batch(7), batch({"type": "Other"}), batch(stored(IDS[:7], [1, 2])), batch(["BlockStored"])],
)
def test_batches_that_make_no_sense_are_refused(content: bytes) -> None:
    with pytest.raises(WireError):
        reader().read(content)


def test_vllm_itself_reads_what_we_send() -> None:
    events = pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")
    changes = [
        Change(True, "pages", b"".join(NAMES[:2]), 8, parent=name_of_namespace(""), ids=Key.of(IDS[:8]).ids),
        Change(True, "checkpoint", NAMES[1], 8),
        Change(True, "checkpoint", NAMES[1], 8, "disk"),
        Change(False, "pages", NAMES[1], 8),
    ]
    read = msgspec.msgpack.decode(encode(changes, PAGE, name_of_namespace("")), type=events.KVEventBatch)
    assert [type(one).__name__ for one in read.events] == ["BlockStored", "BlockStored", "BlockStored", "BlockRemoved"]
    assert [one.group_idx for one in read.events] == [0, 1, 1, 0]
    assert [one.medium for one in read.events] == [events.MEDIUM_GPU, events.MEDIUM_GPU, "STORAGE", events.MEDIUM_GPU]
    sent = msgspec.msgpack.encode(read)
    assert [one.kind for one in reader().read(sent)] == ["pages", "checkpoint", "checkpoint", "pages"]
