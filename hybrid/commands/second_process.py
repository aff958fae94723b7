"""The second process of `hybrid parity`: it shares nothing with the first one, and computes while that one does what
needs nothing of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybrid.cache.config import CacheConfig
from hybrid.commands.judge import Judge
from hybrid.commands.parity_drafts import Drafted, predictor
from hybrid.engine.engine import Engine
from hybrid.models.loading import open_checkpoint


@contextmanager
def rare_collections() -> Iterator[None]:
    """Within this context cyclic garbage is looked for rarely: what transformers and torch import is a million objects,
    all of which each full collection visits, and engines are freed without it."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100 * thresholds[0], *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def second_process(model: str | Path) -> Iterator[Executor]:
    """A process that imports what an engine needs while this one works, and looks for garbage as rarely. It computes
    one job at a time, in order; of those that wait none is begun after an error."""
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=gc.set_threshold, initargs=gc.get_threshold()) as process:
        process.submit(_import, str(model))
        try:
            yield process
        except BaseException:
            process.shutdown(cancel_futures=True)
            raise


def _import(model: str) -> None:
    open_checkpoint(model)


def transformers_logits(path: Path, ids: Sequence[int], dtype: str = "float32") -> np.ndarray[Any, Any]:
    """`[tokens, vocab]` logits of a prompt, computed by transformers' own model in a type, in fp32.

    They are numbers of NumPy, which go from one process to another by value.
    """
    from transformers import AutoModelForCausalLM

    from hybrid.hf.torch_functions import use_torch_functions, without_kernels

    with without_kernels():  # "eager": their grouped product refuses rows that are not multiples of 16 bytes
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()
    use_torch_functions(theirs)
    with torch.inference_mode():
        logits: np.ndarray[Any, Any] = theirs(input_ids=torch.tensor([ids])).logits[0].float().numpy()
    return logits


def predicted(model: str, seed: int, dtype: str) -> list[Drafted]:
    """Answers with drafts of the checkpoint's own predictor."""
    config = CacheConfig(memory="64MiB", deterministic=True)
    engine = Engine.from_pretrained(model, dtype=dtype, cache=config, speculation="mtp")
    return predictor(Judge(engine, seed))
