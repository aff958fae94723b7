"""Drafts from what was there before: n-grams, and how many drafts pay."""

from __future__ import annotations

import gc
import random
import tracemalloc
import weakref
from array import array
from collections.abc import Sequence
from functools import partial

import pytest

from hybrid import Drafter, History, Key, SpeculationConfig
from hybrid.speculation import cached
from hybrid.speculation.acceptance import CLAIMED, MAX_WAIT, Acceptance, Claims
from hybrid.speculation.cached import BLOCK, LEAST_TOKENS, ContinuationDrafter, GramDrafter
from hybrid.speculation.drafter import ChainDrafter
from hybrid.speculation.grams import GRAMS, GramIndex
from hybrid.speculation.speculator import PassTimes, Speculator
from support.pictures import cache_with, serve


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


def test_what_is_found_has_the_last_tokens_before_it() -> None:
    """Whatever has the same hash. And nothing is lost when the table grows."""
    rng, index = random.Random(0), GramIndex(100_000)
    texts = [array("i", [rng.randrange(200) for _ in range(2500)]) for _ in range(3)]
    for text in texts:
        index.extend(index.open(text), text)
    found = {2: 0, 6: 0}
    for _ in range(5000):
        ids = array("i", [rng.randrange(200) for _ in range(8)])
        place = index.find(ids)
        if place is not None:
            assert place[0][place[1] - 2 : place[1]] == ids[-2:]
            found[2] += 1
    for text in texts:
        for at in range(6, 2499, 5):
            place = index.find(text[:at])
            found[6] += place is not None and place[0][place[1] - 6 : place[1]] == text[at - 6 : at]
    assert found[2] > 100
    assert found[6] > 0.5 * 1500


def test_what_is_known_of_a_sequence_is_not_indexed_again() -> None:
    rng, drafter = random.Random(0), GramDrafter()
    text = array("i", [rng.randrange(50_000) for _ in range(1000)])
    drafter.end(history_of(text))
    turn = array("i", [*text, *range(60_000, 60_050)])
    drafter.end(history_of(turn))
    assert drafter.num_tokens == 1050


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
    """The memory that a request keeps of its own, beside that, is of its latest tokens."""
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


@pytest.mark.parametrize("added", [1, 3, 20])
def test_requests_that_add_few_tokens_take_no_more_memory_for_each(added: int) -> None:
    """And they are drafted, each up to its own end."""
    rng, drafter = random.Random(0), GramDrafter()
    prompt = [rng.randrange(50_000) for _ in range(50)]
    texts = [array("i", prompt + [rng.randrange(50_000) for _ in range(added)]) for _ in range(2000)]
    tracemalloc.start()
    try:
        for text in texts:
            drafter.end(history_of(text))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 24 * 2000 * added + 2**16  # a table that is created has 32 KB
    if added > 3:
        drafted = [[*drafter.propose(history_of(text[:-5]), 9)[0]] for text in texts[-50:]]
        assert sum(found == [*text[-5:]] for found, text in zip(drafted, texts[-50:], strict=True)) > 40


def test_an_index_forgets_the_pieces_that_were_not_extended_for_longest() -> None:
    rng, index = random.Random(0), GramIndex(1000)
    bound = index.num_bytes + 4 * 1000  # the table has slots for more
    texts = [array("i", [rng.randrange(50_000) for _ in range(100)]) for _ in range(30)]

    def is_known(text: array[int]) -> bool:
        return any(index.find(text[:at]) == (text, at) for at in range(50, 99))  # newer ones take slots of older ones

    first, *pieces = [index.open(text) for text in texts]
    index.extend(first, texts[0][:50])
    for at, (piece, text) in enumerate(zip(pieces, texts[1:], strict=True)):
        index.extend(piece, text)
        assert index.num_tokens <= 1000 and index.num_bytes <= bound
        if at == 5:
            index.extend(first, texts[0][50:])
        assert at != 12 or is_known(texts[0])

    assert [is_known(text) for text in texts] == [False] * 20 + [True] * 10
    texts[0].extend([7, 8])
    index.extend(first, texts[0][100:])  # all of it is known again
    assert is_known(texts[0]) and index.num_tokens == 102 + 8 * 100


