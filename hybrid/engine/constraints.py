"""Changes that the parameters of a request make to its logits, before a token is chosen.

`Constraints` belong to one request that has such parameters, and know its history. `RowEdits` are what they do to one
row of logits, and `Edits` what is done to all rows of a pass, on their device.

Nothing changes by asking: `Constraints.after` is a function of the parameters and the history, and of draft tokens that
may follow it. The history advances only by `accept`, once for each token of the answer.

An answer may have to follow a JSON schema, a regular expression or a grammar, or be one of several texts: which tokens
may come next is decided by its form (`hybrid.engine.forms`), and the others are excluded from the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid.engine.forms import CompleteError, LateError, Matcher, Numbers
from hybrid.engine.sampling_params import LogitsProcessor, SamplingParams
from hybrid.errors import SamplingError
from hybrid.memory.device import on_device


class RowEdits(NamedTuple):
    """The changes of one row of logits, in the order in which they are made.

    Attributes:
        bias: (token ids, numbers that are added).
        penalty: (token ids, factors that positive logits are divided by and negative ones multiplied with, numbers that
            are subtracted).
        process: maps the row to another one; None: there is nothing more to do.
        excluded: token ids that are not chosen.
        mask: a bit for each token, whether it may be chosen, `[ceil(vocab / 32)]` int32; None: all may.
    """

    bias: tuple[Numbers, Numbers] | None
    penalty: tuple[Numbers, Numbers, Numbers] | None
    process: Callable[[Tensor], Tensor] | None
    excluded: list[int]
    mask: Numbers | None = None


class ThinkingGate:
    """Finds the end of the reasoning that an answer begins with: its grammar holds after that.

    Args:
        mark: that ends reasoning.
        bytes_of: the bytes of a token's text.

    Attributes:
        is_over: the mark was found.
    """

    def __init__(self, mark: bytes, bytes_of: Callable[[int], bytes]) -> None:
        self.is_over: bool = False
        self._mark = mark
        self._bytes_of = bytes_of
        self._tail = b""

    def accept(self, token: int) -> None:
        """Record that the answer continues with this token."""
        text = self._tail + self._bytes_of(token)
        self.is_over = self._mark in text
        self._tail = text[-len(self._mark) :]

    def num_tokens(self, drafts: Sequence[int]) -> int | None:
        """The number of these drafts that belong to the reasoning. None if it does not end with them."""
        if self.is_over:
            return 0
        text = self._tail
        for number, token in enumerate(drafts, 1):
            text += self._bytes_of(token)
            if self._mark in text:
                return number
        return None


class Constraints:
    """The constraints that one request's parameters put on its logits.

    Args:
        params: of the request.
        prompt: its token ids.
        end_tokens: the tokens that end its answer, those of `params` included.
        bad_words: token ids of each of its bad words.
        matcher: the grammar that its answer follows; None: there is none.
        gate: reasoning before what follows the grammar; None: there is none. It is not ended by an end-of-text token.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        end_tokens: frozenset[int],
        bad_words: Sequence[Sequence[int]] = (),
        matcher: Matcher | None = None,
        gate: ThinkingGate | None = None,
    ) -> None:
        self._gate = gate
        self._failures: dict[tuple[int, ...], str] = {}  # of the latest pass, by the answer before the row
        self._complete: set[tuple[int, ...]] = set()  # answers of the latest pass's rows that nothing can follow
        self._is_held = False
        self._params = params
        self._matcher = matcher
        self._end_tokens = sorted(end_tokens)
        self._bad_words = [tuple(word) for word in bad_words]
        self._prompt = list(prompt)
        self._answer: list[int] = []
        self._bias: tuple[Numbers, Numbers] | None = None
        if params.logit_bias:
            self._bias = np.array([*params.logit_bias], np.int64), np.array([*params.logit_bias.values()], np.float64)
        self._is_penalized = has_penalty(params)
        # distinct tokens of the prompt, then those of the answer, and how often each is in the answer
        tokens = np.unique(np.asarray(self._prompt if params.repetition_penalty != 1 else [], np.int64))
        self._tokens: list[int] = tokens.tolist()
        self._counts: list[int] = [0] * len(self._tokens)
        self._place: dict[int, int] = {token: place for place, token in enumerate(self._tokens)}

    @property
    def failure(self) -> str | None:
        """Why the row after the answer has no token: its own functions or its grammar failed. None if they did not."""
        return self._failures.get(tuple(self._answer)) if self._failures else None

    @property
    def is_complete(self) -> bool:
        """Tell whether nothing can follow the answer."""
        if self._matcher is None:
            return False
        return self._matcher.is_complete or (bool(self._complete) and tuple(self._answer) in self._complete)

    @property
    def is_late(self) -> bool:
        """Tell whether it is not known yet what may follow the answer."""
        return self._matcher is not None and self._matcher.is_late

    @property
    def was_late(self) -> bool:
        """Tell whether that was not known when a token was chosen: from then on its request computes nothing until it
        is, has no drafts, and is not launched ahead."""
        return self._matcher is not None and self._matcher.was_late

    @property
    def is_held(self) -> bool:
        """Tell whether a row of the latest pass has no token because it was late."""
        return self._is_held

    def end_form(self) -> None:
        """Record that the request has ended: its form is not asked any more."""
        if self._matcher is not None:
            self._matcher.end()

    def wait_for_form(self, seconds: float) -> None:
        """Wait until it is known what may follow the answer."""
        if self._matcher is not None:
            self._matcher.wait(seconds)

    def accept(self, token: int) -> None:
        """Record that the answer continues with this token."""
        if self._gate is not None and not self._gate.is_over:
            self._gate.accept(token)
        elif self._matcher is not None:
            self._matcher.accept(token)
        self._answer.append(token)
        if self._is_penalized:
            self._count(token)

    def after(self, drafts: Sequence[int] = ()) -> RowEdits:
        """Return the changes of the logits of the token after the history and these draft tokens. Without drafts it is
        the first row of a pass."""
        answer = [*self._answer, *drafts]
        if not drafts:
            self._failures, self._complete, self._is_held = {}, set(), False
        process = self._process(answer)
        mask, excluded = None, self._excluded(answer)
        num_thinking = self._gate.num_tokens(drafts) if self._gate is not None else 0
        if num_thinking is None:
            excluded += self._end_tokens
        elif self._matcher is not None:
            try:
                mask = self._matcher.mask(drafts[num_thinking:])
            except SamplingError as error:
                process = partial(self._fail, error, answer)
            except CompleteError:
                self._complete.add(tuple(answer))
                process = partial(torch.full_like, fill_value=torch.nan)
            except LateError:
                self._is_held = True
                process = partial(torch.full_like, fill_value=torch.nan)
        return RowEdits(self._bias, self._penalty(drafts), process, excluded, mask)

    def _fail(self, error: Exception, answer: Sequence[int], row: Tensor) -> Tensor:
        """A row of which no token can be chosen."""
        message = str(error) if isinstance(error, SamplingError) else f"{type(error).__name__}: {error}"
        self._failures[tuple(answer)] = message
        return torch.full_like(row, torch.nan)

    def _count(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._tokens))
        if place == len(self._tokens):
            self._tokens.append(token)
            self._counts.append(0)
        self._counts[place] += 1

    def _penalty(self, drafts: Sequence[int]) -> tuple[Numbers, Numbers, Numbers] | None:
        if not self._is_penalized:
            return None
        tokens, counts = self._tokens, self._counts
        if drafts:
            tokens, counts, place = tokens.copy(), counts.copy(), dict(self._place)
            for token in drafts:
                if place.setdefault(token, len(tokens)) == len(tokens):
                    tokens.append(token)
                    counts.append(0)
                counts[place[token]] += 1
        params, often = self._params, np.array(counts, np.float64)
        minus = params.frequency_penalty * often + params.presence_penalty * (often > 0)
        return np.array(tokens, np.int64), np.full(len(tokens), params.repetition_penalty), minus

    def _excluded(self, answer: list[int]) -> list[int]:
        excluded = list(self._end_tokens) if len(answer) < self._params.min_tokens else []
        for word in self._bad_words:
            known = len(word) - 1
            if len(answer) >= known and tuple(answer[len(answer) - known :]) == word[:-1]:
                excluded.append(word[-1])
        return excluded

    def _process(self, answer: list[int]) -> Callable[[Tensor], Tensor] | None:
        if not self._params.logits_processors:
            return None
        return partial(self._run, answer)

    def _run(self, answer: list[int], row: Tensor) -> Tensor:
        """A row after the request's own functions. What they raise is the failure of this request alone."""
        try:
            return _processed(tuple(self._params.logits_processors), self._prompt, answer, row)
        except Exception as error:
            return self._fail(error, answer, row)


