"""Restored contents arrive while the first layers compute. A copier that copies as late as it may, into NaN, finds
whoever uses contents that are not there yet: all answers are those of cold runs, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid import Engine, RequestOutput, SamplingParams, SpeculationConfig
from hybrid.cache.config import CacheConfig
from hybrid.cache.lease import Lease
from hybrid.commands.random_checkpoints import FAMILIES, add_random_predictor, write_random_checkpoint
from hybrid.key import Key
from support.arriving import CopyError, LateCopier, late_copiers
from support.engines import GRID, answer, assert_nothing_held, cold, greedy, ids
from support.graphs import overlapping, with_graphs

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

PARAMS = greedy(6, logprobs=3)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[LateCopier]:
    return late_copiers(monkeypatch)


def small(tiny: Engine, pages: int = 30, states: int = 8, *, speculation: Any = None, **config: Any) -> Engine:
    """An engine whose memory holds few prompts, with host memory for the rest."""
    page_bytes, state_bytes = tiny.cache.unit_bytes
    memory = pages * page_bytes + states * state_bytes
    settings: dict[str, Any] = {"host": "64MiB", "deterministic": True, **config}
    cache = CacheConfig(page_size=GRID, chunk_size=GRID, memory=memory, **settings)
    engine = tiny.with_cache(cache, speculation=speculation)
    for _ in range(20):
        engine.cache.note_pass(1, 1.0)  # computing is slow: whatever can be restored is
    return engine


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    assert output.error is None
    assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)


def evicted(engine: Engine, *prompts: list[int]) -> None:
    """Answer prompts, and have everything leave the device."""
    for prompt in prompts:
        answer(engine, prompt, PARAMS)
    engine.cache.allocator.evict(engine.cache.tree.evict_all)


def saved(engine: Engine, prompt: list[int]) -> list[bytes]:
    """Return what a file of the prompt would hold."""
    archive = engine.cache.archive([Key.of(prompt)], model="a model")
    return [tensor.numpy().tobytes() for tensor in (archive.pages, archive.checkpoints)]


def begun(engine: Engine, prompt: list[int]) -> Lease:
    """A lease of no request, with contents on their way."""
    key = Key.of(prompt)
    lease = engine.cache.begin(key, len(key) - 1, len(key))
    assert lease is not None and lease.restoring is None and lease.num_hit_tokens
    assert engine.cache.memory.uploads.are_pending
    return lease


@pytest.mark.parametrize(
    "config",
    [{}, {"state_share": 0.5}, {"verify_contents": True}, {"eviction": "lru"}],
    ids=["one budget", "fixed", "verified", "lru"],
)
def test_answers_are_those_of_cold_runs(tiny: Engine, late: list[LateCopier], config: dict[str, Any]) -> None:
    engine = small(tiny, **config)
    prompts = [ids(6 * GRID + 5 * seed, seed=seed) for seed in range(5)]
    for _ in range(2):
        for prompt in prompts:
            assert_same(answer(engine, prompt, PARAMS), cold(tiny, prompt, PARAMS))
            engine.cache.audit(contents="verify_contents" in config)
    assert engine.cache.stats().restored_checkpoints > 0
    if not engine.cache.config.verify_contents:  # digests are taken of all contents at once
        assert late[0].num_partial > engine.cache.stats().restored_checkpoints, "layers waited for their own contents"
    assert_nothing_held(engine)


@pytest.mark.parametrize("host", ["1MiB", None], ids=["host memory and disk", "disk"])
def test_what_leaves_for_a_disk_is_there_when_it_is_written(
    tiny: Engine, late: list[LateCopier], tmp_path: Path, host: str | None
) -> None:
    """The memory that it leaves is written at once, and host memory drops it while it may be on its way."""
    engine = small(tiny, host=host, disk="64MiB", directory=tmp_path / "cache")
    prompts = [ids(6 * GRID + 5 * seed, seed=seed) for seed in range(5)]
    for _ in range(2):
        for prompt in prompts:
            assert_same(answer(engine, prompt, PARAMS), cold(tiny, prompt, PARAMS))
    engine.close()
    again = small(tiny, host=host, disk="64MiB", directory=tmp_path / "cache")
    for prompt in prompts:
        output = answer(again, prompt, PARAMS)
        assert_same(output, cold(tiny, prompt, PARAMS))
        assert output.usage.cached_tokens, "another process would find it"
    stats = again.cache.stats()
    assert stats.restored_checkpoints and not stats.tier_failures
    assert late[0].outward.num_host_waits
    again.close()


def test_the_host_waits_for_nothing_that_leaves_for_host_memory(tiny: Engine, late: list[LateCopier]) -> None:
    engine, prompt = small(tiny), ids(6 * GRID + 3)
    evicted(engine, prompt)
    assert_same(answer(engine, prompt, PARAMS), cold(tiny, prompt, PARAMS))
    assert engine.cache.stats().restored_checkpoints and late[0].outward.num_calls
    assert not late[0].outward.num_host_waits


def test_each_layer_waits_for_its_own_contents(tiny: Engine, late: list[LateCopier]) -> None:
    engine, prompt = small(tiny), ids(6 * GRID + 3)
    evicted(engine, prompt)
    late[0].waited.clear()
    assert_same(answer(engine, prompt, PARAMS), cold(tiny, prompt, PARAMS))
    num_layers = len(engine.model.model.layers)
    waited = late[0].waited
    assert len(waited) == num_layers + 1, "each layer once, and all at the end of the pass; no pass after it"
    assert waited == sorted(waited) and len(set(waited)) == num_layers


def test_a_pass_waits_for_all_before_it_ends(
    tiny: Engine, late: list[LateCopier], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt, forward = small(tiny), ids(6 * GRID + 3), tiny.model.forward
    evicted(engine, prompt)
    pending = list[tuple[bool, bool]]()

    def watched(*args: Any) -> Any:
        arrivals = engine.cache.memory.uploads
        before, logits = arrivals.are_pending, forward(*args)
        pending.append((before, arrivals.are_pending))
        return logits

    monkeypatch.setattr(engine.model, "forward", watched)
    answer(engine, prompt, PARAMS)
    assert pending[0] == (True, False)
    assert (True, True) not in pending and (False, True) not in pending


def test_requests_that_start_together_share_what_arrives(tiny: Engine, late: list[LateCopier]) -> None:
    """Copy-on-write of a checkpoint that is on its way, and hits on pages that another request restored."""
    engine, prefix = small(tiny, pages=80, states=20), ids(5 * GRID)
    evicted(engine, [*prefix, *ids(20, seed=9)])
    prompts = [[*prefix, *ids(3 + 7 * seed, seed=seed)] for seed in range(4)]
    outputs = engine.generate(prompts, PARAMS, progress=False)
    assert engine.cache.stats().restored_checkpoints == 1
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.usage.cached_tokens == 5 * GRID
        assert_same(output, cold(tiny, prompt, PARAMS))
    assert_nothing_held(engine)


def test_several_answers_and_sampling(tiny: Engine, late: list[LateCopier]) -> None:
    engine, prompt = small(tiny, pages=60, states=20), ids(6 * GRID + 3)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0, seed=3, n=3, logprobs=2)
    evicted(engine, prompt)
    restored, expected = answer(engine, prompt, params), cold(tiny, prompt, params)
    assert engine.cache.stats().restored_checkpoints == 1
    for own, other in zip(restored.completions, expected.completions, strict=True):
        assert (own.token_ids, own.logprobs) == (other.token_ids, other.logprobs)


def test_stored_smaller_checkpoints_are_unpacked_once_they_are_there(
    tiny: Engine, late: list[LateCopier], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"deterministic": False, "state_dtype": "int8"}
    engine, prompts = small(tiny, **settings), [ids(8 * GRID + 3, seed=seed) for seed in range(3)]
    monkeypatch.undo()
    at_once = small(tiny, **settings)
    for prompt in prompts:
        evicted(engine, prompt)
        evicted(at_once, prompt)
        assert_same(answer(engine, prompt, PARAMS), answer(at_once, prompt, PARAMS))
    assert engine.cache.stats().restored_checkpoints == at_once.cache.stats().restored_checkpoints > 0
    assert late[0].num_partial > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "launched ahead"])
def test_under_retractions_aborts_and_evictions(tiny: Engine, late: list[LateCopier], overlap: bool) -> None:
    """Memory for few of the requests, which are aborted at any time."""
    engine = overlapping(small(tiny, pages=36, states=10), overlap)
    prompts = [ids(4 * GRID + 7 * seed, seed=seed) for seed in range(8)]
    expected = [cold(tiny, prompt, greedy(24, logprobs=3)) for prompt in prompts]
    aborted = 0
    for turn in range(4):
        for number, prompt in enumerate(prompts):
            engine.add_request(prompt, greedy(24, logprobs=3), request_id=str(number))
        outputs = dict[str, RequestOutput]()
        for step in range(1000):
            if not engine.has_work:
                break
            outputs.update({output.request_id: output for output in engine.step()})
            if step % 5 == turn and str(step % 8) in outputs and outputs[str(step % 8)].finish_reason is None:
                engine.abort(str(step % 8))
                aborted += 1
        for number, output in outputs.items():
            assert output.error is None
            if output.finish_reason == "length":
                assert_same(output, expected[int(number)])
    stats = engine.stats()
    assert stats.finished["length"] == 32 - aborted and aborted > 4
    assert engine.cache.stats().restored_checkpoints > 8
    assert late[0].num_partial > 0
    assert_nothing_held(engine)


def test_a_copy_that_fails_in_any_layer_is_a_miss(tiny: Engine, late: list[LateCopier]) -> None:
    prompt, other = ids(6 * GRID + 3), ids(7 * GRID, seed=5)
    engine, expected = small(tiny, pages=60, states=20), cold(tiny, prompt, PARAMS)
    evicted(engine, prompt)
    num_calls = 0
    while True:
        num_calls += 1
        late[0].num_calls, late[0].fails_at = 0, num_calls
        output = answer(engine, prompt, PARAMS)
        assert_same(output, expected)
        if late[0].num_calls < num_calls:
            break
        assert "failed: the copy cannot be begun" in str(output.explain)
        assert output.usage.cached_tokens == 0
        late[0].fails_at = None
        assert_same(answer(engine, other, PARAMS), cold(tiny, other, PARAMS))  # with the memory that it had
        assert_nothing_held(engine)
        engine.cache.allocator.evict(engine.cache.tree.evict_all)
    assert output.usage.cached_tokens == 6 * GRID
    assert num_calls == len(engine.model.model.layers) + 1
    assert engine.cache.stats().tier_failures == num_calls - 1


def test_memory_that_is_freed_while_contents_arrive_is_used_after_that(tiny: Engine, late: list[LateCopier]) -> None:
    """A lease is closed and all is evicted at once: others get its memory, whose contents arrive if no one waits."""
    engine = small(tiny)
    prompt, others = ids(6 * GRID + 3), [ids(9 * GRID + 2, seed=seed) for seed in range(1, 4)]
    for _ in range(3):
        evicted(engine, prompt)
        engine.cache.close(begun(engine, prompt))
        engine.cache.clear()  # without a copy: no one reads it
        assert not engine.cache.memory.uploads.are_pending
        for other in others:
            assert_same(answer(engine, other, PARAMS), cold(tiny, other, PARAMS))
    assert_nothing_held(engine)


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_a_restore_that_fails_after_its_copies_were_begun(
    tiny: Engine, late: list[LateCopier], monkeypatch: pytest.MonkeyPatch, state_dtype: str
) -> None:
    """The tree refuses it: the memory is the lease's, which computes in it, or gives it to others."""
    engine = small(tiny, pages=40, state_dtype=state_dtype, deterministic=False)
    prompt, other = ids(6 * GRID + 3), ids(30 * GRID, seed=5)
    plain = small(tiny, host=None, state_dtype=state_dtype, deterministic=False)
    expected = {length: answer(plain, own, PARAMS) for length, own in ((30, other), (6, prompt))}
    key, cache = Key.of(prompt), engine.cache
    evicted(engine, prompt)
    with monkeypatch.context() as patch:
        patch.setattr(cache.tree, "insert", refuses)
        lease = cache.begin(key, len(key) - 1, len(key))
        assert lease is not None and lease.num_hit_tokens == 0
    assert late[0].num_calls and late[0].num_made == len(late[0].begun), "its place is free"
    cache.close(lease)
    cache.clear()
    for own, length in ((other, 30), (prompt, 6)):
        assert_same(answer(engine, own, PARAMS), expected[length])
    assert_nothing_held(engine)


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
@pytest.mark.parametrize("is_page", [True, False])
def test_private_memory_is_freed_once_contents_are_there(
    tiny: Engine, late: list[LateCopier], state_dtype: str, is_page: bool
) -> None:
    cache = small(tiny, state_dtype=state_dtype, deterministic=False).cache
    allocator, tensors = cache.allocator, cache.memory.tensors
    pages, place, slot = allocator.allocate_pages(1), allocator.allocate_new_checkpoint(), allocator.allocate_state()
    assert tensors is not None and pages is not None and place is not None and slot is not None
    contents, checkpoint = bytes(tensors.read_page(pages[0])), bytes(tensors.read_checkpoint(place))
    cache.memory.contents.write(pages, [contents], place, checkpoint)
    allocator.free_states([slot])
    assert cache.memory.uploads.are_pending, "it was another slot"
    if is_page:
        allocator.free_pages(pages)
    else:
        allocator.free_checkpoint(place)
    assert late[0].num_made == len(late[0].begun)


