"""Drafts from what was there before: n-grams, and how many drafts pay."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from functools import partial

import pytest

from hybrid import Drafter, History, Key, SpeculationConfig
from hybrid.speculation.cached import BLOCK, GramDrafter
from hybrid.speculation.grams import GRAMS, GramIndex
from hybrid.speculation.pace import Acceptance, PassCost, Worth
from hybrid.speculation.speculator import Speculator


def history_of(ids: array[int], namespace: str = "") -> History:
    return History(ids, 1, namespace, partial(Key.of, ids))


def test_the_latest_place_of_the_longest_gram_is_found() -> None:
    rng = random.Random(0)
    ids = array("i", [rng.randrange(1000) for _ in range(500)])
    index = GramIndex(10_000)
    index.extend(index.open(ids), ids)
    found = [index.find(ids[:at]) for at in range(GRAMS[0], 499)]
    assert all(place in (None, (ids, at)) for at, place in enumerate(found, GRAMS[0]))
    assert sum(place is not None for place in found) > 0.95 * len(found)  # a newer one takes the slot of an older one
    assert index.find(ids[:20] + array("i", [7, 7, 7, 7])) is None


def test_an_image_has_placeholders_that_are_indexed_as_tokens() -> None:
    ids = array("i", [5, 6, 7, *[-1] * 20, 8, 9, 10, 11, 12])
    index = GramIndex(100)
    index.extend(index.open(ids), ids)
    assert index.find(array("i", [8, 9, 10, 11])) == (ids, 27)


def test_a_text_that_an_image_followed_elsewhere_is_not_drafted() -> None:
    ids = array("i", [5, 6, 7, -1, -1, 8, 9, 5, 6, 7])
    speculator = Speculator(SpeculationConfig(), [GramDrafter()], 100)
    assert speculator.propose(history_of(ids), 7, 1) is None


def test_each_token_of_an_answer_is_indexed_once_and_drafted_soon() -> None:
    rng, drafter = random.Random(1), GramDrafter()
    ids = array("i", [rng.randrange(1000)])
    history = history_of(ids)
    for _ in range(1000):
        ids.append(rng.randrange(1000))
        drafter.propose(history, 7)
    assert 1001 - BLOCK < drafter.num_tokens <= 1001
    drafted = 0
    for start in range(100, 900, 40):
        ids.extend(ids[start : start + 5])
        drafted += [*drafter.propose(history, 7)[0]] == [*ids[start + 5 : start + 12]]
    assert drafted > 16  # of 20: a newer gram takes the slot of an older one
    drafter.end(history)
    assert drafter.num_tokens == len(ids)


def test_a_long_prompt_takes_the_memory_of_its_index() -> None:
    """What a request keeps of its own, beside that, is of its latest tokens."""
    rng, drafter = random.Random(0), GramDrafter()
    ids = array("i", [rng.randrange(50_000) for _ in range(40_000)])
    history = history_of(ids)
    tracemalloc.start()
    try:
        drafter.propose(history, 7)
        for token in range(20):
            ids.append(token)
            drafter.propose(history, 7)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 1.5 * drafter.num_bytes


def test_grams_do_not_cross_namespaces() -> None:
    drafter = GramDrafter()
    drafter.end(history_of(array("i", range(100)), "a"))
    assert not drafter.propose(history_of(array("i", range(20, 30)), "b"), 7)[0]
    assert [*drafter.propose(history_of(array("i", range(20, 30)), "a"), 3)[0]] == [30, 31, 32]


def test_a_pass_costs_what_the_fastest_ones_took() -> None:
    cost, rng = PassCost(), random.Random(0)
    for _ in range(400):
        rows = rng.choice((1, 2, 4, 8))
        noise = rng.choice((1.0, 1.0, 1.3, 3.0, 20.0))
        cost.observe(rows, (0.020 + 0.003 * rows + 0.005 * (rows > 1)) * noise, rows - 1)
    assert cost.row == pytest.approx(0.003, rel=0.2)
    assert cost.base == pytest.approx(0.020, rel=0.2)
    assert cost.extra == pytest.approx(0.005, rel=0.3)


def test_a_pass_that_was_captured_says_nothing() -> None:
    """Nor does one whose replay was."""
    cost = PassCost()
    for rows, seconds in ((1, 1.0), (2, 1.1), (4, 1.3), (8, None)):
        for each in (50.0, 20.0, seconds):
            if each is not None:
                cost.observe(rows, each, rows - 1)
    assert cost.row == pytest.approx(0.1) and cost.extra == pytest.approx(0)


def test_as_many_drafts_are_computed_as_raise_the_tokens_per_second() -> None:
    assert Worth(1, 1.1, 0.1).best([0.9**ahead for ahead in range(1, 20)]) == 11  # ten: passes of 12 rows are common
    assert Worth(1, 1.1, 0.1).best([1.0] * 13) == 11  # a capture of 14 rows takes longer than two drafts gain
    assert Worth(8, 1.8, 0.1).best([1.0]) == 1  # 9 rows are not common, and nothing less would pay
    assert Worth(1, 1.1, 0.1).best([0.95, 0.1]) == 1
    assert Worth(64, 7.4, 0.1).best([0.8, 0.8]) == 0  # one row more costs what it brings
    assert Worth(1, 2.0, 1.0).best([0.4]) == 0
    assert Worth(1, 1.1, 0.1, 0.6).best([0.5]) == 0  # not even what a pass with drafts costs in addition
    assert Worth(1, 1.1, 0.1, 0.6).best([0.9, 0.8, 0.7]) == 3
    assert Worth(1, 1.1, 0.1).pays(0.3, [0.9]) and not Worth(1, 1.1, 0.1).pays(0.1, [0.9])


def test_drafts_that_do_not_pay_are_looked_at_less_and_less() -> None:
    measured, looked = Acceptance(0.6), []
    for at in range(1, 301):
        if measured.is_due(at):
            looked.append(at)
            measured.paid(False, at)
    assert looked[0] == 1 and 3 < len(looked) < 9 and looked[-1] - looked[-2] > 60
    assert not any(Acceptance(0.6, measured.pauses).is_due(at) for at in range(1, 4))
    measured.paid(True, 300)
    assert measured.is_due(301)


def test_what_rows_cost_is_measured_again_now_and_then() -> None:
    """Otherwise a cost that was measured while the machine was busy would be believed for ever."""
    cost, tried = PassCost(), []
    for at in range(400):
        if cost.is_doubted(1, 0.5):
            tried.append(at)
            cost.observe(2, 1.0, 1)
    assert 4 < len(tried) < 12 and tried[-1] - tried[-2] > 60
    assert not any(cost.is_doubted(1, 0.01) for _ in range(100))  # whatever rows cost, it would not pay


@pytest.mark.parametrize("period", [1, 2, 3, 5, 40])
def test_an_answer_that_repeats_itself_is_drafted_from_its_second_round_on(period: int) -> None:
    drafter, ids = GramDrafter(), array("i", range(100, 130))
    history = history_of(ids)
    drafter.propose(history, 7)
    for _ in range(2 + 4 // period):  # a round, and four tokens more
        ids.extend(range(period))
    assert [*drafter.propose(history, 7)[0]] == [at % period for at in range(7)]


def test_after_a_replaced_token_the_source_is_drafted_at_once() -> None:
    drafter = GramDrafter()
    drafter.end(history_of(array("i", range(100))))
    ids = array("i", range(10))
    history = history_of(ids)
    assert [*drafter.propose(history, 3)[0]] == [10, 11, 12]
    ids.extend([10, 11, 12, 13, 500])  # 14 is replaced
    assert [*drafter.propose(history, 3)[0]] == [15, 16, 17]
    ids.extend([501])  # that was not it: one token is no proof
    assert [*drafter.propose(history, 3)[0]] == []
    ids.extend([16, 17])
    assert [*drafter.propose(history, 3)[0]] == [18, 19, 20]


def test_the_chance_of_a_draft_follows_from_how_long_its_source_was_right() -> None:
    """Each token that comes is compared with the source, whether it was drafted or not."""
    rng, drafter = random.Random(0), GramDrafter()
    document = [rng.randrange(1000) for _ in range(600)]
    drafter.end(history_of(array("i", document)))
    ids = array("i", [5000])
    history, chances = history_of(ids), {4: [0.0], 12: [0.0]}
    for round in range(40):  # four tokens lead to a source, of which three times in four nothing follows
        start = rng.randrange(20, 500)
        for at in range(start, start + (4 if round % 4 else 30)):
            ids.append(document[at])
            tokens, _, likely = drafter.propose(history, 1)
            if at - start + 1 in chances and len(tokens):
                chances[at - start + 1].append(likely[0])
        ids.append(2000 + round)
        drafter.propose(history, 1)
    assert chances[4][-1] < 0.5 < 0.9 < chances[12][-1]


class Silent(Drafter):
    """Drafts tokens that never come, and counts how often it is asked."""

    def __init__(self, has_any: bool) -> None:
        self.has_any, self.calls = has_any, 0

    def propose(self, history: History, limit: int) -> tuple[list[int], range]:
        self.calls += 1
        return ([7] * limit, range(-1, limit - 1)) if self.has_any else ([], range(0))


def drafted(speculator: Speculator, requests: int, passes: int) -> list[int]:
    """Drafts of each pass that has some, of requests one after another. None is ever right; a row takes a fifth of a
    pass."""
    counts: list[int] = []
    for _ in range(requests):
        ids = array("i", [1])
        history = history_of(ids)
        for _ in range(passes):
            drafts = speculator.propose(history, 15, 1)
            count = len(drafts or ())
            if drafts is not None:
                counts.append(count)
                speculator.verified(history, drafts, [])
            speculator.timed(1 + count, 1.0 + 0.2 * count, count)
            ids.append(1)
        speculator.end(history)
    return counts


@pytest.mark.parametrize("has_any", [True, False])
def test_drafts_that_are_never_right_are_compared_and_not_computed(has_any: bool) -> None:
    drafter = Silent(has_any)
    speculator = Speculator(SpeculationConfig(drafters=(drafter,)), (drafter,), 1000)
    assert sum(drafted(speculator, requests=10, passes=200)) < 12
    assert drafter.calls < (150 if has_any else 800)  # of 2,000 passes


def test_drafts_that_become_right_are_computed_though_none_was_for_long() -> None:
    """What was not computed is compared with what came."""
    drafter = Silent(True)
    speculator = Speculator(SpeculationConfig(drafters=(drafter,)), (drafter,), 1000)
    ids = array("i", [1])
    history, computed = history_of(ids), []
    for at in range(1200):
        token = 1 if at < 400 else 7
        drafts = speculator.propose(history, 15, 1)
        path = range(len(drafts) if drafts is not None and token == 7 else 0)
        if drafts is not None:
            computed.append(at)
            speculator.verified(history, drafts, path)
        speculator.timed(1 + len(drafts or ()), 1.0 + 0.2 * len(drafts or ()), len(drafts or ()))
        ids.extend([token] * (1 + len(path)))
    assert len([at for at in computed if at < 400]) < 10
    assert len([at for at in computed if at >= 900]) == 300


def test_each_drafter_hears_once_that_a_request_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Drafter] = []
    cached, own = GramDrafter(), Silent(True)
    for drafter in (cached, own):
        monkeypatch.setattr(drafter, "end", lambda history, each=drafter: heard.append(each))
    speculator = Speculator(SpeculationConfig(), (own, cached), 1000)
    history = history_of(array("i", [1]))
    speculator.propose(history, 7, 1)
    speculator.end(history)
    assert heard == [own, cached]


@pytest.mark.parametrize("claimed", [1.0, 0.5])
def test_a_drafter_that_says_more_than_is_true_is_not_believed_for_long(claimed: float) -> None:
    class Boasting(Drafter):
        def propose(self, history: History, limit: int) -> tuple[list[int], range, list[float]]:
            return [7] * limit, range(-1, limit - 1), [claimed] * limit

    drafter = Boasting()
    speculator = Speculator(SpeculationConfig(drafters=(drafter,)), (drafter,), 1000)
    assert len(drafted(speculator, requests=5, passes=100)) < 25  # of 500
    ids, computed = array("i", [7]), 0
    history = history_of(ids)
    for _ in range(60):  # it is right now
        drafts = speculator.propose(history, 15, 1)
        computed += drafts is not None
        ids.extend([7] * (1 + len(drafts or ())))
        if drafts is not None:
            speculator.verified(history, drafts, range(len(drafts)))
    assert computed > 30
