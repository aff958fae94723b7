"""What copies on disk are worth: what a checkpoint alone saves now, less what restoring it takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from hybrid.tiers.rate import Cost, Rate
from hybrid.tiers.reuse import Reuse
from hybrid.tiers.savings import Savings
from hybrid.tiers.tier import Note, Offer
from support.disks import ByGroup, savings, tier_at

SIZE = 1500


def test_a_hit_saves_computing_what_it_alone_saves_less_restoring_it() -> None:
    reuse = Reuse()
    reuse.left("branch last 0")
    rule = Savings(Rate(0.5), reuse, page_bytes=10, checkpoint_bytes=100, page_size=4)
    cost = Cost(1.0, 0.01)  # 2 seconds, and a tenth for each page
    assert rule.tokens(100, 0, cost) == 96
    assert rule.tokens(100, 30, cost) == 110, "120 tokens are in pages that only it needs"
    assert rule.tokens(1, 0, cost) == 0, "computing is faster"
    note = Note("branch", 0, 0, 100, 100, "branch last 0")
    rule.follow(ByGroup(reuse))
    assert rule.value(note, cost, 30) == pytest.approx(0.25 * 110 / 400)


def test_a_checkpoint_is_copied_if_it_is_likely_to_save_what_copying_takes() -> None:
    reuse = Reuse()
    rule = Savings(Rate(0.5), reuse, page_bytes=10, checkpoint_bytes=100, page_size=4)
    cost, note = Cost(1.0, 0.01), Note("branch", 0, 0, 12, 400, "branch last 0")
    assert not rule.pays(note, cost, False), "half of 4 seconds, for 2.3"
    reuse.wanted("branch last 0")
    assert rule.pays(note, cost, False), "4 seconds, as likely as can be"
    for _ in range(9):
        reuse.left("branch last 0")
    assert not rule.pays(note, cost, False)
    assert rule.pays(note, cost, True), "the process ends"
    assert not rule.pays(replace(note, num_tokens=4), cost, True), "restoring takes as long"


def names(text: str) -> list[bytes]:
    """The names of the prefixes of a text, the longest first: a letter is a page."""
    return [text[:end].encode() for end in range(len(text), 0, -1)]


def life(path: Path, num_bytes: int = 10**6, **chat: int) -> set[str]:
    """A process whose device drops chats: each its checkpoint, which saves so many tokens, and then its pages.

    Returns:
        The checkpoints that are on disk; each has all its pages.
    """
    tier = tier_at(path, num_bytes, savings=savings())
    for text, num_tokens in 8 * [*chat.items()]:  # of what was there, the value is asked for when it is in the way
        note, whole = Note("branch", 0, 0, num_tokens, 64, "branch last 0"), names(text)
        tier.offer(Offer(("checkpoint", whole[0]), SIZE, lambda: bytes(SIZE), note, path=iter(whole)))
        for at, name in enumerate(whole, 1):
            tier.offer(Offer(("page", name), SIZE, lambda: bytes(SIZE), path=iter(whole[at:])))
        assert tier.flush()
        assert tier.violations() == []
    held = {text for text in ("ab", "abcdefgh", "y", "z") if ("checkpoint", text.encode()) in tier}
    assert all(("page", name) in tier for text in held for name in names(text))
    tier.close()
    return held


def test_the_checkpoint_that_is_left_is_worth_what_both_were(tmp_path: Path) -> None:
    """A conversation was worth its last turn when it left the device, since the turn before was there."""
    assert life(tmp_path, abcdefgh=1, ab=2) == {"ab", "abcdefgh"}
    assert life(tmp_path, num_bytes=36_000, y=3) == {"ab", "abcdefgh", "y"}
    assert life(tmp_path, num_bytes=36_000, z=3) == {"abcdefgh", "y", "z"}, "one turn had to go"
    assert life(tmp_path) == {"abcdefgh", "y", "z"}


def test_a_page_without_a_checkpoint_that_needs_it_is_not_written(tmp_path: Path) -> None:
    tier = tier_at(tmp_path)
    assert not tier.offer(Offer(("page", b"a"), SIZE, lambda: pytest.fail("it is read for nothing")))
    note = Note("branch", 0, 0, 9, 9, "branch last 0")
    assert tier.offer(Offer(("checkpoint", b"ab"), SIZE, lambda: bytes(SIZE), note, path=iter([b"ab", b"a"])))
    assert tier.offer(Offer(("page", b"a"), SIZE, lambda: bytes(SIZE)))
    assert not tier.offer(Offer(("page", b"b"), SIZE, lambda: pytest.fail("it is read for nothing")))
    tier.close()
    again = tier_at(tmp_path)
    assert again.offer(Offer(("page", b"ab"), SIZE, lambda: bytes(SIZE), path=iter([b"a"]))), "also in the next life"
    again.close()
