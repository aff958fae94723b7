"""Which pages checkpoints need: none for itself, and each as long as a checkpoint below it is there."""

import math
from random import Random

import pytest

from hybrid.tiers.needs import Needs


def path(text: str) -> list[bytes]:
    """The names of the prefixes of a text, the longest first: a letter is a page."""
    return [text[:end].encode() for end in range(len(text), 0, -1)]


def needs_of(*texts: str) -> Needs:
    needs = Needs()
    for text in texts:
        needs.add(iter(path(text)))
    return needs


def test_a_checkpoint_needs_the_pages_up_to_it() -> None:
    needs = needs_of("abc")
    assert [name in needs for name in (b"a", b"ab", b"abc", b"abcd", b"b")] == [True, True, True, False, False]
    assert needs.num_alone(b"abc") == 3
    assert needs.remove(b"abc") == [(b"abc", b"ab"), (b"ab", b"a"), (b"a", None)]
    assert len(needs) == 0


def test_pages_that_two_need_are_needed_until_both_are_gone() -> None:
    #      ab ── c ●
    #         └─ d ── e ●
    needs = needs_of("abc", "abde")
    assert (needs.num_alone(b"abc"), needs.num_alone(b"abde")) == (1, 2)
    assert [name for name, _ in needs.remove(b"abc")] == [b"abc"]
    assert needs.num_alone(b"abde") == 4
    assert [name for name, _ in needs.remove(b"abde")] == [b"abde", b"abd", b"ab", b"a"]


def test_a_checkpoint_on_the_way_keeps_its_own_pages() -> None:
    needs = needs_of("abcd", "ab")
    assert (needs.num_alone(b"ab"), needs.num_alone(b"abcd")) == (0, 2)
    assert needs.checkpoints(b"a") == [b"ab", b"abcd"]
    assert needs.remove(b"ab") == []
    assert needs.num_alone(b"abcd") == 4


def test_a_path_is_read_as_far_as_it_is_not_known() -> None:
    needs = needs_of("abcdef")

    def names() -> object:
        yield from [b"abcdefg", b"abcdef"]
        pytest.fail("the rest is known")

    needs.add(names())  # type: ignore[arg-type]
    assert needs.num_alone(b"abcdefg") == 1


def test_a_checkpoint_is_shortened_page_by_page_until_another_needs_them() -> None:
    #      a ── b ● ── c ── d ●
    needs = needs_of("abcd", "ab")
    assert needs.shorten(b"abcd") == (b"abcd", b"abc")
    assert needs.num_alone(b"abc") == 1
    assert needs.shorten(b"abc") == (b"abc", None), "there is a checkpoint at ab"
    assert needs.shorten(b"ab") == (b"ab", b"a")
    assert needs.shorten(b"a") == (b"a", None)
    assert len(needs) == 0
    needs = needs_of("abc", "ab")
    assert needs.shorten(b"ab") is None, "abc needs it"
    assert needs.num_alone(b"abc") == 3
    assert needs.violations([b"abc"]) == []


def test_a_path_says_where_it_joins_what_is_needed() -> None:
    needs = needs_of("abc")
    assert needs.add(iter(path("abde"))) == b"ab"
    assert needs.add(iter(path("abc"))) == b"abc"
    assert needs.add(iter(path("x"))) is None


@pytest.mark.parametrize("seed", range(4))
def test_counts_hold_through_random_changes(seed: int) -> None:
    rng, needs = Random(seed), Needs()
    kept: dict[bytes, str] = {}
    for _ in range(1500):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 9)))
        name = text.encode()
        if name in kept and rng.random() < 0.5:
            del kept[name]
            shortened = needs.shorten(name)
            if shortened is not None and shortened[1] is not None:
                kept[shortened[1]] = text[:-1]
        elif name in kept:
            needs.remove(name)
            del kept[name]
        else:
            needs.add(iter(path(text)))
            kept[name] = text
        if kept:
            one = rng.choice([*kept])
            others = {page for other in kept.values() if other.encode() != one for page in path(other)}
            assert needs.num_alone(one) == len(set(path(kept[one])) - others)
        assert len(needs) == len({page for text in kept.values() for page in path(text)})
        assert needs.violations(kept) == []


def test_pages_that_are_known_later_are_needed_too() -> None:
    needs = Needs()
    needs.add([b"abcd"])
    assert needs.num_alone(b"abcd") == 1
    needs.extend(b"abcd", [b"abc"])
    needs.extend(b"abc", path("ab"))
    needs.extend(b"abc", [b"x"])  # it is known already
    needs.extend(b"y", [b"x"])  # nothing needs it
    assert needs.num_alone(b"abcd") == 4
    needs.add(path("abxy"))
    assert (needs.num_alone(b"abcd"), needs.num_alone(b"abxy")) == (2, 2)
    assert needs.violations([b"abcd", b"abxy"]) == []
    assert [*needs.upward(b"abc")] == [b"abc", b"ab", b"a"]


def test_a_path_that_leads_back_to_itself_ends() -> None:
    needs = Needs()
    needs.add([b"c", b"b", b"a", b"c", b"b"])
    needs.extend(b"a", [b"b"])
    needs.extend(b"a", [b"z", b"c"])
    assert [*needs.upward(b"c")] == [b"c", b"b", b"a", b"z"]
    assert needs.num_alone(b"c") == 4
    assert needs.violations([b"c"]) == []


def test_a_page_is_worth_what_the_best_checkpoint_is_that_needs_it() -> None:
    needs, known = needs_of("abcd", "abxy", "ab"), dict[bytes, float]()
    values = {b"ab": 2.0, b"abcd": 5.0, b"abxy": 3.0}
    assert needs.best(b"a", values.__getitem__, known) == 3.0, "where requests continued last"
    assert needs.best(b"abc", values.__getitem__, known) == 5.0
    assert needs.best(b"z", values.__getitem__, known) == -math.inf
    assert known == {b"a": 3.0, b"ab": 3.0, b"abx": 3.0, b"abxy": 3.0, b"abc": 5.0, b"abcd": 5.0}
    values[b"ab"] = 9.0
    assert needs.best(b"a", values.__getitem__, {}) == 9.0
