"""A collection of which samples are drawn: each item is as likely as another, and what is gone is never drawn."""

from collections import Counter
from random import Random

from hybrid.tiers.sampled import Sampled


def test_a_sample_of_few_is_all_of_them() -> None:
    items: Sampled[str] = Sampled(Random(0))
    for item in "abcb":
        items.add(item)
    assert sorted(items.sample(3)) == ["a", "b", "c"]
    assert (len(items), "a" in items, "d" in items) == (3, True, False)
    items.discard("a")
    items.discard("a")
    assert sorted(items) == ["b", "c"]
    items.clear()
    assert items.sample(3) == []


def test_what_is_drawn_is_there_and_everything_is_drawn() -> None:
    rng = Random(1)
    items, there = Sampled[int](Random(2)), set[int]()
    for _ in range(4000):
        number = rng.randrange(200)
        if rng.random() < 0.5:
            items.add(number)
            there.add(number)
        else:
            items.discard(number)
            there.discard(number)
        sample = items.sample(8)
        assert set(sample) <= there
        assert len(set(sample)) == len(sample) == min(8, len(there))
        assert items.violations("the collection") == []
    counts = Counter(number for _ in range(4000) for number in items.sample(8))
    assert set(counts) == there
    assert max(counts.values()) < 2 * min(counts.values())
