"""How large everything in `bench/gpu.py` is: as in Qwen3.5-9B, or tiny for a rehearsal."""

from dataclasses import dataclass
from typing import Any

import torch

LAYER_TYPES = ["linear_attention"] * 3 + ["full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        dtype: of weights, inputs, keys and values.
        layers: of the pools that the kernels are measured on; one of them is used at a time.
        decode: (requests, tokens of each) of decode attention.
        extend: (requests, tokens before) of extend attention.
        steps: requests of a delta rule decode.
        copies: states of a copy.
        new: tokens of an extend.
        prompts: tokens of a prompt for the chunk rule and the convolution.
        many: prompts at once, beside one alone.
        rows: of the elementwise kernels.
        products: rows of the matrix products.
        matrices: (out, in, name) of their weights.
        experts: (how many, experts per row, inputs, inner size) of a mixture of experts.
        expert_rows: rows of its products.
        config: of the model, for `Qwen3_5TextConfig`.
        memory: of a cache.
        batched_tokens: of a step of the engine.
        document, question: tokens of a hit, and of what follows it.
        decoding: (requests, tokens of each) of the decode steps.
        steps_timed: decode steps that are measured.
        group: (requests, shared tokens, least and most own tokens, new tokens) of the prefix-sharing workload.
        runs: of the engine's figures.
        copied: bytes of the roofline's copy.
        matmul: rows and columns of its matrices.
    """

    dtype: torch.dtype
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    decode: tuple[tuple[int, int], ...]
    extend: tuple[tuple[int, int], ...]
    new: int
    steps: tuple[int, ...]
    copies: tuple[int, ...]
    prompts: tuple[int, ...]
    many: int
    rows: tuple[int, ...]
    products: tuple[int, ...]
    matrices: tuple[tuple[int, int, str], ...]
    experts: tuple[int, int, int, int]
    expert_rows: tuple[int, ...]
    config: dict[str, Any]
    memory: str
    batched_tokens: int
    document: int
    question: int
    decoding: tuple[tuple[int, int], ...]
    steps_timed: int
    group: tuple[int, int, int, int, int]
    runs: int
    copied: int
    matmul: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def kv_bytes(self) -> int:
        """Of a token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Of the recurrent state of a sequence in one layer."""
        return self.value_heads * self.key_dim * self.value_dim * 4


FULL = Sizes(
    dtype=torch.bfloat16,
    layers=2,
    heads=16,
    kv_heads=4,
    head_dim=256,
    page_size=64,
    key_heads=16,
    value_heads=32,
    key_dim=128,
    value_dim=128,
    width=4,
    decode=((1, 4096), (8, 4096), (64, 4096), (1, 32768), (8, 32768), (64, 32768), (1, 131072)),
    extend=((1, 0), (1, 4096), (1, 32768), (4, 4096)),
    new=512,
    steps=(1, 8, 64, 256),
    copies=(1, 8, 32),
    prompts=(512, 2048, 8192),
    many=8,
    rows=(1, 32, 2048),
    products=(1, 8, 32, 512, 2048),
    matrices=(
        (8192, 4096, "in_proj_qkv"),
        (12288, 4096, "gate_proj"),
        (4096, 12288, "down_proj"),
        (248320, 4096, "lm_head"),
    ),
    experts=(256, 8, 2048, 512),  # Qwen3.5-35B-A3B
    expert_rows=(1, 32, 256, 2048, 8192),
    config={  # Qwen3.5-9B: the class defaults of transformers 5.23, said here since other versions may have others
        "layer_types": LAYER_TYPES * 8,
        "rope_parameters": ROPE,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    memory="24GiB",
    batched_tokens=2048,
    document=8192,
    question=64,
    decoding=((1, 2048), (32, 2048)),
    steps_timed=40,
    group=(48, 1024, 32, 128, 16),
    runs=7,
    copied=2 << 30,
    matmul=8192,
)

TOY = Sizes(
    dtype=torch.float32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    page_size=16,
    key_heads=1,
    value_heads=2,
    key_dim=16,
    value_dim=16,
    width=4,
    decode=((1, 32), (2, 48)),
    extend=((1, 0), (2, 32)),
    new=16,
    steps=(1, 3),
    copies=(1, 2),
    prompts=(32,),
    many=2,
    rows=(1, 5),
    products=(1, 20),
    matrices=((48, 32, "a toy"),),
    experts=(6, 2, 32, 16),
    expert_rows=(1, 9),
    config={
        "layer_types": LAYER_TYPES,
        "rope_parameters": ROPE,
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    },
    memory="2MiB",
    batched_tokens=64,
    document=64,
    question=16,
    decoding=((1, 32), (3, 32)),
    steps_timed=3,
    group=(4, 32, 2, 8, 2),
    runs=2,
    copied=1 << 16,
    matmul=64,
)
