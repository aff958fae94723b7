"""Keys: token ids as bytes, how far two of them agree, and the names of their prefixes."""

from array import array
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from hybrid import ArgumentError
from hybrid.key import PAIRS, TOKEN_BYTES, Key, check_namespace, common_prefix, names_of
from support.planted import Planted, PlantedError


def naive_common_prefix(a: list[int], b: list[int], a_start: int, b_start: int, step: int, most: int) -> int:
    """Tokens, in whole steps, compared one by one."""
    equal = 0
    for x, y in zip(a[a_start : a_start + most], b[b_start:], strict=False):
        if x != y:
            break
        equal += 1
    return equal // step * step


@pytest.mark.parametrize("seed", range(20))
def test_the_common_prefix_is_the_one_found_token_by_token(seed: int) -> None:
    random = Random(seed)
    for _ in range(50):
        a = [random.choice((1, 1, 1, 1, 2)) for _ in range(random.randint(0, 20))]
        b = [random.choice((1, 1, 1, 1, 2)) for _ in range(random.randint(0, 20))]
        a_start, b_start = random.randint(0, len(a)), random.randint(0, len(b))
        step, most = random.randint(1, 4), random.randint(0, 25)
        in_bytes = (count * TOKEN_BYTES for count in (a_start, b_start, step, most))
        found = common_prefix(Key.of(a).ids, Key.of(b).ids, *in_bytes)
        assert found == naive_common_prefix(a, b, a_start, b_start, step, most) * TOKEN_BYTES


@pytest.mark.usefixtures("untraced")
def test_an_exception_while_ids_are_compared_lets_them_grow_though_it_is_kept() -> None:
    kept, line, planted = [], 0, Planted(0)
    while not line or planted.was_raised:
        line += 1
        a, b = bytes(40), bytearray(40)
        planted = Planted(line, "key.py", spares_locks=True)
        try:
            with planted.traced():
                assert common_prefix(a, b, 0, 0, TOKEN_BYTES, 40) == 40
        except PlantedError as error:
            kept.append(error)
        b += a
    assert len(kept) > 5


def test_ids_given_as_an_array_a_list_or_a_tuple_are_one_key() -> None:
    assert Key.of(array("i", [1, 2, 3])) == Key.of([1, 2, 3]) == Key.of((1, 2, 3))
    assert len(Key.of([1, 2, 3])) == 3
    assert len(Key.of([])) == 0


def test_the_type_of_an_array_does_not_matter() -> None:
    assert Key.of(array("q", [1, 2, 3])) == Key.of([1, 2, 3])
    assert Key.of(array("H", [1, 2, 3])) == Key.of([1, 2, 3])


def test_a_key_belongs_to_its_namespace() -> None:
    assert Key.of([1]) != Key.of([1], "other")
    assert hash(Key.of([1], "other")) == hash(Key.of([1], "other"))


@pytest.mark.parametrize("seed", range(20))
def test_pairs_are_equal_as_far_as_both_their_tokens_are(seed: int) -> None:
    random = Random(seed)
    for _ in range(50):
        a, b = ([random.choice((1, 1, 1, 2)) for _ in range(random.randint(1, 12))] for _ in range(2))
        one, other = Key.of_pairs(a), Key.of_pairs(b)
        equal = 0
        for x, y in zip(pairwise(a), pairwise(b), strict=False):
            if x != y:
                break
            equal += 1
        assert len(one) == len(a) - 1
        if one.namespace == other.namespace:
            found = common_prefix(one.ids, other.ids, 0, 0, TOKEN_BYTES, 100) // TOKEN_BYTES
        else:
            found = 0
        assert found == equal


def test_keys_of_pairs_share_nothing_with_keys_of_tokens_or_of_another_namespace() -> None:
    names = {Key.of_pairs([5, 6], name).namespace for name in ("", "a", "5 ", "5 a")}
    names |= {Key.of_pairs([first, 6], "").namespace for first in (6, 55)}
    assert len(names) == 6
    assert all(name.startswith(PAIRS) for name in names)
    for refuse in (check_namespace, lambda name: Key.of([1], name), lambda name: Key.of_pairs([1], name)):
        with pytest.raises(ArgumentError, match="must not begin with"):
            refuse(f"{PAIRS}5 ")


def test_no_match_of_pairs_ends_with_a_token_inside_a_unit() -> None:
    key = Key.of_pairs(range(20), units=[(0, 3), (7, 12)])
    # n positions are n + 1 tokens
    ends = [key.whole(count, 1) + 1 for count in range(1, 20)]
    assert [end for end in ends if 7 < end < 12] == []
    assert [end for end in ends if end in (2,)] == []
    assert set(ends) == {1, *range(3, 8), *range(12, 21)}


def test_a_key_of_pairs_needs_a_token() -> None:
    assert len(Key.of_pairs([5])) == 0
    with pytest.raises(ArgumentError, match="at least one token"):
        Key.of_pairs([])


@pytest.mark.parametrize("ids", [["a"], [1 << 40], [1.5], None, 5], ids=repr)
def test_ids_that_are_no_integers_of_32_bits_are_refused(ids: Any) -> None:
    for make in (Key.of, Key.of_pairs):
        with pytest.raises(ArgumentError, match="integers of 32 bits"):
            make(ids)


# Names of prefixes


def test_a_name_is_of_all_tokens_before_it() -> None:
    one, other = names_of(b"aabbcc", "", 2), names_of(b"aabbdd", "", 2)
    assert len(one) == 3
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert names_of(b"bbaacc", "", 2)[2] != one[2]
    assert names_of(b"aabbc", "", 2) == one[:2]


def test_namespaces_have_names_of_their_own() -> None:
    assert not set(names_of(b"aabbcc", "a", 2)) & set(names_of(b"aabbcc", "b", 2))
    assert names_of(b"", "a", 2) == []


def test_names_stay_what_they_are_on_disk_and_in_events() -> None:
    """Copies of earlier versions are found by them, and replicas of several versions understand each other."""
    assert [name.hex() for name in names_of(Key.of([*range(-2, 6)]).ids, "", 16)] == [
        "67980fe588f8ae93d7219bac62109976",
        "3e733deddaa2b21097fdfe1d8212b362",
    ]
    assert names_of(Key.of([*range(4)]).ids, "tenant", 16)[0].hex() == "53065f6d185903e016de34e44c186254"
