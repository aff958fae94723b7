"""The size of a save or a load."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Transfer:
    """The size of a save or a load.

    Attributes:
        checkpoints: positions at which requests can resume.
        pages: pages.
        num_bytes: of them together.
        present: checkpoints that were there already.
        copies: checkpoints that went to host memory or disk, because there was no memory for them on the device.
        skipped: checkpoints that were not loaded, by reason.
    """

    checkpoints: int = 0
    pages: int = 0
    num_bytes: int = 0
    present: int = 0
    copies: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        text = f"{self.checkpoints} checkpoints and {self.pages} pages, {self.num_bytes} bytes"
        if self.present:
            text += f"; {self.present} checkpoints were there"
        if self.copies:
            text += f"; {self.copies} checkpoints went to host memory or disk"
        return text + "".join(f"; {count} skipped: {reason}" for reason, count in self.skipped.items())
