"""Qwen3-Next (as 80B-A3B): the layers of Qwen3.5 MoE, with input projections stored in another order.

On disk the linear layers have two projections, `in_proj_qkvz` and `in_proj_ba`, whose rows are ordered by key head: its
q, its k, then v and z of the value heads that use it. Loading reorders them as in Qwen3.5, so that the layers are the
same.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.models.layers import MLP
from hybrid.models.moe import ExpertsOnDisk, SparseMoE
from hybrid.models.qwen3_5 import Qwen3_5ForCausalLM
from hybrid.models.weights import Layouts, Source

PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "in_proj_qkv": ("in_proj_qkvz", ("q", "k", "v")),
    "in_proj_z": ("in_proj_qkvz", ("z",)),
    "in_proj_b": ("in_proj_ba", ("b",)),
    "in_proj_a": ("in_proj_ba", ("a",)),
}
"""For each projection the one on disk that contains it, and its parts there."""


def projection_layouts(parameter: str, config: Any) -> Layouts | None:
    """Return the layout of a projection of a linear layer; None: the parameter is none."""
    name = next((name for name in PARTS if parameter.endswith(f".linear_attn.{name}.weight")), None)
    if name is None:
        return None
    stored, parts = PARTS[name]
    rows = torch.cat([_rows(config, stored)[part] for part in parts])
    return ((Source(parameter.replace(f".{name}.", f".{stored}."), rows=rows),),)


def _rows(config: Any, stored: str) -> dict[str, Tensor]:
    """Rows of a projection on disk, by part, in the order of heads."""
    key_heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    group = config.linear_num_value_heads // key_heads
    values = group * config.linear_value_head_dim
    if stored == "in_proj_ba":
        widths = {"b": group, "a": group}
    else:
        widths = {"q": key_dim, "k": key_dim, "v": values, "z": values}
    rows = torch.arange(key_heads * sum(widths.values()), device="cpu").view(key_heads, -1)
    parts = rows.split(list(widths.values()), dim=1)
    return {name: part.flatten() for name, part in zip(widths, parts, strict=True)}


class Qwen3NextForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3-Next with its head: of a `Qwen3NextConfig`."""

    parts_on_disk = (projection_layouts, ExpertsOnDisk("num_experts", "moe_intermediate_size"))

    @classmethod
    def feed_forward(cls, config: Any, index: int) -> nn.Module:
        """Make the feed-forward part of a layer: a mixture of experts, or a dense one."""
        has_experts = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
        if has_experts and index not in config.mlp_only_layers:
            return SparseMoE(config, config.norm_topk_prob)
        return MLP(config.hidden_size, config.intermediate_size)
