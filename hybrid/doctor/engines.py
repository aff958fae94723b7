"""The engines that traffic is replayed on, by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from hybrid.doctor.absent_packages import absent_packages
from hybrid.doctor.engine import EngineModel
from hybrid.doctor.own import OwnCache
from hybrid.doctor.sglang import SglangScheduler
from hybrid.doctor.sizes import Memory, Sizes
from hybrid.doctor.vllm import VllmScheduler
from hybrid.errors import ArgumentError, VersionError
from hybrid.sglang.installed import TESTED as SGLANG_TESTED
from hybrid.vllm.installed import TESTED as VLLM_TESTED
from hybrid.vllm.installed import installed_version

ENGINES: dict[str, tuple[str, Callable[..., EngineModel], dict[str, Any]]] = {
    "vllm": ("vLLM's scheduler, block pool and states (0.33, or as it is installed)", VllmScheduler, {}),
    "sglang": ("SGLang's unified radix cache, and what its scheduler asks of it (0.5.23)", SglangScheduler, {}),
    "hybrid": ("this package, as it is by default", OwnCache, {"eviction": "lhd"}),
    "lru": ("this package's placement, and the least recently used is evicted", OwnCache, {"eviction": "lru"}),
    "marconi": ("this package's placement, and eviction after Marconi", OwnCache, {"eviction": "flop_aware"}),
}
"""What each is, its model and the model's options."""

BOUND = "bound"
"""The name of what no engine can do better."""

NAMES_AGAIN = ("0.32",)
"""Releases of vLLM in which a state that is found is named once more, and not found before the next step."""


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
    if name == "vllm":
        own = {"names_again": _names_again()}
    return make(sizes, memory, **{**own, **options})


def _names_again() -> bool:
    """Tell whether the vLLM that is installed is one of `NAMES_AGAIN`. Where none is, its model is of 0.33."""
    try:
        return ".".join(installed_version().split(".")[:2]) in NAMES_AGAIN
    except VersionError:
        return False


class Installed(NamedTuple):
    """An engine's own scheduler, as it is installed.

    Attributes:
        name: what it is; of one that cannot be used, why a model stands in.
        make: makes one of the model's sizes, bytes, the requests as they come, and the engine with endless memory that
            follows, if any; None: it cannot be used.
    """

    name: str
    make: Callable[..., Any] | None = None


def installed(engine: str, sizes: Sizes) -> Installed:
    """The own scheduler of an engine, if it is installed and known here, and serves a model of these sizes."""
    known: tuple[str, ...]
    find: Callable[[], str]
    if engine == "vllm":
        known, find = VLLM_TESTED, installed_version
        path, name, title = "hybrid.doctor.installed_vllm", "InstalledVllm", "vLLM {}'s own scheduler"
    elif engine == "sglang":
        known, find = SGLANG_TESTED, partial(version, "sglang")
        path, name, title = "hybrid.doctor.installed_sglang", "InstalledSglang", "SGLang {}'s own cache and pools"
        if not sizes.state_bytes:
            return Installed("a model: of SGLang its cache of models with states is used")
    else:
        return Installed("a model")
    brand = title.split()[0]
    try:
        found = find()
    except (VersionError, PackageNotFoundError):
        return Installed(f"a model: {brand} is not installed here")
    if found not in known and ".".join(found.split(".")[:2]) not in known:
        return Installed(f"a model: {brand} {found} is installed, and {', '.join(known)} are known here")
    try:
        with absent_packages() if engine == "sglang" else nullcontext():
            make = getattr(import_module(path), name)
    except Exception as error:  # whatever an installation lacks
        return Installed(f"a model: {brand} {found} is installed, and cannot be used here ({str(error)[:100]})")
    return Installed(title.format(found), make)
