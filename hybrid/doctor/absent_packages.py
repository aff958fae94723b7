"""SGLang's caches without a GPU and without most of what SGLang depends on.

Importing them imports much of SGLang, and with it packages for kernels, grammars, servers and media that its caches
never call. Those that are not installed are replaced by empty modules, whose every attribute is a mock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

NAMES = """
IPython anthropic blobfile cachetools compressed_tensors cutlass cv2 datasets decord decord2 deep_gemm dill
einops fastapi flash_attn flashinfer gguf interegular kernels llguidance lmcache mistral_common modelscope
mooncake multipart nixl openai openai_harmony outlines pandas partial_json_parser prometheus_client pyarrow
pynvml python_multipart quack requests scipy sentencepiece setproctitle sgl_kernel sglang_kernel soundfile
starlette tiktoken timm torch_memory_saver torchao torchaudio torchcodec torchvision tvm tvm_ffi uvicorn uvloop
watchfiles xgrammar xxhash zmq aiohttp orjson pybase64 triton tqdm
"""

OPTIONAL = frozenset(NAMES.split())
"""Packages that may be absent."""

UNUSED = (
    "sglang.srt.constrained.base_grammar_backend",
    "sglang.srt.entrypoints.openai.protocol",
    "sglang.srt.parser.reasoning_parser",
)
"""Modules of SGLang that need such a package to be what it is, and that no cache uses."""


class AbsentPackage(ModuleType):
    """A module that has every attribute: mocks."""

    __path__: list[str] = []  # noqa: RUF012 - what a package has
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class AbsentFinder(MetaPathFinder, Loader):
    """Finds what is absent, when nothing else has found it."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in UNUSED:
            return ModuleSpec(name, self, is_package=True)
        root = name.partition(".")[0]
        if root in OPTIONAL and (root == name or isinstance(sys.modules.get(root), AbsentPackage)):
            return ModuleSpec(name, self, is_package=True) if PathFinder.find_spec(root) is None else None
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentPackage(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def absent_packages() -> Iterator[None]:
    """Have absent packages imported as mocks for a while. Afterwards they are absent again, but for those who have
    imported them."""
    finder = AbsentFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, AbsentPackage)]:
            del sys.modules[name]
