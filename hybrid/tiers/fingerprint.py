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

FORMAT = 1
"""Version of what is written. Another version is not read."""

DIGEST_BYTES = 16
"""Bytes of a digest of contents: blake2b."""

MAX_THREADS = 8
"""Weights are hashed by up to this many threads: hashlib lets others run meanwhile."""

PACKAGES = ("torch", "numba", "llvmlite", "triton", "transformers")
"""They compute, or compile what computes."""

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
        version: of this package.
        format: of what is written.
    """

    model: str
    page_size: int
    chunk_size: int
    page: str
    checkpoint: str
    deterministic: bool
    version: str
    format: int = FORMAT

    def differences(self, other: Fingerprint) -> list[str]:
        """Why contents made under `other` are of no use here; empty if they are.

        Contents that are bitwise those of cold runs can be used where that is not required.
        """
        found = []
        for name in (field.name for field in fields(self)):
            here, there = getattr(self, name), getattr(other, name)
            if here != there and not (name == "deterministic" and there):
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
    return {
        **{name: _version(name) for name in PACKAGES},
        **{name: os.environ.get(name, "") for name in VARIABLES},
        "CPU": f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "GPU": f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if on_gpu else "",
        "kernels": "" if on_gpu else _compiled(),
        "threads": str(num_threads()),
    }


def _compiled() -> str:
    """Return the abilities of the CPU that compiled operations use and that may change bits. Two of one name may differ
    in that: a virtual machine hides instructions."""
    if all(op.compiled_function() is None for op in OPS.values()):
        return ""
    target: Any = compiled_module("target")
    taken = [name for name, has in (("fma", target.HAS_FMA), ("pairs of bfloat16", target.HAS_PAIRS)) if has]
    return f"compiled for this CPU, with {' and '.join(taken) or 'no fma'}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    found = re.search(r"model name\s*: (.*)", CPUINFO.read_text(encoding="utf-8")) if CPUINFO.is_file() else None
    return found[1] if found is not None else platform.processor() or platform.machine()