def has_penalty(params: SamplingParams) -> bool:
    """Tell whether logits depend on the tokens before."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def are_needed(params: SamplingParams) -> bool:
    """Tell whether a request with these parameters has constraints."""
    return bool(
        has_penalty(params)
        or params.logit_bias
        or params.bad_words
        or params.min_tokens
        or params.logits_processors
        or params.structured
    )


def _processed(processors: tuple[LogitsProcessor, ...], prompt: list[int], answer: list[int], row: Tensor) -> Tensor:
    """A row of logits after a request's own functions. They get copies, so that they cannot change the history."""
    for processor in processors:
        histories = ([*prompt], [*answer]) if _num_parameters(processor) >= 3 else ([*answer],)
        result = processor(*histories, row.clone())
        if not isinstance(result, Tensor) or result.shape != row.shape or not result.is_floating_point():
            shown = f"{list(result.shape)} of {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
            raise SamplingError(f"a logits processor must return the row of logits, {list(row.shape)}; got {shown}")
        row = result.to(row)
    return row


def _num_parameters(function: LogitsProcessor) -> int:
    """Positional parameters of a function; 2 where that is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 2
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)


@dataclass(frozen=True)
class Edits:
    """The changes of rows of logits, on the host. `[N]` entries each, with the row and the token of an entry.

    Attributes:
        bias: (rows, tokens, numbers), or None; likewise the others.
        penalty: (rows, tokens, factors, numbers).
        processes: (row, function).
        excluded: (rows, tokens).
        masks: (rows `[M]`, masks `[M, ceil(vocab / 32)]` int32).
    """

    bias: tuple[Tensor, ...] | None
    penalty: tuple[Tensor, ...] | None
    processes: tuple[tuple[int, Callable[[Tensor], Tensor]], ...]
    excluded: tuple[Tensor, ...] | None
    masks: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, rows: Sequence[RowEdits | None]) -> Edits | None:
        """The edits of rows. None if nothing is done to any of them."""
        known = [(row, edits) for row, edits in enumerate(rows) if edits is not None]
        if not known:
            return None
        return cls(
            _joined((row, edits.bias) for row, edits in known),
            _joined((row, edits.penalty) for row, edits in known),
            tuple((row, edits.process) for row, edits in known if edits.process is not None),
            _joined((row, (np.array(edits.excluded, np.int64),)) for row, edits in known if edits.excluded),
            _stacked([(row, edits.mask) for row, edits in known if edits.mask is not None]),
        )

    def apply(self, logits: Tensor) -> Tensor:
        """The logits `[S, vocab]` after the edits, which are -inf for tokens that are not chosen; a copy. What is done
        to a row does not depend on the others."""
        logits, device = logits.clone(), logits.device
        if self.bias is not None:
            rows, tokens, numbers = (on_device(part, device) for part in self.bias)
            logits[rows, tokens] += numbers.to(logits.dtype)
        if self.penalty is not None:
            rows, tokens, factors, numbers = (on_device(part, device) for part in self.penalty)
            old, factors = logits[rows, tokens], factors.to(logits.dtype)
            logits[rows, tokens] = torch.where(old > 0, old / factors, old * factors) - numbers.to(logits.dtype)
        for row, process in self.processes:
            logits[row] = process(logits[row])
        if self.excluded is not None:
            rows, tokens = (on_device(part, device) for part in self.excluded)
            logits[rows, tokens] = -torch.inf
        if self.masks is not None:
            rows, words = (on_device(part, device) for part in self.masks)
            bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=device)) & 1
            allowed = bits.flatten(1)[:, : logits.shape[-1]].bool()
            logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
        return logits


def _stacked(masks: list[tuple[int, Numbers]]) -> tuple[Tensor, Tensor] | None:
    """Masks of several rows, with their rows."""
    if not masks:
        return None
    rows, words = zip(*masks, strict=True)
    return torch.tensor(rows), torch.from_numpy(np.stack(words))


def _joined(entries: Iterable[tuple[int, tuple[Numbers, ...] | None]]) -> tuple[Tensor, ...] | None:
    """Entries of several rows, with their rows."""
    known = [(row, parts) for row, parts in entries if parts is not None]
    if not known:
        return None
    rows = np.concatenate([np.full(len(parts[0]), row, np.int64) for row, parts in known])
    columns = zip(*(parts for _, parts in known), strict=True)
    return tuple(torch.from_numpy(part) for part in (rows, *map(np.concatenate, columns)))
