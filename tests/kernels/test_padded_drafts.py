"""Passes with drafts that are padded, as graphs of them need: no bit of a row depends on the padding, padding writes
nothing, one capture serves however drafts are dealt out, and what it keeps after accepted drafts has the bits of a
replay of these drafts alone.

Kernels are ours, interpreted and watched; what a graph holds is recorded as a GPU would record it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from hybrid import Engine, SpeculationConfig
from hybrid.engine.captured_passes import CapturedPasses
from hybrid.engine.padding import MAX_ROWS_WITH_DRAFTS, Padding, padding_of
from hybrid.engine.replay import Replay, replay_states
from hybrid.engine.results import Verification
from hybrid.engine.step import Step
from hybrid.speculation.drafter import History
from support.drafters import Scripted, chain
from support.engines import GRID, greedy, ids
from support.recording import records
from support.small_passes import CPU, VOCAB, computed, engine_of, interpreted, memory_of, planned, put_back
from support.tensors import ints, same_bits, untouched

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

LENGTHS = (GRID + 3, 5, GRID - 1)
"""Tokens of prompts; that of the last one is a boundary when it decodes."""


@pytest.fixture(autouse=True)
def _plain(use_kernels: Callable[[str], None]) -> None:
    """Products are not compiled when a model is made."""
    use_kernels("reference")


def steps_of(deterministic: bool, drafts: list[tuple[int, ...]]) -> Iterator[tuple[Engine, Step]]:
    """Steps that decode, with these numbers of drafts of each request."""
    now: dict[int, int] = {}

    def script(history: History, limit: int) -> tuple[list[int], list[int]]:
        return chain([token % VOCAB for token in ids(now.get(history.prompt_len, 0), len(history))][:limit])

    speculation = SpeculationConfig(drafters=(Scripted(script),), adaptive=False, max_drafts=7)
    engine = engine_of(deterministic, speculation)
    for seed, length in enumerate(LENGTHS):
        engine.add_request([token % VOCAB for token in ids(length, seed)], greedy(40))
    engine.step()
    for counts in drafts:
        now.update(zip(LENGTHS, counts, strict=True))
        step = engine.scheduler.schedule()
        assert [part.num_drafts for part in step.parts] == list(counts)
        yield engine, step
        engine.scheduler.retract_all("a test asks for it")
        now.clear()
        engine.step()


def padding_for(step: Step) -> Padding:
    padding = padding_of(step, 0)
    assert padding is not None and padding.runs
    return padding


def accepted(step: Step, counts: tuple[int, ...]) -> Replay:
    """The replay after these numbers of accepted drafts of each request."""
    found: list[Replay] = []
    Verification(step.parts, frozenset(), found.append).keep([[*range(count)] for count in counts])
    return found[0]


def test_padding_beside_drafts_changes_no_bit_and_writes_nothing() -> None:
    for engine, step in steps_of(True, [(2, 0, 1)]):
        bare, padded = planned(engine, step, None), planned(engine, step, padding_for(step))
        assert padded.num_decoded > bare.num_decoded
        (logits, memory), (expected, expected_memory) = computed(engine, padded), computed(engine, bare)
        for one, other in zip([logits, *memory], [expected, *expected_memory], strict=True):
            assert same_bits(one, other)
        idle = replace(padded, numbers=padded.idle())
        assert all(map(same_bits, computed(engine, idle)[1], memory_of(engine)))


def test_one_graph_serves_however_drafts_are_dealt_out_and_accepted() -> None:
    dealt: list[tuple[int, ...]] = [(3, 0, 2), (1, 1, 1)]
    taken: list[tuple[int, ...]] = [(2, 0, 2), (0, 1, 1)]
    graphs, layouts = None, []
    for (engine, step), counts in zip(steps_of(True, dealt), taken, strict=True):
        replay, memory = accepted(step, counts), memory_of(engine)
        if graphs is None:
            graphs = CapturedPasses(engine.model, memory[0], engine.cache.state_tensors, CPU, records, on_gpu=True)
        padded, before = planned(engine, step, padding_for(step)), [tensor.clone() for tensor in memory]
        with interpreted():
            batch = padded.on(CPU)[0]
            expected = engine.model(batch, memory[0], engine.cache.state_tensors).clone()
            assert batch.log is not None
            replay_states(engine.model, batch.log, replay, engine.cache.state_tensors, CPU)
            expected_memory = put_back(engine, before)
            ran = graphs.run(padded)
            assert ran.keep_states is not None
            ran.keep_states(replay)
        assert same_bits(ran.logits, expected)
        assert all(map(same_bits, put_back(engine, before), expected_memory))
        layouts.append(padded.shape)
        assert "decodes.run_starts" in dict(padded.shape)
    assert graphs is not None
    assert len(set(layouts)) == len(graphs.graphs) == 1


def test_more_rows_than_a_graph_may_keep_are_launched() -> None:
    for engine, step in steps_of(False, [(3, 0, 2)]):
        assert padding_for(step) == Padding(3, 16, runs=7)
        step.parts[:] = step.parts * (MAX_ROWS_WITH_DRAFTS // 8)
        assert padding_of(step, 0) == Padding(48, 16, runs=127)
        step.parts.append(step.parts[0])
        assert padding_of(step, 0) is None
        del step.parts[3:]
        assert engine.runner is not None


@pytest.mark.parametrize(
    ("sizes", "padding"),
    [((1, 1, 1), (1, 16, 1)), ((1, 7, 20), (1, 64, 2)), ((16, 1, 1), (31, 16, 31)), ((3, 20, 65), (12, 256, 8))],
)
def test_few_shapes_occur_with_drafts(sizes: tuple[int, int, int], padding: tuple[int, int, int]) -> None:
    rows, width, runs = padding
    assert Padding.with_drafts(*sizes) == Padding(rows, width, runs=runs)


@pytest.mark.parametrize("folder", ["reference", "triton", "cpu"])
def test_requests_without_tokens_change_nothing(folder: str) -> None:
    if folder == "cpu":
        pytest.importorskip("numba")
    torch.manual_seed(0)
    channels, heads = 2 * 2 * 8 + 4 * 12, 4
    step = import_module(f"hybrid.kernels.{folder}.delta_rule").gated_delta_step
    shift = import_module(f"hybrid.kernels.{folder}.memory").shift_rows
    rows = torch.randn(5, channels), *torch.randn(2, 5, heads)
    weights = torch.randn(channels, 4), -torch.rand(heads), torch.randn(heads)
    windows, states, last = torch.randn(8, 3, channels), torch.randn(8, heads, 8, 12), torch.randn(8, 24)
    reads, writes = ints([1, -1, -1, 2, 0]), ints([1, -1, 4, 2, -1])

    def run(starts: list[int]) -> list[Tensor]:
        pools = windows.clone(), states.clone(), last.clone()
        where = ints(starts), reads, writes
        return [step(*rows, *weights, *pools[:2], *where), shift(rows[0][:, :24], pools[2], *where), *pools]

    expected, found = run([0, 3, 4, 5]), run([0, 3, 4, 5, 5])
    assert all(map(same_bits, found, expected))
    for pool, before in zip(found[2:], (windows, states, last), strict=True):
        assert untouched(before, pool, [1, 2, 4])
