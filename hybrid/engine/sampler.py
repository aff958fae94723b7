"""From logits to tokens: greedy or random, and their log-probabilities.

The token at a position is a pure function of its row of logits, the parameters and the seed of its request, the number
of tokens of the answer before it, and the history. In steps:

* `Edits.apply` (`hybrid.engine.constraints`) does to the row what the parameters say, as the history demands;
* `uniform(seed, index)` is the random number of token `index` of the answer;
* `choose` chooses the token. A row's choice does not depend on the other rows. It looks at the most likely tokens
  first, which settle most rows without sorting the vocabulary; `Sampled.is_settled` says which.

Nothing advances by asking: several positions, such as those along a path of draft tokens, may be asked for in one pass
(`Request.sample_row(drafts)`), and one position again and again. The history advances where a token is appended to its
request, and nowhere else. So an answer does not depend on whether prompts were cached, on what else is in the batch, on
retraction, on failures, or on how many positions a pass computes.

On a CPU probabilities and their logarithms are computed by compiled operations, each row by itself
(`kernels/cpu/elementwise.py`). What torch computes here is exact, or is one operation on each element that is rounded
as IEEE 754 says, so that it cannot depend on the batch: values are compared, sorted and gathered, and probabilities are
added up as whole numbers.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid.engine.constraints import Edits
from hybrid.engine.sampling_params import SamplingParams
from hybrid.kernels.ops import compiled_for

GREEDY = SamplingParams()

PRESELECTED = 1024
"""Number of the most likely tokens of a row that are looked at first."""

MAX_SORTED = 2048
"""Elements of all rows up to which sorting them is faster than to look for the most likely ones first."""

WHOLE = 2**52
"""A probability of 1 as a whole number; a token with less than 1 of it is never chosen."""


class SampleRow(NamedTuple):
    """The way the token of one row of logits is chosen.

    Attributes:
        params: of its request.
        number: its random number, in [0, 1); 0 where the token is the most likely one.
    """

    params: SamplingParams
    number: float


class SamplingRows(NamedTuple):
    """The way a token is chosen from each of S rows of logits: `[S]` fp64 each, as in `SamplingParams`.

    Attributes:
        uniform: the random number of the row, in [0, 1).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


def new_seed() -> int:
    """Return a seed for a request whose parameters give none."""
    return secrets.randbits(63)


def uniform(seed: int, index: int) -> float:
    """Return number `index` of a request's own random numbers, in [0, 1): it depends on nothing else, so that a token
    that is sampled again after a failure is the same."""
    return np.random.Generator(np.random.Philox(key=seed, counter=index)).random()


def sampling_numbers(rows: Sequence[SampleRow | None]) -> list[list[float]]:
    """Return the numbers of `SamplingRows`.

    Args:
        rows: how the token of each is chosen; None: its token is not needed.
    """
    known = [row if row is not None else SampleRow(GREEDY, 0.0) for row in rows]
    return [
        [row.params.temperature for row in known],
        [row.params.top_k for row in known],
        [row.params.top_p for row in known],
        [row.params.min_p for row in known],
        [row.number for row in known],
    ]


def sample(logits: Tensor, rows: SamplingRows | None) -> Tensor:
    """Choose a token of every row, on the logits' device. A row's choice does not depend on the others.

    Args:
        logits: `[S, vocab]` fp32.
        rows: how; None: the most likely token of every row.

    Returns:
        `[S]` int64.
    """
    if rows is None:
        return logits.argmax(-1)
    return torch.where(rows.temperature > 0, _among_all(probabilities(logits, rows), rows), logits.argmax(-1))


