"""Every tensor of a family is on one list, and whoever moves contents moves all of them."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.errors import ArgumentError, AuditError, OwnershipError
from hybrid.key import TOKEN_BYTES, Key
from hybrid.memory.contents import Mover
from hybrid.memory.copies import Contents
from hybrid.memory.memory import CacheMemory
from hybrid.memory.tensors import CacheTensors
from hybrid.models.attention import WINDOW
from hybrid.spec import HybridSpec, StateTensor, TokenTensor
from support.caches import AuditedCache, key_of
from support.tensors import bits

CPU = torch.device("cpu")
PAGE = 8

EVERYTHING = HybridSpec(
    tokens=(
        TokenTensor.kv(2, 1, 6, torch.bfloat16),
        TokenTensor("window.kv", (3, 2), (1, 5), torch.float32, window=16),
        TokenTensor("index.keys", (2,), (7,), torch.float16, block=4),
        TokenTensor("index.position", (), (), torch.int32),
        TokenTensor("predictor.kv", (1, 2), (1, 3), torch.bfloat16),
        TokenTensor("codes.kv", (1, 2), (2, 5), torch.int8),
        TokenTensor("codes.scales", (1, 2), (2,), torch.float32),
        replace(TokenTensor.kv(1, 2, 9, torch.bfloat16).packed("fp8"), name="packed.kv"),
    ),
    state=(
        StateTensor("recurrent", (2, 2, 9, 17), torch.float32),
        StateTensor("conv", (2, 3, 11), torch.bfloat16),
        StateTensor("history", (7,), torch.int32),
        StateTensor(WINDOW, (2, 2, 13, 1, 6), torch.bfloat16),
    ),
)
"""A made-up family with one tensor of every kind."""

MEMORIES: dict[str, Callable[[], CacheMemory]] = {
    "fixed": lambda: CacheMemory.fixed(EVERYTHING, PAGE, 24, 10, CPU),
    "one budget": lambda: CacheMemory.for_spec(EVERYTHING, 40_000, CPU, page_size=PAGE),
    "stored smaller": lambda: CacheMemory.for_spec(EVERYTHING, 40_000, CPU, page_size=PAGE, state_dtype="int8"),
}


@pytest.fixture(params=MEMORIES)
def memory(request: pytest.FixtureRequest) -> CacheMemory:
    return MEMORIES[request.param]()


def tensors_of(memory: CacheMemory) -> CacheTensors:
    assert memory.tensors is not None
    return memory.tensors


def randomize(tensors: dict[str, torch.Tensor], index: int, rng: torch.Generator) -> None:
    """Random numbers into one page, or one state slot, of every tensor."""
    for tensor in tensors.values():
        values = torch.randint(0, 1000 if tensor.element_size() > 1 else 100, tensor[index].shape, generator=rng)
        tensor[index] = values if not tensor.is_floating_point() else values / 7


def contents(tensors: dict[str, torch.Tensor], index: int) -> dict[str, list[int]]:
    return {name: bits(tensor[index]).flatten().tolist() for name, tensor in tensors.items()}


def test_every_tensor_has_a_place_of_its_own(memory: CacheMemory) -> None:
    tensors = tensors_of(memory)
    assert [*tensors.tokens] == [tensor.name for tensor in EVERYTHING.tokens]
    assert [*tensors.state] == [tensor.name for tensor in EVERYTHING.state]
    for views, indices in ((tensors.tokens, (6, 7, 8)), (tensors.state, (3, 4, 5))):
        every = [(index, tensor[index]) for tensor in views.values() for index in indices]
        for number, (_, part) in enumerate(every, 1):
            part.fill_(number)
        assert all((part == number).all() for number, (_, part) in enumerate(every, 1))


def test_shapes_are_those_of_a_page() -> None:
    tensors = tensors_of(MEMORIES["fixed"]())
    assert tensors.tokens["kv"].shape == (24, 2, 2, PAGE, 1, 6)
    assert tensors.tokens["index.keys"].shape == (24, 2, PAGE // 4, 7)
    assert tensors.tokens["index.position"].shape == (24, PAGE)
    assert tensors.state["history"].dtype == torch.int32


def test_a_page_may_not_end_inside_a_block() -> None:
    with pytest.raises(ArgumentError, match=r"'index.keys' keeps a row for every 4 tokens, and a page of 2 tokens"):
        CacheMemory.for_spec(EVERYTHING, 2**20, CPU, page_size=2)


def test_two_tensors_of_one_name_are_refused() -> None:
    one = StateTensor("conv", (1,), torch.float32)
    with pytest.raises(ArgumentError, match="two tensors are named 'conv'"):
        HybridSpec((), (one, one))


def forgets_nothing(
    move: Callable[[CacheTensors], None], of: Callable[[CacheTensors], dict[str, torch.Tensor]]
) -> bool:
    """Tell whether moving page or slot 3 to 5 moves every tensor of it."""
    tensors, rng = tensors_of(MEMORIES["fixed"]()), torch.Generator().manual_seed(1)
    views = of(tensors)
    for index in (3, 5):
        randomize(views, index, rng)
    before = contents(views, 3)
    assert all(before[name] != held for name, held in contents(views, 5).items())
    move(tensors)
    return contents(views, 5) == before


def pages(tensors: CacheTensors) -> dict[str, torch.Tensor]:
    return tensors.tokens


def states(tensors: CacheTensors) -> dict[str, torch.Tensor]:
    return tensors.state


def test_movers_forget_nothing() -> None:
    assert forgets_nothing(lambda tensors: tensors.move_pages({3: 5}), pages)
    assert forgets_nothing(lambda tensors: tensors.move_states({3: 5}), states)
    assert forgets_nothing(lambda tensors: tensors.write_page(5, tensors.read_page(3)), pages)
    assert forgets_nothing(lambda tensors: tensors.write_checkpoint(5, tensors.read_checkpoint(3)), states)


@pytest.mark.parametrize("name", [tensor.name for tensor in EVERYTHING.tokens])
def test_a_mover_that_forgets_a_tensor_of_pages_is_found(name: str) -> None:
    def move(tensors: CacheTensors) -> None:
        for other, tensor in tensors.tokens.items():
            if other != name:
                tensor[5] = tensor[3]

    assert not forgets_nothing(move, pages)


@pytest.mark.parametrize("name", [tensor.name for tensor in EVERYTHING.state])
def test_a_mover_that_forgets_a_tensor_of_states_is_found(name: str) -> None:
    def move(tensors: CacheTensors) -> None:
        for other, tensor in tensors.state.items():
            if other != name:
                tensor[5] = tensor[3]

    assert not forgets_nothing(move, states)


def test_contents_are_read_without_the_gaps_between_tensors() -> None:
    """The bytes of a piece that held something else before are not read."""
    tensors = tensors_of(MEMORIES["one budget"]())
    assert len(tensors.read_page(4)) == sum(tensor.num_bytes(PAGE) for tensor in EVERYTHING.tokens)
    assert len(tensors.read_checkpoint(4)) == sum(tensor.num_bytes for tensor in EVERYTHING.state)


def test_contents_of_another_size_are_refused() -> None:
    tensors = tensors_of(MEMORIES["fixed"]())
    with pytest.raises(OwnershipError, match="3 bytes are to be written where"):
        tensors.write_page(1, b"abc")


def test_a_checkpoint_that_is_stored_smaller_is_read_and_written_with_its_scales() -> None:
    tensors, rng = tensors_of(MEMORIES["stored smaller"]()), torch.Generator().manual_seed(2)
    randomize(tensors.state, 2, rng)
    tensors.store(2, 4)
    tensors.restore(4, 3)
    tensors.write_checkpoint(5, tensors.read_checkpoint(4))
    for tensor in tensors.state.values():
        tensor[6].zero_()
    tensors.restore(5, 6)
    assert contents(tensors.state, 6) == contents(tensors.state, 3)
    assert contents(tensors.state, 6)["history"] == contents(tensors.state, 2)["history"], "ids are never rounded"


class Forgetful:
    """A mover, reader and writer that leaves one tensor of whatever it writes as it was."""

    def __init__(self, tensors: CacheTensors, forgotten: str) -> None:
        self.tensors = tensors
        self.forgotten = forgotten
        self.read_page = tensors.read_page
        self.read_checkpoint = tensors.read_checkpoint
        self.page_layout = tensors.page_layout
        self.checkpoint_layout = tensors.checkpoint_layout

    def move_pages(self, moves: dict[int, int]) -> None:
        self._but_one(self.tensors.tokens, [*moves.values()], lambda: self.tensors.move_pages(moves))

    def move_states(self, moves: dict[int, int]) -> None:
        self._but_one(self.tensors.state, [*moves.values()], lambda: self.tensors.move_states(moves))

    def write_page(self, page: int, contents: Contents) -> None:
        self._but_one(self.tensors.tokens, [page], lambda: self.tensors.write_page(page, contents))

    def write_checkpoint(self, slot: int, contents: Contents) -> None:
        self._but_one(self.tensors.state, [slot], lambda: self.tensors.write_checkpoint(slot, contents))

    def _but_one(self, views: dict[str, torch.Tensor], places: list[int], write: Callable[[], None]) -> None:
        view = views.get(self.forgotten)
        before = view[places].clone() if view is not None else None
        write()
        if view is not None:
            view[places] = before


NAMES = [tensor.name for tensor in (*EVERYTHING.tokens, *EVERYTHING.state)]


def cache_on(forgotten: str | None, num_bytes: int = 60_000, **config: Any) -> AuditedCache:
    """A cache of the made-up family, whose mover forgets a tensor."""
    memory = CacheMemory.for_spec(EVERYTHING, num_bytes, CPU, page_size=PAGE)
    for tensor in (*tensors_of(memory).tokens.values(), *tensors_of(memory).state.values()):
        tensor.zero_()  # another test may have left here what is looked for
    if forgotten is not None:
        mover = Forgetful(tensors_of(memory), forgotten)
        sizes = memory.sizes
        memory = CacheMemory(
            memory.pages, memory.states, arena=memory.arena, sizes=sizes, tensors=memory.tensors, mover=mover
        )
    settings = {"page_size": PAGE, "chunk_size": PAGE, "eviction": "lru", "verify_contents": True, **config}
    cache = AuditedCache(memory, CacheConfig(**settings), model="made up")
    cache.note_pass(1, 1.0)  # what takes a second a token is worth a copy
    return cache


def compute(cache: HybridCache, key: Key, seed: int) -> None:
    """A request that writes random numbers into its pages and its checkpoint."""
    rng, tensors = torch.Generator().manual_seed(seed), tensors_of(cache.memory)
    lease = cache.open(key, len(key) - 1, len(key))
    assert lease is not None
    checkpoint = cache.capture(lease, len(key))
    assert checkpoint is not None
    for page in lease.private_pages:
        randomize(tensors.tokens, page, rng)
    randomize(tensors.state, checkpoint.slot, rng)
    cache.advance(lease, len(key))
    cache.commit(lease, key, len(key))
    cache.close(lease)


Held = list[dict[str, list[int]]]
"""The contents of every tensor, of pages and of a state."""


def hit(cache: HybridCache, key: Key) -> Held:
    """Return what a request gets whose prompt continues a cached one."""
    longer = Key(key.ids + key.ids[:TOKEN_BYTES])
    lease, tensors = cache.open(longer, len(key), len(longer)), tensors_of(cache.memory)
    assert lease is not None
    assert lease.num_hit_tokens == len(key)
    held = [contents(tensors.tokens, page) for page in lease.block_table[: len(key) // PAGE]]
    held.append(contents(tensors.state, lease.read_slot))
    cache.close(lease)
    return held


def by_host_memory(forgotten: str | None) -> tuple[Held, Held]:
    return _evicted_and_back(cache_on(forgotten, host=1 << 20))


def by_disk(forgotten: str | None) -> tuple[Held, Held]:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        cache = cache_on(forgotten, disk=1 << 20, directory=folder)
        stack.callback(cache.shutdown)
        return _evicted_and_back(cache)


def by_a_restart(forgotten: str | None) -> tuple[Held, Held]:
    with TemporaryDirectory() as folder, ExitStack() as stack:
        cache = cache_on(None, disk=1 << 20, directory=folder)
        before, _ = _evicted_and_back(cache)
        cache.shutdown()
        other = cache_on(forgotten, disk=1 << 20, directory=folder)
        stack.callback(other.shutdown)
        return before, hit(other, key_of(other, "abc"))


def _evicted_and_back(cache: AuditedCache) -> tuple[Held, Held]:
    key = key_of(cache, "abc")
    compute(cache, key, 1)
    before = hit(cache, key)
    cache.evict_checkpoints(100)
    cache.evict_pages(100)
    assert [*cache.tree.nodes()] == []
    compute(cache, key_of(cache, "xyzuv"), 2)  # writes over what was left
    return before, hit(cache, key)


def by_a_file(forgotten: str | None) -> tuple[Held, Held]:
    cache, other = cache_on(None), cache_on(forgotten)
    key = key_of(cache, "abc")
    compute(cache, key, 1)
    compute(other, key_of(other, "xyzuv"), 2)
    other.clear()
    other.load(cache.archive([key], model="m").to_bytes(), model="m")
    return hit(cache, key), hit(other, key)


def by_a_fork(forgotten: str | None) -> tuple[Held, Held]:
    """Return what is held of a prompt that ends inside a page."""
    cache, rng = cache_on(forgotten), torch.Generator().manual_seed(1)
    key, tensors = key_of(cache, "abc", extra=3), tensors_of(cache.memory)
    lease = cache.open(key, len(key) - 1, len(key))
    assert lease is not None
    for page in lease.private_pages:
        randomize(tensors.tokens, page, rng)
    randomize(tensors.state, lease.front, rng)
    cache.advance(lease, len(key))
    copy = cache.fork(lease)
    assert copy is not None
    both = []
    for own in (lease, copy):
        both.append([*(contents(tensors.tokens, page) for page in own.block_table), contents(tensors.state, own.front)])
    assert not {*lease.block_table} & {*copy.block_table}
    cache.close(lease)
    cache.close(copy)
    return both[0], both[1]


WAYS = {
    "host memory": by_host_memory,
    "disk": by_disk,
    "a restart": by_a_restart,
    "a file": by_a_file,
    "a fork": by_a_fork,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_tensor_goes_every_way(way: str) -> None:
    before, after = WAYS[way](None)
    assert before == after


@pytest.mark.parametrize("forgotten", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_a_mover_that_forgets_a_tensor_on_any_way_is_found(way: str, forgotten: str) -> None:
    before, after = WAYS[way](forgotten)
    wrong = {name for one, other in zip(before, after, strict=True) for name in one if one[name] != other[name]}
    assert wrong == {forgotten}


def run(mover: Callable[[CacheTensors], Mover]) -> None:
    """Random requests in a memory whose units are moved together; its contents are audited after each."""
    tensors = CacheMemory.for_spec(EVERYTHING, 40_000, CPU, page_size=PAGE)
    memory = CacheMemory(
        tensors.pages, tensors.states, arena=tensors.arena, sizes=tensors.sizes, mover=mover(tensors_of(tensors))
    )
    config = CacheConfig(page_size=PAGE, chunk_size=PAGE, eviction="lru", verify_contents=True)
    cache, rng, generator = HybridCache(memory, config), Random(0), torch.Generator().manual_seed(3)
    for _ in range(120):
        key = key_of(cache, "".join(rng.choice("aab") for _ in range(rng.randint(1, 6))))
        lease = cache.open(key, len(key) - 1, len(key))
        assert lease is not None
        checkpoint = cache.capture(lease, len(key))
        for page in lease.private_pages:
            randomize(tensors_of(tensors).tokens, page, generator)
        if checkpoint is not None:
            randomize(tensors_of(tensors).state, checkpoint.slot, generator)
        cache.advance(lease, len(key))
        cache.commit(lease, key, len(key))
        cache.close(lease)
        cache.audit(contents=True)
    assert cache.stats().moved_pages > 0


def test_compaction_moves_every_tensor() -> None:
    run(lambda tensors: tensors)


@pytest.mark.parametrize("forgotten", ["kv", "index.keys", "codes.scales", "packed.kv"])
def test_the_audit_finds_a_mover_that_forgets_one(forgotten: str) -> None:
    with pytest.raises(AuditError, match=r"page \d+ was changed"):
        run(lambda tensors: Forgetful(tensors, forgotten))
