"""Small passes by the interpreted kernels: an engine whose model the interpreter computes in a second, the steps that
it would take, and what they do to memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hybrid import CacheConfig, Engine, EngineConfig, SpeculationConfig
from hybrid.engine.build import LoadedModel, build_cache
from hybrid.engine.padding import Padding
from hybrid.engine.planner import Plan, plan
from hybrid.engine.step import Step
from hybrid.kernels import ops
from hybrid.models.qwen3_5 import Qwen3_5ForCausalLM
from support.checkpoints import layers, text_config
from support.engines import GRID

CPU = torch.device("cpu")
VOCAB = 128
SIZES = {
    "layer_types": layers("LF"),
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
"""Of the model."""


@contextmanager
def interpreted() -> Iterator[None]:
    """Within this, models call our Triton kernels."""

    def of(name: str) -> Any:
        kernel = ops.OPS[name].kernel
        return lambda *args, batch_invariant=True: kernel(*args)

    with patch.dict(os.environ, HYBRID_KERNELS="triton"), patch.multiple(ops, **{name: of(name) for name in ops.OPS}):
        yield


def engine_of(deterministic: bool, speculation: SpeculationConfig | None = None) -> Engine:
    """An engine on a model of two layers."""
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(text_config(**SIZES), GRID)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    loaded = LoadedModel(model=model, device=CPU)
    config = CacheConfig(page_size=GRID, chunk_size=GRID, deterministic=deterministic)
    limits = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, enforce_eager=True)
    return Engine(loaded, build_cache(loaded, config, (32, 16)), limits, speculation=speculation)


def memory_of(engine: Engine) -> list[Tensor]:
    """The pages, and the tensors of the state slots."""
    return [engine.cache.kv, *engine.cache.state_tensors.values()]


def computed(engine: Engine, made: Plan) -> tuple[Tensor, list[Tensor]]:
    """The logits of a plan and the memory after it, which is put back."""
    before = [tensor.clone() for tensor in memory_of(engine)]
    with interpreted():
        logits = engine.model(made.on(CPU)[0], engine.cache.kv, engine.cache.state_tensors)
    return logits[: num_logits(made)].clone(), put_back(engine, before)


def num_logits(made: Plan) -> int:
    """Rows of logits that are not padding."""
    return sum(own.count for own in made.sampled)


def put_back(engine: Engine, before: list[Tensor]) -> list[Tensor]:
    """Put the contents of the memory back; returns what they were."""
    after = [tensor.clone() for tensor in memory_of(engine)]
    for tensor, kept in zip(memory_of(engine), before, strict=True):
        tensor.copy_(kept)
    return after


def planned(engine: Engine, step: Step, padding: Padding | None) -> Plan:
    """The plan of a step."""
    return plan(step, GRID, GRID, engine.deterministic, padding)
