"""The watch of interpreted launches finds the bugs that are planted here, and nothing where there are none.

A bug is planted by changing the text of a kernel's module; the changed copy is imported under another name.
"""

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hybrid.kernels.triton import convolution, delta_rule, elementwise, memory
from support.program_order import ORDERS, Loom
from support.races import BOUNDS, RACE, UNFENCED
from support.tensors import ints, rows_of, starts_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU"),
    pytest.mark.usefixtures("untraced"),  # the lines of other tests, through interpreted kernels
]

ARRIVE = '            is_last = tl.atomic_add(counter, 1, sem="acq_rel") == PROGRAMS - 1\n'
ALL_HAVE_READ = "            tl.debug_barrier()  # all threads have read\n"
BEFORE_STORE = "            tl.debug_barrier()  # the slot may be the one that was read\n"
AFTER_STORE = "            tl.debug_barrier()\n            slot = write\n"
BEFORE_WINDOW = "    tl.debug_barrier()  # the slot may be the one that was read\n"
COPY = "    tl.store(write + at, tl.load(read + at, mask=exists), mask=exists)"
FIRST_TILE = "        if tile == 0:\n"
CONVOLVED = "total, mask=channel < tl.where(row < left, num_channels, 0))"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def planted(module: ModuleType, folder: Path, text: str, instead: str) -> ModuleType:
    """A copy of a module with some of its text changed."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(text) == 1
    path = folder / "planted.py"
    path.write_text(source.replace(text, instead), encoding="utf-8")
    spec = spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    copy = module_from_spec(spec)
    sys.modules["planted"] = copy
    spec.loader.exec_module(copy)
    return copy


def step(module: Any) -> None:
    """A step of one token of each of two requests, two value heads that share a key head; slots 5 and 3 go on."""
    _step(module, [1, 1], [5, 3], [5, 3])


def chain(module: Any) -> None:
    """A request of three tokens that keeps two windows, the second from the first."""
    _step(module, [3], [5, -1, -1], [5, -1, 9])


def _step(module: Any, lengths: list[int], reads: list[int], writes: list[int]) -> None:
    tokens, heads, dim = sum(lengths), 2, 16
    channels = (2 + heads) * dim
    module.gated_delta_step(
        torch.randn(tokens, channels),
        torch.randn(tokens, heads),
        torch.randn(tokens, heads),
        torch.randn(channels, 4),
        -torch.rand(heads),
        torch.randn(heads),
        torch.randn(12, 3, channels),
        torch.randn(12, heads, dim, dim),
        starts_of(lengths),
        ints(reads),
        ints(writes),
    )


def convolve(module: Any) -> None:
    """Two requests, of which one has one token and goes on in its own slot."""
    module.causal_conv1d(
        torch.randn(4, 24),
        torch.randn(24, 4),
        torch.randn(12, 3, 24),
        starts_of([3, 1]),
        ints([5, 3]),
        ints([9, 3]),
        rows_of([(0, 1, 10)]),
    )


def convolve_tiles(module: Any) -> None:
    """A request of two tiles of tokens."""
    tokens = module.TILE + 3
    where = starts_of([tokens]), ints([5]), ints([9]), rows_of([])
    module.causal_conv1d(torch.randn(tokens, 24), torch.randn(24, 4), torch.randn(12, 3, 24), *where)


def copy(module: Any) -> None:
    rows = torch.randint(256, (6, 24), dtype=torch.uint8)
    module.copy_states(rows, ints([0, 1]), ints([4, 5]))


BUGS: list[tuple[Any, Callable[[Any], None], str, str, str]] = [
    (delta_rule, step, ARRIVE, ARRIVE.replace("acq_rel", "relaxed"), RACE),
    (delta_rule, step, ARRIVE, ARRIVE.replace("acq_rel", "acquire"), RACE),
    (delta_rule, step, ARRIVE, ARRIVE.replace("acq_rel", "release"), RACE),
    (delta_rule, step, ALL_HAVE_READ, "", RACE),
    (delta_rule, chain, ALL_HAVE_READ, "", RACE),
    (delta_rule, step, ARRIVE, ARRIVE.replace("PROGRAMS - 1", "0"), RACE),
    (delta_rule, step, "    if is_last:\n        row =", "    if kept >= 0:\n        row =", RACE),
    (delta_rule, chain, BEFORE_STORE, "", UNFENCED),
    (delta_rule, chain, AFTER_STORE, "            slot = write\n", UNFENCED),
    (convolution, convolve, BEFORE_WINDOW, "", UNFENCED),
    (convolution, convolve_tiles, FIRST_TILE, "        if tile >= 0:\n", RACE),
    (
        convolution,
        convolve,
        CONVOLVED,
        "total, mask=exists)",
        RACE,
    ),
    (memory, copy, COPY, COPY.replace(", mask=exists)", ")"), BOUNDS),
]
NAMES = [
    "an arrival that is relaxed",
    "an arrival that hands on nothing",
    "an arrival that takes over nothing",
    "an arrival without its barrier",
    "an arrival without its barrier, after several tokens",
    "windows written by the first that arrives",
    "windows written by all",
    "windows that are kept without the first barrier",
    "windows that are kept without the second barrier",
    "windows of a prompt without the barrier",
    "windows of a prompt written for all of its tiles",
    "outputs past the end of a request",
    "copies without a mask",
]


@pytest.mark.parametrize(("module", "run", "text", "instead", "kind"), BUGS, ids=NAMES)
def test_a_planted_bug_is_found_in_every_order(
    module: Any, run: Callable[[Any], None], text: str, instead: str, kind: str, tmp_path: Path, watch: Any
) -> None:
    bug = planted(module, tmp_path, text, instead)
    for order in ORDERS:
        with watch.ordered(order):
            run(bug)
        found = watch.take()
        assert kind in {finding.kind for finding in found}, order
        assert all(site[0] == bug.__file__ for finding in found for site in finding.sites)


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_found_where_no_bug_is_planted(order: str, watch: Any) -> None:
    with watch.ordered(order):
        for module, run in ((delta_rule, step), (delta_rule, chain), (convolution, convolve), (memory, copy)):
            run(module)
            assert watch.take() == []


def test_results_are_the_same_in_every_order(watch: Any) -> None:
    results = []
    for order in ORDERS:
        with watch.ordered(order):
            rows = torch.arange(48, dtype=torch.uint8).view(6, 8)
            memory.copy_states(rows, ints([0, 1]), ints([4, 5]))
            results.append(rows)
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(results[0][4:], results[0][:2])


def test_lanes_that_are_masked_and_memory_that_nobody_wrote_hold_nan(tmp_path: Path) -> None:
    text = "    y = tl.load(x + _row_places(row, inner, x_outer_stride, x_inner_stride) + at, mask=exists, other=0.0)\n"
    source = Path(str(elementwise.__file__)).read_text(encoding="utf-8")
    first = text + "    if ADD:"
    assert first in source
    bug = planted(elementwise, tmp_path, first, first.replace(", other=0.0", ""))
    x = torch.randn(2, 24)
    assert elementwise.rms_norm(x, torch.ones(24), 1e-6).isfinite().all()
    assert bug.rms_norm(x, torch.ones(24), 1e-6).isnan().all()
    assert torch.empty(3).isnan().all()
    assert x.new_empty(3, dtype=torch.float16).isnan().all()
    assert (torch.empty_like(x, dtype=torch.int64) > 2**60).all()


def test_every_woven_program_runs_once(watch: Any) -> None:
    done: list[int] = []
    loom = Loom(watch.draw, lambda program: None)

    def execute(program: int) -> None:
        for _ in range(program % 5):
            loom.turn()
        done.append(program)

    for count in (1, 3, 4, 5, 20):
        done.clear()
        loom.run(range(count), execute)
        assert sorted(done) == list(range(count))
    assert done != sorted(done)


def test_an_error_of_a_woven_program_is_raised_and_the_others_end(watch: Any) -> None:
    done: list[int] = []
    loom = Loom(watch.draw, lambda program: None)

    def execute(program: int) -> None:
        for _ in range(10):
            loom.turn()
        if program == 3:
            raise KeyError(program)
        done.append(program)

    with pytest.raises(KeyError, match="3"):
        loom.run(range(20), execute)
    assert len(done) < 19
