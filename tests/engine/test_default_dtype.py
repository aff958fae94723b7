"""The type that a model runs in where none is asked for, on CPUs on which bfloat16 is faster and others."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybrid import CacheConfig, Engine, EngineConfig, SamplingParams
from hybrid.commands.parity import Judge, busy_batch, second_turn
from hybrid.engine import build
from hybrid.kernels.ops import prefers_bfloat16
from hybrid.models.loading import TINY, CheckpointFolder, open_checkpoint

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(params=[True, False], ids=["faster", "no faster"])
def is_faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Tell whether bfloat16 is faster on the CPU."""
    found: bool = request.param
    monkeypatch.setattr(build, "prefers_bfloat16", lambda: found)
    return found


class Config:
    """A configuration that states a type, or None."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype


def stating(own: torch.dtype | None, whole: torch.dtype | None = None) -> CheckpointFolder:
    return CheckpointFolder(TINY, "qwen3_5", Config(own), Config(whole))


@pytest.mark.parametrize("stored", [FLOAT, BRAIN, HALF, None])
def test_on_a_cpu_it_is_bfloat16_only_where_the_checkpoint_and_the_cpu_have_it(
    stored: torch.dtype | None, is_faster: bool
) -> None:
    found, reason = build.default_dtype(stating(stored), CPU)
    assert found == (BRAIN if stored == BRAIN and is_faster else FLOAT)
    assert ("faster" in reason) == (stored == BRAIN)
    assert ("float16 are not compiled" in reason) == (stored == HALF)


@pytest.mark.parametrize("stored", [FLOAT, BRAIN, HALF])
def test_on_a_gpu_it_is_that_of_the_checkpoint(stored: torch.dtype, is_faster: bool) -> None:
    assert build.default_dtype(stating(stored), GPU)[0] == stored


@pytest.mark.parametrize("place", ["text_config", "outside", "both"])
def test_vision_language_checkpoints_state_it_inside_or_outside(place: str, tmp_path: Path) -> None:
    text = json.loads((TINY / "config.json").read_text())
    text.pop("dtype")
    inner = {} if place == "outside" else {"dtype": "bfloat16"}
    outer = {} if place == "text_config" else {"dtype": "float32" if place == "both" else "bfloat16"}
    config = {"model_type": "qwen3_5", "text_config": {**text, **inner}, **outer}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert build.default_dtype(open_checkpoint(tmp_path), GPU)[0] == BRAIN


def test_an_engine_runs_in_it_and_says_why_once(is_faster: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hybrid.engine.build")
    engine = Engine.from_pretrained("tiny", device="cpu", cache=CacheConfig(memory="16MiB"))
    expected = BRAIN if is_faster else FLOAT
    assert engine.cache.kv.dtype == expected
    assert engine.deterministic
    lines = [record.getMessage() for record in caplog.records if record.name == "hybrid.engine.build"]
    assert len([line for line in lines if f"on cpu in {expected}: " in line]) == 1


def test_what_is_asked_for_is_taken(is_faster: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hybrid.engine.build")
    other = "float32" if is_faster else "bfloat16"
    engine = Engine.from_pretrained("tiny", device="cpu", dtype=other, cache=CacheConfig(memory="16MiB"))
    assert engine.cache.kv.dtype == build.DTYPES[other]
    assert "as asked for" in caplog.text


def test_hits_are_bitwise_cold_runs_in_it(is_faster: bool) -> None:
    judge = Judge(Engine.from_pretrained("tiny", device="cpu", cache=CacheConfig(memory="64MiB", chunk_size=16)))
    assert [check for check in (second_turn(judge), busy_batch(judge)) if not check.passed] == []


# On which CPUs


@pytest.mark.parametrize(("features", "expected"), [("+avx,+fma,+avx512f", True), ("+avx,+fma", False)])
def test_it_is_bfloat16_where_registers_are_wide(features: str, expected: bool) -> None:
    program = "from hybrid.kernels.ops import prefers_bfloat16; print(prefers_bfloat16())"
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": features, "HYBRID_KERNELS": "auto"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(expected)


def test_it_is_float32_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", "reference")
    assert not prefers_bfloat16()


@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_torch_allocates_by_default_is_of_no_matter(dtype: str, quantized: str | None) -> None:
    """transformers sets it for the whole process while it loads a model, perhaps in another thread: what compiled
    operations write has the size that they expect."""
    cache = CacheConfig(page_size=16, chunk_size=16, memory="16MiB")
    config = EngineConfig(max_num_batched_tokens=1024, overlap=False)
    engine = Engine.from_pretrained(
        TINY, device="cpu", dtype=dtype, load_dtype=quantized, cache=cache, config=config, speculation="cache+mtp"
    )
    params = SamplingParams(max_new_tokens=12, logprobs=3, temperature=0.7, seed=1)
    prompts = [[5 + n % 90 for n in range(length)] for length in (700, 40, 333)]
    found = []
    for default in (torch.float32, torch.float16):
        try:
            torch.set_default_dtype(default)
            outputs = engine.with_cache(cache, speculation="cache+mtp").generate(prompts, params, progress=False)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([(output.token_ids, output.logprobs) for output in outputs])
    assert found[0] == found[1]
