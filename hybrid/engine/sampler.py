"""From logits to tokens: greedy or random, and their log-probabilities.

The token at a position is a pure function of its row of logits, the parameters and the seed of its request, the number
of tokens of the answer before it, and the history. In steps:

* `Edits.apply` (`hybrid.engine.constraints`) does to the row what the parameters say, as the history demands;
* `uniform(seed, index)` is the random number of token `index` of the answer;
* `sample` chooses the token. A row's choice does not depend on the other rows.

Nothing advances by asking: several positions, such as those along a path of draft tokens, may be asked for in one pass
(`Request.sample_row(drafts)`), and one position again and again. The history advances where a token is appended to its
request, and nowhere else. So an answer does not depend on whether prompts were cached, on what else is in the batch, on
retraction, on failures, or on how many positions a pass computes.
"""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid.engine.constraints import Edits, RowEdits
from hybrid.engine.sampling_params import SamplingParams

GREEDY = SamplingParams()

WHOLE = 2**52
"""A probability of 1 as a whole number; a token with less than 1 of it is never chosen."""


class SampleRow(NamedTuple):
    """How the token of one row of logits is chosen.

    Attributes:
        params: of its request.
        number: its random number, in [0, 1); 0 where the token is the most likely one.
        edits: what is done to the logits before; None: nothing.
    """

    params: SamplingParams
    number: float
    edits: RowEdits | None = None


class SamplingRows(NamedTuple):
    """How a token is chosen from each of S rows of logits: `[S]` fp64 each, as in `SamplingParams`.

    Attributes:
        uniform: the random number of the row, in [0, 1).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


def new_seed() -> int:
    """A seed for a request whose parameters give none."""
    return secrets.randbits(63)


def uniform(seed: int, index: int) -> float:
    """Number `index` of a request's own random numbers, in [0, 1): it depends on nothing else, so that a token
    that is sampled again after a failure is the same."""
    return np.random.Generator(np.random.Philox(key=seed, counter=index)).random()


def sampling_numbers(rows: Sequence[SampleRow | None]) -> list[list[float]] | None:
    """The numbers of `SamplingRows`; None when all rows are greedy.

    Args:
        rows: how the token of each is chosen; None: its token is not needed.
    """
    if not any(row is not None and row.params.temperature for row in rows):
        return None
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
    most_likely = logits.argmax(-1)
    if rows is None:
        return most_likely
    smallest = torch.finfo(logits.dtype).tiny  # a smaller number would be 0 here
    temperature = rows.temperature.clamp(min=smallest).to(logits.dtype).unsqueeze(-1)
    most = logits.max(-1, keepdim=True).values
    values, tokens = torch.softmax((logits - most) / temperature, dim=-1).sort(dim=-1, descending=True, stable=True)
    # whole numbers from here on: their sums are the same in any order, and so on any device
    weights = (values.double() * WHOLE).long()
    rank = torch.arange(weights.shape[-1], device=weights.device)
    top_k = torch.where(rows.top_k > 0, rows.top_k, float("inf")).unsqueeze(-1)
    weights = weights * (rank < top_k)
    summed = weights.cumsum(-1)
    before = (summed - weights).double()
    weights = weights * (before < rows.top_p.unsqueeze(-1) * summed[..., -1:])  # the token that crosses it stays
    weights = weights * (weights >= rows.min_p.unsqueeze(-1) * weights[..., :1])
    summed = weights.cumsum(-1)
    chosen = (summed <= (rows.uniform.unsqueeze(-1) * summed[..., -1:]).long()).sum(-1, keepdim=True)
    chosen = torch.minimum(chosen, (weights > 0).sum(-1, keepdim=True) - 1).clamp(min=0)  # no weight: NaN
    return torch.where(rows.temperature > 0, tokens.gather(-1, chosen).squeeze(-1), most_likely)


NO_TOKEN = -1
"""Instead of a token: the parameters of a request exclude all of them, or its own functions gave NaN."""


def sample_edited(logits: Tensor, edits: Edits, rows: SamplingRows | None) -> Tensor:
    """Choose a token of every row after its edits; the logits stay as they are.

    Args:
        logits: `[S, vocab]` fp32.
        edits: what is done to the rows before.
        rows: how; None: the most likely token of every row.

    Returns:
        `[S]` int64; `NO_TOKEN` where a row has NaN, plus infinity, or nothing but minus infinity.
    """
    edited = edits.apply(logits)
    return torch.where(edited.max(-1).values.isfinite(), sample(edited, rows), NO_TOKEN)


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
    """Log-probabilities of the `count` most likely tokens of every row, and of the chosen one.

    Args:
        logits: `[S, vocab]` fp32.
        chosen: `[S]` int64.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    values, tokens = logprobs.topk(min(count, logits.shape[-1]))
    return Logprobs(values, tokens, logprobs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1))
