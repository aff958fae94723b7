"""`hybrid parity` with little to do."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hybrid.commands import parity


def only_repeated_prompts(patch: pytest.MonkeyPatch, logits: bool = False) -> None:
    """Let `hybrid parity` run one scenario, and compare logits if they are asked for."""
    patch.setattr(parity, "SCENARIOS", (parity.repeated_prompt,))
    for name in ("drafts", "files", "predicted"):
        patch.setattr(parity, name, lambda *_: [])
    if not logits:
        patch.setattr(parity, "against_transformers", lambda *_: [])
        patch.setattr(parity, "transformers_logits", lambda *_: np.zeros(()))
    patch.setattr(parity, "second_process", lambda _: ThreadPoolExecutor(1))
