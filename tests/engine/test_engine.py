"""The engine: prompts in, answers out."""

import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid import CacheConfig, Engine, SamplingParams
from hybrid.models.torch_functions import use_torch_functions
from support.engines import GRID, answer, assert_nothing_held, cold, engine_on, greedy, ids, run_to_end


def test_greedy_answers_are_those_of_transformers(tiny: Engine) -> None:
    from transformers import AutoModelForCausalLM

    from hybrid.models.loading import TINY

    theirs = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    use_torch_functions(theirs)
    prompt = tiny.tokenizer("The with statement is used to", return_tensors="pt")
    expected = theirs.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt.input_ids.shape[1] :].tolist()
    output = answer(engine_on(tiny), "The with statement is used to", SamplingParams(max_new_tokens=24))
    assert output.token_ids == expected
    assert output.text == tiny.tokenizer.decode(expected, skip_special_tokens=True)


def test_there_is_one_result_per_prompt_in_order(tiny: Engine) -> None:
    prompts = [ids(50, seed=1), ids(5, seed=2), ids(120, seed=3)]
    outputs = engine_on(tiny).generate(prompts, [greedy(9), greedy(2), greedy(1)], progress=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == [9, 2, 1]
    assert [output.usage.completion_tokens for output in outputs] == [9, 2, 1]
    assert [output.usage.prompt_tokens for output in outputs] == [50, 5, 120]


def test_a_prompt_is_a_text_or_ids_or_chat_messages(tiny: Engine) -> None:
    engine = engine_on(tiny)
    text = "def add(a, b):"
    in_ids = tiny.tokenizer(text).input_ids
    assert engine.generate(text, greedy(4))[0].token_ids == engine.generate([in_ids], greedy(4))[0].token_ids
    assert engine.generate(in_ids, greedy(4))[0].prompt_token_ids == in_ids
    as_tensor = torch.tensor([in_ids, in_ids])
    assert [output.prompt_token_ids for output in engine.generate(as_tensor, greedy(1))] == [in_ids, in_ids]
    messages = [{"role": "user", "content": "What is a list?"}]
    chat = tiny.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    one, several = engine.generate(messages, greedy(4))[0], engine.generate([messages, text], greedy(4))
    assert one.prompt_token_ids == tiny.tokenizer(chat).input_ids == several[0].prompt_token_ids
    assert several[1].prompt_token_ids == in_ids


def test_a_stream_gives_the_text_of_generate_in_pieces(tiny: Engine) -> None:
    engine = engine_on(tiny)
    whole = answer(engine, "class Foo:", greedy(20)).text
    pieces = list(engine.stream("class Foo:", greedy(20)))
    assert "".join(pieces) == whole
    assert len(pieces) > 1
    assert_nothing_held(engine)


def test_a_stream_that_is_dropped_aborts_its_request(tiny: Engine) -> None:
    engine = engine_on(tiny)
    pieces = engine.stream("The if statement", greedy(60))
    next(pieces)
    assert engine.has_work
    pieces.close()
    assert_nothing_held(engine)
    assert answer(engine, ids(20)).token_ids == cold(tiny, ids(20)).token_ids


def test_add_request_and_step_give_the_outputs_that_moved(tiny: Engine) -> None:
    engine = engine_on(tiny)
    first = engine.add_request(ids(40, seed=1), greedy(3))
    second = engine.add_request(ids(200, seed=2), greedy(2))
    moved = [sorted(output.request_id for output in engine.step()) for _ in range(3)]
    assert moved[0] == [first, second]
    assert [first] in moved or [first, second] in moved[1:]
    outputs = run_to_end(engine)
    assert_nothing_held(engine)
    assert all(output.finish_reason == "length" for output in outputs.values())


def test_generate_leaves_other_requests_their_outputs(tiny: Engine) -> None:
    engine = engine_on(tiny)
    other = engine.add_request(ids(30, seed=1), greedy(2))
    mine = answer(engine, ids(30, seed=2), greedy(12))
    assert mine.token_ids == cold(tiny, ids(30, seed=2), greedy(12)).token_ids
    outputs = run_to_end(engine)
    assert outputs[other].finish_reason == "length"
    assert outputs[other].token_ids == cold(tiny, ids(30, seed=1), greedy(2)).token_ids


def test_an_answer_ends_for_a_reason(tiny: Engine) -> None:
    prompt = ids(33)
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    free = answer(engine_on(tiny), prompt, greedy(12, **sampled))
    assert free.finish_reason == "length"
    stop_token = next(token for at, token in enumerate(free.token_ids) if token not in free.token_ids[:at] and at >= 3)
    cut = answer(engine_on(tiny), prompt, greedy(12, stop_token_ids=[stop_token], **sampled))
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop_token) + 1]


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(tiny: Engine) -> None:
    engine, prompt = engine_on(tiny), "The for statement"
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    whole = answer(engine, prompt, greedy(30, **sampled)).text
    stop = whole[len(whole) // 2 :][:3]
    cut = answer(engine, prompt, greedy(30, stop=[stop], **sampled))
    assert cut.finish_reason == "stop"
    assert cut.text == whole[: whole.index(stop)]
    assert "".join(engine.stream(prompt, greedy(30, stop=stop, **sampled))) == cut.text


def test_the_end_token_ends_an_answer_unless_it_is_ignored(tiny: Engine) -> None:
    prompt = ids(20)
    end = answer(engine_on(tiny), prompt, greedy(3)).token_ids[1]
    engine = Engine(replace(tiny.loaded, end_tokens=frozenset([end])), engine_on(tiny).cache)
    stopped = answer(engine, prompt, SamplingParams(max_new_tokens=3))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] == end
    assert len(stopped.token_ids) <= 2
    assert len(answer(engine, prompt, greedy(3)).token_ids) == 3