def refuses(*args: Any, **rest: Any) -> Any:
    raise CopyError("the tree takes nothing")


def test_a_closed_engine_waits_for_what_arrives(tiny: Engine, late: list[LateCopier]) -> None:
    engine, prompt = small(tiny), ids(6 * GRID + 3)
    evicted(engine, prompt)
    cache = engine.cache
    begun(engine, prompt)
    cache.memory.release()
    assert late[0].num_made == len(late[0].begun), "who gets the memory next is not overwritten"


@pytest.mark.parametrize("read", ["save", "evict", "open", "kv", "state_tensors"])
def test_readers_wait_for_what_arrives(tiny: Engine, late: list[LateCopier], read: str) -> None:
    engine, prompt = small(tiny, pages=60), ids(6 * GRID + 3)
    evicted(engine, prompt)
    cache = engine.cache
    cache.close(begun(engine, prompt))
    cache.memory.uploads.wait_for_all()
    data = saved(engine, prompt)
    cache.allocator.evict(cache.tree.evict_all)
    lease = begun(engine, prompt)
    if read == "save":
        assert saved(engine, prompt) == data
    elif read == "evict":
        cache.close(lease)
        assert cache.tiers is not None and cache.tiers.host is not None
        cache.tiers.host.clear()
        cache.allocator.evict(cache.tree.evict_all)  # is copied again
        lease = begun(engine, prompt)
        assert saved(engine, prompt) == data
    elif read == "open":
        key = Key.of(prompt)
        again = cache.open(key, len(key) - 1, len(key))
        assert again is not None and not cache.memory.uploads.are_pending
        cache.close(again)
    else:
        found = getattr(cache, read)
        tensors = found.values() if isinstance(found, dict) else [found]
        at = lease.read_slot if isinstance(found, dict) else lease.block_table[0]
        assert all(tensor[at].isfinite().all() for tensor in tensors)
    cache.close(lease)
    assert_same(answer(engine, prompt, PARAMS), cold(tiny, prompt, PARAMS))


