"""Passes with drafts, replays of what was accepted, and passes of the predictor are captured on a CPU: their bits are
those of passes that are launched kernel by kernel."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid import CacheConfig, Engine, EngineConfig, RequestOutput, SamplingParams, SpeculationConfig
from hybrid.commands.random_checkpoints import add_random_predictor, write_random_checkpoint
from hybrid.engine import captured_passes, drafting, predictor
from hybrid.engine.capture import capture_for
from hybrid.engine.predictor import ChainNumbers
from hybrid.engine.replay import Replay, ReplayOfAll
from hybrid.kernels.cpu.drafts import Chains, continue_chains
from hybrid.speculation.drafter import ChainDrafter, Drafter, History
from support.drafters import Scripted, chain
from support.engines import GRID, assert_nothing_held, greedy, ids
from support.graphs import in_place, with_graphs

SAMPLED = SamplingParams(max_new_tokens=40, ignore_eos=True, logprobs=2, temperature=1.2, top_p=0.9, seed=7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path: Path = tmp_path_factory.mktemp("model")
    add_random_predictor(write_random_checkpoint(path, "qwen3_5_text, odd sizes"))
    cache = CacheConfig(memory="64MiB", page_size=GRID, chunk_size=GRID)
    return Engine.from_pretrained(path, dtype="float32", cache=cache, speculation="mtp")


def engine_of(
    model: Engine, *drafters: str | Drafter, eager: bool = False, max_drafts: int = 7, **cache: Any
) -> Engine:
    """An engine that computes all drafts, with an empty cache of its own."""
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, **cache)
    drafts = SpeculationConfig(drafters=drafters, adaptive=False, max_drafts=max_drafts) if drafters else None
    config = EngineConfig(enforce_eager=eager, audit=True)
    return model.with_cache(settings, size=(96, 24), config=config, speculation=drafts)


def mostly(model: Engine, known: dict[tuple[int, ...], list[int]], right: int = 6) -> Scripted:
    """Drafts the known answers to prompts; after so many right tokens one is wrong."""
    vocab = model.model.config.vocab_size

    def script(history: History, limit: int) -> tuple[list[int], list[int]]:
        done = len(history) - history.prompt_len
        tokens = known.get(tuple(history[: history.prompt_len]), [])[done : done + limit]
        return chain([(token + (at % (right + 1) == right)) % vocab for at, token in enumerate(tokens, done)])

    return Scripted(script)


def known_of(outputs: list[RequestOutput]) -> dict[tuple[int, ...], list[int]]:
    """The answers to prompts, for `mostly`."""
    return {tuple(output.prompt_token_ids): output.token_ids for output in outputs}


def prompts_of(model: Engine, count: int) -> list[list[int]]:
    vocab = model.model.config.vocab_size
    return [[token % vocab for token in ids(20 + 9 * seed, seed=seed)] for seed in range(count)]


@pytest.mark.parametrize("params", [greedy(40, logprobs=2), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
def test_answers_are_those_of_launched_passes(model: Engine, params: SamplingParams, deterministic: bool) -> None:
    prompts = prompts_of(model, 4)
    plain = engine_of(model, eager=True, deterministic=deterministic).generate(prompts, params, progress=False)
    known = known_of(plain)
    captured, launched = (
        engine_of(model, mostly(model, known), eager=eager, deterministic=deterministic) for eager in (False, True)
    )
    for count in (1, 4, 4):  # alone, together, and as hits
        outputs = [engine.generate(prompts[:count], params, progress=False) for engine in (captured, launched)]
        assert [output.token_ids for output in outputs[0]] == [output.token_ids for output in plain[:count]]
        assert [output.logprobs for output in outputs[0]] == [output.logprobs for output in outputs[1]]
        assert sum(output.usage.accepted_tokens for output in outputs[0]) > 15 * count
    assert captured.runner.graphs is not None and launched.runner.graphs is None
    assert_nothing_held(captured)


def test_a_step_of_several_requests_and_one_with_drafts_are_one_capture(model: Engine) -> None:
    prompts, known = prompts_of(model, 4), dict[tuple[int, ...], list[int]]()
    engine = engine_of(model, mostly(model, known, 1000), max_drafts=3)
    outputs = engine.generate(prompts, greedy(29), progress=False)
    assert len(engine.runner.graphs.graphs) == 1  # type: ignore[union-attr]
    known.update(known_of(outputs))
    engine.cache.clear()
    usage = engine.generate([prompts[0]], greedy(29), progress=False)[0].usage
    assert (usage.drafted_tokens, usage.accepted_tokens) == (21, 21)  # seven passes of four rows
    assert len(engine.runner.graphs.graphs) == 1  # type: ignore[union-attr]


def test_graphs_are_bounded(model: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_passes, "MAX_GRAPHS", 2)
    prompts = prompts_of(model, 3)
    plain = engine_of(model).generate(prompts, greedy(30), progress=False)
    known = known_of(plain)
    engine = engine_of(model, mostly(model, known, 3))
    outputs = engine.generate(prompts, greedy(30), progress=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert len(engine.runner.graphs.graphs) == 2  # type: ignore[union-attr]


def test_a_replay_that_cannot_be_captured_is_launched(model: Engine, caplog: pytest.LogCaptureFixture) -> None:
    steps: list[list[list[int]]] = []

    def run(slots: Any) -> None:
        steps.append([slots.starts.tolist(), slots.read.tolist(), slots.write.tolist()])

    def capture(again: Callable[[], Tensor]) -> Any:
        raise MemoryError("no memory for a capture")

    replay = ReplayOfAll(5, 3, model.device, run, capture)
    with caplog.at_level(logging.WARNING):
        replay.keep(Replay([1, 2, 4], [0, 2, 3], [7, -1, 8], [-1, 7, 8]))
    replay.keep(Replay([3], [0, 1], [6], [6]))
    assert steps == [
        [[0, 1, 3, 4, 5, 5, 5], [0, 7, -1, -1, 8], [-1, -1, 7, -1, 8]],
        [[0, 1, 3, 4, 5, 5, 5], [0, -1, -1, 6, -1], [-1, -1, -1, 6, -1]],
    ]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("least", [0.0, 0.02])
def test_the_predictor_captured_drafts_what_it_drafts_launched(
    model: Engine, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains end at the same tokens, too."""
    monkeypatch.setattr(ChainDrafter, "least", least)
    prompts = prompts_of(model, 3)
    plain = engine_of(model).generate(prompts, greedy(40), progress=False)
    stats = []
    for eager in (False, True):
        engine = engine_of(model, "mtp", eager=eager)
        for count in (1, 3):
            outputs = engine.generate(prompts[:count], greedy(40), progress=False)
            assert [output.token_ids for output in outputs] == [output.token_ids for output in plain[:count]]
        assert_nothing_held(engine)
        stats.append(engine.stats().speculation["mtp"])
    assert stats[0] == stats[1] and stats[0].refused == 0
    whole = stats[0].drafted_tokens > 5 * stats[0].proposals
    assert whole is (least == 0.0)


