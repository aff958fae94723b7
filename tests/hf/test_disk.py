"""`hybrid.hf` with a directory: what an earlier cache computed comes back, for the same model only, to the bit."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid.hf.prefix_cache import PrefixCache
from support.hf import assert_nothing_held, assert_same, cache_on, greedy, ids, tiny_model

NEXT_LIFE = """
import sys
import torch
from support.hf import cache_on, greedy, ids, tiny_model
cache = cache_on(tiny_model("qwen3_5_text"), disk="64MiB", directory=sys.argv[1], deterministic=True)
output = cache.generate(ids(120), **greedy())
cache.close()
found = {"hit": cache.explanations[0].usable_hit, "why": str(cache.explanations[0])}
torch.save({**found, "sequences": output.sequences, "logits": torch.stack(output.logits)}, sys.argv[2])
"""


@pytest.fixture
def model() -> Any:
    return tiny_model("qwen3_5_text")


def on_disk(model: Any, path: Path, **options: Any) -> PrefixCache:
    return cache_on(model, disk="64MiB", directory=path / "cache", **{"deterministic": True, **options})


@pytest.mark.parametrize("name", ["qwen3_5_text", "gemma3_text", "deepseek_v32"])
@pytest.mark.parametrize("host", [None, "8MiB"])
def test_what_an_earlier_cache_computed_is_a_hit(name: str, host: str | None, tmp_path: Path) -> None:
    first = on_disk(tiny_model(name), tmp_path, host=host)
    expected = first.generate(ids(120), **greedy())
    first.close()
    assert first.stats().disk_failure is None
    again = on_disk(tiny_model(name), tmp_path, host=host)
    assert_same(again.generate(ids(120), **greedy()), expected)
    assert again.explanations[0].usable_hit == 112
    assert "restored from disk" in str(again.explanations[0])
    assert_nothing_held(again)
    again.close()


def test_another_process_finds_it_with_the_bits_of_a_cold_run(model: Any, tmp_path: Path) -> None:
    first = on_disk(model, tmp_path)
    first.generate(ids(120), **greedy())
    first.close()
    script, result = tmp_path / "life.py", tmp_path / "result.pt"
    script.write_text(NEXT_LIFE)
    tests = Path(__file__).parents[1]
    command = [sys.executable, str(script), str(tmp_path / "cache"), str(result)]
    subprocess.run(command, check=True, cwd=tests.parent, env={**os.environ, "PYTHONPATH": str(tests)})
    found = torch.load(result)
    assert found["hit"] == 112, found["why"]
    assert "restored from disk" in found["why"]
    cold = cache_on(model, deterministic=True).generate(ids(120), **greedy())
    assert torch.equal(found["sequences"], cold.sequences)
    assert torch.equal(found["logits"], torch.stack(cold.logits))


def test_other_weights_and_other_settings_are_a_miss_with_a_reason(model: Any, tmp_path: Path) -> None:
    first = on_disk(model, tmp_path)
    first.generate(ids(120), **greedy())
    first.close()
    other = on_disk(tiny_model("qwen3_5_text", seed=1), tmp_path)
    other.generate(ids(120), **greedy())
    assert other.explanations[0].usable_hit == 0
    assert "is not used: model is" in str(other.explanations[0])
    other.close()
    model.set_attn_implementation("eager")
    eager = on_disk(model, tmp_path)
    eager.generate(ids(120), **greedy())
    assert eager.explanations[0].usable_hit == 0
    eager.close()


def test_a_model_that_changes_uses_nothing_of_what_it_was_and_spoils_nothing(model: Any, tmp_path: Path) -> None:
    cache = on_disk(model, tmp_path, memory=60_000)
    expected = cache.generate(ids(120), **greedy())
    for seed in range(1, 6):
        cache.generate(ids(120, seed), **greedy(2))
    model.load_state_dict(tiny_model("qwen3_5_text", seed=1).state_dict())
    found = cache.generate(ids(120), **greedy())
    assert cache.explanations[0].usable_hit == 0
    assert_same(found, cache_on(tiny_model("qwen3_5_text", seed=1), deterministic=True).generate(ids(120), **greedy()))
    model.set_attn_implementation("eager")
    cache.generate(ids(120), **greedy())
    assert cache.explanations[0].usable_hit == 0
    cache.close()
    cache.generate(ids(120), **greedy())  # it works on
    again = on_disk(tiny_model("qwen3_5_text"), tmp_path)
    assert_same(again.generate(ids(120), **greedy()), expected)
    assert "restored from disk" in str(again.explanations[0])
    again.close()


def test_an_option_that_there_is_not_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'disc'"):
        PrefixCache(model, disc="1GiB")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'gpu_memory_utilisation'.*there are: device, .*directory"):
        PrefixCache(model, gpu_memory_utilisation=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'evict'; did you mean eviction"):
        PrefixCache(model, evict="lru")  # type: ignore[call-arg]