def test_what_is_loaded_is_there(tiny: Engine, late: list[LateCopier]) -> None:
    source, target, prompt = small(tiny, host=None), small(tiny, host=None), ids(6 * GRID + 3)
    answer(source, prompt, PARAMS)
    assert target.load(source.dump([prompt])).checkpoints
    assert not target.cache.memory.uploads.are_pending and late[1].num_calls
    assert_same(answer(target, prompt, PARAMS), cold(tiny, prompt, PARAMS))


def test_what_arrives_is_moved_once_it_is_there(tiny: Engine, late: list[LateCopier]) -> None:
    """Pages, and a checkpoint, are moved together in an elastic memory while a lease that was begun has them."""
    engine, prompt = small(tiny, pages=60), ids(6 * GRID + 3)
    evicted(engine, prompt)
    lease, cache = begun(engine, prompt), engine.cache
    tensors, pages = cache.memory.tensors, cache.allocator.allocate_pages(2)
    assert tensors is not None and pages is not None
    first = lease.block_table[0]
    tensors.move_pages({first: pages[0]})
    assert torch.equal(tensors.kv[first], tensors.kv[pages[0]]) and tensors.kv[first].isfinite().all()
    cache.allocator.free_pages(pages)
    cache.close(lease)
    evicted(engine, prompt)
    lease, slot = begun(engine, prompt), cache.allocator.allocate_state()
    assert slot is not None
    tensors.move_states({lease.read_slot: slot})
    assert all(state[slot].isfinite().all() for state in tensors.state.values())
    cache.allocator.free_states([slot])
    cache.close(lease)
    assert_nothing_held(engine)


