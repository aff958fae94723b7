"""What a request got from a tier."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.units import format_bytes


@dataclass(frozen=True, slots=True)
class Restored:
    """What a request got from the tiers.

    Attributes:
        tier: where it came from: "host memory", "disk", "host memory and disk".
        num_tokens: tokens that are not computed because of it.
        num_bytes: that were copied to the device.
        seconds: that it took to read and write them.
        waited: seconds that the request waited until they were read: less, where they were read while it was queued.
        refused: why something deeper was not restored; empty: there was nothing deeper.
    """

    tier: str
    num_tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    refused: str = ""

    def __str__(self) -> str:
        parts = []
        if self.num_tokens:
            size, time = format_bytes(self.num_bytes), 1000 * self.seconds
            waited = f", waited {1000 * self.waited:.1f} ms" if self.waited >= 1e-4 else ""
            parts.append(f"{self.num_tokens} tokens restored from {self.tier}, {size} in {time:.1f} ms{waited}")
        if self.refused:
            parts.append(self.refused)
        return "; ".join(parts)
