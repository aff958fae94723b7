"""Where requests go: to their homes, where memory is, and where nothing was promised twice."""

from __future__ import annotations

import pytest

from hybrid.fleet import Reservation, Router
from support.prefixes import PAGE, checkpoint, names_of, pages


def router_of(num_replicas: int) -> Router:
    router = Router(PAGE)
    for replica in range(num_replicas):
        router.add(replica)
    return router


def prompt(*path: int) -> tuple[list[bytes], int]:
    names = names_of(*path)
    return names, len(names) * PAGE + 1


def run(router: Router, reservation: Reservation, *path: int) -> None:
    """The replica computes a prompt, and has it then."""
    names = names_of(*path)
    router.computed(reservation)
    router.apply(reservation.replica, [pages(names), checkpoint(names)])
    router.ended(reservation)


def test_a_session_goes_home_and_what_is_promised_is_there() -> None:
    router = router_of(4)
    first = router.choose(*prompt(1, 2), now=0.0, session="ann")
    assert first.promised == 0
    run(router, first, 1, 2)
    for turn in range(3, 8):
        following = router.choose(*prompt(*range(1, turn)), now=float(turn), session="ann")
        assert following.replica == first.replica
        assert following.promised == (turn - 2) * PAGE if turn > 3 else 2 * PAGE
        run(router, following, *range(1, turn))


@pytest.mark.parametrize(
    ("better", "worse"), [("device", "host"), ("host", "disk"), ("disk", "nothing"), ("device", "disk")]
)
def test_what_a_tier_takes_to_restore_counts(better: str, worse: str) -> None:
    names, num_tokens = prompt(*range(8))
    for chosen in (0, 1):
        router = router_of(2)
        for replica, tier in ((chosen, better), (1 - chosen, worse)):
            if tier == "device":
                router.apply(replica, [pages(names), checkpoint(names)])
            elif tier != "nothing":
                router.apply(replica, [checkpoint(names, tier=tier)])
        reservation = router.choose(names, num_tokens, now=0.0)
        assert reservation.replica == chosen
        assert reservation.promised == (len(names) * PAGE if better == "device" else 0)  # copies are not promised


def test_a_longer_copy_on_a_disk_is_worth_more_than_a_short_prefix_on_a_device() -> None:
    names, num_tokens = prompt(*range(8))
    for depth, chosen in ((2, 1), (7, 0)):
        router = router_of(2)
        router.apply(0, [pages(names[:depth]), checkpoint(names[:depth])])
        router.apply(1, [checkpoint(names, tier="disk")])
        assert router.choose(names, num_tokens, now=0.0).replica == chosen


def test_new_sessions_are_spread_by_the_memory_that_they_take() -> None:
    router = router_of(4)
    chosen = [router.choose(*prompt(*[at] * 50), now=0.0, session=str(at)) for at in range(8)]
    assert sorted(one.replica for one in chosen) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_place_is_reserved_when_it_is_chosen_and_given_back_once() -> None:
    router = router_of(2)
    taken = [router.choose(*prompt(at), now=0.0) for at in range(2)]
    assert {one.replica for one in taken} == {0, 1}
    for one in taken * 2:
        router.ended(one)
    again = [router.choose(*prompt(at + 5), now=500.0) for at in range(2)]
    assert {one.replica for one in again} == {0, 1}


def test_without_ids_a_prompt_that_continues_another_is_its_session_and_one_that_branches_off_is_not() -> None:
    router = router_of(4)
    system = [7] * 20
    sessions = {}
    for at in range(4):
        chosen = router.choose(*prompt(*system, *[100 + at] * 60), now=float(at))
        sessions[at] = chosen
        run(router, chosen, *system, *[100 + at] * 60)
    assert len({id(one.session) for one in sessions.values()}) == 4
    for at, before in sessions.items():
        following = router.choose(*prompt(*system, *[100 + at] * 60, 5, 5), now=10.0 + at)
        assert following.session is before.session
        assert following.replica == before.replica
        run(router, following, *system, *[100 + at] * 60, 5, 5)


def test_a_request_goes_to_the_prompt_under_way_that_it_shares_and_that_is_no_promise() -> None:
    router = router_of(4)
    leader = router.choose(*prompt(*[1] * 40), now=0.0, session="a")
    others = [router.choose(*prompt(*[1] * 40, at), now=0.0, session=f"b{at}") for at in range(3)]
    assert {one.replica for one in others} == {leader.replica}
    assert {one.promised for one in others} == {0}
    assert {one.expected for one in others} == {40 * PAGE}


def test_a_session_whose_home_has_lost_its_prompt_goes_where_least_was_computed() -> None:
    router = router_of(2)
    path = range(100, 200)
    home = router.choose(*prompt(*path), now=0.0, session="ann")
    run(router, home, *path)
    other = [7] * 100  # the home is given more than the other replica
    run(router, router.choose(*prompt(*other), now=1.0, among=[home.replica]), *other)
    following = router.choose(*prompt(*path, 5), now=2.0, session="ann")
    assert following.replica == home.replica
    router.ended(following)
    router.apply(home.replica, [pages(names_of(*path), False), checkpoint(names_of(*path), False)])
    assert router.choose(*prompt(*path, 5, 6), now=30.0, session="ann").replica != home.replica


def test_a_next_turn_that_comes_before_the_events_of_the_last_one_goes_home() -> None:
    router = router_of(2)
    path = range(100, 200)
    home = router.choose(*prompt(*path), now=0.0, session="ann")
    router.ended(home)  # what the replica has now is not known yet
    following = router.choose(*prompt(*path, 5), now=0.1, session="ann")
    assert (following.replica, following.promised) == (home.replica, 0)
    router.ended(following)
    assert router.choose(*prompt(*path, 5, 6), now=5.0, session="ann").replica != home.replica  # it was evicted


def test_load_beyond_the_patience_takes_a_session_from_home() -> None:
    router = router_of(2)
    home = router.choose(*prompt(1, 2, 3), now=0.0, session="ann")
    run(router, home, 1, 2, 3)
    here = [one for at in range(40) if (one := router.choose(*prompt(50 + at), now=1.0, among=[home.replica]))]
    assert len(here) == 40
    assert router.choose(*prompt(1, 2, 3, 4), now=2.0, session="ann").replica != home.replica


def test_a_replica_that_is_removed_gets_nothing_and_one_that_returns_begins_with_nothing() -> None:
    router = router_of(2)
    first = router.choose(*prompt(1, 2, 3), now=0.0, session="ann")
    run(router, first, 1, 2, 3)
    router.remove(first.replica)
    router.apply(first.replica, [pages(names_of(1, 2, 3))])  # an event that was late
    again = router.choose(*prompt(1, 2, 3, 4), now=1.0, session="ann")
    assert again.replica != first.replica
    assert again.promised == 0
    router.ended(first)
    router.add(first.replica)
    assert router.index.find(names_of(1, 2, 3)).pages[first.replica] == 0
    router.remove(0)
    router.remove(1)
    with pytest.raises(LookupError, match="no replica"):
        router.choose(*prompt(1), now=2.0)


def test_sessions_that_are_idle_give_their_memory_back() -> None:
    router = router_of(2)
    for at in range(6):
        router.ended(router.choose(*prompt(*[at] * 30), now=0.0, session=f"old{at}"))
    big = router.choose(*prompt(*[9] * 200), now=1000.0, session="new")
    router.ended(big)
    small = router.choose(*prompt(8), now=1001.0, session="other")
    assert small.replica != big.replica
