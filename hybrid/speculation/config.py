"""The settings of speculation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybrid import checks
from hybrid.errors import ArgumentError
from hybrid.speculation.drafter import Drafter

BY_NAME = ("cache", "mtp")
"""The drafters that are known by name."""

MAX_DRAFTS = 63
"""The largest `max_drafts`."""


@checks.known_names
@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Drafters, and how much they draft.

    Args:
        drafters: each "cache", "mtp" or a `Drafter`. Drafts of several form one tree; the most probable are computed.
        max_drafts: number of drafts of one request in one pass, at most. A pass computes them in addition to one token.
        adaptive: compute as many drafts as pay, by measured acceptance and measured times of passes. Otherwise as many
            as the drafters propose, up to `max_drafts`.

    Raises:
        ArgumentError: a value is out of range.
    """

    drafters: Sequence[str | Drafter] = ("cache",)
    max_drafts: int = 15
    adaptive: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.drafters, str) or not isinstance(self.drafters, Iterable):
            raise ArgumentError(
                "SpeculationConfig: drafters must be a tuple of names and hybrid.Drafter objects, such as ('cache',); "
                f"got {checks.shown(self.drafters)}"
            )
        object.__setattr__(self, "drafters", tuple(self.drafters))
        for drafter in self.drafters:
            if not isinstance(drafter, Drafter) and drafter not in BY_NAME:
                raise ArgumentError(
                    f"SpeculationConfig: each of drafters must be one of {', '.join(BY_NAME)}, or a hybrid.Drafter; "
                    f"got {checks.shown(drafter)}"
                )
            if isinstance(drafter, Drafter):
                _check_described(drafter)
        if not self.drafters:
            raise ArgumentError("SpeculationConfig: drafters is empty; give one, or speculation=None to the engine")
        max_drafts = checks.integer("SpeculationConfig: max_drafts", self.max_drafts, 1, MAX_DRAFTS)
        object.__setattr__(self, "max_drafts", max_drafts)
        object.__setattr__(self, "adaptive", checks.boolean("SpeculationConfig: adaptive", self.adaptive))

    @property
    def uses_predictor(self) -> bool:
        """Tell whether the checkpoint's own predictor drafts."""
        return "mtp" in self.drafters

    @classmethod
    def of(cls, speculation: SpeculationConfig | str | None) -> SpeculationConfig | None:
        """Make a configuration of what an engine was given: one, or the names of drafters joined by "+".

        Raises:
            ArgumentError: it is neither.
        """
        if speculation is None or isinstance(speculation, SpeculationConfig):
            return speculation
        if not isinstance(speculation, str):
            raise ArgumentError(
                f"speculation must be None, the name of a drafter ({', '.join(BY_NAME)}), or a "
                f"hybrid.SpeculationConfig; got {checks.shown(speculation)}"
            )
        return cls(drafters=tuple(speculation.split("+")))


def _check_described(drafter: Drafter) -> None:
    """Check what a drafter says of itself."""
    kind = f"drafter {type(drafter).__name__}"
    if not isinstance(drafter.name, str):
        raise ArgumentError(f"{kind}: name must be a string; got {checks.shown(drafter.name)}")
    if not 0 <= checks.number(f"{kind}: prior", drafter.prior) <= 1:
        raise ArgumentError(f"{kind}: prior must be from 0 to 1; got {checks.shown(drafter.prior)}")
