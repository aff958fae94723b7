"""Contents of pages and states inside transformers can be verified, from any moment on."""

import pytest
import torch

from hybrid import ArgumentError, AuditError
from support.hf import GRID, assert_same, cache_on, greedy, ids, tiny_model


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_flipped_bit_is_found_once_contents_are_verified(deterministic: bool) -> None:
    cache = cache_on(tiny_model("qwen3_5_text"), deterministic=deterministic)
    first, second = ids(4 * GRID + 3, 0), ids(4 * GRID + 3, 1)
    expected = cache.generate(first, **greedy(4))
    with pytest.raises(ArgumentError, match="verify_contents"):
        cache.audit(contents=True)
    cache.verify_contents()
    assert cache.stats().pages_cached == 0
    for _ in range(2):  # the second call is a hit
        assert_same(cache.generate(first, **greedy(4)), expected)
        cache.generate(second, **greedy(4))
    assert cache.explanations[0].usable_hit == 4 * GRID
    cache.audit(contents=True)
    node = next(node for _, node in cache.cache.tree.nodes() if node.slot is not None)
    for name, tensors, at in (
        ("page", cache.memory.tensors.tokens, node.pages[0]),
        ("checkpoint", cache.memory.tensors.state, node.slot),
    ):
        tensor = next(iter(tensors.values()))[at]
        kept = tensor.clone()
        tensor.view(-1).view(torch.int32)[0] ^= 1
        with pytest.raises(AuditError, match=rf"{name}.*was changed"):
            cache.audit(contents=True)
        tensor.copy_(kept)
    cache.audit(contents=True)
