"""Drafts of a checkpoint's own predictor, for all requests of a step together.

The predictor is computed between two passes of the model: it reads the last hidden state of each request from the
request's state slot, and its keys and values from the request's pages, where every pass of the model writes them along.
Those that it writes itself, in the places of its drafts, are overwritten by the pass that verifies them; what is after
the accepted ones is never read, and never shared. Its passes are captured where decode steps are.
"""

from __future__ import annotations

import logging
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid.batch import Batch, Group
from hybrid.cache.cache import HybridCache
from hybrid.engine.capture import Capture
from hybrid.engine.captured_passes import CapturedModel
from hybrid.engine.padding import Padding
from hybrid.engine.planner import ALIGNMENT
from hybrid.engine.step import Part
from hybrid.kernels.ops import compiled_module
from hybrid.memory.device import on_device
from hybrid.models.mtp import HIDDEN
from hybrid.speculation.acceptance import CLAIMED, CLAIMS, Claims, PredictedChain, rate_of
from hybrid.speculation.config import MAX_DRAFTS
from hybrid.speculation.drafter import ChainDrafter, History

log: logging.Logger = logging.getLogger(__name__)

ALTERNATIVES = 2
"""Tokens that are proposed for each position: the most probable ones. On a CPU the most probable one alone is: passes
with trees are not captured, and take more than they yield."""

MAX_PASSES = 64
"""Captured passes that are kept, at most; the one that was not used for longest goes."""

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
    """

    def __init__(
        self, rows: Sequence[tuple[int, ...]], tables: Sequence[Sequence[int]], width: int, page_size: int
    ) -> None:
        self._rows = rows
        self._tables: list[int] = []
        for table in tables:
            self._tables += table
            self._tables += [0] * (width - len(table))
        self._ends = [len(table) * page_size for table in tables]
        self._page_size = page_size
        self.shape: tuple[int, int] = (len(rows), width)

    def at(self, ahead: int) -> list[int]:
        """Return those of the pass over the tokens `ahead` of the last known ones: the columns, each filled up to whole
        `ALIGNMENT`s, and then the page ids."""
        rows = [self._next(row, ahead) for row in range(len(self._rows))] if ahead else self._rows
        numbers: list[int] = []
        idle = [0] * (-len(rows) % ALIGNMENT)
        for column in (*zip(*rows, strict=True), self._ends):
            numbers += column
            numbers += idle
        return numbers + self._tables

    def _next(self, row: int, ahead: int) -> tuple[int, ...]:
        """Return what the row of a token becomes, as `hybrid.kernels.cpu.drafts.continue_chains` has it. Its own token
        is not known to the host, and the hidden state before it is in no slot."""
        _, position, _, length, _ = self._rows[row]
        if length + ahead > self._ends[row]:  # it has no page: what is computed is of no use
            return 0, position + ahead, -1, self._ends[row], -1
        page, offset = divmod(length + ahead - 1, self._page_size)
        slot = self._tables[row * self.shape[1] + page] * self._page_size + offset
        return 0, position + ahead, slot, length + ahead, -1


class PredictorInputs(NamedTuple):
    """Inputs of a pass of the predictor, for N requests.

    Attributes:
        tokens: `[N]` the tokens.
        positions: `[N]` their rotary positions.
        slots: `[N]` where their keys and values are written; -1: nowhere.
        lengths: `[N]` of the sequences up to there.
        states: `[N]` the state slots with the hidden states before them; -1: those of the predictor are taken.
        block_table: `[N, max_pages]`.
        hidden: `[N, hidden_size]` the hidden states before them.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    states: Tensor
    block_table: Tensor
    hidden: Tensor

    @classmethod
    def of(cls, numbers: Tensor, count: int, hidden: Tensor) -> PredictorInputs:
        """Make views of `ChainNumbers.at`, and what is read besides."""
        length = count + -count % ALIGNMENT
        columns = [numbers[length * column :][:count] for column in range(COLUMNS)]
        tokens, positions, slots, lengths, states, _ = columns
        block_table = numbers[length * COLUMNS :].view(count, -1)
        return cls(tokens, positions, slots, lengths, states, block_table, hidden)

    def batch(self) -> Batch:
        """Return the tokens, as ones that are decoded."""
        count = len(self.tokens)
        starts = torch.arange(count + 1, device=self.tokens.device)
        nothing = self.tokens.new_empty(0)
        rows = slice(0, count)
        return Batch(
            token_ids=self.tokens,
            positions=self.positions,
            slot_mapping=self.slots,
            checkpoints=nothing,
            sample_rows=nothing,
            prefills=None,
            decodes=Group(rows, starts, self.lengths, self.block_table, nothing, nothing, num_splits=None),
            decode_start=None,
        )


