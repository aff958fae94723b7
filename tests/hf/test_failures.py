"""`hybrid.hf.PrefixCache` when a pass fails: nothing of it is cached, and the next call computes afresh."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
import torch

from hybrid import NonFiniteError, UnsupportedModelError
from hybrid.hf.installed import cache_in
from support.hf import assert_nothing_held, assert_same, cache_on, greedy, having, ids, tiny_model
from support.planted import Planted, PlantedError


@pytest.fixture(scope="module", params=having("qwen3_5_text", "lfm3"))
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@contextmanager
def nan_planted(model: Any, layer: int, pass_number: int, token: int = -1) -> Iterator[list[int]]:
    """One pass of the model has NaN in the output of a layer, for one token. Yields the lengths of its passes."""
    lengths: list[int] = []

    def plant(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        lengths.append(hidden.shape[1])
        if len(lengths) == pass_number:
            hidden = hidden.clone()
            hidden[:, token] = float("nan")
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    hook = model.model.layers[layer].register_forward_hook(plant)
    try:
        yield lengths
    finally:
        hook.remove()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("pass_number", [1, 5, 6])
@pytest.mark.parametrize(("layer", "token"), [(0, -1), (1, 0), (2, -1)])
def test_a_pass_with_nan_is_an_error_and_nothing_of_it_is_cached(
    model: Any, layer: int, token: int, pass_number: int, deterministic: bool
) -> None:
    """In the prefill, in the pass of the prompt's tail, and while decoding."""
    cache = cache_on(model, deterministic=deterministic)
    cold = cache_on(model, deterministic=deterministic)
    with nan_planted(model, layer, pass_number, token) as lengths, pytest.raises(NonFiniteError, match="NaN or inf"):
        cache.generate(ids(70), **greedy(6))
    assert len(lengths) == pass_number
    assert_nothing_held(cache)
    found = cache.generate(ids(70), **greedy(6))
    if deterministic:
        assert_same(found, cold.generate(ids(70), **greedy(6)))
    assert all(logits.isfinite().all() for logits in found.logits)
    assert_nothing_held(cache)


def test_nan_in_one_prompt_of_a_batch_leaves_the_others_cached(model: Any) -> None:
    cache = cache_on(model)
    batch = ids(40, rows=3)
    with nan_planted(model, 1, 3), pytest.raises(NonFiniteError):  # two passes for the chunks of each prompt, one after
        cache.generate(batch, **greedy())
    assert [cache.explain(batch[row : row + 1]).usable_hit for row in range(3)] == [32, 0, 0]
    assert_same(cache.generate(batch, **greedy()), cache_on(model).generate(batch, **greedy()))
    assert_nothing_held(cache)


def test_an_answer_that_cannot_be_cached_is_returned_with_a_warning() -> None:
    """In deterministic mode its chunks are computed once more; NaN there is no reason to lose the answer."""
    model = tiny_model("qwen3_5_text")
    cache = cache_on(model)
    expected = cache_on(model).generate(ids(40), **greedy(30))
    with nan_planted(model, 1, 3 + 29 + 1), pytest.warns(RuntimeWarning, match="not cached"):
        found = cache.generate(ids(40), **greedy(30))
    assert_same(found, expected)
    assert cache.explain(torch.cat([found.sequences, ids(5)], 1)).usable_hit == 0, "what it had read is dropped"
    assert_nothing_held(cache)


