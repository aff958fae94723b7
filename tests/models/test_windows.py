"""A family with sliding windows in the engine: memory, hits, forks, drafts, retraction; what is refused.

Its logits are compared with transformers' in `test_families.py`, where it is one of the families.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid import CacheConfig, Engine, EngineConfig, Key, SpeculationConfig
from hybrid.batch import StateSteps
from hybrid.cache.lease import Lease
from hybrid.commands.random_checkpoints import write_random_checkpoint
from hybrid.models.attention import decode_windows
from hybrid.models.gemma3 import Gemma3ForCausalLM
from hybrid.models.loading import open_checkpoint
from support.checkpoints import edit_config
from support.engines import answer, assert_nothing_held, greedy, ids, run_to_end
from support.tensors import same_bits

WINDOW = 47


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("windows"), "gemma3_text")


def load(path: Path, chunk_size: int) -> Engine:
    return Engine.from_pretrained(path, device="cpu", cache=CacheConfig(memory="16MiB", chunk_size=chunk_size))


@pytest.fixture(scope="module")
def loaded(path: Path) -> Engine:
    return load(path, 16)


def engine_on(
    loaded: Engine,
    size: tuple[int, int] | None = (96, 24),
    speculation: SpeculationConfig | None = None,
    **config: Any,
) -> Engine:
    """An engine with an empty cache of its own."""
    settings = {"page_size": 16, "chunk_size": loaded.cache.config.chunk_size, **config}
    return loaded.with_cache(CacheConfig(**settings), size=size, speculation=speculation)


def of_prompt(engine: Engine, prompt: list[int]) -> Lease:
    """A lease of the cache for a prompt."""
    lease = engine.cache.open(Key.of(prompt), len(prompt) - 1, len(prompt))
    assert lease is not None
    return lease


def prompt_of(count: int, seed: int = 0) -> list[int]:
    return [3 + token % 300 for token in ids(count, seed)]


def test_pages_hold_full_attention_alone_and_a_state_holds_the_windows(path: Path) -> None:
    config = open_checkpoint(path).config
    spec = Gemma3ForCausalLM.spec(config, torch.bfloat16)
    (kv,), (window,) = spec.tokens, spec.state
    assert kv.shape(16) == (1, 2, 16, 2, 32), "of the three layers one keeps all tokens"
    assert window.shape == (2, 2, WINDOW, 2, 32)
    assert spec.state_bytes == 2 * 2 * WINDOW * 2 * 32 * 2


def test_the_memory_of_a_sequence_grows_by_the_pages_of_full_attention(loaded: Engine) -> None:
    engine = engine_on(loaded, enabled=False)
    page_bytes, state_bytes = engine.cache.unit_bytes
    engine.add_request(prompt_of(20 * WINDOW), greedy(2))
    engine.step()
    stats = engine.cache.stats()
    held = stats.pages_private * page_bytes + stats.states_private * state_bytes
    # of all layers it would be three times the pages
    assert held <= -(-(20 * WINDOW + 2) // 16) * page_bytes + 2 * state_bytes
    run_to_end(engine)
    assert_nothing_held(engine)


@pytest.mark.parametrize(("page_size", "chunk_size"), [(16, 16), (8, 32), (64, 16), (16, 64)])
def test_a_hit_is_bitwise_a_cold_run_for_any_page_and_chunk(path: Path, page_size: int, chunk_size: int) -> None:
    """Prompts that are shorter and longer than the window, then a branch and second turns."""
    loaded, size = load(path, chunk_size), (160, 32)
    engine = engine_on(loaded, size, page_size=page_size)
    cold = engine_on(loaded, size, page_size=page_size, enabled=False)
    prompts = [prompt_of(33), prompt_of(5 * 64 + 7, 1)]
    hits = 0
    for turn in range(3):
        for at, prompt in enumerate(prompts):
            output, expected = (answer(each, prompt, greedy(24, logprobs=3)) for each in (engine, cold))
            assert output.token_ids == expected.token_ids
            assert output.logprobs == expected.logprobs
            hits += output.usage.cached_tokens
            prompts[at] = prompt + output.token_ids + prompt_of(9, 7 + turn) if turn else prompt[: 4 * 64 + 3]
    assert hits > 5 * 64
    assert_nothing_held(engine)


def test_a_hit_needs_the_checkpoint_alone(loaded: Engine) -> None:
    """Rings of other slots may hold anything by then."""
    engine, cold = engine_on(loaded), engine_on(loaded, enabled=False)
    prompt = prompt_of(10 * 16)
    answer(engine, prompt, greedy(4))
    again = prompt + prompt_of(5, 3)
    lease = of_prompt(engine, again)
    assert lease.num_hit_tokens == 160
    rings = engine.cache.state_tensors["window"]
    own = {0, lease.read_slot}
    for slot in range(len(rings)):
        if slot not in own:
            rings[slot] = float("nan")
    pages = {*lease.block_table}
    for page in set(range(len(engine.cache.kv))) - pages:
        engine.cache.kv[page] = float("nan")
    engine.cache.close(lease)
    output = answer(engine, again, greedy(6, logprobs=2))
    assert output.usage.cached_tokens == 160
    assert output.logprobs == answer(cold, again, greedy(6, logprobs=2)).logprobs


def test_several_answers_to_one_prompt_are_those_of_requests_by_themselves(loaded: Engine) -> None:
    engine = engine_on(loaded)
    sampled = greedy(20, temperature=1.0, seed=5)
    output = answer(engine, prompt_of(50), replace(sampled, n=3))
    assert len({tuple(one.token_ids) for one in output.completions}) > 1
    first = answer(engine_on(loaded, enabled=False), prompt_of(50), sampled)
    assert output.completions[0].token_ids == first.token_ids
    assert_nothing_held(engine)


def test_when_memory_runs_out_answers_stay_the_same(loaded: Engine) -> None:
    engine = engine_on(loaded, size=(16, 4))
    prompts = [prompt_of(3 * 16 + 2 + at, 20 + at) for at in range(4)]
    names = [engine.add_request(prompt, greedy(40)) for prompt in prompts]
    outputs = run_to_end(engine)
    assert engine.scheduler.num_retractions > 0
    cold = engine_on(loaded, enabled=False)
    assert [outputs[name].token_ids for name in names] == [answer(cold, p, greedy(40)).token_ids for p in prompts]
    assert_nothing_held(engine)


def test_drafts_change_no_token(loaded: Engine) -> None:
    """The second time they come from the cache; a window ends in the middle of them."""
    engine = engine_on(loaded, speculation=SpeculationConfig(adaptive=False))
    expected = answer(engine_on(loaded, enabled=False), prompt_of(30), greedy(60, logprobs=2))
    outputs = [answer(engine, prompt_of(30), greedy(60, logprobs=2)) for _ in range(2)]
    assert all(output.logprobs == expected.logprobs for output in outputs)
    assert outputs[1].usage.accepted_tokens > 20
    assert_nothing_held(engine)


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_a_token_whose_ring_is_not_kept_changes_no_ring(kernels: str, use_kernels: Callable[[str], None]) -> None:
    """It was launched before it was known that there is none."""
    use_kernels(kernels)
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, heads, 16, generator=rng) for heads in (4, 2, 2))
    before = torch.randn(5, 2, 7, 2, 16, generator=rng)
    positions, starts = torch.tensor([30, 31, 2]), torch.arange(4)

    def after(write: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rings = before.clone()
        steps = StateSteps(starts, torch.tensor([1, 2, 3]), torch.tensor(write))
        return decode_windows(query, key, value, positions, rings, steps, 0.25), rings

    output, rings = after([1, -1, 2])
    expected, others = after([1, 4, 2])
    assert same_bits(output[::2], expected[::2])
    assert same_bits(rings[[0, 1, 2, 3]], others[[0, 1, 2, 3]])
    assert same_bits(rings[4], before[4])


def test_a_request_without_a_next_token_fails_alone_where_steps_are_launched_ahead(loaded: Engine) -> None:
    """The one beside it has the last state slot."""

    def fails_at_the_fifth(answer: list[int], row: torch.Tensor) -> torch.Tensor:
        return row if len(answer) < 4 else torch.full_like(row, torch.nan)

    settings = CacheConfig(page_size=16, chunk_size=16)
    engine = loaded.with_cache(settings, size=(64, 3), config=EngineConfig(overlap=True))
    bad = engine.add_request(prompt_of(20), greedy(30, logits_processors=[fails_at_the_fifth]))
    good = engine.add_request(prompt_of(33, 1), greedy(30, logprobs=2))
    outputs = run_to_end(engine)
    assert outputs[bad].finish_reason == "error" and len(outputs[bad].token_ids) == 4
    expected = answer(engine_on(loaded, enabled=False), prompt_of(33, 1), greedy(30, logprobs=2))
    assert outputs[good].logprobs == expected.logprobs
    assert_nothing_held(engine)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_windows_may_be_stored_smaller(loaded: Engine, state_dtype: str) -> None:
    settings = {"memory": "4MiB", "state_dtype": state_dtype, "deterministic": False}
    engine, prompt = engine_on(loaded, size=None, **settings), prompt_of(100)
    first = answer(engine, prompt, greedy(1, logprobs=1))
    again = answer(engine, prompt, greedy(1, logprobs=1))
    assert again.usage.cached_tokens == 96
    assert first.logprobs is not None
    assert again.logprobs is not None
    token = first.token_ids[0]
    assert again.logprobs[0][token] == pytest.approx(first.logprobs[0][token], abs=0.2)
    assert again.logprobs != first.logprobs, "what was restored is rounded"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"sliding_window": 0}, "sliding_window 0"),
        ({"layer_types": ["full_attention"] * 3}, "no sliding_attention layer"),
        ({"layer_types": ["sliding_attention"] * 3}, "no full_attention layer"),
    ],
)
def test_what_is_not_computed_here_is_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "gemma3_text")
    edit_config(tmp_path, **changes)
    checkpoint = open_checkpoint(tmp_path)
    assert words in checkpoint.unsupported
    assert checkpoint.family is None  # transformers' layers compute it, or refuse it