class Predicted(NamedTuple):
    """Results of a pass, for N requests.

    Attributes:
        tokens: `[N, K]` the most probable tokens of each, falling.
        chances: `[N, K]` fp32, their probabilities.
        hidden: `[N, hidden_size]` the hidden states that they follow from.
    """

    tokens: Tensor
    chances: Tensor
    hidden: Tensor


Found = tuple[list[list[list[int]]], list[list[list[float]]]]
"""Tokens and their probabilities, of each pass of a chain, each request, and each of the most probable ones."""


class CapturedChains(NamedTuple):
    """A captured pass that continues its chain where it is run again. All that it reads must stay where it is.

    Attributes:
        values: integers, as `ChainNumbers.at`; the host writes them.
        chains: a `hybrid.kernels.cpu.drafts.Chains`.
        program: the pass.
        kept: what has the memory.
    """

    values: np.ndarray
    chains: Any
    program: Any
    kept: tuple[object, ...]

    def run(self, numbers: list[int], beliefs: list[float], most: int) -> Found:
        """Run up to `most` passes, as long as a chain is worth one more token."""
        self.values[:] = numbers
        self.chains.beliefs.numpy()[:] = beliefs
        self.chains.control.zero_()
        self.program.repeat(most, self.chains.control[1:])
        count = int(self.chains.control[0])
        return self.chains.tokens[:count].tolist(), self.chains.claims[:count].tolist()