def test_a_chain_has_the_same_numbers_captured_and_launched() -> None:
    """Also those of requests whose pages end before those of others: they see no page that is not theirs."""
    rng, width, page_size = random.Random(0), 4, 4
    tables = [[rng.randrange(50) for _ in range(rng.randint(1, width))] for _ in range(5)]
    lengths = [rng.randint(len(table) * page_size - 3, len(table) * page_size) for table in tables]
    rows = [(7, 100 + row, 60 + row, length, row) for row, length in enumerate(lengths)]
    numbers = ChainNumbers(rows, tables, width, page_size)
    columns, table = (part.clone() for part in torch.tensor(numbers.at(0)).split([36, 20]))
    beliefs, control = torch.zeros(1 + 5 + 50), torch.zeros(2, dtype=torch.int64)
    found = torch.zeros(9, 5, 1, dtype=torch.int64), torch.zeros(9, 5, 1)
    chains = Chains(columns.view(6, 6), table.view(5, width), torch.zeros(5), beliefs, control, *found)
    for ahead in range(1, 9):
        continue_chains(chains, page_size)
        chains.columns[0] = 0  # the token is known to the predictor alone
        assert columns.tolist() == numbers.at(ahead)[:36]
        assert all(chains.columns[3, :5] <= torch.tensor([len(table) * page_size for table in tables]))


