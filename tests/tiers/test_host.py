"""Host memory as a store of copies: what is worth more stays, and nothing exceeds its size."""

from random import Random

import pytest

from hybrid.tiers.chain import chain
from hybrid.tiers.host import HostTier
from hybrid.tiers.ranking import Worth
from hybrid.tiers.tier import Offer


def named(number: int, kind: str = "page") -> tuple[str, bytes]:
    return kind, number.to_bytes(4, "little")


def offer(
    tier: HostTier, number: int, seconds: float = 1.0, size: int = 10, group: str = "", kind: str = "page"
) -> bool:
    return tier.offer(Offer(named(number, kind), size, lambda: bytes(size), Worth(group, seconds)))


def test_what_fits_is_kept() -> None:
    tier = HostTier(30)
    assert all(offer(tier, number) for number in range(3))
    assert (len(tier), tier.bytes_used, tier.bytes_written, tier.bytes_offered) == (3, 30, 30, 30)
    copy = tier.get(named(1))
    assert copy is not None and copy.contents == bytes(10)
    assert tier.violations() == []


def test_a_copy_that_is_there_is_not_written_again() -> None:
    tier = HostTier(30)
    offer(tier, 1)
    assert tier.offer(Offer(named(1), 10, lambda: pytest.fail("it is read again"), Worth("", 1.0)))
    assert (tier.bytes_written, tier.bytes_offered) == (10, 20)


def test_what_is_worth_more_replaces_what_is_worth_less_and_not_the_other_way() -> None:
    tier = HostTier(20)
    offer(tier, 1, seconds=5)
    offer(tier, 2, seconds=1)
    assert not tier.offer(Offer(named(3), 10, lambda: pytest.fail("it is read for nothing"), Worth("", 0.5)))
    assert offer(tier, 4, seconds=3)
    assert [number for number in range(5) if named(number) in tier] == [1, 4]
    assert not offer(tier, 5, seconds=4, size=20), "it would take the place of more than it is worth"
    assert tier.violations() == []


def test_what_saves_no_time_and_what_is_too_large_is_not_kept() -> None:
    tier = HostTier(20)
    assert not offer(tier, 1, seconds=0)
    assert not offer(tier, 2, seconds=-1)
    assert not offer(tier, 3, size=21)
    assert len(tier) == 0


def test_copies_without_hits_age_and_are_dropped_in_the_end() -> None:
    tier = HostTier(20)
    offer(tier, 0, seconds=8)
    for number in range(1, 40):
        offer(tier, number, seconds=1 + number % 2)
        tier.used(named(number))
    assert named(0) not in tier


def test_a_copy_that_is_used_stays() -> None:
    tier = HostTier(20)
    offer(tier, 0, seconds=2, group="used")
    for number in range(1, 60):
        tier.used(named(0))
        offer(tier, number, seconds=2, group="new")
    assert named(0) in tier
    assert tier.num_hits == 59


def test_groups_that_are_hit_are_worth_more() -> None:
    tier = HostTier(100)
    for number in range(5):
        offer(tier, number, group="good")
        tier.used(named(number))
        offer(tier, 100 + number, group="bad")
    for number in range(5):
        offer(tier, 200 + number, group="good")
    assert sum(named(number) in tier for number in range(100, 105)) == 0
    assert sum(named(number) in tier for number in range(200, 205)) == 5


def test_cleared_is_empty_and_works() -> None:
    tier = HostTier(20)
    offer(tier, 1, kind="checkpoint")
    tier.clear()
    assert (len(tier), tier.bytes_used, tier.num_checkpoints, tier.num_pages) == (0, 0, 0, 0)
    assert offer(tier, 1)
    assert tier.violations() == []


@pytest.mark.parametrize("seed", range(4))
def test_bookkeeping_holds_through_random_calls(seed: int) -> None:
    rng, tier = Random(seed), HostTier(200)
    for _ in range(3000):
        number, kind = rng.randrange(60), rng.choice(("page", "checkpoint"))
        action = rng.random()
        if action < 0.6:
            size = rng.choice((4, 10, 33))
            before = tier.bytes_used
            kept = offer(tier, number, rng.random() * 5 - 0.5, size, rng.choice("ab"), kind)
            assert kept == (named(number, kind) in tier)
            assert kept or tier.bytes_used == before, "nothing is dropped for what is not kept"
        elif action < 0.9:
            tier.used(named(number, kind))
        elif action < 0.99:
            tier.drop(named(number, kind))
        else:
            tier.clear()
        assert tier.bytes_used <= 200
        assert tier.violations() == []


def test_a_read_that_fails_changes_nothing_that_counts() -> None:
    tier = HostTier(30)

    def fail() -> bytes:
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        tier.offer(Offer(named(1), 10, fail, Worth("", 1.0)))
    assert tier.violations() == []
    assert named(1) not in tier


# Names of prefixes


def test_a_name_is_of_all_tokens_before_it() -> None:
    one, other = chain(b"aabbcc", "", 2), chain(b"aabbdd", "", 2)
    assert len(one) == 3
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert chain(b"bbaacc", "", 2)[2] != one[2]
    assert chain(b"aabbc", "", 2) == one[:2]


def test_namespaces_have_names_of_their_own() -> None:
    assert not set(chain(b"aabbcc", "a", 2)) & set(chain(b"aabbcc", "b", 2))
    assert chain(b"", "a", 2) == []
