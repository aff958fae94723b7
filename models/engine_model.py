"""What an engine asks of a model."""

from typing import Any

import torch
from torch import nn


class EngineModel(nn.Module):
    """A model in an engine. One of this very class stands where something else computes, and has a configuration alone.

    Args:
        config: of transformers.

    Attributes:
        keeps_bits: a hit can give the bits of a cold run, whatever else is in the batch.
        takes_drafts: it keeps the states between the drafts of a pass.
        takes_adapters: adapters can change its products.
        takes_images: it computes with embeddings that are given.
        is_warmed_up: it is tried with steps of every size before the first request, on a GPU.
    """

    keeps_bits: bool = True
    takes_drafts: bool = True
    takes_adapters: bool = True
    takes_images: bool = True
    is_warmed_up: bool = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config: Any = config

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of activations; None: it computes nothing."""
        return None

    @property
    def decode_can_be_recorded(self) -> bool:
        """Tell whether steps that decode can be captured."""
        return False

    @property
    def prompts_can_be_recorded(self) -> bool:
        """Tell whether passes with prompts can be captured."""
        return False