class PredictorPasses:
    """Runs passes of the predictor.

    Args:
        model: has a predictor.
        kv: the pages.
        states: `[slots, hidden_size]` the last hidden state of each sequence.
        device: of the model.
        alternatives: tokens that are found for each position.
        page_size: tokens of a page.
        capture: captures passes, on a CPU, where there are no alternatives; None: each is launched kernel by kernel.
    """

    def __init__(
        self,
        model: Any,
        kv: Tensor,
        states: Tensor,
        device: torch.device,
        alternatives: int,
        page_size: int,
        capture: Capture | None = None,
    ) -> None:
        self._page_size = page_size
        self._model = model
        self._kv = kv
        self._states = states
        self._device = device
        self._alternatives = alternatives
        self._capture = capture
        # in the order in which they were used
        self._captured: OrderedDict[tuple[int, int], CapturedChains] = OrderedDict()
        self._captured_model = CapturedModel(model.mtp, model.model.embed_tokens, model.lm_head)

    @property
    def num_captured(self) -> int:
        """Number of passes that are captured."""
        return len(self._captured)

    def width(self, num_pages: int) -> int:
        """Return the columns of a block table of this many pages: few widths occur where passes are captured."""
        return num_pages if self._capture is None else Padding.of(1, num_pages).width

    def chains(self, numbers: ChainNumbers, most: int, rates: Sequence[Sequence[float]], least: float) -> Found:
        """Compute chains of tokens after each request.

        Args:
            numbers: of the requests.
            most: tokens of a chain.
            rates: how often the predictor was right about each request, by tenths of what it claims.
            least: on a CPU, where the host waits for each pass, there are no more of them once all chains are less
                probable.
        """
        captured = self._captured_for(numbers)
        if captured is None:
            return self._launched(numbers, most, rates, least)
        beliefs = [least, *[1.0] * len(rates), *chain.from_iterable(rates)]
        return captured.run(numbers.at(0), beliefs, min(most, MAX_DRAFTS))

    def _captured_for(self, numbers: ChainNumbers) -> CapturedChains | None:
        """Return the captured pass for these numbers; None: there is none."""
        if self._captured_model.is_hooked:
            return None
        captured = self._captured.get(numbers.shape)
        if captured is not None:
            self._captured.move_to_end(numbers.shape)
        elif self._capture is not None:
            captured = self._record(self._capture, numbers)
        return captured

    def _launched(self, numbers: ChainNumbers, most: int, rates: Sequence[Sequence[float]], least: float) -> Found:
        """Do the same kernel by kernel."""
        before: Predicted | None = None
        passes: list[Predicted] = []
        reached = [1.0] * len(rates)
        for ahead in range(most):
            inputs = self._inputs(numbers.at(ahead), len(rates))
            self._fill(inputs, before)
            logits, hidden = self._model.draft(inputs.batch(), inputs.hidden, self._kv)
            chances, tokens = logits.softmax(-1).topk(self._alternatives)
            before = Predicted(tokens, chances, hidden)
            passes.append(before)
            if self._device.type == "cpu":
                first = chances[:, 0].tolist()
                reached = [
                    own * rate_of(each, claimed) for own, each, claimed in zip(reached, rates, first, strict=True)
                ]
                if max(reached) < least:
                    break
        return [each.tokens.tolist() for each in passes], [each.chances.tolist() for each in passes]

    def _inputs(self, values: list[int], count: int) -> PredictorInputs:
        """Make what a pass reads, without hidden states."""
        hidden = self._states.new_empty(count, self._states.shape[1])
        return PredictorInputs.of(on_device(torch.tensor(values), self._device), count, hidden)

    def _fill(self, inputs: PredictorInputs, before: Predicted | None) -> None:
        """Write the hidden states that a pass reads, and tokens that are not known to the host."""
        if before is None:
            torch.index_select(self._states, 0, inputs.states, out=inputs.hidden)
        else:
            inputs.tokens.copy_(before.tokens[:, 0])
            inputs.hidden.copy_(before.hidden)

    def _record(self, capture: Capture, numbers: ChainNumbers) -> CapturedChains | None:
        """Capture a pass of this shape, which is run for that with these numbers. If it fails, no other is tried."""
        (count, width), values = numbers.shape, numbers.at(0)
        host = torch.zeros(len(values) + 2, dtype=torch.int64)
        given = host[: len(values)]
        given.copy_(torch.tensor(values))
        inputs = PredictorInputs.of(given, count, self._states.new_empty(count, self._states.shape[1]))
        batch = inputs.batch()
        drafts: Any = compiled_module("drafts")
        memory: Any = compiled_module("memory")
        chains = drafts.Chains(
            given[: len(values) - count * width].view(COLUMNS, -1),
            inputs.block_table,
            chances=torch.empty(count, dtype=torch.float32),
            beliefs=torch.zeros(1 + count + count * CLAIMS, dtype=torch.float32),
            control=host[-2:],
            tokens=torch.empty(MAX_DRAFTS, count, 1, dtype=torch.int64),
            claims=torch.empty(MAX_DRAFTS, count, 1, dtype=torch.float32),
        )

        def run() -> Tensor:
            memory.take_rows(self._states, inputs.states, inputs.hidden)
            logits, hidden = self._model.draft(batch, inputs.hidden, self._kv)
            drafts.choose_drafts(logits, hidden, inputs.tokens, inputs.hidden, chains.chances)
            drafts.continue_chains(chains, self._page_size)
            return inputs.tokens

        try:
            run()  # what a model computes once is no part of the program
            given.copy_(torch.tensor(values))  # they are those of the next token now
            program, _ = capture(run)
        except Exception as error:
            self._capture = None
            log.warning("capturing the predictor failed (%s: %s); it is launched", type(error).__name__, error)
            return None
        if len(self._captured) == MAX_PASSES:
            self._captured.popitem(last=False)
        captured = self._captured[numbers.shape] = CapturedChains(given.numpy(), chains, program, (inputs, batch))
        return captured


