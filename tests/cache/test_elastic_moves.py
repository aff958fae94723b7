"""One budget for pages and checkpoints: what stands in the way is moved together, and found where it has moved to."""

import gc

import pytest
import torch
from torch import Tensor

from hybrid.cache.config import CacheConfig
from hybrid.cache.lease import Lease
from hybrid.memory.memory import CacheMemory
from hybrid.spec import HybridSpec, StateTensor, TokenTensor
from support.caches import AuditedCache, Content, Contents, Memory, RandomWorkload, contents_of, key_of, release, serve
from support.elastic import ONE, THREE, TWO, elastic, finish, held

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

# Moving together


def halves_of_pages() -> tuple[AuditedCache, Memory, Lease, Lease]:
    """Seven pieces, none of them free; two hold two pages each, which would fit into one. The pages of one half belong
    to a running request, those of the other to the tree."""
    cache = elastic(7, ONE)
    memory = Memory(cache)
    keys = [key_of(cache, text) for text in ("ab", "cd", "ef", "gh")]
    leases = []
    for key in keys:
        lease = cache.open(key, 3, 4)
        assert lease is not None
        memory.forward(lease, key, 4, lease.front)
        cache.advance(lease, 4)
        leases.append(lease)
    cache.commit(leases[3], keys[3], 4)
    for index in (0, 2):
        cache.close(leases[index])
    assert cache.take_back(leases[1])
    assert cache.take_back(leases[3])
    assert (cache.memory.arena.num_free, cache.memory.pages.num_free) == (0, 4)
    return cache, memory, leases[1], leases[3]


def test_pages_that_stand_in_the_way_are_moved_together_and_nothing_is_evicted() -> None:
    cache, memory, private, shared = halves_of_pages()
    node = shared.page_lock.node
    before = list(private.block_table), list(shared.block_table)
    lease = cache.open(key_of(cache, "xy"), 3, 0)
    assert lease is not None
    assert cache.stats().moved_pages == 2
    assert held(cache)[:3] == (0, 0, 2)
    assert [list(private.block_table), list(shared.block_table)] != before
    assert list(node.pages) == list(shared.block_table)
    assert [memory.pages[page][1] for page in private.block_table] == [(99, 99), (99, 99, 100, 100)]
    memory.check()
    for one in (private, shared, lease):
        cache.close(one)
    release(cache)


def test_a_move_that_raises_leaves_everything_as_it_was() -> None:
    cache, memory, private, shared = halves_of_pages()
    contents, before = contents_of(cache), (list(private.block_table), list(shared.block_table))
    assert isinstance(contents, Contents)
    contents.fails = True
    stats = held(cache)
    with pytest.raises(MemoryError, match="planted"):
        cache.open(key_of(cache, "xy"), 3, 0)
    assert held(cache) == stats
    assert (cache.stats().moved_pages, len(cache.leases)) == (0, 2)
    assert (list(private.block_table), list(shared.block_table)) == before
    memory.check()
    contents.fails = False
    assert cache.open(key_of(cache, "xy"), 3, 0) is not None
    assert cache.stats().moved_pages == 2
    memory.check()


def halves_of_states() -> tuple[AuditedCache, Memory, Lease]:
    """Five pieces, none of them free; two hold one checkpoint each, and the front of a request lies in piece 0."""
    cache = elastic(5, TWO)
    memory = Memory(cache)
    opened = [cache.open(key_of(cache, letter), 1, 0) for letter in "abcde"]
    leases = [lease for lease in opened if lease is not None]
    assert [lease.front for lease in leases] == [1, 2, 3, 4, 5]
    for lease, letter in zip(leases, "abcde", strict=True):
        assert cache.reserve(lease, 2)
        cache.advance(lease, 2)
        memory.pages[lease.block_table[0]] = memory.states[lease.front] = ("", (ord(letter),) * 2)
    for index in (1, 3):
        finish(cache, leases[index], "abcde"[index])
    for index in (2, 4):
        cache.close(leases[index])
    assert cache.memory.arena.num_free == 0
    return cache, memory, leases[0]


def test_checkpoints_that_stand_in_the_way_are_moved_together_and_stay() -> None:
    cache, memory, lease = halves_of_states()
    assert cache.reserve(lease, 2 * 4)
    assert cache.stats().moved_pages == 0
    assert cache.reserve(lease, 2 * 7)
    assert cache.stats().moved_pages == 1
    assert held(cache)[:4] == (0, 0, 2, 2)
    memory.check()


def test_a_checkpoint_that_somebody_reads_is_not_moved() -> None:
    cache, memory, lease = halves_of_states()
    readers = [cache.open(key_of(cache, text), 3, 0) for text in ("bx", "dx")]
    assert all(reader is not None for reader in readers)
    slots = [reader.read_slot for reader in readers if reader is not None]
    assert cache.reserve(lease, 2 * 4)
    assert not cache.reserve(lease, 2 * 7)
    assert [reader.read_slot for reader in readers if reader is not None] == slots
    assert held(cache)[:4] == (0, 0, 2, 2)
    memory.check()


