"""An engine with a directory: what an earlier engine computed is a hit, and answers like a cold run, to the bit."""

from pathlib import Path
from typing import Any

import pytest

from hybrid import Engine
from hybrid.cache.config import CacheConfig
from hybrid.engine.build import LoadedModel
from support.engines import GRID, answer, assert_nothing_held, cold, computing_is_slow, greedy, ids

PARAMS = greedy(8, logprobs=3)


def small(tiny: Engine, path: Path, **config: Any) -> Engine:
    """An engine whose memory holds few prompts, with a directory for the rest."""
    page_bytes, state_bytes = tiny.cache.unit_bytes
    memory = 30 * page_bytes + 8 * state_bytes
    settings: dict[str, Any] = {"deterministic": True, "verify_contents": True, **config}
    engine = tiny.with_cache(
        CacheConfig(page_size=GRID, chunk_size=GRID, memory=memory, disk="64MiB", directory=path, **settings)
    )
    computing_is_slow(engine)
    return engine


def flush(engine: Engine) -> None:
    assert engine.cache.tiers is not None and engine.cache.tiers.disk is not None
    assert engine.cache.tiers.disk.flush()


@pytest.mark.parametrize("host", [None, "1MiB"])
def test_answers_are_those_of_cold_runs_through_evictions_and_lives(
    tiny: Engine, tmp_path: Path, host: str | None
) -> None:
    prompts = [ids(6 * GRID + 5 * seed, seed=seed) for seed in range(5)]
    for life in range(3):
        with small(tiny, tmp_path, host=host) as engine:
            for prompt in prompts:
                expected, warm = cold(tiny, prompt, PARAMS), answer(engine, prompt, PARAMS)
                assert (warm.token_ids, warm.logprobs) == (expected.token_ids, expected.logprobs)
                engine.cache.audit(contents=True)
                assert life == 0 or warm.usage.cached_tokens == (len(prompt) - 1) // GRID * GRID
            stats = engine.cache.stats()
            assert (stats.restored_checkpoints > 0) == (life > 0)
            assert (stats.tier_failures, stats.disk_failure) == (0, None)
            assert_nothing_held(engine)


def test_an_output_says_that_its_hit_came_from_disk(tiny: Engine, tmp_path: Path) -> None:
    prompt = ids(8 * GRID, seed=1)
    with small(tiny, tmp_path) as engine:
        answer(engine, prompt, PARAMS)
    with small(tiny, tmp_path) as engine:
        again = answer(engine, prompt, PARAMS)
    assert again.usage.cached_tokens == 7 * GRID
    assert "tokens restored from disk" in str(again.explain)


def test_stored_smaller_checkpoints_come_back_as_they_were(tiny: Engine, tmp_path: Path) -> None:
    prompts = [ids(8 * GRID, seed=seed) for seed in range(4)]
    settings: dict[str, Any] = {"deterministic": False, "state_dtype": "int8"}
    with small(tiny, tmp_path, **settings) as engine:
        for prompt in prompts:
            answer(engine, prompt, PARAMS)
    first = []
    for _ in range(2):  # both from the same copies
        with small(tiny, tmp_path, **settings) as engine:
            first.append([answer(engine, prompt, PARAMS).token_ids for prompt in prompts])
            assert engine.cache.stats().restored_checkpoints == len(prompts)
    assert first[0] == first[1]
    with small(tiny, tmp_path) as engine:
        text = str(answer(engine, prompts[0], PARAMS).explain)
    assert "on disk is not used: " in text
    assert "there and" in text


def test_weights_that_differ_in_one_bit_are_another_model(tiny: Engine, tmp_path: Path) -> None:
    prompt = ids(6 * GRID, seed=3)
    with small(tiny, tmp_path) as engine:
        answer(engine, prompt, PARAMS)
        model = engine.model
    weight = next(model.parameters())
    other = Engine.from_pretrained("tiny", cache=tiny.cache.config)
    next(other.model.parameters()).data[0, 0] += 1e-3
    assert weight.data[0, 0] != next(other.model.parameters()).data[0, 0]
    with small(other, tmp_path) as engine:
        output = answer(engine, prompt, PARAMS)
    assert output.usage.cached_tokens == 0
    assert "on disk is not used: model is" in str(output.explain)


def test_namespaces_and_clear_reach_the_disk(tiny: Engine, tmp_path: Path) -> None:
    prompt = ids(6 * GRID, seed=4)
    with small(tiny, tmp_path) as engine:
        engine.generate([prompt], PARAMS, namespace="one", progress=False)
    with small(tiny, tmp_path) as engine:
        assert engine.generate([prompt], PARAMS, namespace="two", progress=False)[0].usage.cached_tokens == 0
        assert engine.generate([prompt], PARAMS, namespace="one", progress=False)[0].usage.cached_tokens > 0
        engine.cache.clear()
        flush(engine)
        assert [*tmp_path.glob("*.safetensors")] == []
        assert engine.generate([prompt], PARAMS, namespace="one", progress=False)[0].usage.cached_tokens == 0


def test_the_weights_are_read_once_for_the_directory_and_for_files(
    tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, digest = [], LoadedModel.digest

    def counted(loaded: LoadedModel) -> str:
        reads.append(1)
        return digest(loaded)

    monkeypatch.setattr(LoadedModel, "digest", counted)
    with small(tiny, tmp_path / "cache") as engine:
        answer(engine, ids(4 * GRID), PARAMS)
        engine.save(tmp_path / "file.hybrid")
        engine.load(tmp_path / "file.hybrid")
    assert len(reads) == 1
    page_bytes, state_bytes = tiny.cache.unit_bytes
    memory = 30 * page_bytes + 8 * state_bytes
    other = tiny.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID, memory=memory, deterministic=True))
    assert other.load(tmp_path / "file.hybrid").checkpoints > 0, "both digests are the same"
    assert len(reads) == 2
