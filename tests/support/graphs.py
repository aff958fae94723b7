"""Engines whose steps run as recorded graphs, or are launched ahead, on a machine without a GPU."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from hybrid import Engine, SpeculationConfig
from hybrid.engine.capture import WARM_UPS, Capture
from hybrid.engine.captured_passes import CapturedPasses
from hybrid.engine.model_runner import ModelRunner


def replays(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Records by remembering: runs the function again, into the same tensor."""
    logits = run().clone()
    return lambda: logits.copy_(run()), logits


def in_place(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Records by remembering, as `CudaCapture` does it: after runs that take memory, and for functions that write the
    same tensor each time."""
    for _ in range(WARM_UPS):
        run()
    first = run()

    def again() -> None:
        assert run().data_ptr() == first.data_ptr()

    return again, first


def with_graphs(
    engine: Engine, capture: Capture = replays, max_prompt_tokens: int = 0, on_gpu: bool = False
) -> tuple[Engine, CapturedPasses]:
    """The engine, its passes through graphs that were captured in this way."""
    cache = engine.cache
    memory = cache.kv, cache.state_tensors
    graphs = CapturedPasses(engine.model, *memory, engine.device, capture, max_prompt_tokens, on_gpu)
    runner = ModelRunner(engine.model, cache, engine.device, engine.deterministic, graphs)
    return Engine(engine.loaded, cache, engine.config, runner=runner, speculation=engine.speculation), graphs


def overlapping(engine: Engine, overlap: bool = True, speculation: SpeculationConfig | None = None) -> Engine:
    """Launch steps before the results of the last one are waited for, as on a GPU."""
    config = replace(engine.config, overlap=overlap)
    return Engine(engine.loaded, engine.cache, config, speculation=speculation)
