"""Bad input gets a clear error that says what to do, nothing leaks, and the engine continues."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from hybrid import (
    ArgumentError,
    CacheConfig,
    CheckpointError,
    Engine,
    EngineConfig,
    HybridError,
    LockError,
    MemoryBudgetError,
    OwnershipError,
    PromptError,
    RequestError,
    SamplingError,
    SamplingParams,
)
from support.engines import GRID, answer, assert_nothing_held, engine_on, greedy, ids, run_despite_failures


@pytest.fixture
def engine(tiny: Engine) -> Any:
    """An engine that must still work, and hold nothing, after the test."""
    engine = engine_on(tiny, pages=20)
    yield engine
    assert_nothing_held(engine)
    assert len(answer(engine, ids(20), greedy(3)).token_ids) == 3
    assert_nothing_held(engine)


@pytest.mark.parametrize("empty", ["", []])
def test_an_empty_prompt_is_refused(engine: Engine, empty: Any) -> None:
    with pytest.raises(PromptError, match="empty; give at least one token"):
        engine.generate([empty], progress=False)


@pytest.mark.parametrize("wrong", [-1, 1024, 10**6])
def test_ids_outside_the_vocabulary_are_refused(engine: Engine, wrong: int) -> None:
    with pytest.raises(PromptError, match=rf"token id {wrong} .* from 0 to 1023"):
        engine.generate([[5, wrong, 7]], progress=False)


@pytest.mark.parametrize("word", ["\ud83d", "no, \udfff"])
def test_a_bad_word_that_no_tokenizer_takes_is_refused(engine: Engine, word: str) -> None:
    with pytest.raises(PromptError, match="bad_words: the text has a lone surrogate"):
        answer(engine, ids(5), greedy(3, bad_words=["yes", word]))


def test_a_prompt_of_another_kind_is_refused(engine: Engine) -> None:
    for wrong in (3.5, [1.5], ["a", 3], None):
        with pytest.raises(PromptError, match="a text, a list of token ids, or a list of chat messages"):
            engine.add_request(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("namespace", [1, True, 1.0, None])
def test_a_namespace_that_is_not_a_string_is_refused(engine: Engine, namespace: Any) -> None:
    for call in (engine.add_request, engine.generate, engine.pin):
        with pytest.raises(ArgumentError, match="a namespace must be a string"):
            call([1, 2, 3], namespace=namespace)


def test_a_prompt_longer_than_the_model_s_limit_is_refused(tiny: Engine) -> None:
    engine = engine_on(tiny, pages=1000)
    with pytest.raises(PromptError, match="has 8192 tokens; this model takes 8192, the answer included"):
        engine.add_request(ids(8192))
    assert_nothing_held(engine)


def test_a_prompt_longer_than_the_memory_is_refused_with_the_smallest_that_would_do(
    engine: Engine, tiny: Engine
) -> None:
    prompt, params = ids(50 * GRID), greedy(10)
    with pytest.raises(MemoryBudgetError, match="needs 51 pages, and there are 20; the smallest memory") as error:
        engine.generate([prompt], params, progress=False)
    memory = int(str(error.value).split("CacheConfig(memory=")[1].split(")")[0])
    enough = tiny.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID, memory=memory))
    assert len(answer(enough, prompt, params).token_ids) == 10
    with pytest.raises(MemoryBudgetError):
        answer(tiny.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID, memory=memory - 1024)), prompt, params)


def test_one_bad_prompt_among_good_ones_starts_none(engine: Engine) -> None:
    with pytest.raises(PromptError):
        engine.generate([ids(20), [], ids(30)], progress=False)
    assert not engine.has_work


def test_memory_too_small_for_one_request_is_refused_with_the_smallest_that_would_do(tiny: Engine) -> None:
    with pytest.raises(MemoryBudgetError, match="one request needs at least"):
        tiny.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID, memory="100KB"))


def test_another_number_of_params_than_of_prompts_is_refused(engine: Engine) -> None:
    with pytest.raises(ArgumentError, match="2 SamplingParams for 1 prompts"):
        engine.generate(["a"], [greedy(), greedy()], progress=False)


def test_contradictory_sampling_parameters_are_refused(engine: Engine) -> None:
    with pytest.raises(SamplingError, match="min_tokens=9 is more than max_new_tokens=8; lower the one"):
        SamplingParams(min_tokens=9, max_new_tokens=8)
    with pytest.raises(SamplingError, match="max_new_tokens must be an integer from 0"):
        SamplingParams(max_new_tokens=-1)


def test_a_second_release_of_a_lock_is_refused(engine: Engine) -> None:
    answer(engine, ids(40), greedy(2))
    node = next(node for _, node in engine.cache.tree.nodes())
    lock = engine.cache.tree.lock_pages(node)
    engine.cache.tree.unlock(lock)
    with pytest.raises(LockError, match="released before"):
        engine.cache.tree.unlock(lock)


def test_stepping_with_nothing_to_do_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="add_request first, and step while has_work"):
        engine.step()


def test_aborting_an_unknown_request_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="no request 'request-99'"):
        engine.abort("request-99")
    request = engine.add_request(ids(9))
    engine.abort(request)
    with pytest.raises(RequestError):
        engine.abort(request)
    assert [output.finish_reason for output in engine.step()] == ["abort"]


def test_a_path_that_the_system_refuses_is_not_a_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="cannot be opened: File name too long"):
        Engine.from_pretrained("a" * 5000)


def test_wrong_engine_arguments_are_refused(tiny: Engine) -> None:
    with pytest.raises(ArgumentError, match="at least 18 with max_num_seqs=2, got 17"):
        Engine(tiny.loaded, tiny.cache, EngineConfig(max_num_seqs=2, max_num_batched_tokens=17))
    with pytest.raises(ArgumentError, match="max_num_seqs"):
        EngineConfig(max_num_seqs=0)
    with pytest.raises(ArgumentError, match="max_waiting"):
        EngineConfig(max_waiting=0)
    with pytest.raises(ArgumentError, match="chunk_size must stay 16"):
        tiny.with_cache(CacheConfig(chunk_size=64))
    with pytest.raises(ArgumentError, match="dtype must be one of"):
        Engine.from_pretrained("tiny", dtype="int3")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        Engine.from_pretrained("/no/such/folder")
    with pytest.raises(ArgumentError, match="no eviction policy is named 'best'; there are: lru"):
        tiny.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID, eviction="best"))


def test_every_argument_error_is_a_value_error_and_a_hybrid_error() -> None:
    for error in (PromptError, SamplingError, MemoryBudgetError, CheckpointError):
        assert issubclass(error, ValueError)
        assert issubclass(error, HybridError)


def test_a_pass_that_fails_is_undone_and_can_be_repeated(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tiny)
    launch, calls = engine.runner.launch, []

    def failing(plan: Any) -> Any:
        result = launch(plan)
        calls.append(plan)
        if len(calls) in (1, 3, 4, 9):
            raise RuntimeError("out of memory, say")
        return result

    monkeypatch.setattr(engine.runner, "launch", failing)
    prompts = [ids(50, seed=n) for n in range(3)]
    requests = [engine.add_request(prompt, greedy(8)) for prompt in prompts]
    outputs, failures = run_despite_failures(engine)
    assert failures == 4
    monkeypatch.undo()
    for request, prompt in zip(requests, prompts, strict=True):
        assert outputs[request].token_ids == answer(engine_on(tiny, enabled=False), prompt, greedy(8)).token_ids
    assert_nothing_held(engine)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_and_its_cache_are_not_copied(tiny: Engine, copied: Callable[[Any], Any]) -> None:
    for one in (tiny, tiny.cache):
        with pytest.raises(OwnershipError, match=r"cannot be copied or pickled.*with_cache"):
            copied(one)
