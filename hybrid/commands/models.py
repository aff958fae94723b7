"""`hybrid models`: the model families that run, what computes them, and what they keep.

A state weighs as much as the keys and values of some tokens: a checkpoint pays where a hit at it saves more than that
many tokens in pages would.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hybrid.commands.commands import Outcome
from hybrid.doctor.sizes import Sizes
from hybrid.models.loading import ARCHITECTURES
from hybrid.units import format_bytes

PAGE = 64
"""Tokens of a page, as by default."""

DELTA = "gated delta rule, convolution", "compiled", "Triton"
MAMBA = "Mamba-2, convolution", "compiled", "plain torch"
WINDOWS = "sliding windows", "compiled", "plain torch for prompts"
KDA = "Kimi delta attention, convolution", "compiled", "plain torch"
OLMO = "gated delta rule, convolution", "compiled", "plain torch"
LIGHTNING = "lightning attention", "compiled", "plain torch"
MAMBA1 = "Mamba-1, convolution", "compiled", "plain torch"
SINKS = "sliding windows with sinks", "compiled", "plain torch"
GRIFFIN = "linear recurrence, convolution, sliding windows", "compiled", "plain torch"
SHORT = "short convolutions", "compiled", "plain torch"
NOTHING = "none", "", ""

STATES: dict[str, tuple[str, str, str]] = {
    "bailing_hybrid": KDA,
    "bamba": MAMBA,
    "falcon_h1": MAMBA,
    "gemma3_text": WINDOWS,
    "gpt_oss": SINKS,
    "granitemoehybrid": MAMBA,
    "jamba": MAMBA1,
    "kimi_linear": KDA,
    "lfm2": SHORT,
    "lfm2_moe": SHORT,
    "llama": NOTHING,
    "minimax": LIGHTNING,
    "nemotron_h": MAMBA,
    "olmo_hybrid": OLMO,
    "qwen3": NOTHING,
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA,
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "recurrent_gemma": GRIFFIN,
}
"""By model type the layers whose state is kept, and what computes them on a CPU and on a GPU. Attention, products,
norms and experts are compiled on a CPU, and Triton kernels on a GPU, in all of them."""


@dataclass(frozen=True)
class Published:
    """A published size of a family.

    Attributes:
        name: as it is published.
        config: the class of transformers that describes it.
        facts: what of its configuration differs from the class, as far as it says what is kept.
    """

    name: str
    config: str
    facts: Mapping[str, Any]


def _mixed(count: int, linear: str, full: int) -> list[str]:
    """Types of layers, those of full attention at the end: where they are does not matter for what is kept."""
    return [linear] * (count - full) + ["full_attention"] * full


PUBLISHED = (
    Published("Qwen3.5-35B-A3B", "Qwen3_5MoeTextConfig", {}),
    Published("Qwen3-Next-80B-A3B", "Qwen3NextConfig", {}),
    Published(
        "LFM2-350M",
        "Lfm2Config",
        {"hidden_size": 1024, "num_attention_heads": 16, "layer_types": _mixed(16, "conv", 6), "num_hidden_layers": 16},
    ),
    Published(
        "LFM2-1.2B", "Lfm2Config", {"hidden_size": 2048, "layer_types": _mixed(16, "conv", 6), "num_hidden_layers": 16}
    ),
    Published("LFM2-8B-A1B", "Lfm2MoeConfig", {"layer_types": _mixed(24, "conv", 6), "num_hidden_layers": 24}),
    Published(
        "granite-4.0-h-small",
        "GraniteMoeHybridConfig",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 40,
            "layer_types": _mixed(40, "linear_attention", 4),
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "mamba_d_state": 128,
        },
    ),
    Published(
        "Nemotron-3-Nano-30B-A3B",
        "NemotronHConfig",
        {
            "hidden_size": 2688,
            "layers_block_type": ["linear_attention"] * 23 + ["moe"] * 23 + ["full_attention"] * 6,
            "num_key_value_heads": 2,
            "mamba_num_heads": 64,
        },
    ),
    Published(
        "Falcon-H1-0.5B",
        "FalconH1Config",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 36,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_state": 128,
        },
    ),
    Published(
        "Falcon-H1-7B",
        "FalconH1Config",
        {
            "hidden_size": 3072,
            "num_hidden_layers": 44,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
        },
    ),
    Published("Olmo-Hybrid-7B", "OlmoHybridConfig", {}),
    Published("Kimi-Linear-48B-A3B", "KimiLinearConfig", {}),
    Published("Ling-3.0-Flash", "BailingHybridConfig", {}),
    Published("Jamba-v0.1", "JambaConfig", {}),
    Published(
        "MiniMax-Text-01",
        "MiniMaxConfig",
        {
            "num_attention_heads": 64,
            "head_dim": 128,
            "num_hidden_layers": 80,
            "layer_types": _mixed(80, "linear_attention", 10),
        },
    ),
    Published("RecurrentGemma-2B", "RecurrentGemmaConfig", {"num_key_value_heads": 1}),
    Published(
        "RecurrentGemma-9B",
        "RecurrentGemmaConfig",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 38,
            "num_attention_heads": 16,
            "num_key_value_heads": 1,
            "lru_width": 4096,
        },
    ),
    Published("gpt-oss-20b", "GptOssConfig", {"num_hidden_layers": 24}),
    Published("gpt-oss-120b", "GptOssConfig", {}),
    Published("Llama-3.1-8B", "LlamaConfig", {"num_key_value_heads": 8}),
    Published("Qwen3-8B", "Qwen3Config", {"num_hidden_layers": 36, "num_key_value_heads": 8}),
)
"""Sizes that people run, from public descriptions of their configurations."""


@dataclass(frozen=True)
class SizeRow:
    """The sizes of a model, in bfloat16, states of Mamba-2 and of the delta rule in float32.

    Attributes:
        model: its name.
        page_bytes: of `PAGE` tokens.
        state_bytes: of one sequence.
        state_tokens: tokens whose keys and values weigh as much as a state; 0: pages are empty.
    """

    model: str
    page_bytes: int
    state_bytes: int
    state_tokens: int

    @classmethod
    def of(cls, sizes: Sizes) -> SizeRow:
        """The row of a model."""
        tokens = round(sizes.state_bytes / sizes.token_bytes) if sizes.token_bytes > 1 else 0
        return cls(sizes.name, PAGE * sizes.token_bytes, sizes.state_bytes, tokens)


def published_sizes() -> list[Sizes]:
    """The sizes of `PUBLISHED`, which transformers' classes describe. What the installed transformers lacks is left
    out."""
    import transformers

    found = []
    for model in PUBLISHED:
        kind: Any = getattr(transformers, model.config, None)
        if kind is not None:
            config = kind(**model.facts)
            spec = ARCHITECTURES[config.model_type].spec(config, torch.bfloat16)
            found.append(Sizes.of_spec(spec, model.name))
    return found


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Print the families, and what models keep: the one that is given, or published ones."""
    sizes = [Sizes.of(args.model)] if args.model is not None else published_sizes()
    rows = [SizeRow.of(each) for each in sizes]
    if args.model is None:
        table = Table("model type", "state of", "computed on a CPU", "on a GPU", title="model families")
        for name, (state, cpu, gpu) in STATES.items():
            table.add_row(name, state, cpu, gpu)
        console.print(table)
    table = Table("model", f"page of {PAGE} tokens", "state", "a state weighs", title="what models keep")
    for row in rows:
        weighs = f"{row.state_tokens} tokens" if row.state_tokens else ""
        state = format_bytes(row.state_bytes) if row.state_bytes else ""
        table.add_row(row.model, format_bytes(row.page_bytes), state, weighs)
    console.print(table)
    families = {name: dict(zip(("state", "cpu", "gpu"), own, strict=True)) for name, own in STATES.items()}
    return Outcome(True, {"families": families, "models": [asdict(row) for row in rows]})
