"""Models with full attention in every layer: Llama, and Qwen3, whose queries and keys have norms. There is no state:
pages are all that a hit needs.
"""

from typing import Any

from hybrid.models.attention import Attention, NormedAttention, PlainAttention
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import MLP
from hybrid.models.mixers import Block


class LlamaForCausalLM(CausalLM):
    """Llama with its head: of a `LlamaConfig`."""

    layer_kinds = ()
    attention: type[Attention] = PlainAttention

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer."""
        mlp = MLP(config.hidden_size, config.intermediate_size, bool(getattr(config, "mlp_bias", False)))
        return (
            Block("input_layernorm", self_attn=cls.attention(config)),
            Block("post_attention_layernorm", mlp=mlp),
        )


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 with its head: of a `Qwen3Config`."""

    attention = NormedAttention

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        if "sliding_attention" in (config.layer_types or ()):
            return "sliding_attention in layer_types is not supported; set use_sliding_window to false"
        return super().unsupported(config)
