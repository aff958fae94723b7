"""Copies on disk when the disk lies, fails, fills up or is slow: a copy less, never a wrong one and never an error."""

import errno
import os
import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from hybrid.tiers.folder import FORMAT, check_folder
from hybrid.tiers.store import DirectoryStore
from hybrid.tiers.tier import Contents, UnavailableError
from support.disks import FaultyStore, contents_of, count_right, fetch, fetched, fill, name_of, offer, tier_at, works

NUMBERS = range(24)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure the disk is tried again at once."""
    monkeypatch.setattr("hybrid.tiers.disk.FIRST_PAUSE", 0.0)
    monkeypatch.setattr("hybrid.tiers.disk.MAX_PAUSE", 0.0)


def written(path: Path) -> None:
    """An earlier life leaves copies in several segments."""
    tier = tier_at(path, num_bytes=400_000)
    fill(tier, NUMBERS)
    assert count_right(tier, NUMBERS) == len(NUMBERS)
    tier.close()


def segments(path: Path) -> list[Path]:
    """List the files of copies, the largest first: times of two that are written at once may be equal."""
    return sorted(path.glob("*.safetensors"), key=lambda file: -file.stat().st_size)


# Bits


def test_flipped_bits_in_the_payload_are_a_miss(tmp_path: Path) -> None:
    written(tmp_path)
    rng, outcomes = Random(0), Counter[str]()
    tier = tier_at(tmp_path)
    for _ in NUMBERS:
        file = rng.choice(segments(tmp_path))
        data = bytearray(file.read_bytes())
        data[rng.randrange(4096, len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        outcomes["right"] = count_right(tier, NUMBERS)
    outcomes["damaged"] = tier.counts.num_damaged
    assert outcomes["right"] + outcomes["damaged"] == len(NUMBERS)
    assert outcomes["damaged"] > 5
    assert tier.flush()
    with pytest.raises(UnavailableError, match="not there any more"):
        fetch(tier, *NUMBERS)
    tier.close()
    tier = tier_at(tmp_path)
    assert count_right(tier, NUMBERS) == outcomes["right"], "damaged copies have left the manifest"
    assert tier.counts.num_damaged == 0
    works(tier)


def test_flipped_bits_in_the_manifest_are_a_miss(tmp_path: Path, quick: None) -> None:
    written(tmp_path / "whole")
    rng, outcomes = Random(1), Counter[str]()
    size = (tmp_path / "whole" / "manifest.sqlite").stat().st_size
    for number in range(60):
        path = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", path)
        data = bytearray((path / "manifest.sqlite").read_bytes())
        at = rng.randrange(100) if number < 10 else rng.randrange(size)  # the header, and anything
        data[at] ^= 1 << rng.randrange(8)
        (path / "manifest.sqlite").write_bytes(data)
        tier = tier_at(path)
        if tier.failure is not None:
            assert "newer" in tier.failure or "version" in tier.failure, tier.failure
            outcomes["refused"] += 1
            tier.close()
            continue
        right = count_right(tier, NUMBERS)
        outcomes["all right" if right == len(NUMBERS) else "some right" if right else "dropped"] += 1
        if right == 0:
            assert tier.report
        works(tier)
        shutil.rmtree(path)
    assert outcomes["all right"] > 5
    assert outcomes["dropped"] > 5


def test_bits_that_flip_in_the_manifest_of_a_running_process(tmp_path: Path, quick: None) -> None:
    written(tmp_path)
    tier = tier_at(tmp_path)
    (tmp_path / "manifest.sqlite").write_bytes(b"\0" * 20_000)
    count_right(tier, NUMBERS)
    for number in range(102, 112):
        offer(tier, number)
        tier.flush()
    assert tier.counts.num_failures > 0
    assert count_right(tier, range(102, 112)) > 0, "it has begun anew"
    assert any("damaged" in line for line in tier.report)
    works(tier)


# Files


@pytest.mark.parametrize("length", [0, 5000])
def test_a_file_that_was_cut_off_is_dropped_with_a_report(tmp_path: Path, length: int) -> None:
    written(tmp_path)
    os.truncate(segments(tmp_path)[0], length)
    tier = tier_at(tmp_path)
    assert "1 files that are missing, cut off, of another user" in tier.report[0]
    assert 0 < count_right(tier, NUMBERS) < len(NUMBERS)
    assert sum(file.stat().st_size for file in segments(tmp_path)) == tier.bytes_used
    works(tier)


def test_a_file_that_is_cut_off_or_removed_under_a_running_process_is_a_miss(tmp_path: Path) -> None:
    written(tmp_path)
    tier = tier_at(tmp_path)
    files = segments(tmp_path)
    os.truncate(files[0], 4100)
    files[1].unlink()
    right = count_right(tier, NUMBERS)
    assert 0 < right < len(NUMBERS)
    assert tier.counts.num_failures > 0
    assert count_right(tier, NUMBERS) == right
    works(tier)


def test_files_of_which_no_copy_is_known_are_removed(tmp_path: Path) -> None:
    written(tmp_path)
    (first, *rest), manifest = segments(tmp_path), sqlite3.connect(tmp_path / "manifest.sqlite")
    manifest.execute("DELETE FROM copies WHERE segment = (SELECT id FROM segments WHERE file = ?)", (first.name,))
    manifest.commit()
    manifest.close()
    tier = tier_at(tmp_path)
    assert "1 files that are missing, cut off, of another user, or without a copy that is known" in tier.report[0]
    assert segments(tmp_path) == rest
    assert 0 < count_right(tier, NUMBERS) < len(NUMBERS)
    works(tier)


def test_files_that_no_manifest_names_are_removed(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / f"{'ab' * 8}-1.safetensors").write_bytes(b"an orphan")
    (tmp_path / f".{'ab' * 8}-2.safetensors.01234567.part").write_bytes(b"not whole")
    (tmp_path / "notes.txt").write_text("of the user")
    tier = tier_at(tmp_path)
    assert "2 files (18 B) of processes that ended before they were done: removed" in tier.report[0]
    assert (tmp_path / "notes.txt").exists()
    assert sum(file.stat().st_size for file in segments(tmp_path)) == tier.bytes_used
    assert not [*tmp_path.glob(".*")]
    assert count_right(tier, NUMBERS) == len(NUMBERS)
    works(tier)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    written(tmp_path / "a")
    file = segments(tmp_path / "a")[0]
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    tier = tier_at(tmp_path / "a")
    assert count_right(tier, NUMBERS) < len(NUMBERS)
    assert (tmp_path / "elsewhere").exists()
    works(tier)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors", "..", ""])
def test_names_that_climb_out_of_the_folder_are_not_followed(tmp_path: Path, name: str) -> None:
    written(tmp_path / "a")
    outside = tmp_path / "outside.safetensors"
    file = segments(tmp_path / "a")[0]
    content = file.read_bytes()
    outside.write_bytes(content)
    with closing(sqlite3.connect(tmp_path / "a" / "manifest.sqlite")) as manifest, manifest:
        manifest.execute("UPDATE segments SET file = ? WHERE file = ?", (name, file.name))
    tier = tier_at(tmp_path / "a")
    assert 0 < count_right(tier, NUMBERS) < len(NUMBERS)
    tier.clear()
    works(tier)
    assert outside.read_bytes() == content


# Versions


def test_a_directory_of_an_older_version_is_dropped_with_a_report(tmp_path: Path) -> None:
    written(tmp_path)
    db = sqlite3.connect(tmp_path / "manifest.sqlite")
    db.execute("PRAGMA user_version = 0")
    db.close()
    tier = tier_at(tmp_path)
    assert f"version 0 of the format, and this is version {FORMAT}: all of it is dropped" in tier.report[0]
    assert count_right(tier, NUMBERS) == 0
    assert segments(tmp_path) == [], "its space is free"
    works(tier)


def test_a_directory_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    written(tmp_path)
    db = sqlite3.connect(tmp_path / "manifest.sqlite")
    db.execute("PRAGMA user_version = 7")
    db.close()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    tier = tier_at(tmp_path)
    assert tier.failure is not None and "version 7" in tier.failure
    assert "the disk is not used: FormatVersionError" in tier.why_missing(name_of(0))
    assert not offer(tier, 1)
    tier.close()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_older_version_of_the_package_is_another_model(tmp_path: Path) -> None:
    tier_at(tmp_path, model="version 0.0.9").close()
    tier = tier_at(tmp_path, model="version 0.0.9")
    fill(tier, NUMBERS)
    tier.close()
    tier = tier_at(tmp_path, model="version 0.1.0")
    assert count_right(tier, NUMBERS) == 0
    assert "version 0.0.9" in tier.why_missing(name_of(0))
    works(tier)


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
def test_a_folder_on_a_network_is_left_out_and_said_once(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    mounts = tmp_path / "mounts"
    here = str(tmp_path).replace(" ", "\\040")
    mounts.write_text(f"22 1 8:1 / / rw - ext4 /dev/sda rw\n35 22 0:29 / {here} rw shared:1 - {kind} host:/x rw\n")
    monkeypatch.setattr("hybrid.tiers.folder.MOUNTS", mounts)
    tier = tier_at(tmp_path / "cache")
    for number in NUMBERS:
        assert not offer(tier, number)
    assert tier.flush()
    assert tier.failure is not None and f"it is on a network ({kind})" in tier.failure
    assert f"on a network ({kind})" in tier.why_missing(name_of(0))
    assert len(caplog.records) == 1
    assert [*(tmp_path / "cache").iterdir()] == []
    tier.close()


def test_a_manifest_of_another_program_is_left_alone(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "manifest.sqlite")
    db.execute("CREATE TABLE songs(title TEXT)")
    db.close()
    before = (tmp_path / "manifest.sqlite").read_bytes()
    tier = tier_at(tmp_path)
    assert tier.failure is not None and "of another program" in tier.failure
    assert not offer(tier, 0)
    tier.close()
    assert (tmp_path / "manifest.sqlite").read_bytes() == before


def test_what_is_wrong_in_a_folder_is_found_and_mended(tmp_path: Path) -> None:
    written(tmp_path)
    assert check_folder(tmp_path) == (len(NUMBERS), [])
    first, second, *_ = segments(tmp_path)
    data = bytearray(first.read_bytes())
    data[4096] ^= 1
    first.write_bytes(data)
    second.unlink()
    (tmp_path / f"{'ab' * 8}.safetensors").write_bytes(b"an orphan")
    before = sorted(file.name for file in tmp_path.iterdir())
    right, wrong = check_folder(tmp_path)
    assert 0 < right < len(NUMBERS)
    text = "\n".join(wrong)
    assert f"{first.name}: the " in text and "a copy on disk is damaged" in text
    assert f"{second.name}: it is missing" in text
    assert f"{'ab' * 8}.safetensors: no copy in it is known" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == before, "nothing is changed"
    assert check_folder(tmp_path, fix=True)[0] == right
    assert check_folder(tmp_path) == (right, [])
    tier = tier_at(tmp_path)
    assert (count_right(tier, NUMBERS), tier.counts.num_damaged, tier.report) == (right, 0, [])
    works(tier)


# Clocks


def test_no_decision_depends_on_the_time_of_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    for index, file in enumerate(tmp_path.iterdir()):
        os.utime(file, (0, 0) if index % 2 else (4e9, 4e9))
    tier = tier_at(tmp_path)
    assert tier.report == []
    assert count_right(tier, NUMBERS) == len(NUMBERS)
    works(tier)


# Calls that fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EACCES])
def test_a_write_that_fails_is_a_copy_less(tmp_path: Path, quick: None, number: int) -> None:
    store = FaultyStore()
    tier = tier_at(tmp_path, open_store=store)
    fill(tier, NUMBERS)
    store.errors["put_from"] = OSError(number, os.strerror(number))
    for one in range(102, 112):
        offer(tier, one)
        tier.flush()
    assert count_right(tier, range(102, 112)) == 0
    assert tier.failure is not None and os.strerror(number) in tier.failure
    assert tier.counts.num_failures > 0
    assert count_right(tier, NUMBERS) > 0
    del store.errors["put_from"]
    offer(tier, 201, seconds=1e9)
    tier.flush()
    assert fetched(tier, 201) == contents_of(201)
    assert tier.failure is None
    assert sum(file.stat().st_size for file in segments(tmp_path)) == tier.bytes_used
    works(tier)


def test_a_disk_that_is_full_is_used_up_to_what_there_is(tmp_path: Path, quick: None) -> None:
    class Full(FaultyStore):
        """A disk with 60,000 bytes."""

        def put_from(self, name: str, parts: list[bytes]) -> None:  # type: ignore[override]
            used = sum(file.stat().st_size for file in segments(tmp_path))
            if used + sum(map(len, parts)) > 60_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().put_from(name, parts)

    tier = tier_at(tmp_path, open_store=Full())
    for number in range(100):
        offer(tier, number, seconds=1.0 + number, size=1900)
        tier.flush()
        assert tier.violations() == []
    assert 0 < tier.num_bytes <= 60_000
    assert count_right(tier, range(90, 100)) >= 5, "what is worth more takes the place of the rest"
    tier.close()


def test_reads_that_fail_are_a_miss_and_no_copy_is_dropped(tmp_path: Path) -> None:
    store = FaultyStore()
    tier = tier_at(tmp_path, open_store=store)
    fill(tier, NUMBERS)
    store.errors["get_into"] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(UnavailableError, match=r"the disk failed: \[Errno 5\] Input/output error"):
        fetch(tier, 1)
    del store.errors["get_into"]
    assert count_right(tier, NUMBERS) == len(NUMBERS)
    works(tier)


def test_a_directory_that_is_removed_is_made_again(tmp_path: Path, quick: None) -> None:
    tier = tier_at(tmp_path / "cache")
    fill(tier, NUMBERS)
    shutil.rmtree(tmp_path / "cache")
    assert count_right(tier, NUMBERS) == 0
    for number in range(102, 112):
        offer(tier, number)
        tier.flush()
    assert count_right(tier, range(102, 112)) > 0
    works(tier)


def test_a_path_that_is_no_directory_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tier = tier_at(tmp_path / "file")
    assert tier.failure is not None and "FileExistsError" in tier.failure
    assert not offer(tier, 1)
    tier.close()


def test_a_directory_that_hangs_delays_the_start_for_a_while_and_is_used_when_it_answers(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    monkeypatch.setattr("hybrid.tiers.disk.START_SECONDS", 0.05)
    answers = threading.Event()

    def open_store(path: Path) -> DirectoryStore:
        answers.wait(10)
        return DirectoryStore(path)

    tier = tier_at(tmp_path, open_store=open_store)
    assert tier.failure == "TimeoutError: no answer within 0 seconds"
    assert count_right(tier, NUMBERS) == 0
    answers.set()
    assert tier.flush()
    assert count_right(tier, NUMBERS) == len(NUMBERS)
    works(tier)


def test_a_process_that_was_stopped_while_it_wrote_stops_no_reader(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    monkeypatch.setattr("hybrid.tiers.folder.BUSY_SECONDS", 0.05)
    stopped = sqlite3.connect(tmp_path / "manifest.sqlite", isolation_level=None)
    stopped.execute("BEGIN IMMEDIATE")
    tier = tier_at(tmp_path)
    assert count_right(tier, NUMBERS) == len(NUMBERS)
    offer(tier, 999)
    assert tier.flush()
    assert tier.failure is not None and "another process that writes there" in tier.failure
    assert count_right(tier, NUMBERS) == len(NUMBERS)
    stopped.close()
    works(tier)


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    written(tmp_path)
    tier = tier_at(tmp_path, num_bytes=400_000)
    for file in segments(tmp_path):
        file.unlink()
        os.mkfifo(file, 0o600)
    with pytest.raises(UnavailableError, match="or is not a plain file"):
        fetch(tier, 1)
    assert count_right(tier, NUMBERS) == 0
    tier.close()


def test_a_disk_that_was_full_is_used_again_when_there_is_more(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.tiers.disk.GROWN_AFTER", 0.0)
    monkeypatch.setattr("hybrid.tiers.disk.WRITTEN_AFTER", 0.02)
    store = FaultyStore()
    store.errors["put_from"] = OSError(errno.ENOSPC, "No space left on device")
    tier = tier_at(tmp_path, open_store=store)
    offer(tier, 0)
    tier.flush()
    assert tier.num_bytes == 0
    del store.errors["put_from"]
    end = time.monotonic() + 10
    while not offer(tier, 3) and time.monotonic() < end:
        time.sleep(0.02)
    assert tier.flush()
    assert fetched(tier, 3) == contents_of(3)
    works(tier)


# A slow disk


def test_what_is_cleared_counts_until_its_files_are_gone(tmp_path: Path) -> None:
    """Copies are offered, cleared and offered again while the disk is slow."""
    sizes: list[int] = []

    class Measured(FaultyStore):
        def put_from(self, name: str, parts: Sequence[Contents]) -> None:
            super().put_from(name, parts)
            sizes.append(sum(file.stat().st_size for file in segments(tmp_path)))

    store, limit, again = Measured(), 60_000, {201: 3000, 202: 3000, 203: 3600, 204: 3900}
    tier = tier_at(tmp_path, num_bytes=limit, open_store=store)
    for number in range(102, 122):
        assert offer(tier, number, seconds=number, size=3000)
        assert tier.flush()
    assert max(sizes) > 0.9 * limit
    store.seconds["put_from"] = 0.3
    for number, size in again.items():
        assert offer(tier, number, seconds=1000.0, size=size)
    time.sleep(0.1)  # the first two are being written
    tier.clear()
    for number, size in again.items():
        assert offer(tier, number, seconds=1000.0, size=size)
    assert tier.flush()
    assert max(sizes) <= limit
    assert count_right(tier, [*again]) == len(again)
    assert tier.violations() == []
    tier.close()


def test_a_slow_write_delays_no_offer_and_what_is_too_much_is_refused(tmp_path: Path) -> None:
    store = FaultyStore()
    store.gates["put_from"] = threading.Event()
    tier = tier_at(tmp_path, num_bytes=100_000, open_store=store)
    kept = sum(offer(tier, number, size=1000) for number in range(500))
    assert segments(tmp_path) == [], "it did not wait for the disk"
    assert 0 < kept < 100
    store.gates["put_from"].set()
    store.seconds["put_from"] = 0.3
    assert tier.counts.bytes_refused > 0
    tier.be_patient(10.0)
    assert all(offer(tier, number, size=1000) for number in range(1002, 1042)), "at the end there is time"
    tier.close()


def test_a_slow_read_is_waited_for_as_long_as_computing_takes_and_then_not_tried_again(tmp_path: Path) -> None:
    store = FaultyStore()
    tier = tier_at(tmp_path, open_store=store)
    fill(tier, NUMBERS)
    store.gates["get_into"] = threading.Event()
    before = tier.cost.seconds(1)
    with pytest.raises(UnavailableError, match="took longer than computing"):
        fetch(tier, 1, seconds=0.05)
    assert tier.cost.seconds(1) > 10 * before
    with pytest.raises(UnavailableError, match="has not answered yet"):
        fetch(tier, 1)
    store.gates["get_into"].set()
    end = time.monotonic() + 10
    while fetched(tier, 1) is None and time.monotonic() < end:
        time.sleep(0.05)
    assert fetched(tier, 1) == contents_of(1)
    works(tier)
