"""The interface of the engines that traffic is replayed on: models of their schedulers, without a model or a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from hybrid.doctor.request import LoggedRequest


class Hit(NamedTuple):
    """The part of a prompt that an engine finds cached.

    Attributes:
        num_tokens: tokens that are not computed.
        num_page_tokens: tokens whose keys and values are cached, with a state at their end or without.
    """

    num_tokens: int
    num_page_tokens: int


MISS = Hit(0, 0)


MAX_RUNNING = 256
"""Requests that run at a time, vLLM's `--max-num-seqs`."""


class Running(Protocol):
    """A request that an engine has begun, with all that it holds there.

    Attributes:
        hit: what of its prompt was cached.
        computed: tokens of the prompt and of the answer that are there.
    """

    hit: Hit
    computed: int


class EngineModel(Protocol):
    """A model of an engine's scheduler.

    `serve` is one request after the other. Several at a time are begun, advanced step by step and ended.

    Attributes:
        mixes: a step computes prompts and a token of each answer; otherwise answers wait for prompts.
        shares_at_once: what a step computes is found by requests that begin later in the same step.
        max_running: requests that run at a time, at most.
    """

    mixes: bool
    max_running: int
    shares_at_once: bool

    def serve(self, request: LoggedRequest) -> Hit:
        """Serve a request from its prompt to its last token, and return what of its prompt was cached."""
        ...

    def new_step(self) -> None:
        """A step begins."""
        ...

    def begin(self, request: LoggedRequest, budget: int | None = None) -> Any:
        """Find a request's prompt and hold what is found.

        Args:
            budget: tokens that are left of the step; None: it is not computed in steps.

        Returns:
            A `Running` of this engine; None: it has no room now, or nothing of it can be computed in this step.
        """
        ...

    def end_of_part(self, running: Any, budget: int) -> int:
        """Where the part of its prompt ends that a step computes, which has `budget` tokens left."""
        ...

    def next_event(self, running: Any) -> int:
        """The number of tokens at which its answer takes memory, gives up some or can be found by others next."""
        ...

    def advance(self, running: Any, end: int) -> bool:
        """Compute a request up to a token. Returns whether there was room."""
        ...

    def end(self, running: Any) -> None:
        """Give up what a request holds."""
        ...