Proposed = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""Predictions for a request, as `Drafter.propose` returns them."""

NOTHING: Proposed = ((), (), ())


@dataclass(eq=False, slots=True)
class _KnownTokens:
    """Knowledge of a request.

    Attributes:
        claims: how often drafts were right, by the probability that the predictor gave them.
        chain: the latest one; None: there is none that was not compared with what came.
    """

    claims: Claims
    chain: PredictedChain | None = None

    def compare(self, ids: Sequence[int]) -> None:
        """Compare the chain with the tokens that came."""
        if self.chain is not None:
            self.claims.compare(self.chain, ids)
            self.chain = None


class MtpDrafter(ChainDrafter):
    """Drafts what the predictor says: a chain of its most probable tokens, each with alternatives.

    How often it was right with what it gave some probability is learned; these are the probabilities of its drafts.
    On a CPU, where the host waits for each pass, a chain is not continued where one more token would not pay.

    Args:
        model: has a predictor.
        cache: the memory that the model reads and writes.
        device: of the model.
        capture: captures passes of the predictor; None: each is launched kernel by kernel.
    """

    def __init__(
        self,
        model: Any,
        cache: HybridCache,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self._alternatives = 1 if device.type == "cpu" else ALTERNATIVES
        hidden, page_size = cache.state_tensors[HIDDEN], cache.config.page_size
        self._passes = PredictorPasses(model, cache.kv, hidden, device, self._alternatives, page_size, capture)
        self._cache = cache
        self._claims = Claims(CLAIMED)
        self._known: dict[History, _KnownTokens] = {}
        self._parts: dict[History, Part] = {}
        self._proposed: dict[History, Proposed] = {}

    @property
    def name(self) -> str:
        """Name of the drafter."""
        return "mtp"

    def take_parts(self, parts: Sequence[Part]) -> None:
        """Take the parts of the next step whose requests may have drafts."""
        self._parts = {part.request.history: part for part in parts}
        self._proposed = {}

    def prepare(self, wanted: Sequence[tuple[History, int]]) -> None:
        """Predict up to this many tokens after each of these histories, as far as there is memory for them."""
        asked, page_size = [], self._cache.config.page_size
        for history, count in wanted:
            part = self._parts[history]
            pages = len(part.lease.block_table) * page_size
            if part.end + count - 1 > pages and not self._cache.reserve(part.lease, part.end + count - 1):
                count = pages - part.start
            asked.append((part, count))
        if asked:
            for (part, _), proposed in zip(asked, self._predict(asked), strict=True):
                self._proposed[part.request.history] = proposed

    def propose(self, history: History, limit: int) -> Proposed:
        """Return what was predicted, with its probabilities."""
        return self._proposed.get(history, NOTHING)

    def _predict(self, asked: Sequence[tuple[Part, int]]) -> list[Proposed]:
        """Predict what follows the last known token of each part, for each as many tokens as are asked for."""
        self._cache.memory.in_flight.wait_for_pass()
        numbers, counts = self._numbers([part for part, _ in asked]), [count for _, count in asked]
        histories = [part.request.history for part, _ in asked]
        for history in histories:
            self._known_of(history).compare(history.ids)
        rates = [self._known[history].claims.rates for history in histories]
        found = self._passes.chains(numbers, max(counts), rates, self.least)
        return [self._proposal(found, row, histories[row], count) for row, count in enumerate(counts)]

    def _numbers(self, parts: Sequence[Part]) -> ChainNumbers:
        """Return those of the last known tokens of parts."""
        tables = [part.lease.block_table for part in parts]
        width = self._passes.width(max(map(len, tables)))
        return ChainNumbers([self._row(part) for part in parts], tables, width, self._cache.config.page_size)

    def _known_of(self, history: History) -> _KnownTokens:
        known = self._known.get(history)
        if known is None:
            known = self._known[history] = _KnownTokens(self._claims.of_request())
        return known

    def _proposal(self, found: Found, row: int, history: History, most: int) -> Proposed:
        """Return the chain of a request, and then its alternatives."""
        (passes, claims), known = found, self._known[history]
        named, claimed = [own[row][0] for own in passes[:most]], [own[row][0] for own in claims[:most]]
        known.chain = PredictedChain(len(history.ids), named, claimed)
        tokens, count = array("q", named), len(named)
        chances = [*map(known.claims.of, claimed)]
        for rank in range(1, self._alternatives):  # what is left of the probability, in parts as they are claimed
            tokens.extend([own[row][rank] for own in passes[:most]])
            for own, chance in zip(claims, chances[:count], strict=False):
                left = 1 - own[row][0]
                chances.append((1 - chance) * min(own[row][rank] / left, 1.0) if left > 0 else 0.0)
        chain = range(-1, count - 1)
        return tokens, chain if self._alternatives == 1 else [*chain] * self._alternatives, chances

    def end(self, history: History) -> None:
        """Learn from a request that has ended."""
        known = self._known.pop(history, None)
        if known is not None:
            known.compare(history.ids)
            self._claims.absorb(known.claims)

    def _row(self, part: Part) -> tuple[int, ...]:
        """Return the numbers of the last known token of a part, as `ChainNumbers` has them."""
        lease, media, page_size = part.lease, part.request.media, self._cache.config.page_size
        page, offset = divmod(part.start, page_size)
        # the tree's pages have what is kept of it
        slot = lease.block_table[page] * page_size + offset if page >= lease.num_shared else -1
        shift = media.shift if media is not None else 0  # what is generated after images has text positions
        return part.request.ids[-1], part.start + shift, slot, part.end, lease.read_slot
