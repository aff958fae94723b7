"""The sizes of a model that a cache depends on: what it keeps per token and per sequence, and in how many layers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from hybrid.doctor.request import UNIT
from hybrid.errors import ArgumentError
from hybrid.models.loading import ARCHITECTURES, open_checkpoint
from hybrid.spec import HybridSpec
from hybrid.units import ceil_div

VLLM_BLOCK = 16
"""Tokens of a block of vLLM where there are no states."""


@dataclass(frozen=True)
class Endless:
    """A memory in which everything stays.

    Attributes:
        num_tokens: of all that will come.
    """

    num_tokens: int


Memory = int | Endless
"""Bytes of a cache, or one that is never full."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

    Attributes:
        token_bytes: keys and values of one token, all layers.
        state_bytes: the state of one sequence, all layers; 0: there is none.
        attention_layers, state_layers: layers that keep them.
        name: of the model, for reports.

    Raises:
        ArgumentError: a number is negative, or a model keeps nothing per token.
    """

    token_bytes: int
    state_bytes: int
    attention_layers: int = 8
    state_layers: int = 24
    name: str = "given sizes"

    def __post_init__(self) -> None:
        if min(self.token_bytes, self.attention_layers) < 1 or min(self.state_bytes, self.state_layers) < 0:
            raise ArgumentError(
                "sizes of a model: bytes per token and layers of attention must be at least 1, those of states at "
                f"least 0; got {self.token_bytes}, {self.state_bytes}, {self.attention_layers}, {self.state_layers}"
            )

    @classmethod
    def of_spec(cls, spec: HybridSpec, name: str) -> Sizes:
        """The sizes of a model that is described by what it keeps."""
        layers = sum(prod(tensor.outer[:1]) for tensor in spec.tokens)
        states = max((tensor.shape[0] for tensor in spec.state), default=0)
        per_token = sum(tensor.num_bytes(64) for tensor in spec.tokens) // 64
        return cls(per_token, sum(tensor.num_bytes for tensor in spec.state), layers, states, name)

    @classmethod
    def of(cls, model: str | Path) -> Sizes:
        """The sizes of a model, by name or by hand.

        Args:
            model: a folder with a config.json, this file, a hub id, or bytes per token and per state as
                "32768,51511296", with the numbers of layers that keep them if they are not 8 and 24:
                "32768,51511296,8,24".

        Raises:
            CheckpointError: there is no such model; UnsupportedModelError: it is of another family.
            ArgumentError: the numbers are not two or four.
        """
        parts = str(model).split(",")
        if all(part.strip().isdigit() for part in parts):
            if len(parts) not in (2, 4):
                raise ArgumentError(
                    f"--model {model}: give bytes per token and bytes of a state, as 32768,51511296, or these and the "
                    "layers of attention and of states, as 32768,51511296,8,24"
                )
            numbers = [int(part) for part in parts]
            layers = numbers[2:] or [8, 24]
            return cls(numbers[0], numbers[1], layers[0], layers[1], str(model))
        path = Path(model)
        checkpoint = open_checkpoint(path.parent if path.name == "config.json" else model)
        dtype = getattr(checkpoint.config, "dtype", None)
        family = ARCHITECTURES[checkpoint.model_type]
        spec = family.spec(checkpoint.config, dtype if isinstance(dtype, torch.dtype) else torch.bfloat16)
        return cls.of_spec(spec, str(model))

    @property
    def vllm_block_size(self) -> int:
        """Tokens of a block that vLLM chooses: a page of attention is no smaller than a state of a layer."""
        if not self.state_bytes:
            return VLLM_BLOCK
        state = ceil_div(self.state_bytes, self.state_layers)
        return ceil_div(ceil_div(state * self.attention_layers, self.token_bytes), UNIT) * UNIT

    def vllm_groups(self, block_size: int) -> tuple[int, int, int]:
        """The groups of layers of vLLM, each of as many layers as the kind with fewer of them has.

        Returns:
            Groups of attention, groups of states, and the bytes of a block.
        """
        size = min(self.attention_layers, self.state_layers or self.attention_layers)
        page = block_size * ceil_div(self.token_bytes, self.attention_layers)
        return ceil_div(self.attention_layers, size), ceil_div(self.state_layers, size), size * page
