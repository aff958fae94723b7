"""The policies of eviction, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

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


POLICIES: dict[str, Callable[..., Policy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
    "mru": MostRecentlyUsed,
    "filo": FirstInLastOut,
    "priority": LowestPriority,
    "flop_aware": FlopAware,
    "lhd": LearnedHitDensity,
}
"""Ours, by name. The options of one are the arguments of its class, numbers with defaults."""


Eviction = str | Mapping[str, Any] | Policy
"""The choice of a policy: see `policy_of`."""


def policy_of(eviction: Eviction) -> Policy:
    """The policy that `CacheConfig.eviction` asks for.

    Args:
        eviction: the name of one of ours, with options as in "flop_aware:alpha=0.5,attention=0" or without; a mapping
            of the same, {"name": "flop_aware", "alpha": 0.5}; or the user's own object.

    Raises:
        ArgumentError: no policy has that name, or it has no such option, or not with that value; or the object is not
            an instance of a subclass of `Policy`.
    """
    if isinstance(eviction, str):
        name, _, given = eviction.partition(":")
        return _made(name.strip(), _options_in(given, eviction))
    if isinstance(eviction, Mapping):
        options: dict[Any, Any] = dict(eviction)
        if not isinstance(name := options.pop("name", None), str):
            raise ArgumentError(
                f'eviction as a mapping has the "name" of a policy beside its options; got {shown(eviction)}'
            )
        return _made(name, options)
    if not isinstance(eviction, Policy):
        raise ArgumentError(
            "eviction must be the name of a policy, or an instance of a subclass of hybrid.Policy with a method "
            f"rank(facts) -> float; got {shown(eviction)}"
        )
    if eviction.order not in (None, "rising", "any"):
        raise ArgumentError(f'the order of a policy must be None, "rising" or "any", got {shown(eviction.order)}')
    return eviction


def options_of(name: str) -> dict[str, Any]:
    """The options of a policy of `POLICIES`, and their default values: the arguments of its class."""
    return {option.name: option.default for option in signature(POLICIES[name]).parameters.values()}


def _options_in(text: str, eviction: str) -> dict[str, str]:
    """The options in what follows the colon after a policy's name, as text."""
    options = {}
    for part in text.split(",") if text.strip() else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ArgumentError(
                f'options of a policy are written as "name:option=value,option=value"; got {shown(eviction)}'
            )
        options[name] = value
    return options


def _made(name: str, given: Mapping[Any, Any]) -> Policy:
    if name not in POLICIES:
        raise ArgumentError(f"no eviction policy is named {shown(name)}; there are: {', '.join(POLICIES)}")
    known, options = options_of(name), {}
    for option, value in given.items():
        if option not in known:
            has = ", ".join(f"{one} ({default!r})" for one, default in known.items())
            raise ArgumentError(
                f"eviction policy {name} has no option {shown(option)}; it has {has if has else 'no options'}"
            )
        options[option] = _value_of(f"{option} of eviction policy {name}", value, type(known[option]))
    return POLICIES[name](**options)


def _value_of(what: str, value: Any, kind: type) -> Any:
    """The value of an option, in the type of its default: from that type, or from text."""
    try:
        found = kind(value) if not isinstance(value, bool) and isinstance(value, str | int | kind) else math.nan
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ArgumentError(f"{what} must be a finite {kind.__name__}, got {shown(value)}")
    return found
