"""Engines whose steps run as recorded graphs, or are launched ahead, on a machine without a GPU."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from hybrid import Engine
from hybrid.engine.capture import Capture
from hybrid.engine.cuda_graphs import CapturedPasses
from hybrid.engine.model_runner import ModelRunner


def replays(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Records by remembering: runs the function again, into the same tensor."""
    logits = run().clone()
    return lambda: logits.copy_(run()), logits


def with_graphs(
    engine: Engine, capture: Capture = replays, max_prompt_tokens: int = 0
) -> tuple[Engine, CapturedPasses]:
    """The engine, its passes through graphs that were captured in this way."""
    cache = engine.cache
    graphs = CapturedPasses(engine.model, cache.kv, cache.state_tensors, engine.device, capture, max_prompt_tokens)
    runner = ModelRunner(engine.model, cache, engine.device, engine.deterministic, graphs)
    return Engine(engine.loaded, cache, engine.config, runner=runner), graphs


def overlapping(engine: Engine, overlap: bool = True) -> Engine:
    """Launch steps before the results of the last one are waited for, as on a GPU."""
    return Engine(engine.loaded, engine.cache, replace(engine.config, overlap=overlap))
