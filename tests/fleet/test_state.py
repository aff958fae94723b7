"""What a front knows: promises that are reserved, kept, broken, and believed no more."""

from __future__ import annotations

import math
from random import Random

import pytest

pytest.importorskip("zmq", reason="the extra 'events' is not installed")
pytest.importorskip("msgspec", reason="the extra 'events' is not installed")

from hybrid.events.change import Change
from hybrid.events.wire import KINDS, Message, decode, encode
from hybrid.fleet.score import Weights
from hybrid.fleet.state import BROKEN, FleetState, Route
from support.prefixes import PAGE, checkpoint, names_of, pages

PATH = names_of(*range(20))


def state_of(*names: str) -> FleetState:
    state = FleetState(PAGE, Weights())
    for name in names:
        state.add(name)
    return state


def says(state: FleetState, name: str, is_snapshot: bool = True) -> None:
    """A replica says that it has the path."""
    state.apply(state.members[name], Message("feed", 2, is_snapshot, [pages(PATH), checkpoint(PATH)]))


def test_whatever_a_replica_says_others_are_chosen_by_what_they_say() -> None:
    """Changes that decode and are wrong: of any kind, tier, depth and size."""
    rng, state = Random(1), state_of("liar", "honest")
    says(state, "honest")
    for number in range(300):
        changes = []
        for _ in range(rng.randrange(6)):
            names = b"".join(rng.choices([*PATH, bytes(16), rng.randbytes(16)], k=rng.randrange(5)))
            kind, tier = rng.choice(KINDS), rng.choice(["device", "host", "disk", "store", "moon", ""])
            depth, size = rng.choice([0, 1, PAGE, 2**62]), rng.choice([0, 1, 2**62])
            value = rng.choice([None, math.nan, math.inf, -1e300])
            changes.append(Change(rng.random() < 0.7, kind, names, depth, tier, size, value))
        message = Message("feed", rng.choice([len(changes), 2**62]), rng.random() < 0.3, changes)
        state.apply(state.members["liar"], decode(encode(message)))
        ask(state, number, 0, f"session {number}")
    assert not state.members["liar"].is_believed or state.members["honest"].sent
    says(state, "honest")
    assert ask(state, 1000, None, "another") == ("honest", 20 * PAGE)


def ask(state: FleetState, number: int, hit: int | None, session: str = "ann") -> tuple[str, int]:
    """A request of the path; `hit`: what its replica had of it, None: what was promised."""
    state.begin(Route(number, PATH, 20 * PAGE + 1, session))
    chosen = state.choose(number, [*state.members])
    assert chosen is not None
    name, promise = chosen
    state.computed(number, promise.num_tokens if hit is None else hit)
    state.end(number, 3)
    return name, promise.num_tokens


def test_the_replica_that_says_it_has_the_prefix_gets_the_request_and_keeps_its_promise() -> None:
    state = state_of("a", "b", "c")
    says(state, "b")
    assert ask(state, 1, None) == ("b", 20 * PAGE)
    member = state.members["b"]
    assert (member.sent, member.promised_tokens, member.broken_tokens) == (1, 80, 0)


def test_a_choice_is_kept_while_its_replica_is_there_and_made_again_when_it_is_not() -> None:
    state = state_of("a", "b")
    says(state, "b")
    state.begin(Route(1, PATH, 81, None))
    assert state.choose(1, ["a", "b"]) == state.choose(1, ["a", "b"])
    state.remove("b")
    name, promise = state.choose(1, ["a"]) or ("", None)
    assert name == "a" and promise is not None and promise.num_tokens == 0
    state.end(1, 0)
    state.end(1, 0)
    assert state.choose(1, ["a"]) is None


def test_a_replica_that_breaks_its_promises_is_read_anew_and_then_believed_no_more() -> None:
    state = state_of("liar")
    number = 0
    for _ in range(BROKEN):
        says(state, "liar")
        for _ in range(BROKEN):
            number += 1
            assert ask(state, number, hit=0) == ("liar", 80)
        number += 1
        assert ask(state, number, hit=0)[1] == 0  # it was forgotten
    assert not state.members["liar"].is_believed
    says(state, "liar")
    says(state, "liar", is_snapshot=False)
    assert ask(state, number + 1, hit=0)[1] == 0
    state.remove("liar")
    state.add("liar again")
    says(state, "liar again")
    assert ask(state, number + 2, None)[1] == 80


def test_one_broken_promise_among_kept_ones_is_an_eviction_that_was_faster() -> None:
    state = state_of("a")
    says(state, "a")
    for number in range(1, 30):
        ask(state, number, hit=0 if number % 2 else None)
    assert state.members["a"].num_reads == 0
    assert state.members["a"].broken_tokens == 15 * 80


def test_what_a_replica_says_that_has_gone_is_not_heard() -> None:
    state = state_of("a", "b")
    gone = state.remove("a")
    state.add("c")  # it gets the number
    state.apply(gone, Message("feed", 2, True, [pages(PATH), checkpoint(PATH)]))
    assert ask(state, 1, None)[1] == 0
