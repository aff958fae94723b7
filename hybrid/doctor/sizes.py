"""The sizes of a model that a cache depends on: what it keeps per token and per sequence, and in how many layers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from hybrid.doctor.request import UNIT
from hybrid.errors import ArgumentError, CheckpointError, UnsupportedModelError
from hybrid.models.loading import ARCHITECTURES, TINY
from hybrid.spec import HybridSpec
from hybrid.units import ceil_div

VLLM_BLOCK = 16
"""Tokens of a block of vLLM where there are no states."""


STATES = ("conv_states", "recurrent_states")
"""What a layer of a cache of transformers keeps per sequence."""

BY_HAND = "give bytes per token, bytes of a state and the layers that keep them, as --model 32768,51511296,8,24"


def _configuration(path: Path) -> Any:
    """The configuration of a text model.

    Raises:
        CheckpointError: there is none.
    """
    from transformers import AutoConfig

    try:
        if path.is_dir() and not (path / "config.json").is_file():
            raise OSError("no folder with a config.json")
        return AutoConfig.from_pretrained(path).get_text_config()
    except Exception as error:  # transformers raises many kinds for a malformed configuration
        shown = str(error).strip().partition("\n")[0][:200]
        raise CheckpointError(
            f"--model {path}: no configuration was found ({shown}); give a config.json, its folder or a hub id as "
            f"'Qwen/Qwen3.5-0.8B', or {BY_HAND.removeprefix('give ')}"
        ) from error


def _num_bytes(kept: Any) -> int:
    """Bytes of a tensor, or of all in a list or by name; of what is none: 0."""
    if isinstance(kept, torch.Tensor):
        return kept.numel() * kept.element_size()
    parts = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list | tuple) else ()
    return sum(map(_num_bytes, parts))


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
        token_bytes: keys and values of one token, all layers; 1 where pages are empty.
        state_bytes: the state of one sequence, all layers; 0: there is none.
        attention_layers, state_layers: layers that keep them.
        name: of the model, for reports.
        block_size: tokens of a block of vLLM; None: as many as vLLM chooses on a GPU.
        crossover: tokens of context at which attention takes as much to compute for a token as all else: the model's
            active parameters over 2 x layers of attention x heads x size of a head; None: not known.

    Raises:
        ArgumentError: a number is negative, a model keeps nothing per token, or a block is no multiple of 16 tokens.
    """

    token_bytes: int
    state_bytes: int
    attention_layers: int = 8
    state_layers: int = 24
    name: str = "given sizes"
    block_size: int | None = None
    crossover: int | None = None

    def __post_init__(self) -> None:
        if min(self.token_bytes, self.attention_layers) < 1 or min(self.state_bytes, self.state_layers) < 0:
            raise ArgumentError(
                "sizes of a model: bytes per token and layers of attention must be at least 1, those of states at "
                f"least 0; got {self.token_bytes}, {self.state_bytes}, {self.attention_layers}, {self.state_layers}"
            )
        if self.block_size is not None and (self.block_size < UNIT or self.block_size % UNIT):
            raise ArgumentError(f"--block-size must be a multiple of {UNIT} tokens; got {self.block_size}")
        if self.crossover is not None and self.crossover < 1:
            raise ArgumentError(f"a crossover is a number of tokens, at least 1; got {self.crossover}")

    @classmethod
    def of_spec(cls, spec: HybridSpec, name: str) -> Sizes:
        """The sizes of a model that is described by what it keeps. One that keeps nothing per token counts as one layer
        of one byte, which is what its pages take."""
        layers = sum(prod(tensor.outer[:1]) for tensor in spec.tokens)
        states = max((tensor.shape[0] for tensor in spec.state), default=0)
        per_token = sum(tensor.num_bytes(64) for tensor in spec.tokens) // 64
        return cls(max(per_token, 1), sum(tensor.num_bytes for tensor in spec.state), max(layers, 1), states, name)

    @classmethod
    def of(cls, model: str | Path, dtype: torch.dtype | None = None) -> Sizes:
        """The sizes of a model, by name or by hand.

        Args:
            model: a folder with a config.json, such a file of any name, a hub id, or bytes per token and per state as
                "32768,51511296", with the numbers of layers that keep them if they are not 8 and 24:
                "32768,51511296,8,24", and with the crossover, which saved compute needs: "32768,51511296,8,24,140000".
                Of a hub id the configuration alone is downloaded.
            dtype: in which the model runs; None: that of the configuration.

        Raises:
            CheckpointError: there is no such configuration. UnsupportedModelError: what its model keeps was not found.
            ArgumentError: the numbers are not two, four or five.
        """
        parts = str(model).split(",")
        if all(part.strip().isdigit() for part in parts):
            if len(parts) not in (2, 4, 5):
                raise ArgumentError(
                    f"--model {model}: give bytes per token and bytes of a state, as 32768,51511296, or these and the "
                    "layers of attention and of states, as 32768,51511296,8,24, or these and the tokens of context at "
                    "which attention takes as much as all else, as 32768,51511296,8,24,140000"
                )
            numbers = [int(part) for part in parts]
            layers = numbers[2:4] or [8, 24]
            crossover = numbers[4] if len(numbers) > 4 else None
            return cls(numbers[0], numbers[1], layers[0], layers[1], str(model), crossover=crossover)
        path = TINY if model == "tiny" else Path(model)
        config = _configuration(path)
        if dtype is None:
            dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
        family = ARCHITECTURES.get(config.model_type)
        if family is not None:
            return cls.of_spec(family.spec(config, dtype), str(model))
        return cls.of_configuration(config, dtype, str(model))

    @classmethod
    def of_configuration(cls, config: Any, dtype: torch.dtype, name: str) -> Sizes:
        """The sizes of a model of transformers, by what its cache has after a prompt that is computed without numbers.

        Args:
            config: of the text model.

        Raises:
            UnsupportedModelError: it has no cache, or its code runs on a GPU only.
        """
        from transformers import AutoModelForCausalLM

        length = 8
        try:
            with torch.device("meta"), torch.no_grad():
                model = AutoModelForCausalLM.from_config(config, dtype=dtype).to("meta")
                cache = model(input_ids=torch.zeros((1, length), dtype=torch.long), use_cache=True).past_key_values
            kept = [vars(layer) for layer in cache.layers]
        except Exception as error:  # whatever the code of a model raises without a device
            raise UnsupportedModelError(
                f"{name}: what a {config.model_type!r} model keeps could not be found ({str(error)[:120]}); {BY_HAND}"
            ) from error
        tokens = [_num_bytes(layer.get("keys")) + _num_bytes(layer.get("values")) for layer in kept]
        states = [sum(_num_bytes(layer.get(key)) for key in STATES) for layer in kept]
        if not any(tokens):
            raise UnsupportedModelError(f"{name}: a {config.model_type!r} model keeps nothing per token; {BY_HAND}")
        return cls(sum(tokens) // length, sum(states), sum(map(bool, tokens)), sum(map(bool, states)), name)

    def cost(self, num_tokens: int) -> float:
        """What computing the first tokens of a prompt takes, in tokens without context."""
        return num_tokens + (num_tokens * num_tokens / (2 * self.crossover) if self.crossover else 0.0)

    @property
    def vllm_block_size(self) -> int:
        """Tokens of a block; that of vLLM's choice is such that a page of attention is no smaller than a state of a
        layer."""
        if self.block_size is not None:
            return self.block_size
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
