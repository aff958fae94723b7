"""Hit density: hits to come, over the time until then. The unit in which `lhd` compares what it knows.

Time is counted in requests. Three things tell when a hit comes: the requests after which checkpoints of the same class
were used (`hybrid.tree.lhd`); the seconds after which such paths were continued (`hybrid.tree.paths`, which divides by
the mean seconds between two requests); and a client that knows it (`density_of_hint`).
"""

from __future__ import annotations

from itertools import pairwise
from math import expm1

import numpy as np

DISCOUNT = 0.01
"""Per request: what happens more than about a hundred requests from now counts little."""

Array = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def density(hazards: Array, widths: np.ndarray, discount: float = DISCOUNT) -> Array:
    """Discounted hits to come over discounted time until then, from the first age of each bin on, `[classes, bins]`.

    Within a bin the hazard is constant, so that both integrals have a closed form; one pass from the last bin back.

    Args:
        hazards: hits per unit of time, by bin of age, `[classes, bins]`.
        widths: units of time in each bin.
        discount: per unit of time.
    """
    hazards = hazards.T
    rates = hazards + discount
    stays = np.exp(np.maximum(-rates * widths[:, None], -100.0))  # smaller ones change no sum, and are slow to compute
    time = (1 - stays) / rates
    ahead = np.stack([time * hazards, time], axis=1)  # hits and time, of each bin alone at first
    for (after, own), stay in zip(pairwise(reversed([*ahead])), stays[-2::-1], strict=True):
        own += stay * after
    return np.ascontiguousarray((ahead[:, 0] / ahead[:, 1]).T)


def density_of_hint(num_requests: int) -> float:
    """The density where a hit comes for sure after `num_requests`. Where it is overdue, it takes as long again until it
    is half as likely.

    Args:
        num_requests: negative: it should have come that many requests ago.
    """
    return DISCOUNT / expm1(DISCOUNT * max(1, num_requests if num_requests > 0 else -2 * num_requests))
