"""The interface of the engines that traffic is replayed on: models of their schedulers, without a model or a GPU."""

from __future__ import annotations

from typing import NamedTuple, Protocol

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


class EngineModel(Protocol):
    """A model of an engine's scheduler. It serves one request after the other."""

    def serve(self, request: LoggedRequest) -> Hit:
        """Serve a request from its prompt to its last token, and return what of its prompt was cached."""
        ...
