"""What a copy of a checkpoint is worth: one rule for all tiers."""

from __future__ import annotations

import math
from typing import Protocol

from hybrid.tiers.rate import Cost, Rate
from hybrid.tiers.reuse import Reuse
from hybrid.tiers.tier import Note

WORTHLESS = -math.inf
"""The value of what is not worth keeping."""


class Judge(Protocol):
    """Says how likely hits are: the policy of the device, which keeps learning from prefixes that are gone."""

    def worth(self, note: Note, tokens_saved: int, num_bytes: int) -> float:
        """The value of a copy at present, per byte: the chance of a hit, times what it saves.

        Args:
            tokens_saved: that a hit saves.
            num_bytes: that are free without it.
        """
        ...

    def known(self, note: Note) -> Note:
        """The note of a copy of an earlier process, as one that this process knows: its age begins now."""
        ...


class Savings:
    """What a hit on a checkpoint saves: the time to compute what it alone saves, less that of restoring it.

    What it alone saves are the tokens of the pages that only it needs, since no other checkpoint is at one of them; at
    least, what it saved when it left the device.

    Args:
        compute: seconds per token that is computed.
        reuse: how likely hits were.
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
        self._judge: Judge | None = None

    def follow(self, judge: Judge) -> None:
        """It says how likely hits are."""
        self._judge = judge

    def num_bytes(self, num_alone: int) -> int:
        """Bytes of a checkpoint and of the pages that only it needs."""
        return self._checkpoint_bytes + num_alone * self._page_bytes

    def tokens(self, num_tokens: int, num_alone: int, cost: Cost) -> int:
        """What a hit saves, in tokens that are computed in that time; 0: restoring takes longer than computing.

        Args:
            num_tokens: that it saved when it left the device.
            num_alone: pages that only it needs.
            cost: of a restore.
        """
        saved = max(num_tokens, num_alone * self._page_size)
        seconds = saved * self.compute.value - cost.seconds(self.num_bytes(num_alone))
        return int(seconds / self.compute.value) if seconds > 0 else 0

    def gain(self, num_tokens: int, seconds: float, *costs: Cost) -> float:
        """Seconds that restoring saves over computing. Where it saves none, costs that were measured fade: later they
        are measured again.

        Args:
            seconds: that restoring takes.
            costs: by which that was found.
        """
        gain = num_tokens * self.compute.value - seconds
        if gain <= 0:
            for cost in costs:
                cost.fade()
        return gain

    def pays(self, note: Note, cost: Cost, is_certain: bool) -> bool:
        """Whether a checkpoint that leaves the device is likely to save as much time as copying it and its pages takes,
        which is taken to be that of restoring them.

        What it saves is what it saved there: the checkpoint before it will be offered too, and no tier has it yet.

        Args:
            cost: of a restore.
            is_certain: it is copied whatever is likely, if a restore would save time.
        """
        saved = self.gain(note.num_tokens, cost.seconds(self._checkpoint_bytes), cost)
        if saved <= 0:
            return False
        copying = cost.seconds(self.num_bytes(note.num_tokens // self._page_size))
        return is_certain or saved * self.reuse.probability(note.group) > copying

    def value(self, note: Note, cost: Cost, num_alone: int) -> float:
        """What a checkpoint is worth at present, per byte. Arguments as those of `tokens`."""
        assert self._judge is not None
        tokens = self.tokens(note.num_tokens, num_alone, cost)
        return self._judge.worth(note, tokens, self.num_bytes(num_alone)) if tokens > 0 else WORTHLESS

    def known(self, note: Note) -> Note:
        """See `Judge.known`."""
        assert self._judge is not None
        return self._judge.known(note)
