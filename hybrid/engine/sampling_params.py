"""How a prompt is continued: the parameters of a request, and what is refused in them."""

from dataclasses import dataclass

from hybrid.errors import SamplingError

MAX_PRIORITY = 100
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
            _is_int(self.priority, -MAX_PRIORITY, MAX_PRIORITY),
            f"priority must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}",
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
