"""Chains of a predictor that are computed in the call of a pass, after the tokens that the pass chooses
(`hybrid.engine.rounds`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Found = tuple[list[list[list[int]]], list[list[list[float]]]]
"""Tokens and their probabilities, of each pass of a chain, each request, and each of the most probable ones."""


class CapturedChains(NamedTuple):
    """A captured pass of a predictor: what the host writes, what runs the pass, which continues the chain where it is
    run again, and what the host reads. All that the pass reads must stay where it is.

    Attributes:
        values: integers, as `ChainNumbers.at`.
        chains: a `hybrid.kernels.cpu.drafts.Chains`, of which these are parts:
        beliefs, control, tokens, claims: as it has them.
        program: the pass.
        page_size: tokens of a page.
        kept: what has the memory.
    """

    values: np.ndarray
    chains: Any
    beliefs: np.ndarray
    control: np.ndarray
    tokens: np.ndarray
    claims: np.ndarray
    program: Any
    page_size: int
    kept: tuple[object, ...]

    def run(self, most: int) -> None:
        """Run up to `most` passes."""
        self.program.repeat(most, self.chains.control[1:])

    @property
    def found(self) -> Found:
        """What the passes have found."""
        count = self.control[0]
        return self.tokens[:count].tolist(), self.claims[:count].tolist()


class ChainsAhead:
    """Chains after the tokens that a pass will choose.

    Args:
        captured: the predictor's passes.
        beliefs: as `hybrid.kernels.cpu.drafts.Chains` has them.
        most: tokens of a chain.
        clock: seconds.

    Attributes:
        captured: as given.
        seconds: in which chains were computed.
        passes: of the predictor, for that.
    """

    def __init__(self, captured: CapturedChains, beliefs: list[float], most: int, clock: Callable[[], float]) -> None:
        self.captured = captured
        self.seconds: float = 0.0
        self.passes: int = 0
        self._beliefs = beliefs
        self._most = most
        self._clock = clock

    @property
    def latest_seconds(self) -> float:
        """In which the latest ones were computed, as each pass takes the same time."""
        return self.seconds * int(self.captured.control[0]) / self.passes if self.passes else 0.0

    def run(self, most: int | None = None) -> None:
        """Compute them, after the tokens that were accepted.

        Args:
            most: of their tokens; None: as many as are wanted.
        """
        started = self._clock()
        self.captured.beliefs[:] = self._beliefs
        self.captured.control[:] = 0
        self.captured.run(min(most, self._most) if most is not None else self._most)
        self.passes += int(self.captured.control[0])
        self.seconds += self._clock() - started
