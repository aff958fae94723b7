"""The passes before the first step, in which kernels are compiled: they leave no trace, and are run on a GPU alone."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hybrid import CacheConfig, Engine, EngineConfig
from hybrid.engine import build
from hybrid.engine.warm_up import Limits, Size, idle_batch, sizes, warm_up
from hybrid.speculation.config import SpeculationConfig
from support.engines import GRID, answer, assert_nothing_held, cold, engine_on, greedy, ids

LIMITS = EngineConfig(max_num_seqs=3, max_num_batched_tokens=70, max_model_len=8 * GRID)


@pytest.mark.parametrize("deterministic", [True, False])
def test_it_writes_no_page_and_its_own_state_slots_alone(tiny: Engine, deterministic: bool) -> None:
    engine = engine_on(tiny, deterministic=deterministic, enforce_eager=True)
    cache, free = engine.cache, engine.cache.memory.pages.num_free
    for tensor in (cache.kv, *cache.state_tensors.values()):
        tensor.fill_(0.125)
    warm_up(engine.model, cache, LIMITS, deterministic)
    assert torch.equal(cache.kv, torch.full_like(cache.kv, 0.125))
    for tensor in cache.state_tensors.values():
        changed = (tensor.flatten(1) != 0.125).any(1).nonzero().flatten().tolist()
        assert len(changed) == 2 and 0 not in changed  # a slot, and where it was moved
    assert cache.memory.pages.num_free == free
    assert_nothing_held(engine)


def test_answers_after_it_are_those_without(tiny: Engine) -> None:
    engine = engine_on(tiny, deterministic=True)
    warm_up(engine.model, engine.cache, LIMITS, True)
    assert answer(engine, ids(40), greedy(6)).token_ids == cold(tiny, ids(40), greedy(6)).token_ids
    assert engine.cache.stats().requests == 1


def test_a_pass_that_fails_leaves_its_memory(tiny: Engine) -> None:
    engine = engine_on(tiny)

    def failing(*args: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with patch.object(engine.model, "forward", failing), pytest.raises(torch.OutOfMemoryError):
        warm_up(engine.model, engine.cache, LIMITS, True)
    assert_nothing_held(engine)


def test_a_runner_on_a_gpu_is_warm(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(build, "warm_up", lambda *args: calls.append(args))
    engine = engine_on(tiny)
    for device in ("cpu", "cuda"):
        loaded = replace(engine.loaded, device=torch.device(device))
        build.model_runner(loaded, engine.cache, LIMITS, True, SpeculationConfig())
    assert calls == [(engine.model, engine.cache, LIMITS, True, SpeculationConfig())]


def test_sizes_are_within_the_limits() -> None:
    for numbers in (
        (1, 65, 1, 64, 64, 63),
        (3, 70, 8, 16, 8, 2),
        (64, 2048, 4096, 64, 64),
        (300, 8192, 4096, 64, 64, 7),
    ):
        limits = Limits(*numbers)
        found = [*sizes(limits)]
        assert len(found) < 220
        assert max(size.decodes for size in found) <= limits.requests
        assert max(size.drafts for size in found) == limits.drafts
        assert {bool(size.prompts) for size in found} == {True, False}
        assert all(size.pages * limits.page_size >= max(size.prompts, default=1) for size in found)
        (size, padded) = [size for size in found if size.captures]
        batch = idle_batch(size, limits.chunk_size, True, 1, torch.device("cpu"))
        assert batch.checkpoints.tolist() == [[0, limits.chunk_size, 1]]
        assert padded == size._replace(is_padded=True)


@pytest.mark.parametrize("deterministic", [True, False])
def test_passes_with_drafts_write_no_page_either(tiny: Engine, deterministic: bool) -> None:
    """And what is computed for those that are accepted, and by the predictor."""
    made = Engine.from_pretrained("tiny", cache=engine_on(tiny).cache.config, speculation="mtp")
    engine = made.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID, deterministic=deterministic), size=(16, 8))
    cache, drafted = engine.cache, []
    for tensor in (cache.kv, *cache.state_tensors.values()):
        tensor.fill_(0.125)
    draft = engine.model.draft
    with patch.object(engine.model, "draft", lambda *args: drafted.append(draft(*args))):
        warm_up(engine.model, cache, LIMITS, deterministic, SpeculationConfig(drafters=("mtp",), max_drafts=5))
    assert drafted
    assert torch.equal(cache.kv, torch.full_like(cache.kv, 0.125))
    for tensor in cache.state_tensors.values():
        assert len((tensor.flatten(1) != 0.125).any(1).nonzero()) == 2
    assert_nothing_held(engine)


def test_an_idle_batch_has_its_sizes() -> None:
    batch = idle_batch(Size((3, 5), 2, 7, 0), 16, False, 4, torch.device("cpu"))
    assert batch.prefills is not None and batch.decodes is not None
    assert batch.prefills.cu_seqlens.tolist() == [0, 3, 8]
    assert batch.decodes.block_table.shape == (2, 7)
    assert (batch.token_ids.numel(), batch.sample_rows.numel()) == (10, 4)
    assert batch.slot_mapping.unique().tolist() == [-1]
    assert (batch.prefills.state_write.tolist(), batch.decodes.state_write.tolist()) == ([4, 4], [-1, -1])
    assert batch.log is None and batch.copies is None
    batch = idle_batch(Size((), 2, 1, 0, drafts=2, is_tree=True), 16, True, 4, torch.device("cpu"))
    assert batch.decodes is not None and batch.decodes.unrolled is not None and batch.log == []
    assert batch.decodes.steps.starts.tolist() == [0, 3, 6]
    assert batch.decodes.state_read.tolist() == [0, -1, -1] * 2
    assert (batch.decodes.block_table.shape, batch.decodes.state_write.tolist()) == ((6, 1), [-1] * 6)
