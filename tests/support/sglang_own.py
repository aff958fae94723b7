"""SGLang's own unit tests of its unified cache, read from a checkout of its repository and run on any backend.

The wheel has no tests. Those of its repository change with every release, and those that are read here are of `COMMIT`:
older than the versions of SGLang that are supported. So what they call by an older name is given that name here: on the
cache, on requests and on results. Whether a test still says something is decided by SGLang: it counts only where it
passes on SGLang's own Python core, read in the same way.
"""

from __future__ import annotations

import ast
import re
import sys
import unittest
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, MatchResult
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from hybrid.sglang.cache import HybridRadixCache, StateComponent, register_tree_core

COMMIT = "0bda0b168ad5bf7311ae639904489a4698a05546"
"""Of github.com/sgl-project/sglang, 2026-08-20."""

FILE = "test/registered/unit/mem_cache/test_unified_radix_cache_unittest.py"

MOVED = {"components.tree_component": "components.base"}
"""Ends of names of modules that are called otherwise now."""

REFUSED = re.compile("hicache|swa|buffer|prefetch|load_back|host|storage|backup|_l3_")
"""In the names of tests of features that the backend refuses."""


def cases_of(source: Path, backend: str) -> Iterator[tuple[str, type[unittest.TestCase]]]:
    """The tests by name, each with the class that runs it; `cfg` of a subclass is what it runs on.

    Args:
        source: a checkout of SGLang's repository.
        backend: "python": SGLang's own core; "hybrid".
    """
    names = module_of((source / FILE).read_text(encoding="utf-8"), backend)
    for suite in ("UnifiedRadixCacheSuite", "TestMambaCheckpointGrid"):
        case = type(suite, (names[suite], unittest.TestCase), {"_CacheConfig": names["CacheConfig"]})
        for test in unittest.TestLoader().getTestCaseNames(case):
            if not REFUSED.search(test):
                yield test, case


def module_of(text: str, backend: str) -> dict[str, Any]:
    """The names that the file defines, with what it imports taken from where it is now."""
    module = sys.modules[f"sglang_own_{backend}"] = ModuleType(f"sglang_own_{backend}")
    names = vars(module)
    body = ast.parse(text)
    for node in [*body.body]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
            body.body.remove(node)
            names |= {alias.asname or alias.name: found(str(node.module), alias.name) for alias in node.names}
    exec(compile(body, FILE, "exec"), names)
    names |= {
        "UnifiedRadixCache": lambda params: cache_of(params, backend),
        "Req": OlderReq,
        "ReqKvInfo": SimpleNamespace,
        "DecLockRefParams": SimpleNamespace,
        "get_device": lambda: "cpu",
    }
    return names


def found(module: str, name: str) -> Any:
    """Return what a name of SGLang means today; a mock if it is gone."""
    for old, new in MOVED.items():
        module = module.removesuffix(old) + new if module.endswith(old) else module
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return MagicMock(name=name)


def run(case: type[unittest.TestCase], test: str, **config: Any) -> str:
    """Run one test. Returns "" if it passes, "skipped", or how it fails."""
    components = (ComponentType.FULL, ComponentType.MAMBA)
    bound = type(case.__name__, (case,), {"cfg": case._CacheConfig(components=components, **config)})  # type: ignore[attr-defined]
    result = unittest.TestResult()
    bound(test).run(result)
    if result.skipped:
        return "skipped"
    return "".join(text.strip().splitlines()[-1] for _, text in [*result.failures, *result.errors])


# What is called by an older name


class Found(MatchResult):
    """A match that has its indices; none of them in one that SGLang has made of it."""

    device_indices = torch.empty(0, dtype=torch.int64)


class OlderReq(Req):
    """A request whose record of KV is read and written as its own."""

    prefix_indices: Any = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "kv" and isinstance(value, SimpleNamespace):
            self.kv.kv_allocated_len = value.kv_allocated_len
        elif name in OF_RECORD:
            setattr(self.kv, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in OF_RECORD:
            return getattr(self.kv, name)
        raise AttributeError(name)

    def set_extend_range(self, start: int, end: int) -> None:
        self.prefix_len, self.extend_end = start, end
        self.extend_range = SimpleNamespace(start=start, end=end)

    def effective_kv_committed_len(self) -> int:
        return self.owned_kv_len()


OF_RECORD = {"req_pool_idx", "mamba_pool_idx", "kv_committed_len", "cache_protected_len", "mamba_last_track_seqlen"}


class View:
    """A node of this project's tree, as one of SGLang's Python core is looked at."""

    def __init__(self, cache: Any, handle: int) -> None:
        core = cache.tree_core
        self.id = handle
        node = core.node_by_id(handle) or core.tree.forest.roots.get("")
        self.children = node.children if node is not None else {}
        self.component_data = {
            kind: SimpleNamespace(value=core.get_component_device_value(handle, kind)) for kind in cache.tree_components
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and other.id == self.id

    def __hash__(self) -> int:
        return self.id


def cache_of(params: Any, backend: str) -> Any:
    """SGLang's cache around a tree core, with the methods that it had."""
    params.tree_core_backend = backend
    base: Any = UnifiedRadixCache
    if backend == "hybrid":
        register_tree_core()
        params.component_registry_override = {ComponentType.MAMBA: StateComponent}
        base = HybridRadixCache

    class Older(base):  # type: ignore[misc]
        def match_prefix(self, params: Any) -> Any:
            result = Found(*super().match_prefix(params))
            result.device_indices = self.path_device_indices(result.last_device_node)
            return result

        def inc_lock_ref(self, node: int, *args: Any, **kwargs: Any) -> Any:
            receipt = super().inc_lock_ref(node, *args, **kwargs)
            self.__dict__.setdefault("receipts", {})[node] = receipt.to_dec_params()
            return receipt

        def dec_lock_ref(self, node: int, params: Any, **kwargs: Any) -> Any:
            receipt = params if isinstance(params, DecLockRefParams) else self.receipts[node]
            return super().dec_lock_ref(node, receipt, **kwargs)

        def cache_unfinished_req(self, req: Any) -> None:
            self.checkpoint(req, up_to=len(req.full_untruncated_fill_ids))
            req.prefix_indices = self.path_device_indices(req.last_node)
            req.swa_prefix_lock_released = False

        def cache_finished_req(self, req: Any, *, is_insert: bool, kv_len_to_handle: int) -> None:
            req.finished_reason = FINISH_LENGTH(length=0)
            if is_insert:
                self.checkpoint(req, up_to=kv_len_to_handle)
            self.free_kv_row(req.kv, [(req.kv.cache_protected_len, kv_len_to_handle)])
            self.unlock(req.lock)
            req.lock = None

    if backend == "hybrid":
        Older.root_node = property(lambda self: View(self, self.root_node_handle()))
        Older.resolve_node_handle = lambda self, handle: View(self, handle)
    with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(backend):
        return Older(params)
