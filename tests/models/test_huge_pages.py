"""Memory for weights in huge pages: when it is asked for, and that parameters are the same in it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybrid.models import weights
from hybrid.models.layers import Linear
from hybrid.models.loading import Quantization, load_model, open_checkpoint
from hybrid.models.weights import ALIGNMENT, huge_pages
from support.checkpoints import random_model, text_config, write_checkpoint
from support.tensors import CPU, same_bits

HUGE = 2**21
PAGE = weights.mmap.PAGESIZE
FEW, MANY = weights.MIN_PAGES - 1, weights.MIN_PAGES + 2


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a system says that has MANY + 1 huge pages free, two of them in one block."""
    orders = (HUGE // PAGE).bit_length()
    counts = [10**6] * (orders - 1) + [MANY - 1, 1]
    monkeypatch.setattr(weights, "HUGE_PAGE_SIZE", tmp_path / "size")
    monkeypatch.setattr(weights, "FREE_BLOCKS", tmp_path / "free")
    (tmp_path / "size").write_text(f"{HUGE}\n")
    lines = [f"Node 0, zone {name} {' '.join(map(str, own))}\n" for name, own in (("DMA", [9, 0]), ("Normal", counts))]
    (tmp_path / "free").write_text("".join(lines))
    return tmp_path


@pytest.mark.parametrize(("num_bytes", "is_found"), [(FEW, False), (MANY, True), (MANY + 1, False)])
def test_huge_pages_are_asked_for_where_they_matter_and_are_free(num_bytes: int, is_found: bool, system: Path) -> None:
    found = huge_pages(num_bytes * HUGE)
    assert (found is not None) == is_found
    if found is not None:
        assert found.numel() == num_bytes * HUGE and found.data_ptr() % HUGE == 0
        found[::PAGE] = 1  # all of it can be written
        assert found[:: HUGE - 1].sum() == 1


@pytest.mark.parametrize("name", ["size", "free"])
@pytest.mark.parametrize("content", [None, "", "Node 0, zone Normal many"])
def test_a_system_that_does_not_say_what_it_has_is_not_asked(name: str, content: str | None, system: Path) -> None:
    (system / name).unlink() if content is None else (system / name).write_text(content)
    assert huge_pages(MANY * HUGE) is None


@pytest.mark.parametrize(("kernels", "quantize"), [("auto", None), ("reference", None), ("auto", Quantization())])
def test_all_parameters_are_in_one_memory_and_are_the_same(
    kernels: str, quantize: Quantization | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", kernels)
    path = write_checkpoint(tmp_path, random_model(text_config()))
    given: list[Tensor] = []

    def memory(num_bytes: int) -> Tensor:
        given.append(torch.full((num_bytes,), 0xFF, dtype=torch.uint8))
        return given[-1]

    expected = load_model(open_checkpoint(path), torch.float32, CPU, 64, quantize=quantize).state_dict()
    monkeypatch.setattr(weights, "huge_pages", memory)
    model = load_model(open_checkpoint(path), torch.float32, CPU, 64, quantize=quantize)
    found, (block,) = model.state_dict(), given
    places = set()
    for name, parameter in found.items():
        assert same_bits(parameter, expected[name]) and parameter.stride() == expected[name].stride(), name
        assert parameter.untyped_storage().data_ptr() == block.data_ptr() and parameter.data_ptr() % ALIGNMENT == 0
        places.add((parameter.data_ptr(), -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT))
    for module in model.modules():
        if isinstance(module, Linear) and module.scale is not None:
            places.add((module.scale.data_ptr(), -(-module.scale.nbytes // ALIGNMENT) * ALIGNMENT))
    assert sum(size for _, size in places) == block.numel()
