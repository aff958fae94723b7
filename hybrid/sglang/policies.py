"""Policies of eviction, by the names of SGLang's flag `--radix-eviction-policy`, and the options of this backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hybrid.errors import ArgumentError
from hybrid.tree.policies import POLICIES
from hybrid.tree.policy import Policy

DEFAULT = "lhd"
"""The policy where `--radix-eviction-policy` is not given."""

NAMES = tuple(POLICIES)
"""The policies that there are. Names that SGLang has too mean what they mean there, for states as well."""

CLASSIC = frozenset({"lru", "lfu", "fifo", "mru", "filo", "priority"})
"""Policies as SGLang has them: an edge of the tree is evicted as a whole, its pages with its state."""


@dataclass(frozen=True, slots=True)
class Options:
    """What `--radix-eviction-policy-config` may say, as JSON.

    Attributes:
        admission: a state is kept only if it is worth more than the one that would be evicted for it.
        ghost_branches: a prompt's state is taken where it leaves a prefix that was cached once, also when the pages
            there were evicted. SGLang saves one state per prefill: such a state takes the place of the prompt's last.
        seed: of the samples of candidates; the same on all ranks.
    """

    admission: bool = True
    ghost_branches: bool = False
    seed: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> Options:
        """The options of a configuration.

        Raises:
            ArgumentError: there is no such option, or its value is of another type.
        """
        given = dict(config or {})
        known = {field.name: type(field.default) for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ArgumentError(
                    f"--radix-eviction-policy-config has {name!r}, which backend hybrid does not know; it knows: "
                    f"{', '.join(known)}"
                )
            if type(value) is not known[name]:
                raise ArgumentError(
                    f"--radix-eviction-policy-config: {name} must be of type {known[name].__name__}, got {value!r:.100}"
                )
        return cls(**given)


def policy_named(name: str) -> Policy:
    """The policy of a name, in capitals or not.

    Raises:
        ArgumentError: there is none of that name.
    """
    made = POLICIES.get(name.lower())
    if made is None:
        raise ArgumentError(
            f"backend hybrid has no eviction policy {name!r:.100}; it has: {', '.join(NAMES)}. SGLang's slru and tlru "
            "are for trees without states: leave --radix-eviction-policy out for lhd"
        )
    return made()