@pytest.mark.parametrize("count", [10, 3000])
def test_the_indices_of_many_namespaces_are_bounded(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens, and the memory that an index takes without any. Those that were used last stay."""
    monkeypatch.setattr(cached, "MAX_TOKENS", 32 * 1024)
    rng, drafter = random.Random(0), GramDrafter()

    def end(namespace: int, ids: array[int]) -> None:
        drafter.end(history_of(ids, str(namespace)))

    texts = [array("i", [rng.randrange(50_000) for _ in range(count)]) for _ in range(100)]
    for namespace, text in enumerate(texts):
        end(namespace, text)
        end(0, array("i", [1, 2, 3]))  # which is used, and so is kept
    assert drafter.num_tokens <= 32 * 1024 and drafter.num_bytes <= 24 * 32 * 1024
    drafted = [bool(drafter.propose(history_of(texts[at][-9:-1], str(at)), 1)[0]) for at in (0, *range(99, 0, -1))]
    assert drafted[:8] == [True] * 8 and sum(drafted) <= 16


def test_a_request_continues_in_a_namespace_that_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens have a piece of their own, whatever others came meanwhile."""
    monkeypatch.setattr(cached, "MAX_TOKENS", 2 * LEAST_TOKENS - 1)
    rng, drafter = random.Random(0), GramDrafter()
    ids, other, more = (array("i", [rng.randrange(50_000) for _ in range(300)]) for _ in range(3))
    history = history_of(ids, "a")
    drafter.propose(history, 7)
    drafter.end(history_of(array("i", range(900)), "b"))  # "a" is forgotten
    drafter.propose(history_of(other, "a"), 7)
    ids.extend(more)
    for _ in range(2):
        drafter.propose(history, 7)
    assert drafter.num_tokens == 900
    for text in (ids, other):
        assert drafter.propose(history_of(text[:100], "a"), 3)[0] == text[100:103]


def test_grams_do_not_cross_namespaces() -> None:
    drafter = GramDrafter()
    drafter.end(history_of(array("i", range(100)), "a"))
    assert not drafter.propose(history_of(array("i", range(20, 30)), "b"), 7)[0]
    assert [*drafter.propose(history_of(array("i", range(20, 30)), "a"), 3)[0]] == [30, 31, 32]


def observed(times: PassTimes, rows: int, drafts: int, seconds: float, count: int = 1) -> PassTimes:
    for _ in range(count):
        times.observe(rows + drafts, seconds, drafts > 0)
    return times


def test_what_passes_take_is_learned_though_some_are_captured() -> None:
    times, rng = PassTimes(), random.Random(0)
    observed(times, 1, 0, 0.500)  # the first ones are
    observed(times, 1, 3, 0.900)
    for at in range(400):
        drafts = rng.choice((0, 0, 1, 3, 7))
        seconds = 0.020 + 0.003 * (1 + drafts) + 0.005 * (drafts > 0)
        observed(times, 1, drafts, seconds * (20 if at % 50 == 0 else 1))
    assert (times.base, times.row, times.extra) == pytest.approx((0.020, 0.003, 0.005), rel=0.25)
    assert times.of(8, True) == pytest.approx(0.049, rel=0.05)


def test_passes_of_which_little_is_known_are_expected_to_cost_a_tenth_for_each_row() -> None:
    times = observed(PassTimes(), 1, 0, 1.1, 100)
    assert (times.base, times.row, times.extra) == pytest.approx((1.0, 0.1, 0.1), rel=0.01)


def test_as_many_drafts_are_computed_as_raise_the_tokens_per_second() -> None:
    def best(rows: int, base: float, row: float, extra: float, chances: list[float]) -> int:
        times = PassTimes()
        times.base, times.row, times.extra = base, row, extra
        return times.best(rows, chances)

    assert best(1, 1.0, 0.1, 0.0, [0.9**ahead for ahead in range(1, 20)]) == 11  # ten: passes of 12 rows are common
    assert best(1, 1.0, 0.1, 0.0, [1.0] * 13) == 11  # a capture of 14 rows takes longer than two drafts gain
    assert best(8, 1.0, 0.1, 0.0, [1.0]) == 1  # 9 rows are not common, and nothing less is worth it
    assert best(1, 1.0, 0.1, 0.0, [0.95, 0.1]) == 1
    assert best(64, 1.0, 0.1, 0.0, [0.8, 0.8]) == 0  # one row more costs what it brings
    assert best(1, 1.0, 1.0, 0.0, [0.4]) == 0
    assert best(1, 1.0, 0.1, 0.6, [0.5]) == 0  # not even what a pass with drafts costs in addition
    assert best(1, 1.0, 0.1, 0.6, [0.9, 0.8, 0.7]) == 3


def test_drafts_that_are_not_worth_it_are_looked_at_less_and_less() -> None:
    measured, looked = Acceptance(0.6), []
    for at in range(1, 301):
        if measured.should_ask(at):
            looked.append(at)
            measured.was_worth(False, at)
    assert looked[:3] == [1, 2, 4] and len(looked) < 15 and looked[-1] - looked[-2] == MAX_WAIT + 1
    assert not any(Acceptance(0.6, measured.misses).should_ask(at) for at in range(1, 4))
    measured.was_worth(True, 300)
    assert measured.should_ask(301)


@pytest.mark.parametrize("extra", [0.0, 6.0])
def test_some_passes_whose_drafts_are_worth_it_have_none(extra: float) -> None:
    """Else what is saved would never be known."""
    speculator, ids, plain = Speculator(SpeculationConfig(), [GramDrafter()], 100), array("i", [*range(9)] * 9), 0
    history = history_of(ids)
    for _ in range(300):
        drafts = speculator.propose(history, 3, 1)
        count = len(drafts or ())
        plain += not count
        speculator.timed(1 + count, 1.0 + 0.1 * count + extra * (count > 0), count)
        ids.extend([(ids[-1] + 1 + at) % 9 for at in range(1 + count)])
    assert 5 < plain < 15 if not extra else plain > 250


def test_drafts_that_cost_too_much_are_tried_again_now_and_then() -> None:
    """Else times that were measured while the machine was busy would be believed for ever."""
    times, tried = PassTimes(), []
    for at in range(1000):
        count = times.best(1, [0.5]) if times.knows_plain else 0
        tried += [at] * count
        observed(times, 1, count, 1.0 + count)
    assert 5 < len(tried) < 40 and tried[-1] > 800


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


def test_what_a_request_has_shown_is_expected_of_the_next_one() -> None:
    """After two tokens that were the same nothing of the source followed: less is expected of such a match."""
    rng, drafter = random.Random(0), GramDrafter()
    document = [rng.randrange(1000) for _ in range(600)]
    drafter.end(history_of(array("i", document)))

    def misled(start: int) -> float:
        ids = array("i", [5000, *document[start : start + 2]])
        history = history_of(ids)
        tokens, _, likely = drafter.propose(history, 3)
        ids.append(2000 + start)
        drafter.propose(history, 3)
        drafter.end(history)
        return likely[0] if len(tokens) else 1.0

    expected = [misled(start) for start in range(20, 500, 30)]
    assert expected[0] == pytest.approx(0.3) and expected[-1] < 0.2


def test_a_continuation_that_came_meanwhile_is_found_with_the_next_page() -> None:
    cache = cache_with("abcdefghij")  # pages of two tokens
    drafter = ContinuationDrafter(lambda: cache.tree)
    assert [*drafter.propose(history_of(array("i", map(ord, "abc"))), 9)[0]] == [*map(ord, "defghij")]
    ids = array("i", map(ord, "abx"))
    history = history_of(ids)
    assert not drafter.propose(history, 9)[0]
    serve(cache, "abxyzzyy")
    assert not drafter.propose(history, 9)[0]  # it is not looked up again before that
    ids.append(ord("y"))
    assert [*drafter.propose(history, 9)[0]] == [*map(ord, "zzyy")]
    ids.extend(map(ord, "zz"))
    assert [*drafter.propose(history, 1)[0]] == [ord("y")]


def test_less_is_expected_of_continuations_that_were_wrong() -> None:
    cache = cache_with("abcdefghijklmnop")
    drafter, expected = ContinuationDrafter(lambda: cache.tree), []
    for length in range(1, 9):
        ids = array("i", map(ord, "abcdefgh"[:length]))
        history = history_of(ids)
        expected.append(drafter.propose(history, 1)[2][0])
        ids.append(ord("!"))
        drafter.propose(history, 1)
        drafter.end(history)
    assert expected[0] == pytest.approx(0.8) and expected[-1] < 0.6


def test_nothing_is_kept_of_a_request_that_has_ended() -> None:
    cache = cache_with("abcdefgh")
    drafters = ContinuationDrafter(lambda: cache.tree), GramDrafter(), Silent(True)
    speculator, gone = Speculator(SpeculationConfig(drafters=drafters[2:]), drafters, 1000), []
    for text in ("abcd", "abxx", "abcdabcdab"):
        ids = array("i", map(ord, text))
        history = history_of(ids)
        for token in "efg":
            speculator.propose(history, 7, 1)
            ids.append(ord(token))
        speculator.end(history)
        gone.append(weakref.ref(history))
        del history
    gc.collect()
    assert [history() for history in gone] == [None] * 3


def test_a_drafter_that_fails_is_asked_less_and_less() -> None:
    class Failing(Silent):
        def propose(self, history: History, limit: int) -> tuple[list[int], range]:
            super().propose(history, limit)
            raise RuntimeError("no idea")

    drafter = Failing(True)
    speculator = Speculator(SpeculationConfig(drafters=(drafter,)), (drafter,), 1000)
    assert drafted(speculator, requests=2, passes=300) == []
    assert speculator.stats["Failing"].refused == drafter.calls < 40


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
    """Drafts that were not computed are compared with what came."""
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
    assert len([at for at in computed if at >= 900]) > 280  # the others measure what passes without drafts take


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


def test_what_a_predictor_claims_is_compared_with_what_came() -> None:
    """Here what it gives 0.25 is right in three of four cases."""
    learned, rng = Claims(CLAIMED), random.Random(0)
    assert learned.of(0.25) == pytest.approx(0.25) and learned.of(1.0) == pytest.approx(0.95)
    assert learned.of(float("nan")) == learned.of(0.0) == 0.0
    for _ in range(3):
        own = learned.of_request()
        for _ in range(40):
            own.observe(0.25, rng.random() < 0.75)
            own.observe(1.0, True)
        assert own.of(0.25) == pytest.approx(0.75, abs=0.2) and own.of(1.0) > 0.98
        learned.absorb(own)
    assert learned.of(0.25) == pytest.approx(0.75, abs=0.1) and learned.of(0.55) == pytest.approx(0.55)


def test_a_drafter_whose_drafts_are_not_worth_a_row_is_asked_less_and_less() -> None:
    """One such pass says nothing: the next token may be clearer."""

    class Unsure(ChainDrafter):
        prepared = 0
        claimed = 0.01

        def prepare(self, wanted: Sequence[tuple[History, int]]) -> None:
            self.prepared += 1

        def propose(self, history: History, limit: int) -> tuple[array[int], range, list[float]]:
            return array("q", [7]), range(-1, 0), [self.claimed]

    drafter = Unsure()
    speculator = Speculator(SpeculationConfig(drafters=(drafter,)), (drafter,), 1000)
    assert drafted(speculator, requests=1, passes=4) == [] and drafter.prepared == 3
    assert drafted(speculator, requests=1, passes=300) == [] and drafter.prepared < 20
    drafter.claimed = 0.9
    before = drafter.prepared
    drafted(speculator, requests=1, passes=30)
    assert drafter.prepared - before > 5