def presample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """`sample` by the `PRESELECTED` most likely tokens of every row, where they are enough.

    Returns:
        `[S]` the tokens, and `[S]` bool which of them are settled: those that `sample` chooses. It gives the others.
    """
    values = probabilities(logits, rows)
    count = min(PRESELECTED, values.shape[-1])
    few, tokens = _most_likely(values, count)
    least = few[..., -1:]
    # which of the tokens that are as likely as the last one are here is open: weights and ranks are known before them
    is_known = few > least if count < values.shape[-1] else torch.ones_like(few, dtype=torch.bool)
    weights = _weights(few) * is_known
    everything = _weights(values).sum(-1, keepdim=True)
    summed = weights.cumsum(-1)
    known = summed[..., -1:]
    rank = torch.arange(count, device=weights.device)
    takes_all = (rows.top_k <= 0) | (rows.top_k >= values.shape[-1])
    top_k = torch.where(takes_all, float("inf"), rows.top_k).unsqueeze(-1)
    has_top_k = top_k <= is_known.sum(-1, keepdim=True)  # the tokens beyond are not among them
    total = torch.where(has_top_k, (weights * (rank < top_k)).sum(-1, keepdim=True), everything)
    weights = weights * (rank < top_k) * ((summed - weights).double() < rows.top_p.unsqueeze(-1) * total)
    least_kept = rows.min_p.unsqueeze(-1) * weights[..., :1]
    weights = weights * (weights >= least_kept)
    # nothing beyond is kept; or all of it is, and what is kept weighs as much as everything
    is_cut = has_top_k | (known.double() >= rows.top_p.unsqueeze(-1) * total) | (_weights(least) < least_kept)
    is_whole = (rows.top_p.unsqueeze(-1) >= 1) & (rows.min_p.unsqueeze(-1) <= 0)
    summed = weights.cumsum(-1)
    kept = torch.where(is_cut, summed[..., -1:], everything)
    number = (rows.uniform.unsqueeze(-1) * kept).long()
    knows_total = has_top_k | takes_all.unsqueeze(-1)
    is_settled = knows_total & (is_cut | is_whole) & (number < summed[..., -1:])
    chosen = _place(summed, number, weights)
    is_greedy = rows.temperature <= 0
    found = torch.where(is_greedy, logits.argmax(-1), tokens.gather(-1, chosen).squeeze(-1))
    return found, is_settled.squeeze(-1) | is_greedy


def probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    """`[S, vocab]` at the temperature of each row."""
    compiled: Any = _compiled_softmax(logits)
    if compiled is not None:
        found: Tensor = compiled.softmax(logits, rows.temperature)
        return found
    smallest = torch.finfo(logits.dtype).tiny  # a smaller number would be 0 here
    temperature = rows.temperature.clamp(min=smallest).to(logits.dtype).unsqueeze(-1)
    return torch.softmax((logits - logits.max(-1, keepdim=True).values) / temperature, dim=-1)


def _compiled_softmax(logits: Tensor) -> Any:
    """Return the module that computes probabilities of these logits, each row by itself; None: torch does."""
    is_known = logits.dtype == torch.float32 and logits.dim() == 2 and logits.shape[1] > 0
    return compiled_for("elementwise", logits) if is_known else None


def _weights(values: Tensor) -> Tensor:
    """Return probabilities as whole numbers: their sums are the same in any order, and so on any device."""
    return (values.double() * WHOLE).long()


def _place(summed: Tensor, number: Tensor, weights: Tensor) -> Tensor:
    """`[S, 1]` the place of a number among weights with these sums."""
    place = (summed <= number).sum(-1, keepdim=True)
    return torch.minimum(place, (weights > 0).sum(-1, keepdim=True) - 1).clamp(min=0)  # no weight: NaN


