"""Drafts change no answer: the same tokens, and in deterministic mode the same bits."""

from typing import Any

import pytest

from hybrid import Engine, RequestOutput, SamplingParams
from hybrid.engine import model_runner
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.drafter import Drafter
from support.drafters import following
from support.engines import GRID, answer, assert_nothing_held, engine_on, greedy, ids


def speculating(tiny: Engine, drafter: Drafter, **config: Any) -> Engine:
    """An engine that computes all that a drafter proposes."""
    own = SpeculationConfig(drafters=(drafter,), adaptive=False)
    base = engine_on(tiny, **config)
    return Engine(base.loaded, base.cache, base.config, speculation=own)


def answers_of(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return engine.generate(prompts, params, progress=False)


def known(outputs: list[RequestOutput]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(output.prompt_token_ids): output.token_ids for output in outputs}


PARAMS = [
    SamplingParams(max_new_tokens=40, ignore_eos=True, logprobs=5),
    SamplingParams(max_new_tokens=40, ignore_eos=True, logprobs=5, temperature=1.3, top_p=0.9, seed=7),
]


@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_drafts_change_neither_tokens_nor_bits(tiny: Engine, params: SamplingParams, right: float) -> None:
    prompts = [ids(50, seed=1), ids(5, seed=2), ids(3 * GRID, seed=3)]
    expected = answers_of(engine_on(tiny), prompts, params)
    engine = speculating(tiny, following(known(expected), right))
    for _ in range(2):  # cold, and as hits
        found = answers_of(engine, prompts, params)
        assert [output.token_ids for output in found] == [output.token_ids for output in expected]
        assert [output.logprobs for output in found] == [output.logprobs for output in expected]
        assert_nothing_held(engine)
    stats = engine.stats().speculation["Scripted"]
    assert stats.drafted_tokens > 0
    if right == 1.0:
        assert stats.accepted_tokens == stats.drafted_tokens


def test_a_draft_needs_no_state_and_a_pass_keeps_its_inputs_alone(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that `bench/speculation.py` computes for a larger model are those that are held here."""
    held: dict[int, int] = {}
    replay = model_runner.replay_states

    def measured(model: Any, log: Any, *others: Any) -> None:
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for each in log for part in each}
        held[len(log[0][0])] = sum(storage.nbytes() for storage in storages.values())
        replay(model, log, *others)

    monkeypatch.setattr(model_runner, "replay_states", measured)
    prompt = ids(40)
    plain = answer(engine_on(tiny), prompt, greedy(40))
    engine = speculating(tiny, following(known([plain])), enforce_eager=True)
    engine.add_request(prompt, greedy(40))
    while engine.has_work:
        engine.step()
        assert engine.cache.stats().states_private <= 2  # the front and the back
    config = tiny.model.config
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    width = 2 * keys * config.linear_key_head_dim + values * config.linear_value_head_dim + 2 * values
    num_layers = config.layer_types.count("linear_attention")
    assert max(held) > 8
    assert held == {rows: rows * num_layers * width * 4 for rows in held}
