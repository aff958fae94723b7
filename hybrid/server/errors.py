"""Why a call over HTTP is refused or fails: one form, which each API writes in its own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hybrid.errors import ArgumentError, ClosedError, EncodingLimitError, HybridError, MemoryBudgetError, QueueFullError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The kind of a failure by its status, in words that both APIs know."""

LATER = {"retry-after": "1"}

TOO_LONG = re.compile("this (model|engine) takes")
"""Of the messages of prompts that are too long."""


@dataclass(eq=False)
class HttpError(Exception):
    """A refused call.

    Attributes:
        status: of HTTP.
        message: what is wrong, and what to do.
        param: the field of the body that is the reason; None: none is.
        code: for programs.
        headers: of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    @property
    def kind(self) -> str:
        """Name the kind of the failure."""
        return KINDS.get(self.status, "api_error")


def failure_of(error: BaseException) -> HttpError:
    """The failure that an exception of the engine is to a client."""
    if isinstance(error, HttpError):
        return error
    text = str(error)
    if isinstance(error, ClosedError):
        return HttpError(503, "the server is ending; send it to another one", code=error.code, headers=LATER)
    if isinstance(error, QueueFullError):
        return HttpError(429, text, code=error.code, headers=LATER)
    if isinstance(error, EncodingLimitError):
        return HttpError(503, text, code=error.code, headers=LATER)
    if isinstance(error, ArgumentError):
        found = re.match(r"SamplingParams: (\w+)", text)
        is_too_long = isinstance(error, MemoryBudgetError) or TOO_LONG.search(text) is not None
        code = "context_length_exceeded" if is_too_long else error.code
        return HttpError(400, text.removeprefix("SamplingParams: "), found and found[1], code)
    if isinstance(error, HybridError):
        return HttpError(500, text, code=error.code)
    return HttpError(500, "the server failed; its log says why", code="internal")
