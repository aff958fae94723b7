"""In deterministic mode copies on disk are used where the bits are those that would be computed."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid import Engine
from hybrid.kernels.cpu.threads import num_threads
from hybrid.kernels.ops import choose_again
from hybrid.tiers.fingerprint import PACKAGES, VARIABLES, arithmetic
from support.engines import GRID, answer, cold, engine_on, greedy, ids

PARAMS = greedy(6, logprobs=3)
PROMPT = ids(5 * GRID + 3)


@pytest.fixture
def other_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other kernels compute than by default."""
    with monkeypatch.context() as patch:
        patch.setenv("HYBRID_KERNELS", "reference")
        choose_again()
        yield
    choose_again()


def life(
    tiny: Engine, path: Path, deterministic: bool = True, is_exact: bool = True
) -> tuple[list[int], object, int, str]:
    """An engine on a directory answers, and what it is cold, unless the twins compute, whose bits depend on the batch.
    Returns ids, log-probabilities, its hit, and why."""
    with engine_on(tiny, pages=40, states=10, deterministic=deterministic, disk="64MiB", directory=path) as engine:
        output = answer(engine, PROMPT, PARAMS)
        if deterministic and is_exact:
            expected = cold(tiny, PROMPT, PARAMS)
            assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
        return output.token_ids, output.logprobs, output.usage.cached_tokens, str(output.explain)


def test_other_kernels_compute_in_the_next_life(tiny: Engine, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert life(tiny, tmp_path)[2] == 0
    first = life(tiny, tmp_path)
    assert first[2] == 5 * GRID
    request.getfixturevalue("other_kernels")
    second = life(tiny, tmp_path, is_exact=False)
    assert second[2] == 0 and "HYBRID_KERNELS is '' there and 'reference' here" in second[3]
    assert first[1] != second[1], "the test needs kernels that round differently"
    assert life(tiny, tmp_path, is_exact=False)[2] == 5 * GRID, "its own copies are there, too"


def test_where_bits_do_not_count_neither_do_kernels(
    tiny: Engine, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    life(tiny, tmp_path, deterministic=False)
    request.getfixturevalue("other_kernels")
    assert life(tiny, tmp_path, deterministic=False)[2] == 5 * GRID


def test_products_by_tiles_compute_in_the_next_life(
    tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = pytest.importorskip("hybrid.kernels.cpu.target")
    life(tiny, tmp_path)
    monkeypatch.setattr(target, "HAS_TILES", not target.HAS_TILES)
    found = life(tiny, tmp_path)
    assert found[2] == 0
    assert re.search("sums is 'by vectors.*' there and 'by tiles.*' here", found[3])


def test_machines_with_the_same_level_are_not_asked_for_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet of several processors agrees."""
    (tmp_path / "cpuinfo").write_text("model name : another processor")
    monkeypatch.setattr("hybrid.tiers.fingerprint.CPUINFO", tmp_path / "cpuinfo")
    assert arithmetic()["CPU"].startswith("another processor")
    monkeypatch.setenv("HYBRID_CPU_LEVEL", "avx2")
    assert arithmetic()["CPU"] == "any, by HYBRID_CPU_LEVEL"


def test_it_names_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = arithmetic()
    assert set(before) == {*PACKAGES, *VARIABLES, "CPU", "GPU", "kernels", "threads"}
    assert all(isinstance(value, str) for value in before.values())
    assert before["torch"] and before["CPU"] and before["threads"] == str(num_threads())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert {name for name, value in arithmetic().items() if value != before[name]} == {"ONEDNN_MAX_CPU_ISA"}
