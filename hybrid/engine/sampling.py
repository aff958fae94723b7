"""From logits to tokens."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import SamplingError

MOST_PRIORITY = 100
"""Priorities lie between minus this and this."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. The default is greedy.

    Args:
        max_new_tokens: at most so many tokens.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0: all.
        top_p: keep the likeliest tokens up to this probability; 1: all.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0: all.
        seed: of this request's own random numbers; None: another one each time.
        stop: texts that end the answer; they are not part of it.
        stop_token_ids: tokens that end the answer, beside the model's own.
        ignore_eos: go on after the model's end-of-text tokens.
        logprobs: report for each token the log-probabilities of the k likeliest and of itself; None: none.
        checkpoint_at: positions of the prompt, in tokens, at which a later prompt will go another way: a checkpoint is
            put at the multiple of the grid at or before each. Negative positions count from the prompt's end.
        pin_for: keep what this request has computed from eviction for so many seconds (`math.inf`: until
            `Engine.unpin`); None: do not pin.
        priority: of what this request leaves in the cache, for eviction policies that ask; the higher, the longer.

    Raises:
        SamplingError: a value is out of range, or two contradict each other.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    checkpoint_at: tuple[int, ...] | list[int] = ()
    pin_for: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        self._require(isinstance(self.stop, str | tuple | list), "stop must be a text, or a tuple or list of texts")
        self._require(
            isinstance(self.stop_token_ids, tuple | list), "stop_token_ids must be a tuple or list of token ids"
        )
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._require(_is_int(self.max_new_tokens, 1), "max_new_tokens must be a number, at least 1")
        self._require(
            _is_number(self.temperature) and 0 <= self.temperature < float("inf"),
            "temperature must be 0 (greedy) or a positive number",
        )
        self._require(_is_int(self.top_k, 0), "top_k must be a positive number, or 0 for all tokens")
        self._require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p must lie in (0, 1]")
        self._require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p must lie in [0, 1]")
        self._require(
            self.seed is None or _is_int(self.seed, 0, 2**63 - 1), "seed must lie in 0 .. 2**63 - 1, or be None"
        )
        self._require(
            self.logprobs is None or _is_int(self.logprobs, 0, 100), "logprobs must lie in 0 .. 100, or be None"
        )
        self._require(all(isinstance(text, str) and text for text in self.stop), "stop must be non-empty texts")
        self._require(all(_is_int(token, 0) for token in self.stop_token_ids), "stop_token_ids must be token ids")
        self._require(
            isinstance(self.checkpoint_at, tuple | list)
            and all(isinstance(at, int) and not isinstance(at, bool) for at in self.checkpoint_at),
            "checkpoint_at must be a tuple or list of positions in tokens",
        )
        object.__setattr__(self, "checkpoint_at", tuple(self.checkpoint_at))
        self._require(
            self.pin_for is None or (_is_number(self.pin_for) and self.pin_for > 0),
            "pin_for must be a positive number of seconds, math.inf, or None",
        )
        self._require(
            _is_int(self.priority, -MOST_PRIORITY, MOST_PRIORITY),
            f"priority must be a whole number from {-MOST_PRIORITY} to {MOST_PRIORITY}",
        )
        if self.temperature == 0:
            for name, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("seed", None)):
                value = getattr(self, name)
                greedy = name == "top_k" and value == 1
                self._require(
                    value == neutral or greedy,
                    f"{name}={value} has no effect with temperature=0 (greedy); set temperature=1.0 or leave it out",
                )

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise SamplingError(f"SamplingParams: {message}")


def _is_int(value: object, least: int, most: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


WHOLE = 2**52
"""A probability of 1 as a whole number; what is below 1 of it is never drawn."""


class Draws(NamedTuple):
    """How S rows of logits are drawn from: `[S]` fp64 each, as in `SamplingParams`.

    Attributes:
        uniform: the random number of the row, in [0, 1).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


def new_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(63)


def uniform(seed: int, index: int) -> float:
    """Number `index` of a request's own random numbers, in [0, 1): it depends on nothing else, so that a token that is
    drawn again, after a failure, is the same."""
    return np.random.Generator(np.random.Philox(key=seed, counter=index)).random()


def draws_of(rows: Sequence[tuple[SamplingParams, float]]) -> list[list[float]] | None:
    """The numbers of `Draws` for rows of (parameters, random number); None when every row takes its likeliest token."""
    if not any(params.temperature for params, _ in rows):
        return None
    return [
        [params.temperature for params, _ in rows],
        [params.top_k for params, _ in rows],
        [params.top_p for params, _ in rows],
        [params.min_p for params, _ in rows],
        [number for _, number in rows],
    ]


def sample(logits: Tensor, draws: Draws | None) -> Tensor:
    """Choose a token of every row, on the logits' device. A row's choice does not depend on the others.

    Args:
        logits: `[S, vocab]` fp32.
        draws: how; None: the likeliest token of every row.

    Returns:
        `[S]` int64.
    """
    likeliest = logits.argmax(-1)
    if draws is None:
        return likeliest
    coldest = torch.finfo(logits.dtype).tiny  # a smaller number would be 0 here
    temperature = draws.temperature.clamp(min=coldest).to(logits.dtype).unsqueeze(-1)
    most = logits.max(-1, keepdim=True).values
    values, tokens = torch.softmax((logits - most) / temperature, dim=-1).sort(dim=-1, descending=True, stable=True)
    # whole numbers from here on: their sums are the same in any order, and so on any device
    weights = (values.double() * WHOLE).long()
    rank = torch.arange(weights.shape[-1], device=weights.device)
    top_k = torch.where(draws.top_k > 0, draws.top_k, float("inf")).unsqueeze(-1)
    weights = weights * (rank < top_k)
    summed = weights.cumsum(-1)
    before = (summed - weights).double()
    weights = weights * (before < draws.top_p.unsqueeze(-1) * summed[..., -1:])  # the token that crosses it stays
    weights = weights * (weights >= draws.min_p.unsqueeze(-1) * weights[..., :1])
    summed = weights.cumsum(-1)
    drawn = (summed <= (draws.uniform.unsqueeze(-1) * summed[..., -1:]).long()).sum(-1, keepdim=True)
    drawn = torch.minimum(drawn, (weights > 0).sum(-1, keepdim=True) - 1)
    return torch.where(draws.temperature > 0, tokens.gather(-1, drawn).squeeze(-1), likeliest)


class Logprobs(NamedTuple):
    """Log-probabilities of S rows before temperature and filters, on the logits' device.

    Attributes:
        values, tokens: `[S, k]` of the likeliest tokens.
        chosen: `[S]` of the tokens that were chosen.
    """

    values: Tensor
    tokens: Tensor
    chosen: Tensor


def token_logprobs(logits: Tensor, chosen: Tensor, count: int) -> Logprobs:
    """Log-probabilities of the `count` likeliest tokens of every row, and of the chosen one.

    Args:
        logits: `[S, vocab]` fp32.
        chosen: `[S]` int64.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    values, tokens = logprobs.topk(min(count, logits.shape[-1]))
    return Logprobs(values, tokens, logprobs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1))
