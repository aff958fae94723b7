"""The cost of a request at each replica, in tokens to compute."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid.fleet.index import Coverage, Depths


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The constants of the score. They were set on traces of `bench/fleet.py` with the seeds that it calls tuned.

    Attributes:
        pages: of the pages after the checkpoint, the part that counts: the next prompt gets a checkpoint there.
        home: what the home of a session is worth, in parts of the prompt.
        memory: cost of a token that lives at a replica beyond its share and that no other session shares.
        share: of the mean of what lives at the replicas, which counts for nothing.
        load: cost of a token that is queued beyond a replica's patience.
        patience: seconds that a replica may be behind the mean, times `even`, before its queue counts.
        even: see `patience`.
        idle: seconds after which a session counts as ended.
        host: cost of a token that is restored from host memory.
    """

    pages: float = 0.5
    home: float = 0.5
    memory: float = 1.0
    share: float = 1.1
    load: float = 2.0
    patience: float = 2.0
    even: float = 1.25
    idle: float = 180.0
    host: float = 0.05


def costs(
    weights: Weights,
    num_tokens: int,
    found: Coverage,
    queued: Depths,
    live: Depths,
    num_replicas: int,
    rate: float,
    home: int | None,
) -> Depths:
    """The cost of a prompt at each replica, `[width]`.

    Args:
        num_tokens: of the prompt.
        found: what the replicas have of it.
        queued: tokens that they are to compute before it.
        live: tokens of sessions that live there and that no other session shares.
        num_replicas: among which the means are taken; what is not a replica has zeros.
        rate: tokens of prompts that a replica computes in a second.
        home: of the session; None: it has none.
    """
    usable = found.checkpoints
    if found.copies is not None:
        usable = np.maximum(usable, found.copies * (1 - weights.host))
    behind = queued - (weights.even * float(queued.sum()) / num_replicas + weights.patience * rate)
    crowded = live - weights.share * float(live.sum()) / num_replicas
    np.maximum(behind, 0.0, out=behind)
    np.maximum(crowded, 0.0, out=crowded)
    if home is not None:
        crowded[home] = -weights.home / weights.memory * num_tokens if weights.memory else 0.0
    cost: Depths = num_tokens - usable - weights.pages * np.maximum(found.pages - usable, 0.0)
    cost += weights.load * behind
    cost += weights.memory * crowded
    return cost
