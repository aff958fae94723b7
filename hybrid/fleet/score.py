"""The cost of a request at each replica, in tokens to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybrid.fleet.index import Coverage, Depths


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The constants of the score. They were set on traces of `bench/fleet.py` with the seeds that it calls tuned.

    Attributes:
        pages: of the pages after the checkpoint, the part that counts: the next prompt gets a checkpoint there.
        home: what the home of a session is worth, in parts of what it still has of the prompt.
        memory: cost of a token that lives at a replica beyond its share and that no other session shares.
        work: cost of a token that a replica was given lately beyond its share, and one prompt.
        share: of the mean of what lives at the replicas, or was given to them, which counts for nothing.
        load: cost of a token that is queued beyond a replica's patience.
        patience: tokens that a replica may be behind, in parts of what it has of the prompt, before its queue counts.
        even: the same, in parts of the mean queue.
        lately: seconds in which what was given to a replica counts less by a factor of e.
        idle: seconds after which a session counts as ended.
        host, disk: cost of a token that is restored from host memory, or from a disk.
    """

    pages: float = 0.5
    home: float = 0.5
    memory: float = 1.0
    work: float = 0.5
    share: float = 1.1
    load: float = 2.0
    patience: float = 1.0
    even: float = 1.25
    lately: float = 120.0
    idle: float = 180.0
    host: float = 0.05
    disk: float = 0.3


class Loads(NamedTuple):
    """What the replicas are given. What is not a replica has zeros.

    Attributes:
        num_replicas: among which the means are taken.
        queued: tokens that they are to compute, `[width]`.
        live: tokens of sessions that live there and that no other session shares, `[width]`.
        lately: tokens that they were given to compute, those of long ago counting less, `[width]`.
    """

    num_replicas: int
    queued: Depths
    live: Depths
    lately: Depths


def costs(weights: Weights, num_tokens: int, found: Coverage, loads: Loads, home: int | None) -> Depths:
    """The cost of a prompt at each replica, `[width]`.

    Args:
        num_tokens: of the prompt.
        found: what the replicas have of it.
        loads: what they are given.
        home: of the session; None: it has none.
    """
    usable = found.checkpoints
    if found.copies is not None:
        usable = np.maximum(usable, found.copies * (1 - weights.host))
    if found.on_disk is not None:
        usable = np.maximum(usable, found.on_disk * (1 - weights.disk))
    ahead = found.pages - usable
    np.maximum(ahead, 0.0, out=ahead)
    cost: Depths = num_tokens - usable - weights.pages * ahead
    mean = 1 / loads.num_replicas
    behind = loads.queued - weights.even * mean * np.add.reduce(loads.queued)
    behind -= weights.patience * np.maximum(found.pages, usable)
    cost += weights.load * np.maximum(behind, 0.0, out=behind)
    crowded = loads.live - weights.share * mean * np.add.reduce(loads.live)
    crowded = weights.memory * np.maximum(crowded, 0.0, out=crowded)
    busy = loads.lately - (weights.share * mean * np.add.reduce(loads.lately) + num_tokens)
    cost += weights.work * np.maximum(busy, 0.0, out=busy)
    if home is not None:  # what lives there already takes no more; without what it had, any replica is as good
        has = min(1.0, max(found.pages[home], usable[home]) / num_tokens)
        crowded[home] -= has * (weights.home * num_tokens + crowded[home])
    cost += crowded
    return cost
