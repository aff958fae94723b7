"""Passes with prompts that are padded, as graphs of them need: no bit of a row depends on the padding, padding writes
nothing, and a graph that was captured of one pass computes another one of the same sizes.

Kernels are ours, interpreted and watched; what a graph holds is recorded as a GPU would record it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from hybrid import Engine
from hybrid.engine.captured_passes import CapturedPasses
from hybrid.engine.padding import Padding
from hybrid.engine.step import Step
from support.engines import GRID, greedy, ids
from support.recording import HostReadError, records
from support.small_passes import CPU, VOCAB, computed, engine_of, interpreted, memory_of, planned, put_back
from support.tensors import ints, rows_of, same_bits, starts_of, untouched

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels


@pytest.fixture(autouse=True)
def _plain(use_kernels: Callable[[str], None]) -> None:
    """Products are not compiled when a model is made."""
    use_kernels("reference")


def steps_of(engine: Engine, lengths: list[list[int]]) -> Iterator[Step]:
    """Steps with prompts of these lengths, each beside the requests of the steps before, which decode; of some prompts
    a part is cached."""
    for number, own in enumerate(lengths):
        for seed, length in enumerate(own):
            prompt = ids(GRID, 9)[: length - 1] + ids(length, 10 * number + seed)[GRID:]
            engine.add_request([*(token % VOCAB for token in prompt), 7], greedy(40))
        step = engine.scheduler.schedule()
        yield step
        engine.scheduler.retract_all("a test asks for it")
        engine.step()


PADDING = Padding(rows=3, width=3, tokens=24, prompts=3, captures=2)
"""Smaller than an engine's, for the interpreter."""


@pytest.mark.parametrize("deterministic", [True, False])
def test_padding_changes_no_bit_and_writes_nothing(deterministic: bool) -> None:
    engine = engine_of(deterministic)
    for step in steps_of(engine, [[GRID + 3], [2, GRID + 1]]):
        padding = PADDING if len(step.parts) > 1 else PADDING._replace(rows=0)
        bare, padded = planned(engine, step, None), planned(engine, step, padding)
        assert padded.num_prefill_tokens == 24 and len(padded.numbers) > len(bare.numbers)
        (logits, memory), (expected, expected_memory) = computed(engine, padded), computed(engine, bare)
        for one, other in zip([logits, *memory], [expected, *expected_memory], strict=True):
            if deterministic:
                assert same_bits(one, other)
            else:  # the tiles of attention follow from the number of rows
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
    idle = replace(padded, numbers=padded.idle())  # of the last step
    assert all(map(same_bits, computed(engine, idle)[1], memory_of(engine)))


def test_a_graph_of_one_pass_computes_another_of_its_sizes() -> None:
    """Other lengths, other numbers of prompts, of requests that decode and of checkpoints, other pages and slots."""
    engine = engine_of(deterministic=True)
    graphs = CapturedPasses(engine.model, engine.cache.kv, engine.cache.state_tensors, CPU, records, 512)
    shapes = []
    for step in steps_of(engine, [[GRID], [2, 9], [GRID + 4]]):
        if len(step.parts) > 1:
            made = planned(engine, step, PADDING)
            expected, memory = computed(engine, made)
            for _ in range(2 if not shapes else 1):  # it is captured when it occurs for the second time
                before = [tensor.clone() for tensor in memory_of(engine)]
                with interpreted():
                    logits = graphs.run(made).logits[: len(made.parts)].clone()
                assert same_bits(logits, expected)
                assert all(map(same_bits, put_back(engine, before), memory))
            shapes.append((made.shape, [len(part.captured) for part in step.parts]))
    assert len({shape for shape, _ in shapes}) == 1 and len(shapes) == 2
    assert len({str(captures) for _, captures in shapes}) == 2 and len(graphs.graphs) == 1


@pytest.mark.parametrize("folder", ["reference", "triton", "cpu"])
def test_a_prompt_that_keeps_no_state_writes_none_and_may_have_no_tokens(folder: str) -> None:
    if folder == "cpu":
        pytest.importorskip("numba")
    torch.manual_seed(0)
    convolve = import_module(f"hybrid.kernels.{folder}.convolution").causal_conv1d
    rule = import_module(f"hybrid.kernels.{folder}.delta_rule").chunk_gated_delta_rule
    lengths, reads = [GRID + 4, 0, GRID + 1], ints([1, 0, 2])
    tokens, tap = sum(lengths), torch.randn(24, 4)
    mixed, windows, states = torch.randn(tokens, 24), torch.randn(8, 3, 24), torch.randn(8, 2, 8, 12)
    q, k, v = torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 12)
    gates = (*torch.randn(2, tokens, 2), -torch.rand(2), torch.randn(2))

    def run(writes: list[int], captures: list[tuple[int, int, int]]) -> list[Tensor]:
        pools = windows.clone(), states.clone()
        where = (starts_of(lengths), reads, ints(writes), rows_of(captures))
        return [
            convolve(mixed, tap, pools[0], *where),
            rule(q, k, v, *gates, pools[1], *where, GRID),
            *pools,
        ]

    expected = run([4, 7, 5], [(2, GRID, 6)])
    found = run([4, -1, -1], [(-1, -1, -1), (2, GRID, 6), (-1, -1, -1)])
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert same_bits(one, other)
    for pool, kept, before in zip(found[2:], expected[2:], (windows, states), strict=True):
        assert same_bits(pool[[4, 6]], kept[[4, 6]])
        assert untouched(before, pool, [4, 6])


def test_a_recording_refuses_what_a_graph_cannot_hold() -> None:
    x = torch.arange(3.0)
    with pytest.raises(HostReadError, match=r"Tensor\.tolist"):
        records(lambda: x * x.tolist()[1])
    replay, found = records(lambda: (x + 1) * 2)
    x.add_(1)
    replay()
    assert found.tolist() == [4, 6, 8]
