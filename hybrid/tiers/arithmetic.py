"""What the bits of results depend on, besides the model, its weights and the settings of the cache."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hybrid.kernels.cpu.threads import num_threads
from hybrid.kernels.ops import OPS, compiled_module

PACKAGES = ("torch", "numba", "llvmlite", "triton", "transformers")
"""They compute, or compile what computes."""

VARIABLES = ("HYBRID_KERNELS", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE", "ONEDNN_MAX_CPU_ISA")
"""They choose kernels and instructions."""

CPUINFO = Path("/proc/cpuinfo")


def arithmetic() -> dict[str, str]:
    """The machine, the packages and the choices that compute here, as texts by name. Where one of them is another, so
    may be bits."""
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
    """What compiled operations take of the CPU that may change bits. Two of one name may differ in that: a virtual
    machine hides instructions."""
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
