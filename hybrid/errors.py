"""The exceptions of this package.

HybridError
├── ArgumentError (also a ValueError)     an argument is wrong; nothing was changed
│   ├── PromptError                       an empty prompt, ids outside the vocabulary, a prompt that is too long
│   ├── KeywordError (also a TypeError)   settings or a call have no such name; the message names the one that is meant
│   ├── SamplingError                     sampling parameters that contradict each other or are out of range
│   ├── MemoryBudgetError                 the memory is too small; the message names the smallest that suffices
│   ├── CacheFileError                    a file of cached prefixes that is damaged, of another model, or cannot be
│   │                                     written
│   └── CheckpointError                   a path without a usable model checkpoint
│       └── UnsupportedModelError         a checkpoint of an architecture that this package does not run
├── NonFiniteError                        a forward pass gave NaN or infinity; nothing of it was cached
├── RequestError                          an unknown request id, stepping an engine that has no work, or a request that
│   │                                     failed while its text was streamed
│   ├── EncodingLimitError                prompts to encode are too large together, or one took too long
│   ├── QueueFullError                    as many requests wait as the engine's configuration allows
│   └── ClosedError                       the engine or the cache was closed, or the thread of an engine ended
├── LockError                             a lock was released twice, or passed to a cache that did not create it
├── OwnershipError                        a page or a state slot was about to be owned or freed twice, or a thread that
│                                         does not own the cache called it
├── AuditError                            an invariant of the cache does not hold: a bug in this package; report it
└── VersionError                          an installed package is not as this one relies on it to be; the message names
                                          the version found, and those known to work
"""

from typing import ClassVar


class HybridError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        code: the kind of the error, for programs; it stays when a message changes.
    """

    code: ClassVar[str] = "internal"


class ArgumentError(HybridError, ValueError):
    """An argument is wrong. Nothing was changed."""

    code: ClassVar[str] = "invalid_argument"


class PromptError(ArgumentError):
    """A prompt cannot be run: it is empty, too long, or holds ids outside the vocabulary."""

    code: ClassVar[str] = "invalid_prompt"


class KeywordError(ArgumentError, TypeError):
    """Settings, or a call, have no such name. The message names the one that is meant."""


class SamplingError(ArgumentError):
    """Sampling parameters are out of range or contradict each other."""

    code: ClassVar[str] = "invalid_parameters"


class MemoryBudgetError(ArgumentError):
    """The memory is too small."""

    code: ClassVar[str] = "memory_too_small"


class CacheFileError(ArgumentError):
    """A file of cached prefixes is damaged, of another model or version, or cannot be written. Nothing was changed."""

    code: ClassVar[str] = "invalid_file"


class CheckpointError(ArgumentError):
    """There is no usable model checkpoint at a path or hub id."""

    code: ClassVar[str] = "invalid_checkpoint"


class UnsupportedModelError(CheckpointError):
    """The checkpoint is of an architecture that this package does not run."""


class NonFiniteError(HybridError):
    """A forward pass gave logits, keys, values or states with NaN or infinity. Nothing of it was cached."""

    code: ClassVar[str] = "not_finite"


class RequestError(HybridError):
    """A request id is unknown, there is no work, or a request failed while its text was streamed."""

    code: ClassVar[str] = "invalid_request"


class QueueFullError(RequestError):
    """A queue is full: `EngineConfig.max_waiting` requests wait, and as many run as can. Nothing was changed; try again
    later."""

    code: ClassVar[str] = "queue_full"


class EncodingLimitError(RequestError):
    """Prompts that wait to be encoded are too large together, or one took too long. Nothing was changed."""

    code: ClassVar[str] = "encoding_limit"


class ClosedError(RequestError):
    """The engine or the cache was closed; or the thread of an `AsyncEngine` ended with an error, the cause of this."""

    code: ClassVar[str] = "closed"


class LockError(HybridError):
    """A lock was released twice, or passed to a cache that did not create it."""


class OwnershipError(HybridError):
    """A page or a state slot was about to be owned or freed twice, or another thread than the owner made a call."""

    code: ClassVar[str] = "wrong_owner"


class AuditError(HybridError):
    """An invariant of the cache does not hold: a bug in this package."""

    code: ClassVar[str] = "inconsistent"


class VersionError(HybridError):
    """An installed package is not as this one relies on it to be. Nothing of what it computed was cached."""

    code: ClassVar[str] = "wrong_version"


REFUSALS = (ArgumentError, RequestError)
"""Exceptions that come before anything is changed: after them the cache needs no audit."""
