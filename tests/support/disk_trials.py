"""Trials of copies on disk that need processes of their own. Imports no torch, so that a process starts in no time.

    python disk_trials.py kill FOLDER NUMBER    a process writes and evicts, and is killed at a random moment
    python disk_trials.py tear FOLDER NUMBER    a process writes, and is killed while a segment is written
    python disk_trials.py share FOLDER NUMBER   two processes read and write NUMBER copies each
    python disk_trials.py user FOLDER           as a user who may not write, and as one who owns nothing there
    python disk_trials.py full FOLDER           as a process whose files may not be larger than 40,000 bytes
    python disk_trials.py space FOLDER          on a file system of 400 kB, which must be possible to mount

Prints what was counted, as JSON.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
import urllib.parse  # noqa: F401 - Path.as_uri imports it when called, which another user may not be able to
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from hybrid.tiers import disk
from hybrid.tiers.tier import Contents
from support.disks import LIMIT, count_right, fill, name_of, offer, tier_at

NUMBERS = range(120)

TORN_LIMIT = 400_000
"""Bytes of a disk on which six copies are one segment."""

NOBODY = 65534


def child(run: Callable[[], None]) -> int:
    """Run in a process of its own, and return its id."""
    number = os.fork()
    if number == 0:
        status = 1
        try:
            run()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return number


def succeeded(number: int) -> bool:
    return os.waitpid(number, 0)[1] == 0


# Killed


def write_for_ever(path: Path, seed: int) -> None:
    """Write more than fits, so that segments are dropped, and use some, and clear now and then."""
    rng, tier = Random(seed), tier_at(path, num_bytes=60_000)
    while True:
        for _ in range(rng.randrange(1, 6)):
            offer(tier, rng.choice(NUMBERS), seconds=rng.randrange(1, 100))
        action = rng.random()
        if action < 0.5:
            tier.flush()
        elif action < 0.6:
            tier.used(name_of(rng.choice(NUMBERS)))
        elif action < 0.62:
            tier.clear()
        count_right(tier, [rng.choice(NUMBERS)])


def check_directory(path: Path, counts: Counter[str], limit: int = 60_000) -> None:
    """Another process finds only what is right, and no file that is not in use."""
    tier = tier_at(path, num_bytes=limit)
    assert tier.failure is None, tier.failure
    assert tier.violations() == []
    held = tier.num_pages + tier.num_checkpoints
    right = count_right(tier, NUMBERS)
    assert right == held, f"{held - right} copies cannot be had"
    counts["copies found"] += right
    counts["lives that found copies"] += right > 0
    for line in tier.report:
        counts["reports of files of processes that ended"] += "of processes that ended" in line
        assert "missing" not in line, line
        assert "damaged" not in line, line
    files = [file.stat().st_size for file in path.glob("*.safetensors")]
    assert sum(files) == tier.bytes_used <= limit
    assert {file.name for file in path.iterdir() if file.suffix != ".safetensors"} <= {
        "manifest.sqlite",
        "manifest.sqlite-wal",
        "manifest.sqlite-shm",
    }
    tier.close()


def kill(path: Path, number: int) -> dict[str, int]:
    counts, rng = Counter[str](), Random(number)
    for seed in range(number):
        writer = child(lambda seed=seed: write_for_ever(path, seed))  # type: ignore[misc]
        time.sleep(rng.uniform(0.001, 0.08))
        os.kill(writer, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(writer, 0)[1]) == signal.SIGKILL, "it ended by itself"
        counts["killed"] += 1
        check_directory(path, counts)
    return counts


def tear(path: Path, number: int) -> dict[str, int]:
    """Each process has written a segment, and is killed within the next: after some of its bytes, before they are on
    the disk, before the file has its name, or before the manifest has its rows."""
    counts, rng = Counter[str](), Random(number)
    for seed in range(number):
        moment = ("bytes", "bytes", "fsync", "replace", "rows")[seed % 5]
        writer = child(lambda seed=seed, moment=moment: write_and_die(path, seed, moment, rng.random()))  # type: ignore[misc]
        assert os.WTERMSIG(os.waitpid(writer, 0)[1]) == signal.SIGKILL, "it ended by itself"
        counts[f"killed: {moment}"] += 1
        counts["files that were not whole"] += len([*path.glob(".*.part")])
        check_directory(path, counts, TORN_LIMIT)
    return counts


def write_and_die(path: Path, seed: int, moment: str, share: float) -> None:
    """Write a segment of three copies, and die while one of six is written."""
    tier, first = tier_at(path, num_bytes=TORN_LIMIT), 3 * (seed % 30)

    def offered(numbers: Sequence[int]) -> None:
        for one in numbers:
            tier.drop([name_of(one)])
            offer(tier, one, seconds=1e6, size=4000)

    def die(*given: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    left, replace = round(share * 6 * 4000), os.replace

    def torn(descriptor: int, parts: Sequence[Contents]) -> int:
        nonlocal left
        whole = b"".join(parts)
        os.write(descriptor, whole[:left])
        if left <= len(whole):
            die()
        left -= len(whole)
        return len(whole)

    def named(part: Path, name: Path) -> None:
        replace(part, name)
        die()

    offered(range(first, first + 3))
    tier.flush()
    verb, fatal = {
        "bytes": ("writev", torn),
        "fsync": ("fsync", die),
        "replace": ("replace", die),
        "rows": ("replace", named),
    }[moment]
    setattr(os, verb, fatal)
    offered(range(first + 3, first + 9))
    tier.flush()


# Shared


def share(path: Path, number: int) -> dict[str, int]:
    """Each process writes its numbers, and in the end reads those of the other."""
    path.mkdir()
    owned = [[one for one in range(2 * number) if one // 3 % 2 == own] for own in (0, 1)]

    def run(own: int) -> None:
        tier, other = tier_at(path), 1 - own
        for one in owned[own]:
            offer(tier, one)
            if one % 7 == 0:
                tier.flush()
                count_right(tier, range(2 * number))
        tier.flush()
        (path.parent / f"done-{own}").touch()
        while not (path.parent / f"done-{other}").exists():
            time.sleep(0.01)
        tier.flush()
        offer(tier, 30_000 + 3 * own)  # a write catches up with the other process
        tier.flush()
        assert tier.counts.num_damaged == 0
        assert tier.failure is None, tier.failure
        found = count_right(tier, owned[other])
        assert tier.violations() == []
        (path.parent / f"found-{own}").write_text(str(found))
        tier.close()

    processes = [child(lambda own=own: run(own)) for own in (0, 1)]  # type: ignore[misc]
    ended = [succeeded(process) for process in processes]
    assert all(ended)
    tier = tier_at(path)
    counts = {f"found by {own} of the other": int((path.parent / f"found-{own}").read_text()) for own in (0, 1)}
    counts["found later"] = count_right(tier, range(2 * number))
    assert tier.report == []
    assert tier.bytes_used == sum(file.stat().st_size for file in path.glob("*.safetensors")) <= LIMIT
    tier.close()
    return counts


# Users and limits


def user(path: Path) -> dict[str, int]:
    """The directory of one user; where this one may be any, it becomes another."""
    is_root = os.geteuid() == 0
    path.mkdir(mode=0o755)
    if is_root:
        os.chown(path, NOBODY, NOBODY)
        os.chmod(path.parent, 0o755)

    def become(uid: int) -> None:
        if is_root:
            os.setgid(uid)
            os.setuid(uid)

    def write() -> None:
        become(NOBODY)
        tier = tier_at(path, num_bytes=10**6)
        fill(tier, NUMBERS)
        tier.close()
        os.chmod(path, 0o500)

    def read_only() -> None:
        become(NOBODY)
        before = sorted(file.name for file in path.iterdir())
        tier = tier_at(path, num_bytes=10**6)
        assert "it cannot be written" in tier.report[0], tier.report
        assert count_right(tier, NUMBERS) == len(NUMBERS)
        assert not offer(tier, 999)
        tier.used(name_of(2))
        tier.clear()
        assert tier.flush()
        assert tier.violations() == []
        tier.close()
        assert sorted(file.name for file in path.iterdir()) == before

    def foreign() -> None:
        os.chmod(path, 0o755)
        if is_root:
            become(NOBODY - 1)
            tier = tier_at(path, num_bytes=10**6)
            assert tier.failure is not None and "belongs to another user" in tier.failure, tier.failure
            assert count_right(tier, NUMBERS) == 0
            assert not offer(tier, 999)
            tier.close()

    def foreign_files() -> None:
        """A file of another user in a directory of one's own, and another user's manifest."""
        if is_root:
            own = path.parent / "own"
            tier = tier_at(own, num_bytes=10**6)
            fill(tier, NUMBERS)
            tier.close()
            file = sorted(own.glob("*.safetensors"))[0]
            os.chown(file, NOBODY, NOBODY)
            tier = tier_at(own, num_bytes=10**6)
            assert "of another user" in tier.report[0]
            assert 0 < count_right(tier, NUMBERS) < len(NUMBERS)
            assert file.exists(), "it is not ours to remove"
            tier.close()
            os.chown(own / "manifest.sqlite", NOBODY, NOBODY)
            tier = tier_at(own, num_bytes=10**6)
            assert tier.failure is not None and "belongs to another user" in tier.failure
            assert count_right(tier, NUMBERS) == 0
            tier.close()

    for run in (write, read_only, foreign, foreign_files):
        assert succeeded(child(run)), run.__name__
    return {"users": 2 if is_root else 1}


def full(path: Path) -> dict[str, int]:
    """The kernel refuses writes: files that are too large."""

    def run() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        disk.FIRST_PAUSE = disk.MAX_PAUSE = 0.0
        tier = tier_at(path, num_bytes=10**6)
        for number in range(60):
            offer(tier, number, size=4000)
            if number % 13 in (0, 2):  # segments of 2 and of 11 copies
                tier.flush()
        assert tier.counts.num_failures > 0
        assert tier.violations() == []
        assert not [*path.glob(".*")], "nothing half done is left"
        count_right(tier, range(60))
        tier.close()

    assert succeeded(child(run))
    tier = tier_at(path)
    found = count_right(tier, range(60))
    assert tier.bytes_used == sum(file.stat().st_size for file in path.glob("*.safetensors"))
    tier.close()
    return {"copies found": found}


def space(path: Path) -> dict[str, int]:
    """The file system has no more room, and then has some again."""
    path.parent.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", path.parent], check=True)
    filler = path.parent / "filler"
    filler.write_bytes(bytes(150_000))
    disk.FIRST_PAUSE = disk.MAX_PAUSE = disk.GROWN_AFTER = 0.0
    tier = tier_at(path, num_bytes=10**6)
    for number in range(60):
        offer(tier, number, size=4000)
        if number % 6 == 2:
            tier.flush()
    failures, found = tier.counts.num_failures, count_right(tier, range(60))
    assert failures > 0 and found > 0
    assert tier.violations() == []
    assert not [*path.glob(".*")], "nothing half done is left"
    filler.unlink()
    for number in range(60, 120):
        offer(tier, number, size=4000, seconds=1000)
        if number % 6 == 2:
            tier.flush()
    later = count_right(tier, range(120))
    assert tier.violations() == []
    tier.close()
    tier = tier_at(path, num_bytes=10**6)
    again = count_right(tier, range(120))
    assert tier.bytes_used == sum(file.stat().st_size for file in path.glob("*.safetensors"))
    tier.close()
    return {"failures": failures, "found": found, "found with more room": later, "found by the next life": again}


if __name__ == "__main__":
    trial, folder, *given = sys.argv[1:]
    trials = {"kill": kill, "tear": tear, "share": share, "user": user, "full": full, "space": space}
    made = trials[trial](Path(folder), *map(int, given))  # type: ignore[operator]
    assert "torch" not in sys.modules
    print(json.dumps(made))
