"""What is released goes first, what is expected stays, and sessions name what their requests have left."""

from array import array

import pytest

from hybrid.errors import ArgumentError
from hybrid.hints import Hints, hints_of
from hybrid.key import Key
from hybrid.tree.node import Checkpoint, Kind, Node
from hybrid.tree.policies import policy_of
from hybrid.tree.sessions import Sessions
from hybrid.tree.tree import Tree
from hybrid.units import Prices

PAGE = 4


def tree_of(policy: str) -> Tree:
    return Tree(PAGE, PAGE, policy_of(policy), Prices(1, 2))


def ids(start: int, count: int, *more: int) -> Key:
    return Key(array("i", [*range(start, start + count), *more]).tobytes())


def put(tree: Tree, key: Key, first: int = 0) -> Node:
    """Insert a key that ends with a state, as a request would."""
    tree.match(key, len(key) - 1)
    place = len(key)
    checkpoint = Checkpoint(first + place, place, Kind.PROMPT_END, 0, 0, False)
    return tree.insert(key, place, array("i", range(first, first + place // PAGE)), checkpoint).node


@pytest.mark.parametrize("policy", ["lru", "lhd"])
def test_what_is_released_is_evicted_first_though_it_was_used_last(policy: str) -> None:
    tree = tree_of(policy)
    for number in range(3):
        put(tree, ids(1000 * number, 16), 100 * number)
    long = put(tree, ids(5000, 16, 1, 2, 3, 4), 400)
    tree.release(long)
    assert tree.evict_one(1).slots == [420]
    tree.check()


def test_what_others_continue_from_is_not_released() -> None:
    tree = tree_of("lru")
    common = put(tree, ids(0, 16))
    one, other = put(tree, ids(0, 16, 1, 2, 3, 4), 100), put(tree, ids(0, 16, 5, 6, 7, 8), 200)
    tree.release(one)
    assert (one.usage.last_used, common.usage.last_used > 0, other.usage.last_used > 0) == (0, True, True)


def test_a_use_ends_a_release_and_an_expectation() -> None:
    tree = tree_of("lhd")
    node = put(tree, key := ids(0, 16))
    tree.expect(node, 5)
    tree.release(node)
    tree.match(Key(key.ids + b"\1\0\0\0"), 16)
    assert node.usage.last_used > 0 and node.usage.expected_at == 0


def test_another_tenants_states_are_not_released() -> None:
    tree = tree_of("lru")
    key = ids(0, 16)
    tree.insert(key, 16, array("i", range(4)), Checkpoint(1, 16, Kind.PROMPT_END, 0, 0, False), tenant="theirs")
    node = tree.peek(key, 16).checkpoint
    assert node is not None
    tree.release(node, "mine")
    assert node.usage.last_used > 0
    tree.release(node, "theirs")
    assert node.usage.last_used == 0


def test_what_is_expected_soon_is_kept_rather_than_what_is_expected_late() -> None:
    tree = tree_of("lhd")
    soon, late = put(tree, ids(0, 16), 0), put(tree, ids(1000, 16), 100)
    tree.expect(soon, 3)
    tree.expect(late, 3000)
    assert tree.evict_one(1).slots == [116]


def test_the_next_state_of_a_long_path_takes_over_what_is_expected() -> None:
    tree = Tree(PAGE, PAGE, policy_of("lru"), Prices(1, 2, 4))
    above, end = put(tree, ids(0, 16)), put(tree, ids(0, 16, 1, 2, 3, 4), 100)
    tree.expect(end, 7)
    tree.evict_nodes([end], 0)
    assert above.usage.expected_at == end.usage.expected_at > 0


def test_a_session_is_released_as_a_whole_when_it_ends() -> None:
    tree, now = tree_of("lru"), [0.0]
    sessions = Sessions(tree, lambda: now[0])
    others = put(tree, ids(9000, 16), 900)
    first, again = put(tree, ids(0, 16)), put(tree, ids(1000, 16), 100)
    sessions.end_request("s", first, Hints())
    sessions.end_request("s", again, Hints())
    assert sessions.end_session("s") and not sessions.end_session("s")
    assert [node.usage.last_used == 0 for node in (first, again, others)] == [True, True, False]


def test_seconds_are_requests_by_the_rate_at_which_they_come() -> None:
    tree, now = tree_of("lhd"), [0.0]
    sessions = Sessions(tree, lambda: now[0])
    for number in range(5):
        node = put(tree, ids(1000 * number, 16), 100 * number)
        now[0] += 10.0
        sessions.end_request(None, node, Hints(expect_resume=100.0))
    assert node.usage.expected_at == tree.candidates.now + 10
    sessions.end_request("s", node, Hints())
    assert sessions.expect("s", 50.0)
    assert node.usage.expected_at == tree.candidates.now + 5


def action(name: str, **payload: object) -> dict[str, object]:
    return {"action_id": "a", "action_type": name, "action_version": "1.0", "payload": payload}


@pytest.mark.parametrize(
    ("actions", "hints"),
    [
        ([action("kv.retain", scope=None, directives=[{"start": 0, "end": 64, "priority": 80, "duration": 60.0}])],
         Hints(retain=60.0, retain_tokens=64)),
        ([action("kv.retain", directives=[{"start": 0, "end": 64, "priority": 80, "duration": 60.0},
                                          {"covers_output": True, "priority": 0}])],
         Hints(retain=60.0, retain_tokens=64, release=True)),
        ([action("kv.retain", priority=3, ttl_seconds=2.5, execute_at="request_completion")], Hints(retain=2.5)),
        ([action("kv.evict", block_hashes=["1"])], Hints(release=True, end_session=True)),
        ([action("hybrid.expect_resume", seconds=30)], Hints(expect_resume=30.0)),
    ],
)  # fmt: skip
def test_an_envelope_says_what_its_actions_mean_elsewhere(actions: list[object], hints: Hints) -> None:
    assert hints_of({"protocol_version": "0.1", "message_id": "m", "actions": actions}) == (hints, ())


def test_wrong_and_unknown_actions_are_named_and_spoil_no_other() -> None:
    wrong = [
        action("kv.fetch", keys=[1]),
        action("hybrid.expect_resume", seconds=-1),
        action("hybrid.expect_resume", seconds="soon"),
        action("kv.retain", directives=[{"priority": 200}]),
        action("kv.retain", directives=3),
    ]
    found = hints_of({"actions": [*wrong, action("hybrid.end_session"), None]})
    assert found.hints == Hints(end_session=True)
    assert len(found.ignored) == len(wrong) + 1
    assert hints_of(None) == hints_of({"actions": "none"}) == (Hints(), ())


def test_hints_out_of_range_are_refused() -> None:
    for wrong in ({"retain": -1.0}, {"expect_resume": 1e12}, {"retain_tokens": 0}, {"release": "yes"}):
        with pytest.raises(ArgumentError):
            Hints(**wrong)
