"""Mixtures of experts: the bits of a token depend on all tokens of its pass, so a chunk is shared as a whole."""

import random

import pytest
import torch

from hybrid.hf.prefix_cache import PrefixCache
from support.hf import VOCAB, assert_same, greedy, tiny_model

MANY_EXPERTS = {"num_experts": 64, "num_local_experts": 64, "num_experts_per_tok": 4}


@pytest.mark.parametrize("kind", ["qwen3_next", "gpt_oss"])
def test_prompts_that_share_a_part_of_a_chunk_get_the_bits_of_cold_runs(kind: str) -> None:
    """The default page, 64 tokens, is smaller than the default chunk, 128."""
    model, rng = tiny_model(kind, **MANY_EXPERTS), random.Random(1)

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(count)]

    document = ids(256 + 192)
    prompts = [document + ids(100), document + ids(90), document[:320] + ids(230), document[:300] + ids(240)]
    cache, hits = PrefixCache(model, "64MiB"), 0
    for prompt in [*prompts, *prompts]:
        warm = cache.generate(torch.tensor([prompt]), **greedy(3))
        cold = PrefixCache(model, "64MiB").generate(torch.tensor([prompt]), **greedy(3))
        assert_same(warm, cold)
        hits += cache.explanations[0].usable_hit
    assert hits >= 4 * 512
