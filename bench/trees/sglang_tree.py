"""SGLang's hybrid radix cache (0.5.23, its Rust or its Python core) behind the interface of `operations.py`.

    pip install torch==2.13.0 transformers==5.23.0 triton==3.7.1 flash-linear-attention==0.6.0 aiohttp apache-tvm-ffi \
        dill ipython msgspec orjson pillow psutil pybase64 pydantic pyzmq requests starlette sortedcontainers typer
    pip install --no-deps sglang==0.5.23

Of SGLang only the tree runs here. Packages that its modules import besides, for other parts of it, are replaced by
stubs where they are not installed. Chunks have 64 tokens, as ours.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import sys
from array import array
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from allocators import TokenAllocator, state_allocator

CHUNK = 64
PACKAGES = """anthropic blobfile cachetools compressed_tensors cutlass cv2 datasets decord decord2 deep_gemm dill
einops_exts fastapi flash_attn flashinfer gguf interegular kernels llguidance lmcache mistral_common modelscope mooncake
multipart nixl numba openai openai_harmony outlines pandas partial_json_parser prometheus_client pyarrow pynvml
python_multipart quack scipy sentencepiece setproctitle sgl_kernel sglang_kernel smg_grpc_servicer soundfile tiktoken
timm torch_memory_saver torchao torchaudio torchcodec torchvision tvm uvicorn uvloop watchfiles xgrammar xxhash"""
"""Packages that parts of SGLang import which do not run here."""

MODULES = """sglang.srt.parser.reasoning_parser sglang.srt.entrypoints.openai.protocol
sglang.srt.constrained.base_grammar_backend"""
"""Modules of SGLang itself of that kind."""


class Stub(MagicMock):
    """Stands for a module."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":
            raise AttributeError(name)
        if name == "StructuralTag":  # the type of a field in a model of pydantic
            schema = classmethod(lambda *_: importlib.import_module("pydantic_core").core_schema.any_schema())
            own = {"__init__": lambda *_, **__: None, "__get_pydantic_core_schema__": schema}
            setattr(self, name, type(name, (), own))
        return super().__getattr__(name) if name not in self.__dict__ else self.__dict__[name]


def stub(name: str) -> Any:
    module = Stub(name=name)
    module.__name__, module.__spec__, module.__version__ = name, ModuleSpec(name, None), "0.0.0"
    return module


class Finder:
    """Finds stubs of packages that are not installed."""

    def __init__(self) -> None:
        self._missing = {name for name in PACKAGES.split() if importlib.util.find_spec(name) is None}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self._missing else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = stub(spec.name)
        module.__spec__ = spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Finder())  # type: ignore[arg-type]
sys.modules.update({name: stub(name) for name in MODULES.split()})
logging.disable(logging.WARNING)

import sglang.srt.mem_cache.unified_cache.components.mamba as mamba  # noqa: E402
import sglang.srt.mem_cache.unified_radix_cache as cache  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402


def without_a_server(module: ModuleType) -> None:
    """Give a module the settings that it otherwise asks a running server for."""
    limits = SimpleNamespace(
        mamba_max_states_per_path=-1, enable_mamba_extra_buffer=True, enable_mamba_extra_buffer_lazy=False
    )
    settings = {
        "mamba_cache_chunk_size": lambda: CHUNK,
        "mamba_checkpoint_grid": lambda page: math.lcm(CHUNK, page),
        "get_exec": lambda: SimpleNamespace(mamba=limits),
    }
    for name, value in settings.items():
        if name in vars(module):
            setattr(module, name, value)


class SGLangTree:
    """One cache of SGLang. Its KV indices are one for each token."""

    unit = 1

    def __init__(self, core: str, page_size: int, kv_slots: int, state_slots: int) -> None:
        without_a_server(mamba)
        if core == "rust":
            without_a_server(importlib.import_module("sglang.srt.mem_cache.rust_tree_core.adapter"))
        self.name, self.page = f"sglang-{core}", page_size
        self.kv, self.st = TokenAllocator(kv_slots, page_size), state_allocator(state_slots)
        pool = object.__new__(HybridReqToTokenPool)
        pool.mamba_allocator, pool.mamba_ckpt_pool = self.st, None
        cache.page_interleave_shard_size = lambda _: 1
        self._cache = cache.UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=pool,
                token_to_kv_pool_allocator=self.kv,
                page_size=page_size,
                enable_mamba_extra_buffer=True,
                tree_components=(ComponentType.FULL, ComponentType.MAMBA),
                tree_core_backend=core,
            )
        )
        self._core = self._cache.tree_core
        assert type(self._core).__name__.lower().startswith("rust") == (core == "rust")

    def key(self, tokens: array[int]) -> array[int]:
        return tokens

    def match(self, key: array[int], num_tokens: int) -> tuple[int, Any, int | None, int]:
        found = self._cache.match_prefix(MatchPrefixParams(key=RadixKey(key, limit=num_tokens)))
        return found.device_prefix_len, found.last_device_node, found.mamba_branching_seqlen, found.full_kv_hit_length

    def indices(self, node: Any) -> Any:
        return self._core.collect_full_device_indices(node, self._core.root_node_handle())

    def insert(self, key: array[int], num_tokens: int, kv: Any, state: Any, previous: int) -> tuple[int, Any, bool]:
        done = self._cache.insert(
            InsertParams(key=RadixKey(key[:num_tokens]), value=kv, mamba_value=state, prev_prefix_len=previous)
        )
        return done.prefix_len, done.last_device_node, not done.mamba_exist

    def lock(self, node: Any) -> Any:
        return self._cache.inc_lock_ref(node)

    def unlock(self, node: Any, receipt: Any) -> None:
        self._cache.dec_lock_ref(node, receipt.to_dec_params())

    def evict(self, num_tokens: int, num_states: int) -> tuple[int, int]:
        done = self._cache.evict(EvictParams(num_tokens=num_tokens, mamba_num=num_states))
        return done.num_tokens_evicted, done.mamba_num_evicted

    def evict_for_alloc(self, num_tokens: int, num_states: int) -> tuple[int, int]:
        done = self._cache.evict_for_alloc(EvictParams(num_tokens=num_tokens, mamba_num=num_states))
        return done.num_tokens_evicted, done.mamba_num_evicted

    def check(self) -> None:
        self._core.sanity_check([], [])

    def sizes(self) -> dict[str, int]:
        core = self._core
        return {
            "kv_evictable": core.full_evictable_size(),
            "kv_protected": core.full_protected_size(),
            "st_evictable": core.mamba_evictable_size(),
            "st_protected": core.mamba_protected_size(),
        }


def rust(**sizes: int) -> SGLangTree:
    """SGLang's Rust core."""
    return SGLangTree("rust", **sizes)


def python(**sizes: int) -> SGLangTree:
    """SGLang's Python core."""
    return SGLangTree("python", **sizes)
