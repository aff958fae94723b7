"""The fingerprint of a cache: what must agree for contents of pages and checkpoints to mean the same in two caches."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.kernels.cpu.threads import num_threads
from hybrid.kernels.ops import OPS, compiled_module

FORMAT = 2
"""Version of what is written. Another version is not read."""

DIGEST_BYTES = 16
"""Bytes of a digest of contents: blake2b."""

MAX_THREADS = 8
"""Weights are hashed by up to this many threads: hashlib lets others run meanwhile."""

PACKAGES = ("torch", "numba", "llvmlite", "triton", "transformers")
"""They compute, or compile what computes."""

LEVEL = "HYBRID_CPU_LEVEL"
"""Names what operations are compiled for, on machines that are to agree (`hybrid.kernels.cpu.target`)."""

VARIABLES = ("HYBRID_KERNELS", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE", "ONEDNN_MAX_CPU_ISA")
"""They choose kernels and instructions."""

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The origin of contents.

    Attributes:
        model: digest of the model's configuration and weights, or a name that the caller gives it.
        page_size, chunk_size: of the cache.
        page, checkpoint: the tensors of a page and of a checkpoint as it is stored, in order: names, shapes and types.
        deterministic: contents are bitwise those of cold runs.
        sums: the order in which products are added up (`order_of_sums`): where it is another, so are bits.
        version: of this package.
        format: of what is written.
    """

    model: str
    page_size: int
    chunk_size: int
    page: str
    checkpoint: str
    deterministic: bool
    sums: str
    version: str
    format: int = FORMAT

    def differences(self, other: Fingerprint) -> list[str]:
        """Why contents made under `other` are of no use here; empty if they are.

        Contents that are bitwise those of cold runs can be used where that is not required, and only where it is the
        order of sums counts.
        """
        found = []
        for name in (field.name for field in fields(self)):
            here, there = getattr(self, name), getattr(other, name)
            is_accepted = there if name == "deterministic" else not self.deterministic if name == "sums" else False
            if here != there and not is_accepted:
                found.append(f"{name} is {there!r:.200} there and {here!r:.200} here")
        return found

    def as_json(self) -> dict[str, Any]:
        """The fields, by name."""
        return asdict(self)


def fingerprint_of_json(content: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint that `as_json` has written.

    Raises:
        ValueError: it is not one.
    """
    expected = {field.name: {"int": int, "bool": bool}.get(str(field.type), str) for field in fields(Fingerprint)}
    if {name: type(value) for name, value in content.items()} != expected:
        raise ValueError("its fingerprint has other fields")
    return Fingerprint(**content)


def digest(contents: bytes | bytearray | memoryview) -> bytes:
    """The digest of a page, of a checkpoint, or of anything that belongs to them."""
    return hashlib.blake2b(contents, digest_size=DIGEST_BYTES, person=b"hybrid content").digest()


def digest_of_model(config: Mapping[str, Any], weights: Iterable[tuple[str, Tensor]]) -> str:
    """The digest of a model: of its configuration, and of every byte of its weights, whatever their order.

    Reads all weights once: about 1 GB per second and thread.

    Args:
        config: what JSON can hold; other values count by their `str`.
        weights: by name.
    """
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"hybrid model")
    whole.update(json.dumps(config, sort_keys=True, default=str).encode())
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        for one in threads.map(_digest_of_tensor, sorted(weights, key=lambda item: item[0])):
            whole.update(one)
    return whole.hexdigest()


@torch.no_grad()
def _digest_of_tensor(named: tuple[str, Tensor]) -> bytes:
    name, tensor = named
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    head = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.blake2b(head + b"\0" + hashlib.blake2b(data).digest(), digest_size=32).digest()


# Arithmetic


def arithmetic() -> dict[str, str]:
    """Name the machine, the packages and the choices that compute here: what the bits of results depend on besides the
    model and the settings. Where one of them is another, so may be bits."""
    on_gpu = torch.cuda.is_available()
    is_named = not on_gpu and _is_compiled() and bool(os.environ.get(LEVEL))
    cpu = f"any, by {LEVEL}" if is_named else f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    return {
        **{name: _version(name) for name in PACKAGES},
        **{name: os.environ.get(name, "") for name in VARIABLES},
        "CPU": cpu,
        "GPU": f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if on_gpu else "",
        "kernels": order_of_sums(),
        "threads": str(num_threads()),
    }


def order_of_sums() -> str:
    """Name the order in which products are added up, and the levels of compiled operations that have it; "" where there
    is a GPU."""
    if torch.cuda.is_available():
        return ""
    if not _is_compiled():
        return "as torch adds them up"
    target: Any = compiled_module("target")
    return f"by tiles, {LEVEL} amx" if target.HAS_TILES else f"by vectors, {LEVEL} but amx"


def _is_compiled() -> bool:
    return any(op.compiled_function() is not None for op in OPS.values())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    found = re.search(r"model name\s*: (.*)", CPUINFO.read_text(encoding="utf-8")) if CPUINFO.is_file() else None
    return found[1] if found is not None else platform.processor() or platform.machine()
