"""The policies of eviction, by name."""

from __future__ import annotations

from collections.abc import Callable

from hybrid.checks import shown
from hybrid.errors import ArgumentError
from hybrid.tree.lhd import LearnedHitDensity
from hybrid.tree.policy import AgingPolicy, Facts, Floats, Ints, Order, Policy


class LeastRecentlyUsed(Policy):
    """The least recently used is evicted first."""

    order: Order | None = "rising"

    def rank(self, facts: Facts) -> float:
        return facts.last_used


class LeastFrequentlyUsed(Policy):
    """The least frequently used is evicted first; among equals the least recently used."""

    order: Order | None = "rising"

    def rank(self, facts: Facts) -> float:
        return facts.hits * 2.0**40 + facts.last_used


class FirstInFirstOut(Policy):
    """The oldest is evicted first."""

    order: Order | None = "rising"

    def rank(self, facts: Facts) -> float:
        return facts.created


class MostRecentlyUsed(Policy):
    """The most recently used is evicted first."""

    order: Order | None = "any"

    def rank(self, facts: Facts) -> float:
        return -facts.last_used


class FirstInLastOut(Policy):
    """The newest is evicted first."""

    order: Order | None = "rising"

    def rank(self, facts: Facts) -> float:
        return -facts.created


class LowestPriority(Policy):
    """The lowest priority is evicted first; among equals the least recently used."""

    order: Order | None = "rising"

    def rank(self, facts: Facts) -> float:
        return facts.priority * 2.0**40 + facts.last_used


class FlopAware(AgingPolicy):
    """Recency plus computation saved per byte (after Marconi, MLSys 2025), both relative to the largest seen lately.

    Computation is counted in tokens of the forward pass: those since the nearest checkpoint above, and attention over
    the tokens before them.

    Args:
        alpha: weight of the computation saved per byte against recency.
        attention: cost that one token of context adds to a token, relative to the rest of its cost.
    """

    def __init__(self, alpha: float = 1.0, attention: float = 1e-5) -> None:
        self._alpha = alpha
        self._attention = attention
        self._densest = 1e-30

    def weigh(self, facts: Facts) -> tuple[int, float]:
        tokens = facts.tokens_saved
        saved = tokens + tokens * self._attention * (facts.num_tokens - tokens / 2)
        density = saved / max(facts.bytes_freed, 1)
        self._densest = max(self._densest, density)
        return 0, density

    def ranks(self, groups: Ints, weights: Floats, ages: Ints) -> Floats:
        return 1 / (1 + ages) + (self._alpha / self._densest) * weights

    def evicted(self, facts: Facts) -> None:
        """Let the largest density seen decay, so that one outlier does not set the scale forever."""
        self._densest *= 0.99


POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
    "mru": MostRecentlyUsed,
    "filo": FirstInLastOut,
    "priority": LowestPriority,
    "flop_aware": FlopAware,
    "lhd": LearnedHitDensity,
}


def policy_of(eviction: str | Policy) -> Policy:
    """The policy that `CacheConfig.eviction` names: one of ours by name, or the user's own object.

    Raises:
        ArgumentError: no policy has that name, or the object is not an instance of a subclass of `Policy`.
    """
    if isinstance(eviction, str):
        if eviction not in POLICIES:
            raise ArgumentError(f"no eviction policy is named {shown(eviction)}; there are: {', '.join(POLICIES)}")
        return POLICIES[eviction]()
    if not isinstance(eviction, Policy):
        raise ArgumentError(
            "eviction must be the name of a policy, or an instance of a subclass of hybrid.Policy with a method "
            f"rank(facts) -> float; got {shown(eviction)}"
        )
    if eviction.order not in (None, "rising", "any"):
        raise ArgumentError(f'the order of a policy must be None, "rising" or "any", got {shown(eviction.order)}')
    return eviction