def test_captured_passes_of_the_predictor_are_bounded(model: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "MAX_PASSES", 2)
    made, kept = list[int](), list[int]()
    chains = predictor.PredictorPasses.chains

    def noted(passes: Any, *given: Any) -> Any:
        found = chains(passes, *given)
        kept.append(passes.num_captured)
        return found

    def counted(device: Any) -> Any:
        capture = capture_for(device)

        def capturing(again: Any) -> Any:
            made.append(len(kept))
            return capture(again)

        return capturing

    monkeypatch.setattr(predictor.PredictorPasses, "chains", noted)
    monkeypatch.setattr(drafting, "capture_for", counted)
    engine, prompts = engine_of(model, "mtp"), prompts_of(model, 3)
    captures = []
    for count in (1, 2, 1, 3, 1, 2):  # two are kept: the one that was not used for longest goes
        before = len(made)
        engine.generate([prompt[:5] for prompt in prompts[:count]], greedy(9), progress=False)
        captures.append(len(made) - before)
    assert captures == [1, 1, 0, 1, 0, 1]
    assert max(kept) == 2


def test_hooks_of_a_predictor_that_was_captured_are_called(model: Engine) -> None:
    engine, prompts, calls = engine_of(model, "mtp"), prompts_of(model, 1), list[int]()
    expected = engine.generate(prompts, greedy(9), progress=False)
    handle = engine.model.mtp.register_forward_hook(lambda *_: calls.append(1))
    engine.cache.clear()
    outputs = engine.generate(prompts, greedy(9), progress=False)
    handle.remove()
    assert outputs[0].token_ids == expected[0].token_ids
    assert len(calls) > 0


def test_a_predictor_that_cannot_be_captured_is_launched(
    model: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = prompts_of(model, 1)
    expected = engine_of(model, "mtp", eager=True).generate(prompts, greedy(20), progress=False)
    engine, draft = engine_of(model, "mtp"), model.model.draft

    def reads(batch: Any, hidden: Tensor, kv: Tensor) -> Any:
        hidden = hidden + float(hidden.sum() * 0)
        return draft(batch, hidden, kv)

    monkeypatch.setattr(engine.model, "draft", reads)
    with caplog.at_level(logging.WARNING):
        outputs = engine.generate(prompts, greedy(20), progress=False)
    assert outputs[0].token_ids == expected[0].token_ids
    assert outputs[0].usage == expected[0].usage
    assert ["capturing the predictor failed" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("params", [greedy(40, logprobs=2), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
def test_answers_through_graphs_as_a_gpu_has_them(model: Engine, params: SamplingParams, deterministic: bool) -> None:
    """With padding, a layout for passes with drafts and one for those without, and logits that all graphs share."""
    prompts = prompts_of(model, 4)
    plain = engine_of(model, eager=True, deterministic=deterministic).generate(prompts, params, progress=False)
    known = known_of(plain)
    launched = engine_of(model, mostly(model, known), eager=True, deterministic=deterministic)
    engine, graphs = with_graphs(launched, in_place, on_gpu=True)
    for count in (1, 4, 4):
        outputs = engine.generate(prompts[:count], params, progress=False)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain[:count]]
        if deterministic:
            assert [output.logprobs for output in outputs] == [output.logprobs for output in plain[:count]]
        assert sum(output.usage.accepted_tokens for output in outputs) > 15 * count
    engine.generate(prompts_of(model, 5)[4:], params, progress=False)  # of which no answer is known
    assert {graph.after_drafts is None for graph in graphs.graphs} == {True, False}
    logits = [graph.logits for graph in graphs.graphs]
    memory = {rows.untyped_storage().data_ptr(): rows.untyped_storage().nbytes() for rows in logits}
    assert sum(memory.values()) <= 2 * max(rows.nbytes for rows in logits) * 2  # twice the largest, a power of two
    assert len(memory) < len(logits)
    assert_nothing_held(engine)
