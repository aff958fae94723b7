"""Keys: token ids as bytes, and how far two of them agree."""

from array import array
from random import Random

import pytest

from hybrid.key import TOKEN_BYTES, Key, common_prefix


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
