"""The layers of Qwen's models for multi-token prediction: they predict the tokens after the next one.

Their input is the norm of the last hidden state and the norm of the next token's embedding, concatenated and multiplied
by `fc`; then follow layers of full attention, a norm, and the model's own head. Checkpoints store them under `mtp.`;
they are loaded on request.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from hybrid.models.layers import Linear, RMSNorm


class MultiTokenPredictor(nn.Module):
    """The weights of these layers.

    Args:
        layers: decoder layers of full attention.
    """

    def __init__(self, config: Any, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.pre_fc_norm_hidden: RMSNorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_embedding: RMSNorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc: Linear = Linear(2 * config.hidden_size, config.hidden_size)
        self.layers: nn.ModuleList = nn.ModuleList(layers)
        self.norm: RMSNorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