def test_an_answer_ends_at_the_model_s_limit(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.model.config, "max_position_embeddings", 40)
    engine = engine_on(tiny)
    output = answer(engine, ids(35), greedy(50))
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 5


def test_logprobs_are_reported_per_token(tiny: Engine) -> None:
    output = answer(engine_on(tiny), ids(20), greedy(4, logprobs=3))
    assert output.logprobs is not None
    assert len(output.logprobs) == 4
    for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
        assert len(logprobs) == 3
        assert max(logprobs, key=logprobs.__getitem__) == token
    assert answer(engine_on(tiny), ids(20), greedy(4)).logprobs is None


def test_a_seed_fixes_the_answer_whatever_else_is_in_the_batch(tiny: Engine) -> None:
    params = SamplingParams(max_new_tokens=16, temperature=1.0, top_p=0.95, seed=7, ignore_eos=True)
    alone = answer(engine_on(tiny), ids(40), params)
    others = [ids(25, seed=5), ids(40), ids(70, seed=6)]
    among = engine_on(tiny).generate(others, [greedy(20), params, greedy(5)], progress=False)[1]
    assert among.token_ids == alone.token_ids
    other = SamplingParams(max_new_tokens=16, temperature=1.0, top_p=0.95, seed=8, ignore_eos=True)
    assert answer(engine_on(tiny), ids(40), other).token_ids != alone.token_ids


def test_namespaces_share_nothing(tiny: Engine) -> None:
    engine = engine_on(tiny)
    prompt = ids(5 * GRID)
    answer(engine, prompt, namespace="a")
    assert answer(engine, prompt, namespace="b").usage.cached_tokens == 0
    assert answer(engine, prompt, namespace="a").usage.cached_tokens > 0


def test_without_the_cache_nothing_is_kept(tiny: Engine) -> None:
    engine = engine_on(tiny, enabled=False)
    for _ in range(2):
        output = answer(engine, ids(80))
        assert output.usage.cached_tokens == output.usage.page_tokens == 0
        assert "cache is disabled" in str(output.explain)
    stats = engine.cache.stats()
    assert stats.pages_cached == stats.checkpoints == 0
    assert_nothing_held(engine)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_next_turn_hits_up_to_the_last_whole_chunk_of_prompt_and_answer(tiny: Engine, deterministic: bool) -> None:
    engine = engine_on(tiny, deterministic=deterministic)
    for length, new in ((3 * GRID + 5, 2 * GRID + 1), (2 * GRID, GRID + 7), (7, 3), (4 * GRID, 5), (3 * GRID - 2, 2)):
        first = answer(engine, ids(length, seed=length), greedy(new))
        turn = answer(engine, first.prompt_token_ids + first.token_ids + ids(GRID, seed=9))
        # Without determinism the last token of the answer was never computed.
        known = length + new - (0 if deterministic else 1)
        assert turn.usage.cached_tokens == known // GRID * GRID


