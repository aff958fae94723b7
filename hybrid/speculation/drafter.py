"""Drafters, and the histories that they see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import overload

from hybrid.key import Key


class History(Sequence[int]):
    """The tokens of a request up to now, prompt and answer: a view that grows with it, equal to itself alone.

    Args:
        ids: the tokens; images have placeholders.
        prompt_len: number of tokens of the prompt.
        namespace: of the cache.
        key: makes the key of the tokens up to now, as the cache compares them.

    Attributes:
        ids, prompt_len, namespace, key: as given. The tokens are to be read alone.
    """

    def __init__(self, ids: array[int], prompt_len: int, namespace: str, key: Callable[[], Key]) -> None:
        self.prompt_len: int = prompt_len
        self.namespace: str = namespace
        self.key: Callable[[], Key] = key
        self.ids: array[int] = ids

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> array[int]: ...
    def __getitem__(self, at: int | slice) -> int | array[int]:
        return self.ids[at]


class Drafter(ABC):
    """Proposes tokens that may come next. Subclass it, and give it to `SpeculationConfig`.

    What it proposes changes no answer, only the time that it takes: a draft counts if it is the token that would have
    been sampled without it. One engine calls it, in one thread.
    """

    @property
    def name(self) -> str:
        """Name of the drafter in `Engine.stats().speculation`."""
        return type(self).__name__

    @property
    def prior(self) -> float:
        """Expected share of its drafts that are accepted, from 0 to 1, before that was measured."""
        return 0.6

    @abstractmethod
    def propose(
        self, history: History, limit: int
    ) -> tuple[Sequence[int], Sequence[int]] | tuple[Sequence[int], Sequence[int], Sequence[float]]:
        """Tokens that may come after a history, as a tree.

        Args:
            history: the tokens of a request up to now.
            limit: the number of tokens that are of use; more are ignored.

        Returns:
            The tokens, and for each of them the index of the token before it: -1 stands for the end of the history.
            Both empty: there is no draft. Tokens with the same parent are alternatives, the most probable first. A
            drafter that knows how probable each token is after those before it returns that too, from 0 to 1; without
            it the measured acceptance is expected.
        """

    def prepare(self, wanted: Sequence[tuple[History, int]]) -> None:  # noqa: B027 - nothing by default
        """Compute what `propose` will be asked for next: histories, each with its limit. A drafter that computes drafts
        of several requests together does so here."""

    def end(self, history: History) -> None:  # noqa: B027 - nothing by default
        """Forget a history: its request has ended, and nothing more is proposed for it."""

    def clear(self) -> None:  # noqa: B027 - nothing by default
        """Forget the tokens of requests that have ended: the cache was cleared."""


class ChainDrafter(Drafter):
    """A drafter that computes chains in `prepare`, token by token, and knows how probable they are.

    Attributes:
        least: the chance of a chain below which one more token would not pay: set before each `prepare`.
    """

    least: float = 0.0
