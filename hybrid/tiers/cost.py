"""The duration of work, as measured lately."""

from __future__ import annotations

WEIGHT = 0.2
"""Weight of the latest measurement of a rate."""

FADING = 0.01
"""Part of a rate that is forgotten whenever it prevents a measurement."""

PRIOR_WEIGHT = 0.1
"""Weight of what was assumed of a transfer, beside that of the latest measurement, which is 1."""

PRIOR_BYTES = 2**20
"""Size of a transfer of which something was assumed; the other is of no bytes."""


class MeasuredTime:
    """Seconds per unit, as measured lately.

    Args:
        assumed: before anything is measured.
    """

    def __init__(self, assumed: float) -> None:
        self.value: float = assumed
        self.is_measured: bool = False

    def note(self, units: int, seconds: float) -> None:
        """Learn that `units` took `seconds`."""
        if units > 0:
            latest = seconds / units
            self.value = latest if not self.is_measured else (1 - WEIGHT) * self.value + WEIGHT * latest
            self.is_measured = True

    def fade(self) -> None:
        """Forget a little, since nothing is done at this rate: one slow measurement would be the last."""
        self.value *= 1 - FADING


class Cost:
    """Seconds that a transfer takes: some for each, and some for each byte. A line through what was measured lately.

    Args:
        latency: seconds per transfer that are assumed until they are measured.
        per_byte: seconds per byte, likewise.
    """

    def __init__(self, latency: float, per_byte: float) -> None:
        self._assumed = (0, latency), (PRIOR_BYTES, latency + PRIOR_BYTES * per_byte)
        self._scale = 1.0  # of what was assumed
        self._sums = [0.0] * 5  # of measurements: weight, bytes, seconds, bytes squared, bytes times seconds
        self.latency: float = latency
        self.per_byte: float = per_byte

    def seconds(self, num_bytes: int) -> float:
        """Estimate what a transfer takes."""
        return self.latency + num_bytes * self.per_byte

    def note(self, num_bytes: int, seconds: float) -> None:
        """Learn that a transfer took so long."""
        self._sums = [(1 - WEIGHT) * each for each in self._sums]
        self._add(self._sums, 1.0, num_bytes, seconds)
        self._fit()

    def fade(self) -> None:
        """Forget a little, since a transfer is not done because it would take this long: one slow one would be the
        last."""
        self._scale *= 1 - FADING
        self._sums[2] *= 1 - FADING
        self._sums[4] *= 1 - FADING
        self._fit()

    @staticmethod
    def _add(sums: list[float], weight: float, num_bytes: int, seconds: float) -> None:
        terms = (1.0, num_bytes, seconds, num_bytes * num_bytes, num_bytes * seconds)
        for at, term in enumerate(terms):
            sums[at] += weight * term

    def _fit(self) -> None:
        sums = [*self._sums]
        for num_bytes, seconds in self._assumed:
            self._add(sums, PRIOR_WEIGHT, num_bytes, seconds * self._scale)
        weight, size, seconds, squares, products = sums
        spread = weight * squares - size * size
        self.per_byte = max(0.0, (weight * products - size * seconds) / spread)
        self.latency = max(0.0, (seconds - self.per_byte * size) / weight)