def test_explain_says_what_was_asked_and_hit_and_why_not_more(tiny: Engine) -> None:
    engine = engine_on(tiny)
    prompt = ids(4 * GRID + 3)
    assert (
        str(answer(engine, prompt).explain) == f"0 of {4 * GRID + 3} tokens cached, pages up to 0: the cache is empty"
    )
    assert "this prompt is new" in answer(engine, ids(40, seed=8)).explain.reason
    again = answer(engine, prompt)
    assert str(again.explain).startswith(f"{4 * GRID} of {4 * GRID + 3} tokens cached, pages up to {4 * GRID}: ")
    assert again.usage.cached_tokens == again.usage.page_tokens == 4 * GRID


def test_ctrl_c_in_the_middle_of_a_pass_leaves_an_engine_that_works(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(tiny, enforce_eager=True)  # a captured pass does not call the model
    other = engine.add_request(ids(30, seed=3), greedy(10))
    passes = 0

    def interrupted(*arguments: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        logits = tiny.model.forward(*arguments)
        if passes == 4:
            raise KeyboardInterrupt  # after the pass has written its states: the worst moment
        return logits

    monkeypatch.setattr(engine.runner, "model", interrupted_model(tiny.model, interrupted))
    with pytest.raises(KeyboardInterrupt):
        answer(engine, ids(50, seed=4), greedy(20))
    engine.cache.audit()
    outputs = run_to_end(engine)
    assert list(outputs) == [other]
    assert outputs[other].token_ids == cold(tiny, ids(30, seed=3), greedy(10)).token_ids
    assert_nothing_held(engine)


def interrupted_model(model: Any, forward: Any) -> Any:
    """The model with another forward pass."""

    class Interrupted:
        config = model.config

        def __call__(self, *arguments: Any) -> torch.Tensor:
            return forward(*arguments)

    return Interrupted()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("where", ["commit", "capture", "begin", "reserve"])
def test_a_signal_in_the_middle_of_the_bookkeeping_waits_for_its_end(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine = engine_on(tiny)
    original = getattr(engine.cache, where)
    calls = 0

    def signalled(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(engine.cache, where, signalled)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([ids(4 * GRID, seed=seed) for seed in (1, 2, 3)], greedy(4), progress=False)
    assert calls >= 3  # the others of the same step had their turn
    monkeypatch.undo()
    while engine.has_work:
        engine.step()
    assert_nothing_held(engine)
    for seed in (1, 2, 3):
        assert answer(engine, ids(4 * GRID, seed=seed)).token_ids == cold(tiny, ids(4 * GRID, seed=seed)).token_ids


def test_engines_on_the_same_weights_keep_their_caches_apart(tiny: Engine) -> None:
    one, other = engine_on(tiny), engine_on(tiny)
    answer(one, ids(64))
    assert answer(other, ids(64)).usage.cached_tokens == 0
    assert one.cache.stats().requests == other.cache.stats().requests == 1


def test_clear_evicts_what_no_request_needs(tiny: Engine) -> None:
    engine = engine_on(tiny)
    answer(engine, ids(64))
    engine.add_request(ids(64), greedy(4))
    engine.step()
    engine.cache.clear()
    engine.cache.audit()
    outputs = run_to_end(engine)
    assert next(iter(outputs.values())).token_ids == cold(tiny, ids(64), greedy(4)).token_ids
    engine.cache.clear()
    assert engine.cache.stats().pages_free == engine.cache.stats().pages_total


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hits_are_bitwise_cold_runs_in_half_precision_too(tiny: Engine, dtype: str) -> None:
    config = CacheConfig(page_size=GRID, chunk_size=GRID, memory="64MiB")
    half = Engine.from_pretrained("tiny", dtype=dtype, cache=config, config=tiny.config)
    engine, params = engine_on(half), greedy(GRID + 3, logprobs=3)
    shared = ids(4 * GRID)
    first = engine.generate([shared + ids(own, seed=own) for own in (5, GRID, 30)], params, progress=False)
    turns = [output.prompt_token_ids + output.token_ids + ids(7) for output in first]
    second = engine.generate(turns, params, progress=False)
    assert all(output.usage.cached_tokens > 4 * GRID for output in second)
    for output in [*first, *second]:
        assert output.logprobs == cold(half, output.prompt_token_ids, params).logprobs
