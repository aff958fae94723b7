"""What a copy of a checkpoint is likely to save: one rule for all tiers."""

from __future__ import annotations

from hybrid.tiers.rate import Cost, Rate
from hybrid.tiers.reuse import Reuse
from hybrid.tiers.tier import Note


class Savings:
    """What a hit on a checkpoint saves: the time to compute what it alone saves, less that of restoring it.

    What it alone saves are the tokens of the pages that only it needs, since no other checkpoint is at one of them; at
    least, what it saved when it left the device.

    Args:
        compute: seconds per token that is computed.
        reuse: how likely hits are.
        page_bytes, checkpoint_bytes: of a page and of a checkpoint.
        page_size: tokens per page.

    Attributes:
        compute, reuse: as given.
    """

    def __init__(self, compute: Rate, reuse: Reuse, page_bytes: int, checkpoint_bytes: int, page_size: int) -> None:
        self.compute: Rate = compute
        self.reuse: Reuse = reuse
        self._page_bytes = page_bytes
        self._checkpoint_bytes = checkpoint_bytes
        self._page_size = page_size

    def num_bytes(self, num_alone: int) -> int:
        """Bytes of a checkpoint and of the pages that only it needs."""
        return self._checkpoint_bytes + num_alone * self._page_bytes

    def seconds(self, num_tokens: int, num_alone: int, cost: Cost) -> float:
        """Time that a hit saves; 0: restoring takes longer than computing.

        Args:
            num_tokens: that it saved when it left the device.
            num_alone: pages that only it needs.
            cost: of a restore.
        """
        saved = max(num_tokens, num_alone * self._page_size)
        return max(0.0, saved * self.compute.value - cost.seconds(self.num_bytes(num_alone)))

    def tokens(self, num_tokens: int, num_alone: int, cost: Cost) -> int:
        """The same in tokens that are computed in that time."""
        return int(self.seconds(num_tokens, num_alone, cost) / self.compute.value) if self.compute.value > 0 else 0

    def per_byte(self, note: Note, num_alone: int, cost: Cost) -> float:
        """What a checkpoint is likely to save, per byte: for a tier that learns of no policy how likely a hit is."""
        chance = self.reuse.probability(note.group)
        return chance * self.seconds(note.num_tokens, num_alone, cost) / max(1, self.num_bytes(num_alone))
