"""Pages that a tier expects, because it has what follows them."""

from __future__ import annotations

from hybrid.tiers.ranking import Worth
from hybrid.tiers.tier import Offer

MAX_EXPECTED = 1 << 17
"""Pages that are expected at a time; the first is forgotten when there are more."""


class Expected:
    """Pages that have not come yet, by the names of their prefixes, and what they may save per byte.

    What leaves the device leaves it from the end of a prefix to its beginning: what follows a page comes before it.
    """

    def __init__(self) -> None:
        self._expected: dict[bytes, Worth] = {}  # per byte

    def follow(self, offer: Offer, worth: Worth) -> None:
        """There is a copy of something: the page before it is worth as much per byte."""
        before = next(offer.path, None)
        if before is not None:
            self._expected.pop(before, None)
            self._expected[before] = Worth(worth.group, worth.seconds / max(1, offer.num_bytes))
            if len(self._expected) > MAX_EXPECTED:
                del self._expected[next(iter(self._expected))]

    def take(self, offer: Offer) -> Worth | None:
        """What a page that comes may save; None: nothing follows it there."""
        worth = self._expected.pop(offer.name[1], None)
        return worth._replace(seconds=worth.seconds * offer.num_bytes) if worth is not None else None

    def clear(self) -> None:
        """Nothing is expected."""
        self._expected.clear()
