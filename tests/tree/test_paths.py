"""The rhythm of paths: what is continued soon is worth more soon after."""

import numpy as np

from hybrid.tree.lhd import LearnedHitDensity
from hybrid.tree.node import Kind, NodeUsage
from hybrid.tree.paths import MAX_OPEN, Path, PathRhythm
from hybrid.tree.policy import Facts


def learned(rhythm: PathRhythm, rounds: int = 300) -> tuple[Path, Path]:
    """An agent that goes on every 5 seconds, and a person every 200. Returns the last path of each."""
    agent: Path | None = None
    person: Path | None = None
    for now in range(1, rounds + 1):
        rhythm.requested(now, 5.0 * now)
        if now % 40:
            agent = rhythm.began(agent)
            rhythm.ended(agent, 50)
        else:
            person = rhythm.began(person)
            rhythm.ended(person, 50)
    assert agent is not None and person is not None
    return agent, person


def test_what_went_on_soon_is_expected_soon_and_less_when_that_has_passed() -> None:
    rhythm = PathRhythm()
    agent, person = learned(rhythm)
    groups = np.array([agent.group, person.group, agent.group])
    fresh, slow, overdue = rhythm.densities(groups, np.array([0, 0, 60])).tolist()
    assert fresh > 5 * slow and fresh > 5 * overdue


def test_the_length_of_an_answer_divides_classes() -> None:
    rhythm = PathRhythm()
    rhythm.requested(1, 0.0)
    groups = []
    for num_tokens in (99, 100, 300, 1000):
        path = rhythm.began(None)
        rhythm.ended(path, num_tokens)
        groups.append(path.group)
    assert groups == [20, 21, 22, 23]


def test_of_more_paths_than_are_watched_the_oldest_is_not_watched_any_more() -> None:
    rhythm = PathRhythm()
    rhythm.requested(1, 0.0)
    paths = [rhythm.began(None) for _ in range(MAX_OPEN + 1)]
    for path in paths:
        rhythm.ended(path, 1)
    assert paths[0].place is None and paths[1].place is not None
    rhythm.began(paths[0])  # continued all the same


def test_only_the_ends_of_long_paths_are_ranked_by_their_rhythm() -> None:
    policy = LearnedHitDensity()
    agent, person = learned(policy.rhythm)

    def rank(path: Path | None, num_tokens: int, below: bool = False) -> float:
        usage = NodeUsage(300, 300, kind=Kind.TURN_END, used_at=300, path=path)
        facts = Facts.without_node(usage, 300, num_tokens, tokens_saved=64, bytes_freed=64, has_below=below)
        return policy.rank(facts)

    assert rank(agent, 1000) == rank(person, 1000)  # paths have no anchors
    policy.rhythm.shortest = 500
    assert rank(agent, 1000) > 5 * rank(person, 1000)
    assert rank(agent, 499) == rank(person, 499)
    assert rank(agent, 1000, below=True) == rank(person, 1000, below=True)
