"""Chains of a predictor that are computed in the call of a pass, after the tokens that the pass chooses.

What a processor has in its caches it loses to the weights that a pass reads, the interpreter and its objects too. So
Python is slow after each of them, and a pass with drafts was followed by two others: the replay of what was accepted,
and the predictor's. Where the tokens of a pass are the most likely ones compiled code says which drafts are accepted,
so that all of it is one call (`hybrid.engine.cuda_graphs.Round`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid.batch import Batch
from hybrid.kernels.cpu.kinds import VERIFIED
from hybrid.kernels.ops import compiled_module
from hybrid.speculation.drafter import History

Found = tuple[list[list[list[int]]], list[list[list[float]]]]
"""Tokens and their probabilities, of each pass of a chain, each request, and each of the most probable ones."""


class CapturedChains(NamedTuple):
    """A captured pass of a predictor: what the host writes, what runs the pass, which continues the chain where it is
    run again, and what the host reads. All that the pass reads must stay where it is.

    Attributes:
        values: integers, as `ChainNumbers.at`.
        after: where a pass of the model comes before, integers: `hybrid.kernels.cpu.drafts.Verified.requests`, and then
            `control`.
        chains: a `hybrid.kernels.cpu.drafts.Chains`, of which these are parts:
        beliefs, control, tokens, claims: as it has them.
        program: the pass.
        page_size: tokens of a page.
        kept: what has the memory.
    """

    values: np.ndarray
    after: np.ndarray
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


def accept(captured: CapturedChains, batch: Batch, chosen: Tensor, slots: Tensor) -> Tensor:
    """Accept drafts of a pass, and write the numbers of chains after the tokens after them.

    Args:
        captured: passes of the predictor over one token of each request.
        batch: of the pass, whose tokens are all decoded ones and drafts.
        chosen, slots: as `hybrid.kernels.cpu.drafts.Verified` has them.

    Returns:
        A tensor that is written.
    """
    decodes = batch.decodes
    module: Any = compiled_module("drafts")
    assert decodes is not None
    requests = torch.from_numpy(captured.after[:-2]).view(-1, VERIFIED)
    given = batch.token_ids, chosen, batch.positions, decodes.seq_lens, decodes.block_table, requests, slots
    module.accept_drafts(module.Verified(*given), captured.chains, captured.page_size)
    return requests


class ChainsAhead:
    """Chains after the tokens that a pass will choose.

    Args:
        captured: the predictor's passes.
        beliefs: as `hybrid.kernels.cpu.drafts.Chains` has them.
        histories: of the requests.
        most: tokens of a chain.
        verified: of each request, as `hybrid.kernels.cpu.drafts.Verified.requests`.
        clock: seconds.

    Attributes:
        captured: as given.
        seconds: in which the chains were computed.
        is_computed: they were.
    """

    def __init__(
        self,
        captured: CapturedChains,
        beliefs: list[float],
        histories: Sequence[History],
        most: int,
        verified: Sequence[Sequence[int]],
        clock: Callable[[], float],
    ) -> None:
        self.captured = captured
        self.seconds: float = 0.0
        self.is_computed: bool = False
        self._beliefs = beliefs
        self._verified = verified
        self._histories = histories
        self._known = [len(history.ids) for history in histories]
        self._most = most
        self._clock = clock

    def begin(self) -> None:
        """The pass begins: write what is read after it."""
        self.captured.beliefs[:] = self._beliefs
        self.captured.after[:] = [*chain.from_iterable(self._verified), 0, 0]

    def run(self) -> None:
        """Compute the chains, after the tokens that were accepted."""
        started = self._clock()
        self.captured.run(self._most)
        self.seconds = self._clock() - started
        self.is_computed = True

    def rows(self) -> dict[History, tuple[int, int]]:
        """The requests whose chains are of use, since they follow the tokens that were chosen: the row of each, and how
        many of its tokens had pages."""
        if not self.is_computed:
            return {}
        accepted = self.captured.after[VERIFIED - 1 : -2 : VERIFIED].tolist()
        found: dict[History, tuple[int, int]] = {}
        for row, (history, known) in enumerate(zip(self._histories, self._known, strict=True)):
            has_pages = self._verified[row][VERIFIED - 2] - known - accepted[row]
            if len(history.ids) == known + accepted[row] + 1 and has_pages > 0:
                found[history] = row, has_pages
        return found
