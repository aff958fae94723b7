"""The probability that copies are wanted again is learned, and the directory keeps it."""

import math
import sqlite3
from pathlib import Path

import pytest

from hybrid.tiers.value import HALVED_AFTER, MAX_GROUPS, Reuse
from support.disks import fill, name_of, savings, tier_at, works

GROUP, OTHER = "turn_end last 0", "branch inner 3 spare"


def taught(left: int, wanted: int, group: str = GROUP) -> Reuse:
    reuse = Reuse()
    for _ in range(left):
        reuse.count_evicted(group)
    for _ in range(wanted):
        reuse.count_requested(group)
    return reuse


def life(path: Path, reuse: Reuse) -> Reuse:
    """A process that learns, and ends."""
    tier = tier_at(path, savings=savings(reuse))
    assert tier.failure is None
    tier.close()
    return reuse


def rows(path: Path) -> list[tuple[object, ...]]:
    db = sqlite3.connect(path / "manifest.sqlite")
    found = db.execute("SELECT * FROM reuse").fetchall()
    db.close()
    return found


def change(path: Path, statement: str, *values: object) -> None:
    db = sqlite3.connect(path / "manifest.sqlite")
    db.execute(statement, values)
    db.commit()
    db.close()


def test_a_group_is_wanted_as_often_as_it_was() -> None:
    assert Reuse().probability(GROUP) == 0.5
    assert abs(taught(99, 25).probability(GROUP) - 0.255) < 1e-9
    assert taught(0, 5).probability(GROUP) == 1.0, "copies of an earlier process, of which it knows nothing"


def test_what_was_long_ago_counts_less() -> None:
    reuse = taught(HALVED_AFTER + 1, 0)
    assert reuse.probability(GROUP) > 0.5 / HALVED_AFTER


def test_the_next_life_knows_what_was_learned_and_adds_to_it(tmp_path: Path) -> None:
    life(tmp_path, taught(9, 9))
    assert life(tmp_path, Reuse()).probability(GROUP) == 0.95
    again = life(tmp_path, taught(10, 0))
    assert again.probability(GROUP) == 9.5 / 20, "both together"
    assert rows(tmp_path) == [(GROUP, 19.0, 9.0)]
    assert life(tmp_path / "another", Reuse()).probability(GROUP) == 0.5, "another directory knows nothing"


def test_two_processes_add_to_one_directory(tmp_path: Path) -> None:
    tiers = [tier_at(tmp_path, savings=savings(taught(10, wanted))) for wanted in (2, 6)]
    for tier in tiers:
        tier.close()
    assert rows(tmp_path) == [(GROUP, 20.0, 8.0)]


def test_it_is_written_while_the_process_lives(tmp_path: Path) -> None:
    reuse = taught(3, 1)
    tier = tier_at(tmp_path, savings=savings(reuse))
    tier.clear()
    fill(tier, range(3))
    tier.clear()
    assert tier.flush()
    assert rows(tmp_path) == [(GROUP, 3.0, 1.0)]
    tier.close()
    assert rows(tmp_path) == [(GROUP, 3.0, 1.0)], "once"


@pytest.mark.parametrize(
    "row",
    [
        ("the text of a prompt", 1.0, 1.0),
        ("turn_end last 0; a name", 1.0, 1.0),
        (OTHER, -1.0, 0.0),
        (OTHER, math.inf, 0.0),
        (OTHER, "many", 0.0),
        (OTHER, 1.0, b"\0"),
        (b"turn_end last 1", 1.0, 1.0),
        (OTHER, 1.0, 10.0 * HALVED_AFTER),
    ],
)
def test_counts_that_cannot_be_right_are_left_out_and_replaced(tmp_path: Path, row: tuple[object, ...]) -> None:
    life(tmp_path, taught(9, 9))
    change(tmp_path, "INSERT INTO reuse VALUES (?, ?, ?)", *row)
    reuse = life(tmp_path, Reuse())
    assert (reuse.probability(GROUP), reuse.probability(OTHER)) == (0.95, 0.5)
    life(tmp_path, taught(1, 0))
    assert rows(tmp_path) == [(GROUP, 10.0, 9.0)]


def test_a_directory_holds_a_bounded_number_of_groups_and_begins_anew_without_any(tmp_path: Path) -> None:
    life(tmp_path, taught(9, 9))
    for number in range(2 * MAX_GROUPS):
        change(tmp_path, "INSERT INTO reuse VALUES (?, 1.0, 1.0)", f"a{number} last 0")
    life(tmp_path, taught(1, 0, OTHER))
    assert len(rows(tmp_path)) <= MAX_GROUPS
    change(tmp_path, "DELETE FROM reuse")
    assert life(tmp_path, Reuse()).probability(GROUP) == 0.5


def test_a_directory_without_the_table_begins_anew(tmp_path: Path) -> None:
    life(tmp_path, taught(9, 9))
    change(tmp_path, "DROP TABLE reuse")
    tier = tier_at(tmp_path)
    assert tier.report == ["its manifest has other tables: all of it is dropped"]
    works(tier)


def test_a_copy_of_an_earlier_life_that_is_used_was_wanted_again(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    fill(tier, range(6))
    tier.close()
    reuse = Reuse()
    tier = tier_at(tmp_path, savings=savings(reuse))
    tier.used(name_of(3))
    tier.used(name_of(4))  # a page
    tier.close()
    assert rows(tmp_path) == [("branch last 0", 0.0, 1.0)]
    assert reuse.probability("branch last 0") == 1.0
