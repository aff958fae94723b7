"""Contents that went bad, in a copy or in memory: a miss, and an answer as from a cold run, instead of an error."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from hybrid import AuditError, Engine, RequestOutput, SamplingParams
from hybrid.cache.config import CacheConfig
from hybrid.key import Key
from hybrid.memory.pool import EMPTY_STATE
from hybrid.tiers.archive import read_archive
from hybrid.tiers.tier import UnavailableError
from hybrid.tree.node import Node
from support.engines import (
    GRID,
    answer,
    assert_nothing_held,
    cold,
    computing_is_slow,
    engine_on,
    greedy,
    ids,
    run_to_end,
)

PARAMS = greedy(6, logprobs=3)
PROMPT = ids(6 * GRID + 5, seed=1)


def small(tiny: Engine, **config: Any) -> Engine:
    """An engine with host memory, a disk, or both."""
    page_bytes, state_bytes = tiny.cache.unit_bytes
    settings: dict[str, Any] = {"host": "64MiB", "memory": 40 * page_bytes + 10 * state_bytes, **config}
    engine = tiny.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID, **{"deterministic": True, **settings}))
    computing_is_slow(engine)
    return engine


def evict(engine: Engine) -> None:
    """Have everything leave the device."""
    engine.cache.allocator.evict(engine.cache.tree.evict_all)


def same(found: RequestOutput, expected: RequestOutput) -> bool:
    return (found.token_ids, found.logprobs, found.error) == (expected.token_ids, expected.logprobs, None)


def node_of(engine: Engine, prompt: list[int] = PROMPT) -> Node:
    key = Key.of(prompt, "")
    node = engine.cache.tree.peek(key, len(key) - 1).checkpoint
    assert node is not None and node.slot is not None
    return node


def spoil_page(engine: Engine, at: int = 1, value: float = torch.nan) -> None:
    """A number in a page of the prompt on the device goes bad."""
    key = Key.of(PROMPT, "")
    found = engine.cache.tree.peek(key, len(key) - 1)
    page = engine.cache.tree.pages(found.deepest, found.num_page_tokens)[at]
    engine.cache.kv[page].view(-1)[3] = value


def spoil_state(engine: Engine, value: float = torch.nan) -> None:
    next(reversed(engine.cache.state_tensors.values()))[node_of(engine).slot].view(-1)[3] = value


def flip(engine: Engine, kind: str, at: int = 0) -> None:
    """A bit of a copy in host memory flips."""
    assert engine.cache.tiers is not None and engine.cache.tiers.host is not None
    host = engine.cache.tiers.host
    names = [name for name in host.names() if name[0] == kind]
    contents = host.begin([names[at]]).take()[0]
    memoryview(contents)[7] ^= 4


# Copies


@pytest.mark.parametrize("kind", ["page", "checkpoint"])
def test_a_copy_in_host_memory_that_went_bad_is_a_miss_and_dropped(tiny: Engine, kind: str) -> None:
    engine, expected = small(tiny), cold(tiny, PROMPT, PARAMS)
    answer(engine, PROMPT, PARAMS)
    evict(engine)
    tiers = engine.cache.tiers
    assert tiers is not None and tiers.host is not None
    for at in range(sum(name[0] == kind for name in tiers.host.names())):
        flip(engine, kind, at)
    found = answer(engine, PROMPT, PARAMS)
    assert same(found, expected)
    assert found.usage.cached_tokens == 0 and "is not what was copied, and is dropped" in str(found.explain)
    stats = engine.cache.stats()
    assert stats.damaged_copies == stats.tier_failures > 0 == stats.restored_checkpoints
    evict(engine)
    again = answer(engine, PROMPT, PARAMS)
    assert same(again, expected) and again.usage.cached_tokens == 6 * GRID, "a good copy took its place"
    assert_nothing_held(engine)


@pytest.mark.parametrize("spoil", [spoil_page, spoil_state])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_what_went_bad_before_it_was_copied_is_not_restored(
    tiny: Engine, tmp_path: Path, where: str, spoil: Callable[[Engine], None]
) -> None:
    engine = small(tiny, **({} if where == "host" else {"host": None, "disk": "64MiB", "directory": tmp_path / "d"}))
    expected = cold(tiny, PROMPT, PARAMS)
    answer(engine, PROMPT, PARAMS)
    spoil(engine)
    evict(engine)
    if where == "disk":
        assert engine.cache.tiers is not None and engine.cache.tiers.disk is not None
        assert engine.cache.tiers.disk.flush()
    found = answer(engine, PROMPT, PARAMS)
    assert same(found, expected) and "it holds NaN or infinity, and is dropped" in str(found.explain)
    assert engine.cache.stats().damaged_copies >= 1
    evict(engine)
    again = answer(engine, PROMPT, PARAMS)
    assert same(again, expected) and again.usage.cached_tokens == 6 * GRID
    engine.close()


# The device


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("spoil", [spoil_page, spoil_state])
def test_a_hit_that_gives_nan_is_computed_cold_once(
    tiny: Engine, spoil: Callable[..., None], value: float, caplog: pytest.LogCaptureFixture
) -> None:
    engine, expected = small(tiny), cold(tiny, PROMPT, PARAMS)
    answer(engine, PROMPT, PARAMS)
    spoil(engine, value=value)
    found = answer(engine, PROMPT, PARAMS)
    assert same(found, expected), found.error
    assert found.usage.cached_tokens == 0 and "is left out" in str(found.explain)
    assert "read 96 cached tokens and got NaN or infinity" in caplog.text
    assert engine.cache.stats().dropped_hits == 1
    for cached_tokens in (0, 6 * GRID):  # what it computed without the cache is not shared
        again = answer(engine, PROMPT, PARAMS)
        assert same(again, expected) and again.usage.cached_tokens == cached_tokens
    assert_nothing_held(engine)


def test_an_infinite_key_without_weight_is_not_seen_on_the_device_and_does_not_leave_it(tiny: Engine) -> None:
    """Its scores may be minus infinity: then the pass is finite, as with another number that changed in memory."""
    engine, expected = small(tiny, verify_contents=True), cold(tiny, PROMPT, PARAMS)
    for value in (torch.inf, -torch.inf):  # one gives minus infinity, the other NaN
        answer(engine, PROMPT, PARAMS)
        spoil_page(engine, value=value)
        found = answer(engine, PROMPT, PARAMS)
        if found.usage.cached_tokens:
            break
    assert found.error is None and not same(found, expected) and found.usage.cached_tokens == 6 * GRID
    with pytest.raises(AuditError, match="was changed"):
        engine.cache.audit(contents=True)
    other = small(tiny)
    assert "it holds NaN or infinity" in str(other.load(engine.dump([PROMPT])))
    evict(engine)
    for one in (other, engine):
        assert same(answer(one, PROMPT, PARAMS), expected)
    assert engine.cache.stats().damaged_copies >= 1


def test_copies_of_what_went_bad_in_memory_are_dropped_too(tiny: Engine) -> None:
    engine, expected = small(tiny), cold(tiny, PROMPT, PARAMS)
    answer(engine, PROMPT, PARAMS)
    evict(engine)
    answer(engine, PROMPT, PARAMS)  # restored: on the device and in host memory
    assert engine.cache.tiers is not None and engine.cache.tiers.host is not None
    assert engine.cache.tiers.host.num_pages
    spoil_page(engine, 0)
    assert same(answer(engine, PROMPT, PARAMS), expected)
    assert engine.cache.tiers.host.num_pages == 0


def test_a_pin_of_what_went_bad_ends(tiny: Engine) -> None:
    engine, expected = small(tiny), cold(tiny, PROMPT, PARAMS)
    answer(engine, PROMPT, greedy(6, logprobs=3, pin_for=1000.0))
    spoil_page(engine)
    for _ in range(2):
        assert same(answer(engine, PROMPT, PARAMS), expected)
    assert engine.cache.stats().pins == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_that_run_on_what_goes_bad_keep_what_they_gave_and_go_on(tiny: Engine, overlap: bool) -> None:
    """Two streams that share a prefix, one of which has not begun to answer, another request beside them."""
    engine = engine_on(tiny, deterministic=True, overlap=overlap)
    prompts = [PROMPT, PROMPT[: 5 * GRID] + ids(2 * GRID, seed=5), ids(3 * GRID, seed=6)]
    expected = [cold(tiny, prompt, greedy(20)).token_ids for prompt in prompts]
    answer(engine, PROMPT, greedy(1))
    names = [engine.add_request(prompts[0], greedy(20))]
    for _ in range(5):
        engine.step()
    names += [engine.add_request(prompt, greedy(20)) for prompt in prompts[1:]]
    engine.step()
    spoil_page(engine)
    outputs = run_to_end(engine)
    assert [outputs[name].token_ids for name in names] == expected
    assert [outputs[name].finish_reason for name in names] == ["length"] * 3
    assert_nothing_held(engine)
    assert answer(engine, PROMPT, greedy(20)).token_ids == expected[0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_several_answers_to_a_prompt_that_went_bad(tiny: Engine, deterministic: bool) -> None:
    engine = engine_on(tiny, deterministic=deterministic)
    params = SamplingParams(max_new_tokens=5, ignore_eos=True, n=3, temperature=0.8, seed=4)
    expected = [one.token_ids for one in answer(engine, PROMPT, params).completions]
    spoil_page(engine)
    found = answer(engine, PROMPT, params)
    assert found.error is None and [len(one.token_ids) for one in found.completions] == [5, 5, 5]
    if deterministic:
        assert [one.token_ids for one in found.completions] == expected
    assert_nothing_held(engine)


def test_a_model_that_computes_nan_is_an_error_and_the_prefix_is_computed_again(tiny: Engine) -> None:
    engine = engine_on(tiny, deterministic=True)
    answer(engine, PROMPT, PARAMS)
    weight = next(parameter for name, parameter in engine.model.named_parameters() if name.endswith("attn.norm.weight"))
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    failed = answer(engine, PROMPT, PARAMS)
    assert failed.finish_reason == "error" and "NaN or infinity" in str(failed.error)
    with torch.no_grad():
        weight.copy_(kept)
    assert engine.cache.stats().dropped_hits == 1
    assert [answer(engine, PROMPT, PARAMS).usage.cached_tokens for _ in range(2)] == [0, 6 * GRID]
    assert_nothing_held(engine)


# Files


def fill_with_nan(rows: torch.Tensor, dtype: torch.dtype, first: int = 0) -> None:
    """A number in each row of an archive is NaN, the one at this byte."""
    size = dtype.itemsize
    rows[:, first : first + size] = torch.full((len(rows), 1), torch.nan).to(dtype).view(torch.uint8)


@pytest.mark.parametrize(
    ("rows", "dtype", "first", "config"),
    [
        ("pages", torch.float32, 12, {}),
        ("checkpoints", torch.float32, 12, {}),
        ("pages", torch.float8_e4m3fn, 3, {"kv_dtype": "fp8"}),
        ("pages", torch.float32, 64, {"kv_dtype": "fp8"}),
        ("pages", torch.float32, 64, {"kv_dtype": "int8"}),
        ("checkpoints", torch.bfloat16, 4, {"state_dtype": "bfloat16", "deterministic": False}),
    ],
    ids=["pages", "checkpoints", "codes of fp8", "scales of fp8", "scales of int8", "stored smaller"],
)
def test_contents_with_nan_are_not_loaded(
    tiny: Engine, rows: str, dtype: torch.dtype, first: int, config: dict[str, Any]
) -> None:
    engine = engine_on(tiny, **config) if "state_dtype" not in config else small(tiny, **config)
    answer(engine, PROMPT, PARAMS)
    archive = read_archive(engine.dump([PROMPT]))
    engine.cache.clear()
    assert not engine.load(archive.to_bytes()).skipped
    engine.cache.clear()
    fill_with_nan(getattr(archive, rows), dtype, first)
    loaded = engine.load(archive.to_bytes())
    assert loaded.checkpoints == 0 and [*loaded.skipped] == ["it holds NaN or infinity"]
    found = answer(engine, PROMPT, PARAMS)
    assert found.error is None and found.usage.cached_tokens == 0


# What was never written


@pytest.mark.parametrize("config", [{}, {"kv_dtype": "fp8", "state_dtype": "int8", "deterministic": False}])
def test_all_that_is_copied_was_written(tiny: Engine, config: dict[str, Any]) -> None:
    """Of memory that holds NaN at first, nothing that counts as damaged is copied."""
    engine = small(tiny, **config)
    for tensor in (engine.cache.kv, *engine.cache.state_tensors.values()):
        tensor.view(torch.uint8).fill_(0xFF)
    for tensor in engine.cache.state_tensors.values():
        tensor[EMPTY_STATE].zero_()
    prompts = [ids(4 * GRID + 5 * seed, seed=seed) for seed in range(4)]
    for _ in range(2):
        for prompt in prompts:
            assert answer(engine, prompt, greedy(2 * GRID)).error is None
            evict(engine)
    stats = engine.cache.stats()
    assert (stats.damaged_copies, stats.dropped_hits) == (0, 0) and stats.restored_checkpoints >= 4


# Everything at once


def damage(engine: Engine, rng: Random) -> str:
    """Something goes bad, somewhere. Returns what."""
    tiers, tree = engine.cache.tiers, engine.cache.tree
    assert tiers is not None and tiers.host is not None
    what = rng.choice(["copies", "a page", "a state", "nothing"])
    if what == "copies" and (names := sorted(tiers.host.names())):
        for name in rng.sample(names, len(names) // 2 + 1):
            with suppress(UnavailableError):  # it was damaged before
                contents = memoryview(tiers.host.begin([name]).take()[0])
                contents[rng.randrange(len(contents))] ^= 1 << rng.randrange(8)
        return what
    nodes = [node for _, node in tree.nodes()]
    if what == "a page" and nodes:
        engine.cache.kv[rng.choice(rng.choice(nodes).pages)].view(-1)[rng.randrange(64)] = torch.nan
        return what
    slots = [node.slot for node in nodes if node.slot is not None]
    if what == "a state" and slots:
        tensor = rng.choice([*engine.cache.state_tensors.values()])
        tensor[rng.choice(slots)].view(-1)[rng.randrange(64)] = torch.nan
        return what
    return "nothing"


def live(tiny: Engine, seed: int, num_answers: int, folder: Path) -> Counter[str]:
    """Requests that share prefixes, alone and together, while things go bad and leave the device, and engines end. Each
    answer is that of a cold run, to the bit; none fails."""
    rng, counts = Random(seed), Counter[str]()
    stems = [ids(rng.randrange(2, 7) * GRID, seed=100 * seed + one) for one in range(4)]
    expected: dict[tuple[int, ...], RequestOutput] = {}

    def opened() -> Engine:
        return small(tiny, host="1MiB", disk="16MiB", directory=folder / "cache")

    def close(engine: Engine) -> None:
        stats = engine.cache.stats()
        counts["damaged copies"] += stats.damaged_copies
        counts["dropped hits"] += stats.dropped_hits
        engine.close()

    engine = opened()
    while counts["answers"] < num_answers:
        prompts = [
            rng.choice(stems) + ids(rng.randrange(1, 20), seed=rng.randrange(6)) for _ in range(rng.choice([1, 1, 3]))
        ]
        names = [engine.add_request(prompt, PARAMS) for prompt in prompts]
        for _ in range(rng.randrange(4)):
            engine.step()
        counts[what := damage(engine, rng)] += 1
        outputs = run_to_end(engine)
        for name, prompt in zip(names, prompts, strict=True):
            if (key := tuple(prompt)) not in expected:
                expected[key] = cold(tiny, prompt, PARAMS)
            assert same(outputs[name], expected[key]), (counts, outputs[name].error)
            counts["answers"] += 1
            counts["hits"] += outputs[name].usage.cached_tokens > 0
            counts["restores"] += "tokens restored from" in str(outputs[name].explain)
        engine.cache.audit()
        if what in ("a page", "a state") or rng.random() < 0.4:
            evict(engine)  # what went bad, and was not used, would be a second fault for a later request
        if rng.random() < 0.1:
            close(engine)
            engine = opened()
    assert_nothing_held(engine)
    close(engine)
    return counts


def test_lives_in_which_things_go_bad(tiny: Engine, tmp_path: Path) -> None:
    counts = live(tiny, 0, 40, tmp_path)
    assert counts["hits"] > 12 and counts["restores"] > 6
    assert counts["damaged copies"] and counts["dropped hits"], counts
