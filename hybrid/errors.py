"""The exceptions of this package.

HybridError
├── ArgumentError (also a ValueError)     an argument is wrong; nothing was changed
│   ├── PromptError                       an empty prompt, ids outside the vocabulary, a prompt that is too long
│   ├── SamplingError                     sampling parameters that contradict each other or are out of range
│   ├── MemoryBudgetError                 the memory given does not suffice; the message names the smallest that does
│   └── CheckpointError                   a path that holds no usable model checkpoint
│       └── UnsupportedModelError         a checkpoint of an architecture that this package does not run
├── NonFiniteError                        the model computed NaN or infinity; nothing of that pass was cached
├── RequestError                          an unknown request id, or stepping an engine that has nothing to do
├── LockError                             a lock released twice, or given to a cache that did not make it
├── OwnershipError                        a page or a state slot was about to be owned twice, or freed twice
└── AuditError                            the books do not balance: a bug in this package, please report it
"""


class HybridError(Exception):
    """Base of every error that this package raises on purpose."""


class ArgumentError(HybridError, ValueError):
    """An argument is wrong. Nothing was changed."""


class PromptError(ArgumentError):
    """A prompt cannot be run as it is."""


class SamplingError(ArgumentError):
    """Sampling parameters are out of range or contradict each other."""


class MemoryBudgetError(ArgumentError):
    """The memory given does not suffice."""


class CheckpointError(ArgumentError):
    """A path or hub id holds no usable model checkpoint."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is of an architecture that this package does not run."""


class NonFiniteError(HybridError):
    """A forward pass gave logits, keys, values or states with NaN or infinity. Nothing of it was cached."""


class RequestError(HybridError):
    """A request id is unknown, or there is nothing to do."""


class LockError(HybridError):
    """A lock was released twice, or given to a tree that did not make it."""


class OwnershipError(HybridError):
    """A page or a state slot was about to be owned twice, or freed twice."""


class AuditError(HybridError):
    """The books do not balance."""
