"""Options that both plugins have, read from what the other engine passes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from hybrid.checks import shown
from hybrid.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    """Options of a tree beside another engine's cache.

    Attributes:
        admission: a state is kept only if it is worth more than what would be evicted for it.
        ghost_branches: a prompt's state is also made where it leaves a prefix that was cached once, when its pages
            were evicted.
        anchors: states are kept along long prompts too (`hybrid.units.anchors`).
        seed: of the samples of candidates; the same on all ranks.
    """

    admission: bool = True
    ghost_branches: bool = False
    anchors: bool = True
    seed: int = 0

    @classmethod
    def read(cls, where: str, given: Any) -> Self:
        """Read the options in an object of JSON.

        Args:
            where: the option of the other engine that it is in, for messages.
            given: the object; None: all are the defaults.

        Raises:
            ArgumentError: it is no object, there is no such option, or a value is of another type.
        """
        if given is not None and not isinstance(given, Mapping):
            raise ArgumentError(f"{where} must be an object with options, got {shown(given)}")
        known = {field.name: type(field.default) for field in fields(cls)}
        for name, value in (given or {}).items():
            if name not in known:
                raise ArgumentError(f"{where} has no option {shown(name)}; it has: {', '.join(known)}")
            if type(value) is not known[name]:
                raise ArgumentError(f"{where}: {name} must be of type {known[name].__name__}, got {shown(value)}")
        return cls(**(given or {}))