def test_a_stored_checkpoint_that_arrives_is_moved_once_it_is_there(tiny: Engine, late: list[LateCopier]) -> None:
    engine, prompt = small(tiny, pages=60, state_dtype="int8", deterministic=False), ids(6 * GRID + 3)
    evicted(engine, prompt)
    lease, cache = begun(engine, prompt), engine.cache
    place, store = cache.allocator.allocate_checkpoint(), cache.memory.contents
    node = cache.tree.peek(lease.key, len(prompt)).checkpoint
    assert place is not None and node is not None and node.slot is not None
    store.move_stored({node.slot: place})
    assert not cache.memory.uploads.are_pending
    cache.allocator.free_checkpoint(place)
    cache.close(lease)
    assert_nothing_held(engine)


def test_captured_passes_wait_for_all(tiny: Engine, late: list[LateCopier]) -> None:
    """A layout with prompts is launched when it occurs first, and captured when it occurs again."""
    engine, graphs = with_graphs(small(tiny, pages=90, states=24), max_prompt_tokens=512, on_gpu=True)
    for _ in range(20):
        engine.cache.note_pass(1, 1.0)
    num_partial = []
    for prompt in [ids(5 * GRID + 3 * seed, seed=seed) for seed in range(4)]:
        expected = cold(tiny, prompt, PARAMS)
        for _ in range(3):
            evicted(engine, prompt)
            assert_same(answer(engine, prompt, PARAMS), expected)
            num_partial.append(late[0].num_partial)
    assert len(graphs.graphs) > 1, "passes with prompts too"
    assert engine.cache.stats().restored_checkpoints == 12
    assert num_partial[-1] == num_partial[-2] == num_partial[-3]


