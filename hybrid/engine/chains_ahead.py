"""Chains of a predictor that are computed in the call of a pass, after the tokens that the pass chooses.

What a processor has in its caches it loses to the weights that a pass reads, the interpreter and its objects too. So
Python is slow after each of them, and a pass with drafts was followed by two others: the replay of what was accepted,
and the predictor's. Where the tokens of a pass are the most likely ones compiled code says which drafts are accepted,
so that all of it is one call (`hybrid.engine.cuda_graphs.Round`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid.engine.pieces import ALIGNMENT
from hybrid.kernels.ops import compiled_module
from hybrid.speculation.drafter import History

Found = tuple[list[list[list[int]]], list[list[list[float]]]]
"""Tokens and their probabilities, of each pass of a chain, each request, and each of the most probable ones."""

VERIFIED = 6
"""Integers of a request: as `hybrid.kernels.cpu.drafts.Verified.requests`."""


COLUMNS = 6
"""Integers of a request, besides its page ids: as `hybrid.kernels.cpu.drafts.Chains.columns`."""


class ChainNumbers:
    """The integers of passes over the last known token of each of some requests, and over those after it.

    Args:
        rows: of each request its last token, that token's rotary position, the slot of its keys and values (-1: they
            are not written), the sequence's length up to there, and the state slot with the hidden state before it.
        tables: the page ids of each request.
        width: as many page ids are given of each.
        page_size: tokens of a page.

    Attributes:
        shape: number of requests, and `width`.
        ends: of each request the tokens for which it has pages.
    """

    def __init__(
        self, rows: Sequence[tuple[int, ...]], tables: Sequence[Sequence[int]], width: int, page_size: int
    ) -> None:
        self._rows = rows
        self._tables: list[int] = []
        for table in tables:
            self._tables += table
            self._tables += [0] * (width - len(table))
        self.ends: list[int] = [len(table) * page_size for table in tables]
        self._page_size = page_size
        self.shape: tuple[int, int] = (len(rows), width)

    def at(self, ahead: int) -> list[int]:
        """Those of the pass over the tokens that are `ahead` of the last known ones: the columns, each filled up to
        whole `ALIGNMENT`s, and then the page ids."""
        rows = [self._next(row, ahead) for row in range(len(self._rows))] if ahead else self._rows
        numbers: list[int] = []
        idle = [0] * (-len(rows) % ALIGNMENT)
        for column in (*zip(*rows, strict=True), self.ends):
            numbers += column
            numbers += idle
        return numbers + self._tables

    def _next(self, row: int, ahead: int) -> tuple[int, ...]:
        """What the row of a token becomes, as `hybrid.kernels.cpu.drafts.continue_chains` has it. Its own token is not
        known to the host, and the hidden state before it is in no slot."""
        _, position, _, length, _ = self._rows[row]
        if length + ahead > self.ends[row]:  # it has no page: what is computed is of no use
            return 0, position + ahead, -1, self.ends[row], -1
        page, offset = divmod(length + ahead - 1, self._page_size)
        slot = self._tables[row * self.shape[1] + page] * self._page_size + offset
        return 0, position + ahead, slot, length + ahead, -1


class CapturedChains(NamedTuple):
    """A captured pass of a predictor: what the host writes, what runs the pass, which continues the chain where it is
    run again, and what the host reads. All that the pass reads must stay where it is.

    Attributes:
        values: integers, as `ChainNumbers.at`.
        requests: `[N, 6]` int64, as `hybrid.kernels.cpu.drafts.Verified` has them.
        chains: a `hybrid.kernels.cpu.drafts.Chains`, of which these are parts:
        beliefs, control, tokens, claims: as it has them.
        program: the pass.
        page_size: tokens of a page.
        kept: what has the memory.
    """

    values: np.ndarray
    requests: np.ndarray
    chains: Any
    beliefs: np.ndarray
    control: np.ndarray
    tokens: np.ndarray
    claims: np.ndarray
    program: Any
    page_size: int
    kept: tuple[object, ...]

    def fill(self, values: list[int], beliefs: list[float]) -> None:
        """Write what the first pass reads."""
        self.values[:] = values
        self.beliefs[:] = beliefs
        self.control[:] = 0

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
        numbers: of the last known tokens.
        beliefs: as `CapturedChains.fill` has them.
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
        numbers: ChainNumbers,
        beliefs: list[float],
        histories: Sequence[History],
        most: int,
        verified: Sequence[Sequence[int]],
        clock: Callable[[], float],
    ) -> None:
        self.captured = captured
        self.seconds: float = 0.0
        self.is_computed: bool = False
        self._histories = histories
        self._known = [len(history.ids) for history in histories]
        self._most = most
        self._clock = clock
        self._numbers, self._beliefs, self._verified = numbers.at(0), beliefs, verified
        self._ends = numbers.ends

    def accept(self, drafted: Tensor, chosen: Tensor, slots: Tensor) -> Tensor:
        """Accept drafts, and turn to the tokens after them; the arguments are those of
        `hybrid.kernels.cpu.drafts.Verified`. Returns what it writes."""
        captured, drafts = self.captured, compiled_module("drafts")
        module: Any = drafts
        requests = torch.from_numpy(captured.requests)
        module.accept_drafts(module.Verified(drafted, chosen, requests, slots), captured.chains, captured.page_size)
        return requests

    def begin(self) -> None:
        """The pass begins: write what is read after it."""
        self.captured.fill(self._numbers, self._beliefs)
        self.captured.requests[:] = self._verified

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
        accepted = self.captured.requests[:, VERIFIED - 1].tolist()
        found: dict[History, tuple[int, int]] = {}
        for row, (history, known) in enumerate(zip(self._histories, self._known, strict=True)):
            has_pages = self._ends[row] - known - accepted[row]
            if len(history.ids) == known + accepted[row] + 1 and has_pages > 0:
                found[history] = row, has_pages
        return found
