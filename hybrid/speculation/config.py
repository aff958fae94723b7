"""The settings of speculation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybrid import checks
from hybrid.checks import BOOLEANS, Rule, RuleError, integers, numbers
from hybrid.errors import ArgumentError
from hybrid.speculation.drafter import Drafter

BY_NAME = ("cache", "mtp")
"""The drafters that are known by name."""

MAX_DRAFTS = 63
"""The largest `max_drafts`."""

PRIORS = numbers("from 0 to 1", lambda prior: 0 <= prior <= 1)
"""`Drafter.prior`."""


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
        checks.settings(self, drafters=DRAFTERS, max_drafts=integers(1, MAX_DRAFTS), adaptive=BOOLEANS)

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


def _read_drafters(value: Iterable[str | Drafter]) -> tuple[str | Drafter, ...]:
    drafters = tuple(value)
    if not drafters:
        raise RuleError("is empty; give one, or speculation=None to the engine")
    for drafter in drafters:
        if isinstance(drafter, Drafter):
            _check_described(drafter)
        elif drafter not in BY_NAME:
            names = ", ".join(BY_NAME)
            raise RuleError(f"must each be one of {names}, or a hybrid.Drafter; got {checks.shown(drafter)}")
    return drafters


DRAFTERS = Rule(
    "a tuple of names and hybrid.Drafter objects, such as ('cache',)",
    lambda value: isinstance(value, Iterable) and not isinstance(value, str),
    _read_drafters,
)


def _check_described(drafter: Drafter) -> None:
    """Check what a drafter says of itself."""
    kind = f"drafter {type(drafter).__name__}"
    checks.text(f"{kind}: name", drafter.name)
    PRIORS.check(f"{kind}: prior", drafter.prior)
