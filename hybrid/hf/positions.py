"""Positions that a model remembers outside of its cache, and rotary frequencies that depend on the longest position.

Vision models store `rope_deltas`: the offset of text positions after the images of the last prompt. The next prompt
that is resumed from a cached prefix would be shifted as well, so they are reset.

Rotary embeddings of the types "dynamic" and "longrope" change the frequencies of all positions once a sequence is
longer than the original context. Tokens cached before that no longer match, so longer prompts are refused, and the part
of an answer beyond the limit is not cached.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class RopeDeltas:
    """The `rope_deltas` of a model's modules.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners: list[Any] = [module for module in model.modules() if "rope_deltas" in vars(module)]
        self._lock = threading.RLock()

    @contextmanager
    def reset(self) -> Iterator[None]:
        """Within this context there are none. The former ones are restored after it. Since a model remembers those of
        one call, other threads wait until then."""
        if not self._owners:
            yield
            return
        with self._lock, self._kept():
            yield

    def set(self, deltas: Sequence[int] | None, device: torch.device) -> None:
        """Those of the prompts of a call: what is to be added to the positions of tokens after them. None: nothing."""
        for owner in self._owners:
            owner.rope_deltas = None if deltas is None else torch.tensor(deltas, device=device).unsqueeze(1)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        before = [vars(owner)["rope_deltas"] for owner in self._owners]
        for owner in self._owners:
            owner.rope_deltas = None
        try:
            yield
        finally:
            for owner, deltas in zip(self._owners, before, strict=True):
                owner.rope_deltas = deltas


def rope_limit(model: nn.Module) -> int | None:
    """The number of tokens up to which the rotary frequencies of a model do not change; None: they never do."""
    limits = [limit for module in model.modules() if "rope_type" in vars(module) for limit in _limits(module)]
    return min(limits, default=None)


def _limits(rotary: Any) -> Iterator[int]:
    """Limits of one rotary embedding of transformers, whose types may differ by layer."""
    types, parameters = rotary.rope_type, rotary.config.rope_parameters
    if isinstance(types, str):
        types, parameters = {"": types}, {"": parameters}
    for layer_type, rope_type in types.items():
        if rope_type == "longrope":
            yield parameters[layer_type]["original_max_position_embeddings"]
        elif "dynamic" in rope_type:
            yield rotary.original_max_seq_len - 1
