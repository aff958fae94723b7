"""Copies on disk: what is found again, what is kept, and what is written."""

import json
import os
import sqlite3
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import safetensors

from hybrid.tiers.disk import DiskTier
from hybrid.tiers.tier import Note, Offer, UnavailableError
from support.disks import (
    LIMIT,
    FaultyStore,
    contents_of,
    count_right,
    digest,
    fetch,
    fill,
    name_of,
    note_of,
    offer,
    origin,
    savings,
    tier_at,
    works,
)


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def test_what_was_written_is_there_before_and_after_it_is_written_and_in_the_next_life(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    for number in range(20):
        assert offer(tier, number)
    assert count_right(tier, range(20)) == 20, "copies that wait are had from memory"
    assert tier.flush()
    assert count_right(tier, range(20)) == 20
    assert (tier.num_checkpoints, tier.num_pages) == (7, 13)
    assert tier.violations() == []
    tier.close()
    again = tier_at(tmp_path)
    assert count_right(again, range(20)) == 20
    assert (again.num_checkpoints, again.num_pages, again.report) == (7, 13, [])
    assert again.bytes_used == sum(file.stat().st_size for file in segments(tmp_path)) == tier.bytes_written
    assert again.violations() == []
    again.close()


def test_a_copy_that_is_there_is_not_written_again_nor_by_the_next_life(tmp_path: Path) -> None:
    for _ in range(2):
        tier = tier_at(tmp_path)
        fill(tier, range(10))
        fill(tier, range(10))
        tier.close()
    assert tier.bytes_written == 0
    assert tier.bytes_offered > 0


def test_what_another_process_writes_at_the_same_time_is_there_once(tmp_path: Path) -> None:
    first, second = tier_at(tmp_path), tier_at(tmp_path)
    for tier in (first, second):
        for number in range(6):
            assert offer(tier, number)
    threads = [threading.Thread(target=tier.flush) for tier in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(segments(tmp_path)) == 1
    assert count_right(second, range(6)) == count_right(first, range(6)) == 6
    for tier in (first, second):
        assert tier.violations() == []
        tier.close()


def test_a_folder_of_the_format_before_is_read(tmp_path: Path) -> None:
    """It had a journal in place of the log, and locks of its processes."""
    tier = tier_at(tmp_path)
    fill(tier, range(6))
    tier.close()
    db = sqlite3.connect(tmp_path / "manifest.sqlite")
    (file,) = segments(tmp_path)
    file.rename(tmp_path / f"{'ab' * 8}-1.safetensors")
    db.execute("UPDATE segments SET file = ?", (f"{'ab' * 8}-1.safetensors",))
    db.commit()
    assert db.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    db.close()
    for name in ("start.lock", f"{'cd' * 8}.lock"):
        (tmp_path / name).touch()
    tier = tier_at(tmp_path)
    assert (count_right(tier, range(6)), tier.report) == (6, [])
    assert not [*tmp_path.glob("*.lock")]
    tier.close()


def test_segments_are_safetensors_with_aligned_contents(tmp_path: Path) -> None:
    tier = tier_at(tmp_path, num_bytes=10**7)
    fill(tier, range(30))
    tier.close()
    found = {}
    for file in segments(tmp_path):
        size = int.from_bytes(file.read_bytes()[:8], "little")
        assert (8 + size) % 4096 == 0
        header = json.loads(file.read_bytes()[8 : 8 + size])
        with safetensors.safe_open(file, "numpy") as opened:
            for key in opened.keys():  # noqa: SIM118
                if not key.startswith("gap"):
                    assert header[key]["data_offsets"][0] % 64 == 0
                    found[key] = opened.get_tensor(key).tobytes()
    assert found == {f"{kind}.{digest.hex()}": contents_of(n) for n in range(30) for kind, digest in [name_of(n)]}


def test_the_limit_holds_and_what_is_worth_less_goes_first(tmp_path: Path) -> None:
    tier = tier_at(tmp_path, num_bytes=100_000)
    for number in range(0, 180, 3):
        offer(tier, number, seconds=500.0 if number % 2 else 100.0, size=5900)
        assert tier.flush()
        assert tier.bytes_used <= 100_000
    kept = [number for number in range(0, 180, 3) if name_of(number) in tier]
    assert len(kept) == 10, "each is a segment of 10,000 bytes"
    assert sum(number % 2 for number in kept) > 5, "what is worth more stays longer"
    assert sum(file.stat().st_size for file in segments(tmp_path)) == tier.bytes_used
    assert tier.counts.bytes_dropped > 0
    assert tier.violations() == []
    tier.close()


def test_what_is_worthless_or_too_large_is_not_read(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    for number, seconds, size, is_worth_it in (
        (0, 1.0, 10, False),
        (1, 1.0, 10, True),  # no checkpoint needs it
        (0, 1.0, LIMIT + 1, True),
    ):
        note, read = note_of(number, seconds), partial(pytest.fail, "it is read for nothing")
        assert not tier.offer(Offer(name_of(number), size, read, note, is_worth_it))
    assert tier.violations() == []
    assert tier.flush()
    assert segments(tmp_path) == []
    tier.close()


def test_what_was_used_is_worth_more_in_the_next_life(tmp_path: Path) -> None:
    tier = tier_at(tmp_path, num_bytes=100_000)
    for number in range(8):
        offer(tier, 3 * number, size=5900, group=f"branch last {number % 2}")
        tier.flush()
    tier.close()
    tier = tier_at(tmp_path, num_bytes=100_000)
    for number in (1, 3, 5, 7):
        tier.used(name_of(3 * number))
    tier.close()
    tier = tier_at(tmp_path, num_bytes=100_000)
    for number in range(300, 318, 3):
        offer(tier, number, size=5900, seconds=250.0, group="branch last 2")
        tier.flush()
    assert all(name_of(3 * number) in tier for number in (1, 3, 5, 7))
    assert not all(name_of(3 * number) in tier for number in (0, 2, 4, 6))
    tier.close()


def test_cleared_is_forgotten_here_and_on_disk(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    fill(tier, range(10))
    offer(tier, 11)
    tier.clear()
    assert (tier.num_pages, tier.num_checkpoints, count_right(tier, range(12))) == (0, 0, 0)
    assert tier.flush()
    assert segments(tmp_path) == []
    fill(tier, range(10))
    tier.close()
    tier.clear()
    assert len(segments(tmp_path)) > 0, "a tier that was closed leaves the disk alone"


def test_a_copy_that_goes_bad_while_it_waits_is_not_written(tmp_path: Path) -> None:
    tier, bad = tier_at(tmp_path), bytearray(contents_of(1))
    assert offer(tier, 0) and offer(tier, 3)
    for number, contents in ((1, bad), (2, contents_of(2))):
        above = iter([digest(one) for one in range(number + 1, 3)])
        assert tier.offer(Offer(name_of(number), len(contents), lambda own=contents: own, path=above))
    bad[5] ^= 1
    assert tier.flush()
    assert count_right(tier, range(4)) == 3 and name_of(1) not in tier
    assert tier.counts.num_damaged == 1 and tier.violations() == []
    works(tier)
    assert count_right(tier_at(tmp_path), range(4)) == 3


def test_a_copy_that_goes_bad_while_it_waits_is_not_restored(tmp_path: Path) -> None:
    tier, bad = tier_at(tmp_path), bytearray(contents_of(1))
    assert offer(tier, 0)
    assert tier.offer(Offer(name_of(1), len(bad), lambda: bad, path=iter([digest(2)])))
    bad[5] ^= 1
    with pytest.raises(UnavailableError, match="is not what was copied, and is dropped"):
        fetch(tier, 1)
    assert tier.counts.num_damaged == 1 and name_of(1) not in tier and tier.violations() == []
    works(tier)


def test_what_is_dropped_is_gone_here_and_on_disk_also_while_it_is_written(tmp_path: Path) -> None:
    store = FaultyStore()
    tier = tier_at(tmp_path, open_store=store)
    fill(tier, range(4))
    tier.drop([name_of(0), name_of(2), name_of(77)])
    for number in range(4, 12):
        assert offer(tier, number)
    tier.drop([name_of(8)])
    assert tier.violations() == []
    store.first["put_from"] = lambda: tier.drop([name_of(4)])
    assert tier.flush()
    gone = {0, 2, 4, 8}
    assert {number for number in range(12) if name_of(number) not in tier} == gone
    assert count_right(tier, range(12)) == 8
    works(tier)
    assert {number for number in range(12) if name_of(number) not in tier_at(tmp_path)} == gone


def test_copies_of_another_model_are_a_miss_with_a_reason_and_go_first(tmp_path: Path) -> None:
    tier = tier_at(tmp_path, num_bytes=100_000, model="other")
    for number in range(9):
        offer(tier, number, size=5900, seconds=100.0)
        tier.flush()
    tier.close()
    tier = tier_at(tmp_path, num_bytes=100_000)
    assert count_right(tier, range(9)) == 0
    assert tier.why_missing(name_of(3)) == "model is 'other' there and 'a model' here"
    assert tier.report == ["3 checkpoints of another model or version: they are not used, and dropped first"]
    for number in range(102, 111):
        assert offer(tier, number, size=5900)
        tier.flush()
    assert count_right(tier, range(102, 111)) == 9
    tier.close()
    tier = tier_at(tmp_path, num_bytes=100_000, model="other")
    assert count_right(tier, range(9)) <= 1
    tier.close()


def test_nothing_of_a_prompt_is_on_disk_unless_it_is_asked_for(tmp_path: Path) -> None:
    secret, ids = "a tenant's name", b"the ids of a prompt, as bytes"
    note = Note("branch", 0, 0, 64, namespace=secret, ids=ids)
    for readable in (False, True):
        path = tmp_path / str(readable)
        tier = tier_at(path, wants_ids=readable)
        given = note if tier.wants_ids else Note("branch", 0, 0, 64)
        tier.offer(Offer(name_of(0), 3, lambda: b"abc", given, path=iter([digest(0)])))
        tier.close()
        whole = b"".join(file.read_bytes() for file in path.iterdir())
        assert (ids in whole, secret.encode() in whole) == (readable, readable)


def test_only_the_owner_may_read_what_is_there(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        tier = tier_at(tmp_path / "deep" / "down")
        fill(tier, range(3))
        tier.close()
    finally:
        os.umask(former)
    assert (tmp_path / "deep" / "down").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "deep" / "down").iterdir()} == {0o600}


def test_a_directory_that_others_could_use_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    tier_at(tmp_path / "open").close()
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o700


def test_a_tier_that_is_freed_ends_its_threads_and_leaves_only_what_is_named(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    fill(tier, range(3))
    tier.close()
    tier.close()
    assert not tier.flush()
    assert not offer(tier, 9)
    assert {file.suffix for file in tmp_path.iterdir()} == {".sqlite", ".safetensors"}


def test_a_fetch_of_what_is_not_there_says_so(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    with pytest.raises(UnavailableError, match="not there any more"):
        fetch(tier, 1)
    tier.close()


def test_the_manifest_is_readable_by_anyones_sqlite(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    fill(tier, range(6))
    tier.close()
    db = sqlite3.connect(tmp_path / "manifest.sqlite")
    assert db.execute("SELECT count(*), sum(bytes) FROM copies").fetchone() == (
        6,
        sum(len(contents_of(number)) for number in range(6)),
    )
    db.close()


def test_what_a_process_does_not_close_is_written_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.tiers.disk.WRITTEN_AFTER", 0.05)
    tier = DiskTier(tmp_path, LIMIT, origin(), savings())
    offer(tier, 0)
    end = time.monotonic() + 10
    while not segments(tmp_path) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(segments(tmp_path)) == 1
    tier.close()
