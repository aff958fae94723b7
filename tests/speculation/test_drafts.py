"""Drafts, their check, and which of them are accepted."""

from array import array
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

from hybrid import ArgumentError, Drafter, History, Key, SpeculationConfig
from hybrid.speculation.drafts import Drafts, accepted, checked
from hybrid.speculation.speculator import Speculator


def made(tokens: tuple[int, ...], parents: tuple[int, ...]) -> Drafts:
    return Drafts(tokens, parents, (("test",),) * len(tokens))


def never(token: int) -> bool:
    return False


def test_the_longest_path_that_the_model_says_is_accepted() -> None:
    #  -1 ─ 5 ─ 6 ─ 7
    #   └── 8 ─ 9
    drafts = made((5, 6, 7, 8, 9), (-1, 0, 1, -1, 3))
    assert accepted(drafts, [5, 6, 7, 1, 1, 1], never) == [0, 1, 2]
    assert accepted(drafts, [5, 6, 1, 1, 1, 1], never) == [0, 1]
    assert accepted(drafts, [8, 0, 0, 0, 9, 2], never) == [3, 4]
    assert accepted(drafts, [1, 6, 7, 1, 1, 1], never) == []


def test_nothing_is_accepted_after_an_end_token_or_a_row_that_is_not_finite() -> None:
    drafts = made((5, 6, 7), (-1, 0, 1))
    assert accepted(drafts, [5, 6, 7, 1], lambda token: token == 6) == [0]
    assert accepted(drafts, [5, -1, 7, 1], never) == [0]
    tree = made((8, 5, 6, 7), (-1, -1, 1, 2))
    assert accepted(tree, [5, 1, 6, 7, 1], lambda token: token == 6) == [1]
    assert accepted(tree, [5, 1, -1, 7, 1], never) == [1]


def test_brothers_with_the_same_token_are_one_and_keep_all_their_children() -> None:
    drafts = checked([5, 5, 6, 7, 6], [-1, -1, 0, 1, 1], "test", 10, 100)
    assert drafts == made((5, 6, 7), (-1, 0, 0))


def test_more_than_the_limit_is_left_out() -> None:
    assert checked(range(9), range(-1, 8), "test", 4, 100) == made((0, 1, 2, 3), (-1, 0, 1, 2))
    assert len(checked([], [], "test", 4, 100)) == 0


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([1, 2], [-1], "same length"),
        (None, [-1], "same length"),
        ([100], [-1], "outside the vocabulary"),
        ([-1], [-1], "outside the vocabulary"),
        ([1.0], [-1], "integers"),
        ([1], [None], "integers"),
        ([True], [-1], "integers"),
        (array("d", [1.0, 2.0]), range(-1, 1), "integers"),
        (array("d", [1.0, float("nan")]), range(-1, 1), "integers"),
        (np.array([1]), [-1], "such as lists; got ndarray and list of 1"),
        ([1], [0], "parents come first"),
        ([1, 2], [-1, 1], "parents come first"),
        ([1], [-2], "parents come first"),
    ],
)
def test_what_cannot_be_computed_is_refused(tokens: object, parents: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        checked(tokens, parents, "test", 4, 100)


def test_probabilities_are_those_of_the_drafts_that_are_kept() -> None:
    assert checked([5, 6, 7], range(-1, 2), "test", 2, 100, [0.5, 0.25, 1]).chances == (0.5, 0.25)
    assert checked([5, 5, 6, 7], [-1, -1, 1, 2], "test", 2, 100, [0.5, 0.4, 0.25, 1]).chances == (0.5, 0.25)
    assert checked(array("i", [5, 6, 7]), range(-1, 2), "test", 2, 100, [np.float32(0.5), 1, 0]).chances == (0.5, 1)


@pytest.mark.parametrize(
    "bad", [[1.5], [-0.1], [float("nan")], ["1"], [None], [], [0.5, 0.5], 0.5, np.ones(1)], ids=str
)
def test_a_probability_that_is_none_is_refused(bad: object) -> None:
    for parents in ([-1], range(-1, 0)):
        for tokens in ([5], array("i", [5])):
            with pytest.raises(ArgumentError, match="a probability"):
                checked(tokens, parents, "test", 4, 100, bad)


def test_of_a_tree_the_first_path_is_a_chain() -> None:
    drafts = made((5, 8, 6, 9, 7), (-1, -1, 0, 1, 2))
    assert drafts.first_path() == made((5, 6, 7), (-1, 0, 1))


@pytest.mark.parametrize("bad", ["mpt", "", "cache+", 7, ["cache"]])
def test_a_speculation_that_is_not_known_is_refused(bad: object) -> None:
    with pytest.raises(ArgumentError, match="drafter"):
        SpeculationConfig.of(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, 64, True, 2.0, "7"])
def test_a_number_of_drafts_that_cannot_be_is_refused(bad: object) -> None:
    with pytest.raises(ArgumentError, match="max_drafts"):
        SpeculationConfig(max_drafts=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"name": 5}, "name must be a text"),
        ({"name": []}, "name must be a text"),
        ({"prior": "a"}, "prior must be from 0 to 1"),
        ({"prior": None}, "prior must be from 0 to 1"),
        ({"prior": float("nan")}, "prior must be from 0 to 1"),
        ({"prior": 1.5}, "prior must be from 0 to 1"),
        ({"prior": -1}, "prior must be from 0 to 1"),
    ],
    ids=str,
)
def test_what_a_drafter_says_of_itself_is_checked(own: dict[str, Any], message: str) -> None:
    drafter = type("Own", (Drafter,), {"propose": lambda *_: ([], []), **own})()
    with pytest.raises(ArgumentError, match=f"drafter Own: {message}"):
        SpeculationConfig(drafters=(drafter,))


def test_a_configuration_needs_a_drafter() -> None:
    with pytest.raises(ArgumentError, match="drafters is empty"):
        SpeculationConfig(drafters=())
    assert SpeculationConfig.of(None) is None
    assert SpeculationConfig.of("cache") == SpeculationConfig()


class Sure(Drafter):
    """Drafts as many tokens as it may, each of which is right with a chance of 0.99."""

    def propose(self, history: History, limit: int) -> tuple[list[int], range, list[float]]:
        return [7] * limit, range(-1, limit - 1), [0.99] * limit


@pytest.mark.parametrize(("requests", "counts"), [(1, {15: 1}), (8, {7: 8}), (40, {0: 16, 1: 24}), (80, {0: 80})])
def test_drafts_fill_a_pass_up_to_the_rows_that_cost_more(requests: int, counts: dict[int, int]) -> None:
    drafter = Sure()
    speculator = Speculator(SpeculationConfig(drafters=(drafter,)), (drafter,), 1000, max_rows=64)
    histories = [History(ids := array("i", [1]), 1, "", partial(Key.of, ids)) for _ in range(requests)]
    for _ in range(16):
        speculator.timed(requests, 1.0)
        speculator.timed(requests + 1, 1.001, 1)
        speculator.timed(requests + 4, 1.004, 4)
    for _ in range(4):  # a pass without room for drafts is no reason to doubt what they cost
        proposed = speculator.propose_all([(history, 30) for history in histories], requests)
        assert Counter(len(drafts or ()) for drafts in proposed) == counts
