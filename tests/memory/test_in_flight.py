"""Contents are read and written once no other thread computes on them."""

from collections.abc import Callable
from typing import Any

import pytest

from hybrid import CacheConfig, CacheMemory, Engine
from hybrid.engine.build import build_cache
from hybrid.memory.tensors import CacheTensors

ACCESSES: dict[str, Callable[[CacheMemory, CacheTensors], Any]] = {
    "move_pages": lambda memory, tensors: tensors.move_pages({1: 2}),
    "move_states": lambda memory, tensors: tensors.move_states({1: 2}),
    "read_page": lambda memory, tensors: tensors.read_page(1),
    "read_checkpoint": lambda memory, tensors: tensors.read_checkpoint(1),
    "fetch_page": lambda memory, tensors: memory.contents.fetch_page(1),
    "fetch_checkpoint": lambda memory, tensors: memory.contents.fetch_checkpoint(1),
    "write_page": lambda memory, tensors: tensors.write_page(1, tensors.read_page(2)),
    "write_checkpoint": lambda memory, tensors: tensors.write_checkpoint(1, tensors.read_checkpoint(2)),
    "write": lambda memory, tensors: memory.contents.write([1], [tensors.read_page(2)], 1, tensors.read_checkpoint(2)),
    "settled": lambda memory, tensors: memory.settled,
    "release": lambda memory, tensors: memory.release(),
}

STORED: dict[str, Callable[[Any], Any]] = {
    "store": lambda stored: stored.store(1, 40),
    "restore": lambda stored: stored.restore(40, 1),
    "move_stored": lambda stored: stored.move_stored({40: 41}),
}


class Pass:
    """Counts how often it was waited for."""

    def __init__(self) -> None:
        self.ends = 0

    def end(self) -> None:
        self.ends += 1


def made(tiny: Engine, state_dtype: str) -> CacheMemory:
    return build_cache(tiny.loaded, CacheConfig(memory="8MiB", state_dtype=state_dtype)).memory


@pytest.mark.parametrize("name", ACCESSES)
@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_who_reads_or_writes_contents_waits_for_a_pass_once(tiny: Engine, name: str, state_dtype: str) -> None:
    memory, under_way = made(tiny, state_dtype), Pass()
    assert memory.tensors is not None
    memory.in_flight.begin_pass(under_way)
    assert memory.in_flight.is_under_way
    for _ in range(2 if name != "release" else 1):
        ACCESSES[name](memory, memory.tensors)
        assert under_way.ends == 1
    assert not memory.in_flight.is_under_way


@pytest.mark.parametrize("name", STORED)
def test_so_does_who_packs_and_moves_stored_checkpoints(tiny: Engine, name: str) -> None:
    memory, under_way = made(tiny, "bfloat16"), Pass()
    assert memory.tensors is not None
    memory.in_flight.begin_pass(under_way)
    STORED[name](memory.contents)
    assert under_way.ends == 1


def test_what_has_no_contents_waits_for_nothing() -> None:
    memory = CacheMemory.of_indices(4, 4)
    memory.in_flight.wait_for_pass()
    assert not memory.in_flight.is_under_way
