"""The check that the checkpoints in a cache are the states of their keys."""

from __future__ import annotations

import torch

from hybrid.cache.config import CacheConfig
from hybrid.engine.engine import Engine
from hybrid.engine.sampling_params import SamplingParams
from hybrid.key import TOKEN_BYTES, Key
from hybrid.tree.node import Node

TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.06}
"""By the type of the model: the largest difference, as a fraction of the largest value, between what decode steps and
what the passes of a prompt compute of the same tokens. In the small model it was 6e-6, 0.0014 and 0.012; another token
among the last few changes a tenth and more."""


def key_of(node: Node) -> bytes:
    """The token ids from the root to a node's end, as bytes."""
    edges, above = [], node
    while above.parent is not None:
        edges.append(above.edge)
        above = above.parent
    return b"".join(reversed(edges))


def check_checkpoints(engine: Engine) -> tuple[int, int]:
    """Compare every checkpoint of a text in the tree with the state of its key, computed again: (checked, wrong).

    Bit by bit in deterministic mode; within rounding in the other, where decoded states are shared as they are.
    """
    cache, config = engine.cache, engine.cache.config
    found = [(name, node, key_of(node)) for name, node in cache.tree.nodes() if node.slot is not None]
    longest = max((len(ids) for _, _, ids in found), default=0) // TOKEN_BYTES
    cold = engine.with_cache(
        CacheConfig(page_size=config.page_size, chunk_size=config.chunk_size, deterministic=True),
        size=(longest // config.page_size + 2, 4 + longest // config.grid),
    )
    wrong = checked = 0
    for namespace, node, key_ids in found:
        ids = memoryview(key_ids).cast("i").tolist()
        if min(ids) < 0:  # positions of images have negative ids
            continue
        checked += 1
        cold.cache.clear()
        cold.generate([[*ids, 0]], SamplingParams(max_new_tokens=1), namespace=namespace, progress=False)
        lease = cold.cache.open_whole(Key.of(ids, namespace))
        assert lease is not None
        assert lease.num_hit_tokens == len(ids)
        for name, tensor in cache.state_tensors.items():
            expected = cold.cache.state_tensors[name][lease.read_slot]
            tolerance = 0.0 if engine.deterministic else TOLERANCES[engine.model.dtype]
            bound = tolerance * float(expected.abs().max())
            wrong += not torch.allclose(tensor[node.slot], expected, rtol=0.0, atol=bound)
        cold.cache.close(lease)
    return checked, wrong
