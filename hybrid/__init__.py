"""A prefix cache for hybrid-architecture language models, with the engine that runs them.

>>> import hybrid
>>> engine = hybrid.Engine.from_pretrained("tiny", cache=hybrid.CacheConfig(memory="64MiB"))
>>> print(engine.generate("def add(a, b):", hybrid.SamplingParams(max_new_tokens=8))[0].text)
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

_root = Path(__file__).resolve().parent.parent
if (_root / "kernels" / "ops.py").is_file():
    __path__.append(
        str(_root)
    )  # in a checkout ./kernels and ./models lie beside this package; installed, they lie within

from hybrid.cache.cache import HybridCache  # noqa: E402
from hybrid.cache.config import CacheConfig  # noqa: E402
from hybrid.cache.pins import Pin  # noqa: E402
from hybrid.cache.stats import CacheStats  # noqa: E402
from hybrid.engine.config import EngineConfig  # noqa: E402
from hybrid.engine.engine import Engine  # noqa: E402
from hybrid.engine.output import RequestOutput, Usage  # noqa: E402
from hybrid.engine.sampling_params import SamplingParams  # noqa: E402
from hybrid.engine.stats import EngineStats, Histogram  # noqa: E402
from hybrid.errors import (  # noqa: E402
    ArgumentError,
    AuditError,
    CacheFileError,
    CheckpointError,
    ClosedError,
    HybridError,
    LockError,
    MemoryBudgetError,
    NonFiniteError,
    OwnershipError,
    PromptError,
    QueueFullError,
    RequestError,
    SamplingError,
    UnsupportedModelError,
)
from hybrid.key import Key  # noqa: E402
from hybrid.memory.memory import CacheMemory, Mover  # noqa: E402
from hybrid.prompts.images import Image, ImagePrompt  # noqa: E402
from hybrid.speculation.config import SpeculationConfig  # noqa: E402
from hybrid.speculation.drafter import Drafter, History  # noqa: E402
from hybrid.tiers.transfer import Transfer  # noqa: E402
from hybrid.tree.policy import Facts, Policy, PolicyWarning  # noqa: E402
from hybrid.version import __version__  # noqa: E402

if TYPE_CHECKING:
    from hybrid.serve.async_engine import AsyncEngine

__all__ = [
    "ArgumentError",
    "AsyncEngine",
    "AuditError",
    "CacheConfig",
    "CacheFileError",
    "CacheMemory",
    "CacheStats",
    "CheckpointError",
    "ClosedError",
    "Drafter",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Facts",
    "Histogram",
    "History",
    "HybridCache",
    "HybridError",
    "Image",
    "ImagePrompt",
    "Key",
    "LockError",
    "MemoryBudgetError",
    "Mover",
    "NonFiniteError",
    "OwnershipError",
    "Pin",
    "Policy",
    "PolicyWarning",
    "PromptError",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingError",
    "SamplingParams",
    "SpeculationConfig",
    "Transfer",
    "UnsupportedModelError",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "hf":  # imports transformers, which takes seconds
        return importlib.import_module("hybrid.hf")
    if name == "AsyncEngine":  # imports asyncio
        return importlib.import_module("hybrid.serve").AsyncEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