# Random requests: contents stay where they are looked for


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("sizes", "num_pieces"), [(ONE, 11), (TWO, 9), (THREE, 9)])
def test_contents_follow_through_random_requests(sizes: tuple[int, int], num_pieces: int, seed: int) -> None:
    cache = elastic(num_pieces, sizes, chunk_size=(2, 4)[seed % 2])
    workload = RandomWorkload(cache, seed)
    workload.run(350)
    stats = cache.stats()
    assert stats.moved_pages > 0
    assert stats.evicted_pages > 5 and stats.evicted_checkpoints > 5 and workload.num_finished > 10
    release(cache)


@pytest.mark.parametrize("seed", range(3))
def test_contents_follow_where_checkpoints_are_stored_smaller(seed: int) -> None:
    cache = elastic(13, ONE, stored_bytes=64)
    workload = RandomWorkload(cache, seed)
    workload.run(300)
    stats = cache.stats()
    assert stats.moved_pages > 0
    assert stats.evicted_pages > 5 and stats.evicted_checkpoints > 5 and workload.num_finished > 10
    release(cache)


# With the memory itself

SPEC = HybridSpec(
    tokens=(TokenTensor.kv(1, 1, 8, torch.float32),),
    state=(StateTensor("conv", (2, 8), torch.float32), StateTensor("recurrent", (17,), torch.float32)),
)
"""Pages of 128 bytes and states of 192, as `TWO`."""


def with_tensors(num_pieces: int) -> AuditedCache:
    config = CacheConfig(page_size=2, chunk_size=2, eviction="lru")
    memory = CacheMemory.for_spec(SPEC, num_pieces * 384, torch.device("cpu"), page_size=2)
    return AuditedCache(memory, config)


def span(unit: Tensor, start: int) -> tuple[int, int]:
    """The bytes of a unit, counted from the start of the memory."""
    first = unit.data_ptr() - start
    return first, first + unit.numel() * unit.element_size()


def test_pages_and_states_are_views_of_one_memory_each_within_its_piece() -> None:
    cache = with_tensors(5)
    kv, state, start = cache.kv, cache.state_tensors, cache.kv.data_ptr()
    assert (len(kv), {len(part) for part in state.values()}) == (5 * 3, {5 * 2})
    storages = {part.untyped_storage().data_ptr() for part in (kv, *state.values())}
    assert len(storages) == 1
    for page in range(15):
        assert span(kv[page], start) == (128 * page, 128 * (page + 1))
    taken = 0
    for slot in range(10):
        for part in state.values():
            first, end = span(part[slot], start)
            assert taken <= first < end <= (slot // 2 + 1) * 384
            assert first >= slot // 2 * 384
            taken = end


def test_the_empty_state_is_zero_and_stays_so_whatever_pages_are_written() -> None:
    cache = with_tensors(5)
    cache.kv[3:] = float("nan")  # all but those of piece 0, which are never handed out
    lease = cache.open(key_of(cache, "x" * cache.largest_request), 1, 2 * cache.largest_request)
    assert lease is not None
    cache.kv[list(lease.block_table)] = 1.0
    for part in cache.state_tensors.values():
        part[lease.front] = 2.0
        assert not part[0].any()
    assert (cache.kv[list(lease.block_table)] == 1.0).all()


class Written(dict[int, Content]):
    """Contents that are looked up by the number that lies in the memory."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.tensors = tensors
        self.contents: list[Content] = []

    def __setitem__(self, index: int, content: Content) -> None:
        for tensor in self.tensors:
            tensor[index] = len(self.contents)
        self.contents.append(content)

    def __getitem__(self, index: int) -> Content:
        numbers = {number for tensor in self.tensors for number in tensor[index].flatten().tolist()}
        assert len(numbers) == 1
        return self.contents[int(numbers.pop())]


@pytest.mark.parametrize("seed", range(2))
def test_tensors_hold_what_was_written_through_random_requests_and_moves(seed: int) -> None:
    cache = with_tensors(8)
    workload = RandomWorkload(cache, seed)
    workload.memory.pages = Written(cache.kv)
    workload.memory.states = Written(*cache.state_tensors.values())
    workload.run(250)
    assert cache.stats().moved_pages > 0
    assert not any(part[0].any() for part in cache.state_tensors.values())
    release(cache)


def test_closed_leases_are_forgotten() -> None:
    cache = elastic(11, ONE)
    key = key_of(cache, "ab")
    serve(cache, key)
    gc.collect()
    before = sum(type(thing) is Lease for thing in gc.get_objects())
    for _ in range(50):
        lease = cache.open(key, 3, 4)
        assert lease is not None
        cache.close(lease)
    gc.collect()
    assert sum(type(thing) is Lease for thing in gc.get_objects()) <= before + 1
