"""What the benchmarks of models on a CPU share: a random Qwen3.5, random prompts, and what is timed."""

from __future__ import annotations

import random
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hybrid import Engine, SamplingParams
from hybrid.models.torch_functions import use_torch_functions

VOCAB = 8192

SIZES: dict[str, int] = {
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""Of the model: 51M parameters."""

RNG = random.Random(1)


@contextmanager
def random_model(args: Namespace, **sizes: int) -> Iterator[tuple[Path, Any]]:
    """A folder with a random Qwen3.5, and transformers' model of it. torch gets the threads that were asked for."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), save_random_model(Path(folder), **sizes)


def save_random_model(path: Path, **sizes: int) -> Any:
    """A random Qwen3.5, by default of 51M parameters, saved by transformers; returns transformers' model."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    sizes = {**SIZES, **sizes}
    config = Qwen3_5TextConfig(vocab_size=VOCAB, tie_word_embeddings=True, initializer_range=0.05, **sizes)
    model = Qwen3_5ForCausalLM(config).eval()
    use_torch_functions(model)
    model.save_pretrained(path)
    return model


def ids(count: int) -> list[int]:
    """A random prompt: two of them share nothing."""
    return RNG.choices(range(3, VOCAB), k=count)


def greedy(count: int) -> SamplingParams:
    """Exactly `count` tokens."""
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


def first_token(engine: Engine, prompt: list[int]) -> float:
    """Seconds to the first token of an answer."""
    seconds = engine.generate([prompt], greedy(1), progress=False)[0].time_to_first_token
    assert seconds is not None
    return seconds


def decode_step(engine: Engine, requests: int, length: int, steps: int) -> float:
    """Median seconds of a step in which requests with prompts of a length decode together."""
    outputs = engine.generate([ids(length) for _ in range(requests)], greedy(steps), progress=False)
    return 1 / statistics.median(output.tokens_per_second or 0.0 for output in outputs)
