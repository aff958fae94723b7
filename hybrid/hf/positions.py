"""Positions that a model remembers outside of its cache, and rotary frequencies that depend on the longest one.

Vision models keep `rope_deltas`: by how much the positions of the last prompt's images moved those of the text after
them. The next prompt resumed from a cached prefix would be shifted as well, so the deltas are reset.

Rotary embeddings of the types "dynamic" and "longrope" compute all positions of a pass with other frequencies once the
sequence is longer than the original context. What was cached before that no longer matches, so such a sequence is
refused, and what an answer has beyond the limit is not cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


class RopeDeltas:
    """The `rope_deltas` of a model's modules.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = [module for module in model.modules() if "rope_deltas" in vars(module)]

    @contextmanager
    def reset(self) -> Iterator[None]:
        """Within this context there are none; those of before are restored after it."""
        before = [vars(owner)["rope_deltas"] for owner in self._owners]
        for owner in self._owners:
            owner.rope_deltas = None
        try:
            yield
        finally:
            for owner, deltas in zip(self._owners, before, strict=True):
                owner.rope_deltas = deltas


def rope_limit(model: nn.Module) -> int | None:
    """Up to how many tokens the rotary frequencies of a model do not change; None: they never do."""
    limits = []
    for module in model.modules():
        rope_types = vars(module).get("rope_type")
        if rope_types is None:
            continue
        by_layer = rope_types if isinstance(rope_types, dict) else {None: rope_types}
        for layer_type, rope_type in by_layer.items():
            parameters = module.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            if rope_type == "longrope":
                limits.append(parameters["original_max_position_embeddings"])
            elif "dynamic" in rope_type:
                limits.append(module.original_max_seq_len - 1)
    return min(limits, default=None)
