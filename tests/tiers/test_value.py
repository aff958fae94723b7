"""The value of copies: when one is made, which is dropped first, and which pages are needed."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from hybrid.tiers.cost import Cost, MeasuredTime
from hybrid.tiers.tier import Note, Offer
from hybrid.tiers.value import WORTHLESS, EvictionOrder, PageRefCounts, Reuse, Savings
from support.disks import tier_at

SIZE = 1500


def rule_of(reuse: Reuse) -> Savings:
    return Savings(MeasuredTime(0.5), reuse, page_bytes=10, checkpoint_bytes=100, page_size=4)


def test_a_copy_is_worth_more_the_likelier_a_hit_is_and_the_more_it_saves() -> None:
    reuse, cost = Reuse(), Cost(1.0, 0.01)  # 2 seconds, and a tenth for each page
    reuse.count_evicted("branch last 0")
    rule, note = rule_of(reuse), Note("branch", 0, 0, 100, 100, "branch last 0")
    assert rule.value(note, cost, 30) == pytest.approx(0.25 * (55 / 400) ** 0.25), "120 tokens are in its own pages"
    assert rule.value(note, cost, 0) == pytest.approx(0.25 * (48 / 100) ** 0.25), "it saved 100"
    assert rule.value(replace(note, num_tokens=1), cost, 0) == WORTHLESS, "computing is faster"
    assert rule.value(replace(note, group="another"), cost, 30) > rule.value(note, cost, 30)


def test_a_checkpoint_is_copied_if_it_is_likely_to_save_what_copying_takes() -> None:
    reuse = Reuse()
    reuse.count_evicted("branch last 0")
    rule = rule_of(reuse)
    cost, note = Cost(1.0, 0.01), Note("branch", 0, 0, 12, 400, "branch last 0")
    assert not rule.is_worth_copying(note, cost, False), "half of 4 seconds, for 2.3"
    reuse.count_requested("branch last 0")
    assert rule.is_worth_copying(note, cost, False), "4 seconds, as likely as can be"
    for _ in range(9):
        reuse.count_evicted("branch last 0")
    assert not rule.is_worth_copying(note, cost, False)
    assert rule.is_worth_copying(note, cost, True), "the process ends"
    assert not rule.is_worth_copying(replace(note, num_tokens=4), cost, True), "restoring takes as long"


# The order


def dropped(order: EvictionOrder[str]) -> str:
    found = order.lowest()
    assert found is not None
    order.drop(found[1])
    return found[1]


def test_of_equals_the_one_that_was_used_longer_ago_goes_first() -> None:
    order = EvictionOrder[str]()
    for key in "abc":
        order.use(key, 1.0)
    assert dropped(order) == "a"
    order.use("b", 1.0)
    assert (dropped(order), dropped(order), order.lowest()) == ("c", "b", None)


def test_what_is_worth_more_stays_longer_and_not_for_ever() -> None:
    order = EvictionOrder[str]()
    order.use("worth", 3.5)
    gone = []
    for key in "abcdefg":
        order.use(key, 1.0)
        gone.append(dropped(order))
    assert gone == ["a", "b", "c", "worth", "d", "e", "f"]


def test_what_is_worthless_goes_before_all_and_ages_nothing() -> None:
    order = EvictionOrder[str]()
    order.use("a", 1.0)
    order.use("b", WORTHLESS)
    assert dropped(order) == "b"
    assert order.rank(1.0) == 1.0


def test_the_order_is_right_through_random_changes() -> None:
    rng, order, ranks = Random(0), EvictionOrder[int](), dict[int, float]()
    for _ in range(5000):
        key = rng.randrange(50)
        if rng.random() < 0.7:
            value = float(rng.randrange(10))
            ranks[key] = order.rank(value)
            order.use(key, value)
        elif rng.random() < 0.5:
            order.discard(key)
            ranks.pop(key, None)
        elif ranks:
            lowest = order.lowest()
            assert lowest is not None and lowest[0] == min(ranks.values()) == ranks.pop(lowest[1])
            order.drop(lowest[1])
        assert set(order) == set(ranks)


# Pages


def path(text: str) -> list[bytes]:
    """The names of the prefixes of a text, the longest first: a letter is a page."""
    return [text[:end].encode() for end in range(len(text), 0, -1)]


def refs_of(*texts: str) -> PageRefCounts:
    refs = PageRefCounts()
    for text in texts:
        refs.add(iter(path(text)))
    return refs


def test_pages_that_two_need_are_needed_until_both_are_gone() -> None:
    #      ab ── c ●
    #         └─ d ── e ●
    refs = refs_of("abc", "abde")
    assert [name in refs for name in (b"a", b"ab", b"abc", b"abcd", b"b")] == [True, True, True, False, False]
    assert refs.remove(b"abc") == [(b"abc", b"ab")]
    assert [name for name, _ in refs.remove(b"abde")] == [b"abde", b"abd", b"ab", b"a"]
    assert len(refs) == 0


def test_a_checkpoint_on_the_way_keeps_its_own_pages() -> None:
    refs = refs_of("abcd", "ab")
    assert sorted(refs.checkpoints(b"a")) == [b"ab", b"abcd"]
    assert refs.remove(b"ab") == []
    assert refs.checkpoints(b"a") == [b"abcd"]


def test_a_path_is_read_as_far_as_it_is_not_known() -> None:
    refs = refs_of("abcdef")

    def names() -> object:
        yield from [b"abcdefg", b"abcdef"]
        pytest.fail("the rest is known")

    assert refs.add(names()) == [b"abcdefg"]  # type: ignore[arg-type]


def test_pages_before_one_may_be_known_later_and_lead_nowhere_back() -> None:
    refs = PageRefCounts()
    refs.add([b"abc"])
    assert refs.extend(b"abc", path("ab")) == [b"ab", b"a"]
    assert refs.extend(b"abc", path("xy")) == [], "they are known"
    assert refs.extend(b"a", [b"abc"]) == [], "of a damaged manifest"
    assert refs.add([b"x", b"y", b"x"]) == [b"x", b"y"]
    assert refs.violations([b"abc", b"x"]) == []
    assert [name for name, _ in refs.remove(b"abc")] == [b"abc", b"ab", b"a"]


def test_counts_hold_through_random_changes() -> None:
    rng, refs, there = Random(0), PageRefCounts(), set[str]()
    for _ in range(3000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 7)))
        if text in there and rng.random() < 0.7:
            refs.remove(text.encode())
            there.discard(text)
        else:
            refs.add(path(text))
            there.add(text)
        assert refs.violations(one.encode() for one in there) == []
        needed = {name for one in there for name in path(one)}
        assert len(refs) == len(needed) and all(name in refs for name in needed)


# On a disk


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