def test_drafts_and_a_predictor(late: list[LateCopier], tmp_path: Path) -> None:
    """The predictor's keys and hidden states are restored, too, and used when drafts are made and replayed."""
    path = add_random_predictor(write_random_checkpoint(tmp_path / "model", "qwen3_5_text, odd sizes"))
    cache = CacheConfig(memory="64MiB", page_size=GRID, chunk_size=GRID)
    model = Engine.from_pretrained(path, dtype="float32", cache=cache, speculation="mtp")
    vocab = model.model.config.vocab_size
    prompts = [[token % vocab for token in ids(5 * GRID + 1 + seed, seed=seed)] for seed in range(3)]
    plain = [cold(model, prompt, PARAMS) for prompt in prompts]
    drafts = SpeculationConfig(drafters=("mtp",), adaptive=False, max_drafts=3)
    engine = small(model, pages=90, states=24, speculation=drafts)
    for _ in range(2):
        evicted(engine, *prompts)
        for output, expected in zip(engine.generate(prompts, PARAMS, progress=False), plain, strict=True):
            assert_same(output, expected)
            assert output.usage.cached_tokens == 5 * GRID
    assert late[-1].num_partial > 0
    before = engine.stats().speculation["mtp"]
    evicted(engine, prompts[0])
    answer(engine, prompts[0], greedy(20))
    assert engine.stats().speculation["mtp"] != before


@pytest.mark.parametrize("name", ["bamba", "gemma3_text", "qwen3_next", "qwen3_5_moe_text"])
def test_every_family(late: list[LateCopier], tmp_path: Path, name: str) -> None:
    assert name in FAMILIES
    path = write_random_checkpoint(tmp_path / "model", name)
    cache = CacheConfig(memory="64MiB", page_size=GRID, chunk_size=GRID)
    model = Engine.from_pretrained(path, device="cpu", dtype="float32", cache=cache)
    prompt = [token % model.model.config.vocab_size for token in ids(5 * GRID + 3)]
    engine = small(model, pages=60, states=20)
    evicted(engine, prompt)
    output = answer(engine, prompt, PARAMS)
    assert output.usage.cached_tokens == 5 * GRID
    assert_same(output, cold(model, prompt, PARAMS))
    assert len(set(late[1].waited)) > 1
