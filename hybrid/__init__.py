"""A prefix cache for hybrid-architecture language models, with the engine that runs them.

>>> import hybrid
>>> engine = hybrid.Engine.from_pretrained("tiny", cache=hybrid.CacheConfig(memory="64MiB"))
>>> print(engine.generate("def add(a, b):", hybrid.SamplingParams(max_new_tokens=8))[0].text)
"""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

_root = Path(__file__).resolve().parent.parent
if (_root / "kernels" / "ops.py").is_file():
    __path__.append(
        str(_root)
    )  # in a checkout ./kernels and ./models lie beside this package; installed, they lie within

from hybrid.errors import (  # noqa: E402
    ArgumentError,
    AuditError,
    CacheFileError,
    CheckpointError,
    ClosedError,
    EncodingLimitError,
    HybridError,
    KeywordError,
    LockError,
    MemoryBudgetError,
    NonFiniteError,
    OwnershipError,
    PromptError,
    QueueFullError,
    RequestError,
    SamplingError,
    UnsupportedModelError,
    VersionError,
)
from hybrid.version import __version__  # noqa: E402

if TYPE_CHECKING:
    from hybrid.cache.cache import HybridCache
    from hybrid.cache.config import CacheConfig
    from hybrid.cache.explain import Explanation
    from hybrid.cache.pins import Pin
    from hybrid.cache.stats import CacheStats
    from hybrid.engine.config import EngineConfig, TenantConfig
    from hybrid.engine.conversation import Conversation
    from hybrid.engine.engine import Engine, TextStream
    from hybrid.engine.output import Accepted, Completion, RequestOutput, Usage
    from hybrid.engine.sampling_params import SamplingParams
    from hybrid.engine.scoring import Score
    from hybrid.engine.stats import EngineStats, Histogram
    from hybrid.hints import Hints
    from hybrid.key import Key
    from hybrid.memory.contents import Mover
    from hybrid.memory.memory import CacheMemory
    from hybrid.prompts.answer_parser import ParsedAnswer, ToolCall
    from hybrid.prompts.images import Image, ImagePrompt
    from hybrid.serve.async_engine import AsyncEngine, OutputStream
    from hybrid.speculation.config import SpeculationConfig
    from hybrid.speculation.drafter import Drafter, History
    from hybrid.tiers.transfer import Transfer
    from hybrid.tree.policy import Facts, Policy, PolicyWarning

__all__ = [
    "Accepted",
    "ArgumentError",
    "AsyncEngine",
    "AuditError",
    "CacheConfig",
    "CacheFileError",
    "CacheMemory",
    "CacheStats",
    "CheckpointError",
    "ClosedError",
    "Completion",
    "Conversation",
    "Drafter",
    "EncodingLimitError",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Explanation",
    "Facts",
    "Hints",
    "Histogram",
    "History",
    "HybridCache",
    "HybridError",
    "Image",
    "ImagePrompt",
    "Key",
    "KeywordError",
    "LockError",
    "MemoryBudgetError",
    "Mover",
    "NonFiniteError",
    "OutputStream",
    "OwnershipError",
    "ParsedAnswer",
    "Pin",
    "Policy",
    "PolicyWarning",
    "PromptError",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingError",
    "SamplingParams",
    "Score",
    "SpeculationConfig",
    "TenantConfig",
    "TextStream",
    "ToolCall",
    "Transfer",
    "UnsupportedModelError",
    "Usage",
    "VersionError",
    "__version__",
]


_HOMES = {
    "cache.cache": "HybridCache",
    "cache.config": "CacheConfig",
    "cache.explain": "Explanation",
    "cache.pins": "Pin",
    "cache.stats": "CacheStats",
    "engine.config": "EngineConfig TenantConfig",
    "engine.conversation": "Conversation",
    "engine.engine": "Engine TextStream",
    "engine.output": "Accepted Completion RequestOutput Usage",
    "engine.sampling_params": "SamplingParams",
    "engine.scoring": "Score",
    "engine.stats": "EngineStats Histogram",
    "hints": "Hints",
    "key": "Key",
    "memory.contents": "Mover",
    "memory.memory": "CacheMemory",
    "prompts.answer_parser": "ParsedAnswer ToolCall",
    "prompts.images": "Image ImagePrompt",
    "serve.async_engine": "AsyncEngine OutputStream",
    "speculation.config": "SpeculationConfig",
    "speculation.drafter": "Drafter History",
    "tiers.transfer": "Transfer",
    "tree.policy": "Facts Policy PolicyWarning",
}
"""Public names by their modules. They are imported when they are first used: a room may be used without what the others
need, as `hybrid.sglang` is without transformers."""

_MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is not None:
        value = globals()[name] = getattr(importlib.import_module(f"hybrid.{module}"), name)
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"hybrid.{name}") is not None:
        return importlib.import_module(f"hybrid.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "hf"})
