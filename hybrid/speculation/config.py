"""The settings of speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.errors import ArgumentError
from hybrid.speculation.drafter import Drafter

BY_NAME = ("cache", "mtp")
"""The drafters that are known by name."""

MAX_DRAFTS = 63
"""The largest `max_drafts`."""


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Who drafts, and how much.

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
        object.__setattr__(self, "drafters", tuple(self.drafters))
        for drafter in self.drafters:
            if not isinstance(drafter, Drafter) and drafter not in BY_NAME:
                raise ArgumentError(
                    f"SpeculationConfig: a drafter must be one of {', '.join(BY_NAME)}, or a hybrid.Drafter; got "
                    f"{drafter!r}"
                )
        if not self.drafters:
            raise ArgumentError("SpeculationConfig: drafters is empty; give one, or speculation=None to the engine")
        if isinstance(self.max_drafts, bool) or not isinstance(self.max_drafts, int):
            raise ArgumentError(f"SpeculationConfig: max_drafts must be an integer, got {self.max_drafts!r}")
        if not 1 <= self.max_drafts <= MAX_DRAFTS:
            raise ArgumentError(f"SpeculationConfig: max_drafts must be from 1 to {MAX_DRAFTS}, got {self.max_drafts}")

    @property
    def uses_predictor(self) -> bool:
        """Whether the checkpoint's own predictor drafts."""
        return "mtp" in self.drafters

    @classmethod
    def of(cls, speculation: SpeculationConfig | str | None) -> SpeculationConfig | None:
        """What an engine was given: a configuration, or the names of drafters joined by "+".

        Raises:
            ArgumentError: it is neither.
        """
        if speculation is None or isinstance(speculation, SpeculationConfig):
            return speculation
        if not isinstance(speculation, str):
            raise ArgumentError(
                f"speculation must be None, the name of a drafter ({', '.join(BY_NAME)}), or a "
                f"hybrid.SpeculationConfig; got {speculation!r}"
            )
        return cls(drafters=tuple(speculation.split("+")))