def _most_likely(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values of every row, falling, and their tokens, which rise among equal values. Which
    of those that are equal to the last one are among them is open: that depends on the count."""
    if count == values.shape[-1]:
        few, tokens = values.sort(dim=-1, descending=True, stable=True)
        return few, tokens
    return _falling(values, values.topk(count).indices)


def _first_most_likely(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return what `_most_likely` does; among values equal to the smallest of them, those of the first tokens."""
    if values.numel() <= MAX_SORTED:
        few, tokens = values.sort(dim=-1, descending=True, stable=True)
        return few[:, :count], tokens[:, :count]
    few, tokens = values.topk(count)
    if not count:
        return few, tokens
    size, least = values.shape[-1], few[:, -1:]
    is_more = few > least
    from_the_end = torch.arange(size, 0, -1, dtype=torch.int32, device=values.device)
    equal = size - torch.where(values == least, from_the_end, 1).topk(count).values.long()
    place = torch.arange(count, device=values.device) - is_more.sum(-1, keepdim=True)
    return _falling(values, torch.where(is_more, tokens, equal.gather(-1, place.clamp(min=0))))


def _falling(values: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of some tokens of every row, falling, and the tokens, which rise among equal values."""
    tokens = tokens.sort(dim=-1).values
    few, order = values.gather(-1, tokens).sort(dim=-1, descending=True, stable=True)
    return few, tokens.gather(-1, order)


def _among_all(values: Tensor, rows: SamplingRows) -> Tensor:
    """`[S]` the tokens that are sampled with these probabilities."""
    values, tokens = values.sort(dim=-1, descending=True, stable=True)
    weights = _weights(values)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    top_k = torch.where(rows.top_k > 0, rows.top_k, float("inf")).unsqueeze(-1)
    weights = weights * (rank < top_k)
    summed = weights.cumsum(-1)
    before = (summed - weights).double()
    weights = weights * (before < rows.top_p.unsqueeze(-1) * summed[..., -1:])  # the token that crosses it stays
    weights = weights * (weights >= rows.min_p.unsqueeze(-1) * weights[..., :1])
    summed = weights.cumsum(-1)
    chosen = _place(summed, (rows.uniform.unsqueeze(-1) * summed[..., -1:]).long(), weights)
    return tokens.gather(-1, chosen).squeeze(-1)


NO_TOKEN = -1
"""Instead of a token: the parameters of a request exclude all of them, or its own functions gave NaN."""

NOT_FINITE = -2
"""In the place of the token of a row of logits with NaN or infinity."""


class Sampled(NamedTuple):
    """Tokens that were chosen from S rows of logits.

    Attributes:
        tokens: `[S]` int64; `NO_TOKEN` where an edited row has NaN, plus infinity, or nothing but minus infinity.
        is_settled: `[S]` bool; the other tokens are not known yet. None: all are settled.
        choose_sorted: chooses all of them, by sorting the vocabulary.
    """

    tokens: Tensor
    is_settled: Tensor | None
    choose_sorted: Callable[[], Tensor]


def most_likely(logits: Tensor) -> Tensor:
    """`[S]` int64: the most likely token of every row, or `NOT_FINITE`.

    Args:
        logits: `[S, vocab]` fp32.
    """
    tokens = compiled_most_likely(logits)
    return tokens if tokens is not None else checked(logits.argmax(-1), logits)


def compiled_most_likely(logits: Tensor) -> Tensor | None:
    """`most_likely` by compiled code, which a captured pass may hold. None: there is none for these logits."""
    module: Any = compiled_for("drafts", logits)
    if module is None or logits.stride(1) != 1:
        return None
    tokens: Tensor = module.most_likely(logits, NOT_FINITE)
    return tokens


def checked(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return tokens chosen from rows of logits, `NOT_FINITE` in the place of those of rows that are not."""
    return torch.where(logits.sum(-1).isfinite(), tokens, NOT_FINITE)  # NaN and infinity remain in a sum


def choose(logits: Tensor, edits: Edits | None, rows: SamplingRows | None) -> Sampled:
    """Choose a token of every row after its edits; the logits stay as they are. Waits for nothing.

    Args:
        logits: `[S, vocab]` fp32.
        edits: what is done to the rows before; None: nothing.
        rows: how; None: the most likely token of every row.
    """
    edited = logits if edits is None else edits.apply(logits)

    def usable(tokens: Tensor) -> Tensor:
        return tokens if edits is None else torch.where(edited.max(-1).values.isfinite(), tokens, NO_TOKEN)

    def choose_sorted() -> Tensor:
        return usable(sample(edited, rows))

    if rows is None:
        return Sampled(choose_sorted(), None, choose_sorted)
    tokens, is_settled = presample(edited, rows)
    return Sampled(usable(tokens), is_settled, choose_sorted)


class Logprobs(NamedTuple):
    """Log-probabilities of S rows before temperature and filters, on the logits' device.

    Attributes:
        values, tokens: `[S, k]` of the most likely tokens.
        chosen: `[S]` of the tokens that were chosen.
    """

    values: Tensor
    tokens: Tensor
    chosen: Tensor


def token_logprobs(logits: Tensor, chosen: Tensor, count: int) -> Logprobs:
    """Return log-probabilities of the `count` most likely tokens of every row, of equal ones the first, and of the one
    that was chosen.

    Args:
        logits: `[S, vocab]` fp32.
        chosen: `[S]` int64.
    """
    compiled: Any = _compiled_softmax(logits)
    logprobs = compiled.log_softmax(logits) if compiled is not None else torch.log_softmax(logits, dim=-1)
    values, tokens = _first_most_likely(logprobs, min(count, logits.shape[-1]))
    return Logprobs(values, tokens, logprobs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1))
