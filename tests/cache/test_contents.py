"""audit(contents=True): what the tree owns holds what it held when it was committed, to the bit."""

from collections.abc import Callable
from random import Random

import pytest
import torch

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.errors import ArgumentError, AuditError
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.spec import HybridSpec, StateTensor, TokenTensor
from hybrid.tree.node import Node
from support.caches import key_of

SPEC = HybridSpec(
    tokens=(TokenTensor.kv(1, 1, 8, torch.float32),),
    state=(StateTensor("conv", (2, 8), torch.float32), StateTensor("recurrent", (1, 2, 3, 4), torch.float32)),
)
CPU = torch.device("cpu")

MEMORIES: dict[str, Callable[[], CacheMemory]] = {
    "fixed": lambda: CacheMemory.fixed(SPEC, 2, 24, 10, CPU),
    "one budget": lambda: CacheMemory.for_spec(SPEC, 9 * 384, CPU, page_size=2),
    "stored smaller": lambda: CacheMemory.for_spec(SPEC, 9 * 384, CPU, page_size=2, state_dtype="int8"),
}


@pytest.fixture(params=MEMORIES)
def cache(request: pytest.FixtureRequest) -> HybridCache:
    config = CacheConfig(page_size=2, chunk_size=2, eviction="lru", verify_contents=True)
    return HybridCache(MEMORIES[request.param](), config)


def fill(cache: HybridCache, text: str, seed: int = 0) -> Key:
    """A request whose pass writes random numbers, committed."""
    rng, key = torch.Generator().manual_seed(seed), key_of(cache, text)
    lease = cache.open(key, len(key) - 1, len(key))
    assert lease is not None
    checkpoint = cache.capture(lease, len(key))
    for page in lease.private_pages:
        cache.kv[page] = torch.randn(cache.kv[page].shape, generator=rng)
    if checkpoint is not None:
        for tensor in cache.state_tensors.values():
            tensor[checkpoint.slot] = torch.randn(tensor[0].shape, generator=rng)
    cache.advance(lease, len(key))
    cache.commit(lease, key, len(key))
    cache.close(lease)
    return key


def node_of(cache: HybridCache, key: Key) -> Node:
    node = cache.tree.peek(key, len(key)).checkpoint
    assert node is not None and node.slot is not None
    return node


def flip(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the last byte."""
    tensor.view(-1).view(torch.uint8)[-1:].bitwise_xor_(1)


def test_untouched_contents_pass(cache: HybridCache) -> None:
    for seed, text in enumerate(("abcd", "abxy", "efgh")):
        fill(cache, text, seed)
    cache.audit(contents=True)


def test_a_bit_flipped_in_a_page_is_found(cache: HybridCache) -> None:
    fill(cache, "abcd")
    node = node_of(cache, fill(cache, "abxy", 1))
    flip(cache.kv[node.pages[0]])
    cache.audit()
    with pytest.raises(AuditError, match=rf"node of '' ending at {node.end}: page {node.pages[0]} was changed"):
        cache.audit(contents=True)


def test_a_bit_flipped_in_a_state_is_found(cache: HybridCache) -> None:
    node = node_of(cache, fill(cache, "abcd"))
    assert node.slot is not None and cache.memory.tensors is not None
    stored = cache.memory.tensors.stored
    flip(cache.state_tensors["recurrent"][node.slot] if stored is None else stored.bytes_of(node.slot)[:32])
    cache.audit()
    with pytest.raises(AuditError, match=f"its checkpoint in slot {node.slot} was changed"):
        cache.audit(contents=True)


@pytest.mark.parametrize("seed", range(2))
def test_contents_are_verified_through_evictions_and_moves(cache: HybridCache, seed: int) -> None:
    rng = Random(seed)
    for step in range(150):
        fill(cache, "".join(rng.choice("aab") for _ in range(rng.randint(1, 6))), step)
        cache.audit(contents=True)
    stats = cache.stats()
    assert stats.evicted_pages > 10 and stats.evicted_checkpoints > 10
    if cache.memory.arena is not None:
        assert stats.moved_pages > 0


def test_contents_that_were_not_digested_cannot_be_verified() -> None:
    cache = HybridCache(MEMORIES["fixed"](), CacheConfig(page_size=2, chunk_size=2))
    with pytest.raises(ArgumentError, match="verify_contents=True"):
        cache.audit(contents=True)


def test_a_memory_without_contents_cannot_be_verified() -> None:
    with pytest.raises(ArgumentError, match="a memory with tensors"):
        HybridCache(CacheMemory.of_indices(8, 4), CacheConfig(verify_contents=True))
