"""How long something takes per unit, as measured lately."""

from __future__ import annotations

WEIGHT = 0.2
"""Weight of the latest measurement of a rate."""

FADING = 0.01
"""Part of a rate that is forgotten whenever it prevents a measurement."""


class Rate:
    """Seconds per unit, as measured lately.

    Args:
        assumed: before anything is measured.
    """

    def __init__(self, assumed: float) -> None:
        self.value: float = assumed
        self.is_measured: bool = False

    def note(self, units: int, seconds: float) -> None:
        """`units` took `seconds`."""
        if units > 0:
            latest = seconds / units
            self.value = latest if not self.is_measured else (1 - WEIGHT) * self.value + WEIGHT * latest
            self.is_measured = True

    def fade(self) -> None:
        """Nothing is done at this rate: without this, one slow measurement would be the last."""
        self.value *= 1 - FADING