def test_a_session_with_nan_raises_and_caches_nothing_of_the_past(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    with cache.session(ids(40)) as past:
        with nan_planted(model, 1, 4), pytest.raises(NonFiniteError):
            model.generate(ids(40), **past.as_argument, **greedy(30))
        assert past.known_rows() is None
    assert cache.explain(ids(60)).usable_hit == 32
    assert_nothing_held(cache)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_state_that_is_not_finite_is_not_captured(deterministic: bool) -> None:
    """Even where the logits of its pass are."""
    model = tiny_model("qwen3_5_text")
    cache = cache_on(model, deterministic=deterministic)

    def plant(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache_in(args, kwargs).layers[0].recurrent_states[0][..., 0, 0] = float("inf")

    hook = model.register_forward_hook(plant, with_kwargs=True)
    with pytest.raises(NonFiniteError):
        cache.generate(ids(70), **greedy())
    hook.remove()
    assert_nothing_held(cache)
    assert cache.explain(ids(70)).usable_hit == 0


# Signals


class TimeLimitError(Exception):
    """Raised by a signal handler."""


def lines_of_ours(action: Callable[[], object], interrupt_at: int | None = None) -> int:
    """Run an action, and count the lines of this library that it runs. A signal arrives at line `interrupt_at`."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("hybrid.hf", "hybrid.cache", "hybrid.interrupts", "hybrid.tree.tree")):
            return None
        if event == "line":
            count += 1
            if count == interrupt_at:
                signal.raise_signal(signal.SIGALRM)
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return count


@pytest.fixture
def alarm_raises() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise TimeLimitError

    before = signal.signal(signal.SIGALRM, handle)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_signal_at_any_point_of_a_call_leaves_the_cache_whole(
    untraced: None, alarm_raises: None, deterministic: bool
) -> None:
    model = tiny_model("qwen3_5_text")

    def turn(cache: Any) -> Any:
        return cache.generate(torch.cat([ids(40), ids(40, 1)], 1), **greedy())

    def fresh() -> Any:
        cache = cache_on(model, 100_000, deterministic=deterministic)
        cache.generate(ids(40), **greedy())
        return cache

    cache = fresh()
    total = lines_of_ours(lambda: turn(cache))
    expected = turn(cache_on(model, deterministic=deterministic))
    num_interrupted = 0
    for point in range(1, total, total // 20):
        try:
            lines_of_ours(lambda cache=cache: turn(cache), point)
        except TimeLimitError:
            num_interrupted += 1
        assert_nothing_held(cache)
        assert signal.getsignal(signal.SIGALRM).__qualname__.startswith("alarm_raises")
        found = turn(cache)
        if deterministic:
            assert_same(found, expected)
        if point % 3 == 0:
            cache = fresh()
    assert num_interrupted > 15


@pytest.mark.parametrize(("error", "reported"), [(torch.OutOfMemoryError, torch.OutOfMemoryError), (KeyError, None)])
def test_a_model_that_cannot_run_is_told_from_a_device_that_is_full(error: Any, reported: Any) -> None:
    model = tiny_model("llama")

    def fail(*_: object) -> None:
        raise error("nowhere")

    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(reported or UnsupportedModelError, match="nowhere"):
        cache_on(model)
    hook.remove()
    assert_nothing_held(cache_on(model))


@pytest.mark.usefixtures("untraced")
def test_an_exception_at_any_line_of_clear_leaves_the_cache_whole() -> None:
    model = tiny_model("llama")
    for line in (1, 7, 19, 25, 31, 46, 58):
        cache = cache_on(model)
        cache.keep(ids(40)[0].tolist())
        planted = Planted(line, "tree/tree.py")
        with suppress(PlantedError), planted.traced():
            cache.clear()
        assert planted.was_raised
        assert_nothing_held(cache)


@pytest.mark.parametrize("call", [1, 2])
def test_an_unexpected_exception_leaves_no_page_with_two_owners(
    model: Any, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_on(model, deterministic=True)
    insert, calls = cache.cache.tree.insert, []

    def raising(*arguments: Any) -> Any:
        calls.append(insert(*arguments))
        if len(calls) == call:
            raise RuntimeError("planted")
        return calls[-1]

    monkeypatch.setattr(cache.cache.tree, "insert", raising)
    with pytest.raises(RuntimeError, match="planted"):
        cache.generate(ids(70), **greedy(6))
    monkeypatch.undo()
    assert_nothing_held(cache)
    assert cache.cache.stats().resets == 1
    for length in (70, 50, 70):
        assert_same(
            cache.generate(ids(length), **greedy(6)),
            cache_on(model, deterministic=True).generate(ids(length), **greedy(6)),
        )
    assert_nothing_held(cache)
