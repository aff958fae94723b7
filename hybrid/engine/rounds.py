"""Rounds: a pass with drafts, their acceptance, the replay of those that are accepted, and what is drafted after them,
in one call; and further rounds after that.

What a processor has in its caches it loses to the weights that a pass reads, the interpreter and its objects too. So
Python is slow after each pass, and takes longer than the passes of a small model. Where the tokens of a pass are the
most likely ones compiled code says which drafts are accepted, and the next drafts may be known: those of the predictor,
whose chain is computed in the call (`hybrid.engine.chains_ahead`), or those that follow in the source of the ones
before. Then it writes the few numbers that the next pass needs, and the engine learns of several passes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hybrid.engine.chains_ahead import CapturedChains, ChainsAhead
from hybrid.kernels.cpu.kinds import FOLLOWED, LEFT, VERIFIED
from hybrid.kernels.ops import compiled_module
from hybrid.memory.pool import EMPTY_STATE
from hybrid.speculation.chances import PredictedChain
from hybrid.speculation.drafter import History
from hybrid.speculation.drafts import Accepted, Drafts

MAX_SECONDS = 0.008
"""There is no further round after as long: other requests wait meanwhile, and Python takes less than the passes."""

MAX_TOKENS = 64
"""Tokens that further rounds have pages for, if there are free ones."""

MAX_ROUNDS = 32
"""Rounds of a call, at most."""

MAX_ENDS = 8
"""Tokens that end an answer; one that may end with more is not computed in rounds."""

PORTION = 4
"""As many rounds are computed between two looks at the clock."""

MOST_IDLE = 4
"""Where a source was left, and no other one is found at once, the next token is computed in the call, if a pass has no
more drafts than these: their rows are computed in vain."""

PREDICTOR = "mtp"
"""Names the drafts of chains."""

NGRAMS = "ngrams"
"""Names the drafts of other sources."""

Numbers = NDArray[np.int64]


class CapturedRound(NamedTuple):
    """A captured pass, the acceptance of its drafts and their replay, with the numbers that they read and write, all of
    which stay where they are. R rows of N requests.

    Attributes:
        single: all of it.
        chains: the predictor's passes that begin with the tokens after those that are accepted; None: there are none.
        proceed: writes the numbers of the next round, after those passes.
        repeated: all of it and `proceed`, where no passes come between.
        resume: writes the numbers of the next round, with drafts from another source.
        stop: of `kernels.cpu.drafts.Rounds.control`.
        requests, followed, sources, ends, control, log, claims: as `hybrid.kernels.cpu.drafts.Rounds` has them.
        chosen: `[R]` the token that the model chooses after each row.
    """

    single: Callable[[], None]
    chains: CapturedChains | None
    proceed: Callable[[], None]
    repeated: Any
    resume: Callable[[], None]
    stop: torch.Tensor
    requests: Numbers
    followed: Numbers
    sources: Numbers
    ends: Numbers
    control: Numbers
    log: Numbers
    claims: NDArray[np.float32]
    chosen: Numbers

    @classmethod
    def capture(
        cls,
        capture: Callable[..., Any],
        then: Callable[..., Any],
        batch: Any,
        chosen: torch.Tensor,
        slots: torch.Tensor,
        chains: CapturedChains | None,
        count: int,
        page_size: int,
    ) -> CapturedRound:
        """Of a captured pass.

        Args:
            capture: captures what follows it.
            then: joins the pass with the acceptance, the replay of what is accepted, and what is given besides.
            batch, chosen, slots: of the pass, a `hybrid.batch.Batch` whose tokens are all decoded ones and drafts, as
                `hybrid.kernels.cpu.drafts.Verified` has them.
            chains: as above.
            count: of requests.
            page_size: tokens of a page.
        """
        decodes, rows = batch.decodes, len(batch.token_ids)
        drafts: Any = compiled_module("drafts")
        assert decodes is not None

        requests, own_chains = _integers(count, VERIFIED), chains.chains if chains is not None else None
        passes = len(own_chains.tokens) if own_chains is not None else 0
        given = batch.token_ids, chosen, batch.positions, decodes.seq_lens, decodes.block_table, requests, slots
        verified = drafts.Verified(*given)
        rounds = drafts.Rounds(
            verified,
            batch.slot_mapping,
            decodes.state_read,
            decodes.state_write,
            _integers(count, FOLLOWED),
            _integers(count, MAX_TOKENS),
            _integers(count, MAX_ENDS),
            _integers(2),
            _integers(MAX_ROUNDS, 2 * rows + 2 * count + 1 + passes * count),
            torch.zeros(MAX_ROUNDS, passes * count),
        )

        def accept() -> torch.Tensor:
            drafts.accept_drafts(verified)
            if chains is not None:
                drafts.begin_chains(verified, own_chains, page_size)
            return requests

        def proceed() -> torch.Tensor:
            drafts.next_round(rounds, own_chains, page_size, EMPTY_STATE)
            return requests

        def resume() -> torch.Tensor:
            drafts.resume_rounds(rounds, page_size, EMPTY_STATE)
            return requests

        accepted, proceeding, resuming = [capture(part)[0] for part in (accept, proceed, resume)]
        programs = then(accepted), chains, proceeding, then(accepted, proceeding), resuming
        return cls(*programs, rounds.control[1:], *[each.numpy() for each in (requests, *rounds[4:], chosen)])


def _integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@dataclass(eq=False, slots=True)
class Followed:
    """A request whose drafts are accepted in the call of their pass.

    Attributes:
        history: its tokens, as the host knows them before.
        first: its first row.
        num_drafts: rows after that.
        known, beyond, boundary: the slot that has the state after its last known token; and the one that is to have
            that after its accepted drafts if they are more than `boundary`. Negative: there is none.
        pages_end: tokens for which it has pages.
        until: it may have as many in further rounds, without the one that is chosen last.
        end_tokens: those that end its answer, `MAX_ENDS` at most.
        drafts: of the first round.
        source: tokens of which these are the first; empty: none follows them.
        num_known: tokens before the round's.
        ask: another source, after the tokens that were chosen; None: there may be none.
        chains: of the predictor, which were not compared with what came. Those that are followed by a round are added.
        tokens: those that were chosen.
        accepted: the drafts of each round, and those that were accepted.
    """

    history: History
    first: int
    num_drafts: int
    known: int
    beyond: int
    boundary: int
    pages_end: int
    until: int
    end_tokens: Sequence[int]
    drafts: Drafts | None
    source: Sequence[int]
    num_known: int
    ask: Callable[[Sequence[int]], Sequence[int]] | None
    chains: list[PredictedChain]
    tokens: list[int] = field(default_factory=list)
    accepted: list[Accepted] = field(default_factory=list)

    @property
    def requests(self) -> tuple[int, ...]:
        """Of the first round, as `hybrid.kernels.cpu.drafts.Verified.requests`."""
        return self.first, self.num_drafts, self.known, self.beyond, self.boundary, self.pages_end, 0, 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """As `hybrid.kernels.cpu.drafts.Rounds.followed`."""
        return self.num_drafts, self.until, self.num_known, 0, len(self.source)

    def take(self, drafts: Drafts | None, chosen: Sequence[int]) -> None:
        """A round of these drafts has chosen as many tokens; all but the last one are drafts."""
        self.tokens += chosen
        self.num_known += len(chosen)
        if drafts is not None:
            self.accepted.append(Accepted(drafts, range(len(chosen) - 1)))


class Rounds:
    """The rounds of a step.

    Args:
        followed: its requests, in the order of their rows.
        chains: of the predictor, after each round; None: there are none.
        may_continue: there may be further rounds, and results are taken from here.
        page_size: tokens of a page.
        clock: seconds.

    Attributes:
        followed, chains, may_continue, page_size: as given.
        count: rounds that were computed.
        elapsed: seconds that they took.
    """

    def __init__(
        self,
        followed: Sequence[Followed],
        chains: ChainsAhead | None,
        may_continue: bool,
        page_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.followed: Sequence[Followed] = followed
        self.chains: ChainsAhead | None = chains
        self.may_continue: bool = may_continue
        self.page_size: int = page_size
        self.count: int = 0
        self.elapsed: float = 0.0
        self._asked: list[int] = []  # rounds that follow another source
        self._clock = clock

    @property
    def has_results(self) -> bool:
        """Whether `followed` says what was chosen and accepted."""
        return self.may_continue and self.count > 0

    @property
    def seconds_of_chains(self) -> float:
        """In which they were computed."""
        return self.chains.seconds if self.chains is not None else 0.0

    def run(self, captured: CapturedRound) -> None:
        """Compute them."""
        started = self._clock()
        captured.requests[:] = [followed.requests for followed in self.followed]
        if self.may_continue:
            self._begin(captured)
            if self.chains is None:
                self._follow_sources(captured, started)
            else:
                self._follow_chains(captured, self.chains, started)
            self._read(captured)
            return
        captured.single()
        if self.chains is not None:
            self.chains.run()
        self.count, self.elapsed = 1, self._clock() - started
        chosen = captured.chosen.tolist()
        for followed, right in zip(self.followed, captured.requests[:, -2].tolist(), strict=True):
            followed.take(followed.drafts, chosen[followed.first : followed.first + right + 1])

    def _follow_chains(self, captured: CapturedRound, chains: ChainsAhead, started: float) -> None:
        """Compute rounds whose drafts are the predictor's."""
        widest, each = max([followed.num_drafts for followed in self.followed]), 0.0
        while not captured.control[1] and self.elapsed < MAX_SECONDS:
            captured.single()
            is_last = self.elapsed + each > MAX_SECONDS
            chains.run(None if is_last else widest)  # a further round has no rows for more
            captured.proceed()
            before, self.elapsed = self.elapsed, self._clock() - started
            each = self.elapsed - before

    def _follow_sources(self, captured: CapturedRound, started: float) -> None:
        """Compute rounds whose drafts follow in sources. Where the only request has left its own, another one may be
        found at once, or after one more token."""
        ask, read, is_idle = self.followed[0].ask if len(self.followed) == 1 else None, 0, False
        while not captured.control[1] and self.elapsed < MAX_SECONDS:
            captured.repeated.repeat(PORTION, captured.stop)
            self.elapsed = self._clock() - started
            if ask is None or captured.control[1] != LEFT:
                continue
            source, was_idle = ask(self._chosen(captured, read)), is_idle
            read, is_idle = int(captured.control[0]), not len(source)
            if is_idle and (was_idle or self.followed[0].num_drafts > MOST_IDLE):
                return
            captured.sources[0, : len(source)] = source
            captured.followed[0, 3:] = 0, len(source)
            self._asked.append(read)
            captured.resume()

    def _chosen(self, captured: CapturedRound, first: int) -> list[int]:
        """The tokens of the only request that were chosen from a round on."""
        rows, count, tokens = len(captured.chosen), int(captured.control[0]), list[int]()
        for log in captured.log[first:count].tolist():
            tokens += log[1 : 2 * log[2 * rows + 1] + 2 : 2]
        return tokens

    def _begin(self, captured: CapturedRound) -> None:
        """Write what the numbers of further rounds are made of."""
        captured.followed[:] = [followed.numbers for followed in self.followed]
        captured.control[:] = 0
        captured.ends[:] = -1
        for row, followed in enumerate(self.followed):
            captured.ends[row, : len(followed.end_tokens)] = followed.end_tokens
            captured.sources[row, : len(followed.source)] = followed.source

    def _read(self, captured: CapturedRound) -> None:
        """Read what was chosen in each round."""
        self.count = int(captured.control[0])
        rows, count = len(captured.chosen), len(self.followed)
        for at, log in enumerate(captured.log[: self.count].tolist()):
            drafted, chosen, counts = log[: 2 * rows : 2], log[1 : 2 * rows : 2], log[2 * rows :]
            end = 2 * count + 1 + counts[2 * count] * count  # of chains
            for row, followed in enumerate(self.followed):
                first, (num_drafts, right) = followed.first, counts[2 * row : 2 * row + 2]
                drafts = followed.drafts if not at else None
                if at and num_drafts:
                    drafts = Drafts.chain(drafted[first + 1 : first + 1 + num_drafts], self._drafter(followed, at))
                followed.take(drafts, chosen[first : first + right + 1])
                if self.chains is not None and at + 1 < self.count:
                    claims = captured.claims[at, row : end - 2 * count - 1 : count].tolist()
                    tokens = counts[2 * count + 1 + row : end : count]
                    followed.chains.append(PredictedChain(followed.num_known, tokens, claims))

    def _drafter(self, followed: Followed, at: int) -> str:
        """Who has proposed the drafts of a round after the first one."""
        if self.chains is not None:
            return PREDICTOR
        if self._asked and self._asked[0] <= at:
            return NGRAMS
        return followed.accepted[0].drafts.drafters[0][0]

    def rows(self) -> dict[History, tuple[int, int]]:
        """The requests whose latest chains are of use, since they follow the tokens that were chosen: the row of each,
        and how many of its tokens had pages."""
        if not self.count:
            return {}
        found: dict[History, tuple[int, int]] = {}
        for row, followed in enumerate(self.followed):
            has_pages = followed.pages_end - followed.num_known + 1
            if len(followed.history.ids) == followed.num_known and has_pages > 0:
                found[followed.history] = row, has_pages
        return found
