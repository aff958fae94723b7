"""How large everything in `bench/gpu` is: as in Qwen3.5-9B, or tiny for a rehearsal."""

from dataclasses import dataclass, replace
from typing import Any

import torch

GATE, DOWN, HEAD = (12288, 4096, "gate_proj"), (4096, 12288, "down_proj"), (248320, 4096, "lm_head")
SMALL = ((1024, 4096, "k_proj"), (256, 12288, "few outputs"))


@dataclass(frozen=True)
class Sizes:
    """How large everything is: by default as in Qwen3.5-9B, experts as in Qwen3.5-35B-A3B."""

    dtype: torch.dtype = torch.bfloat16  # of weights, inputs, keys and values
    model: tuple[int, int, int, int] = (248320, 4096, 12288, 32)  # vocabulary, hidden size, inner size, layers
    heads: tuple[int, int, int] = (16, 4, 256)  # of attention: query heads, KV heads, size of a head
    linear_heads: tuple[int, int, int, int] = (16, 32, 128, 128)  # key heads, value heads, size of a key, of a value
    width: int = 4  # of the convolution
    layers: int = 2  # of the pools that kernels are measured on; one of them is used at a time
    page_size: int = 64
    decode: tuple[tuple[int, int], ...] = (  # (requests, tokens of each) of attention
        *((requests, tokens) for tokens in (4096, 32768) for requests in (1, 8, 64)),
        (1, 131072),
    )
    extend: tuple[tuple[int, int], ...] = ((1, 0), (1, 4096), (1, 32768), (4, 4096))  # (requests, tokens before)
    new: int = 512  # tokens of an extend
    steps: tuple[int, ...] = (1, 8, 64, 256)  # requests of a delta rule decode
    copies: tuple[int, ...] = (1, 8, 32)  # states
    prompts: tuple[int, ...] = (512, 2048, 8192)  # tokens of a prompt, for the chunk rule and the convolution
    many: int = 8  # prompts at once, besides one alone
    rows: tuple[int, ...] = (1, 32, 2048)  # of the elementwise kernels
    products: tuple[int, ...] = (1, 8, 32, 512, 2048)  # rows of the matrix products
    matrices: tuple[tuple[int, int, str], ...] = ((8192, 4096, "in_proj_qkv"), GATE, DOWN, *SMALL, HEAD)
    experts: tuple[int, int, int, int] = (256, 8, 2048, 512)  # their number, experts per row, inputs, inner size
    expert_rows: tuple[int, ...] = (1, 32, 256, 2048, 8192)
    memory: str = "24GiB"  # of a cache
    batched_tokens: int = 2048  # of a step of the engine
    document: int = 8192  # tokens of a hit
    question: int = 64  # tokens after it
    decoding: tuple[tuple[int, int], ...] = ((1, 2048), (32, 2048))  # (requests, tokens of each) of decode steps
    steps_timed: int = 40
    group: tuple[int, int, int, int, int] = (48, 1024, 32, 128, 16)  # requests, shared, own (least, most), new tokens
    runs: int = 7  # of the engine's figures
    copied: int = 2 << 30  # bytes of the roofline's copy
    matmul: int = 8192  # rows and columns of its matrices

    @property
    def smoke(self) -> "Sizes":
        """One size of each kind, and a model of few layers."""
        lists = ("decode", "extend", "steps", "copies", "prompts", "rows", "products", "matrices", "expert_rows")
        one = {name: getattr(self, name)[:2][-1:] for name in lists}
        return replace(
            self, **one, many=1, memory="4GiB" if self.model[3] > 4 else self.memory, model=(*self.model[:3], 4)
        )

    @property
    def config(self) -> dict[str, Any]:
        """Of the model: the class defaults of transformers 5.23, since other versions may have others."""
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        return {
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (self.model[3] // 4),
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
            **dict(
                zip(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), self.model, strict=True)
            ),
            **dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), self.heads, strict=True)),
            **{f"linear_{name}": value for name, value in zip(names, self.linear_heads, strict=True)},
            "linear_conv_kernel_dim": self.width,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        }

    @property
    def channels(self) -> int:
        key_heads, value_heads, key_dim, value_dim = self.linear_heads
        return 2 * key_heads * key_dim + value_heads * value_dim

    @property
    def kv_bytes(self) -> int:
        """Of a token in one layer."""
        return 2 * self.heads[1] * self.heads[2] * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Of the recurrent state of a sequence in one layer."""
        _, value_heads, key_dim, value_dim = self.linear_heads
        return value_heads * key_dim * value_dim * 4

    @property
    def window_bytes(self) -> int:
        """Of the convolution's window of a sequence in one layer."""
        return (self.width - 1) * self.channels * self.dtype.itemsize


FULL = Sizes()

COMPILED = replace(
    FULL,
    decode=((1, 4096), (64, 4096)),
    extend=((2, 3072),),
    new=1024,
    steps=(1, 64),
    copies=(4,),
    prompts=(2048,),
    many=2,
    rows=(64,),
    products=(1, 32, 64, 2048),
    matrices=(GATE, DOWN, *SMALL),
    expert_rows=(1, 64, 256, 2048),
)
"""What `resources.py` compiles: a case of every kind."""

TOY = Sizes(
    dtype=torch.float32,
    model=(128, 32, 48, 4),
    heads=(4, 2, 16),
    linear_heads=(1, 2, 16, 16),
    layers=2,
    page_size=16,
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
