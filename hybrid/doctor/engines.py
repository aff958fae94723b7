"""The engines that traffic is replayed on, by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from hybrid.doctor.engine import EngineModel
from hybrid.doctor.own import OwnCache
from hybrid.doctor.sglang import SglangScheduler
from hybrid.doctor.sizes import Memory, Sizes
from hybrid.doctor.vllm import VllmScheduler
from hybrid.errors import ArgumentError, VersionError
from hybrid.vllm.installed import TESTED, installed_version

ENGINES: dict[str, tuple[str, Callable[..., EngineModel], dict[str, Any]]] = {
    "vllm": ("vLLM's scheduler, block pool and states (0.33)", VllmScheduler, {}),
    "sglang": ("SGLang's unified radix cache, and what its scheduler asks of it (0.5.23)", SglangScheduler, {}),
    "hybrid": ("this package, as it is by default", OwnCache, {"eviction": "lhd"}),
    "lru": ("this package's placement, and the least recently used is evicted", OwnCache, {"eviction": "lru"}),
    "marconi": ("this package's placement, and eviction after Marconi", OwnCache, {"eviction": "flop_aware"}),
}
"""What each is, its model and the model's options."""

BOUND = "bound"
"""The name of what no engine can do better."""


def engine_of(name: str, sizes: Sizes, memory: Memory, **options: Any) -> EngineModel:
    """The model of an engine.

    Args:
        name: one of `ENGINES`.
        sizes: of the model that it serves.
        memory: bytes for its cache, or what is endless.
        options: of the model of the engine, such as `retention` of vLLM's.

    Raises:
        ArgumentError: there is no such engine. MemoryBudgetError: the memory is too small for it.
    """
    if name not in ENGINES:
        raise ArgumentError(f"there is no engine {name!r}; there are: {', '.join([*ENGINES, BOUND])}")
    _, make, own = ENGINES[name]
    return make(sizes, memory, **{**own, **options})


class Installed(NamedTuple):
    """An engine's own scheduler, as it is installed.

    Attributes:
        name: what it is; of one that cannot be used, why a model stands in.
        make: makes one of the model's sizes, bytes, the requests as they come, and the engine with endless memory that
            follows, if any; None: it cannot be used.
    """

    name: str
    make: Callable[..., Any] | None = None


def installed(engine: str) -> Installed:
    """The own scheduler of an engine, if it is installed and known here."""
    if engine != "vllm":
        return Installed("a model")
    try:
        version = installed_version()
    except VersionError:
        return Installed("a model: vLLM is not installed here")
    if ".".join(version.split(".")[:2]) not in TESTED:
        return Installed(f"a model: vLLM {version} is installed, and {', '.join(TESTED)} are known here")
    try:
        make = import_module("hybrid.doctor.installed_vllm").InstalledVllm
    except Exception as error:  # whatever an installation lacks
        return Installed(f"a model: vLLM {version} is installed, and cannot be used here ({str(error)[:100]})")
    return Installed(f"vLLM {version}'s own scheduler", make)
