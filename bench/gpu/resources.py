#!/usr/bin/env python
"""What each Triton kernel takes of a GPU that need not be there: registers, spills, shared memory, tensor cores.

    python bench/kernel_resources.py                           # every kernel at the sizes of Qwen3.5-9B, for an H100
    python bench/kernel_resources.py --capability 80           # for an A100
    python bench/kernel_resources.py --only matmul,attention   # operations whose name or module contains one of these
    python bench/kernel_resources.py --json resources.json

The public functions of ./kernels are called on CPU tensors in bfloat16; each launch becomes a compilation by the
assembler that comes with triton, and nothing is computed. How to read the columns:

    registers   per thread, at most 255; a multiprocessor has 65536
    stack       bytes per thread of what did not fit into registers, in slow memory
    spills      instructions that read or write the stack; inside of a loop they cost time
    shared      KiB per program; a program that wants more than the device has does not start
    resident    programs that a multiprocessor holds at once, and what limits them
    matrix      tensor-core instructions in the code: HGMMA (Hopper's own) or HMMA (of every device)
    async       copies to shared memory that overlap with arithmetic (LDGSTS)

Exit status 1 when a kernel does not compile or does not fit the device. Compiled kernels are kept in Triton's cache
(TRITON_CACHE_DIR), so that a second run takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kernel_cases import Case, all_cases
from rich.console import Console
from rich.table import Table
from tqdm import tqdm


@dataclass(frozen=True)
class Device:
    """What a multiprocessor has, and what of it one program may take at most, in bytes."""

    names: str
    shared_memory: int
    shared_memory_of_program: int
    registers: int = 65536
    warps: int = 64
    programs: int = 32


DEVICES = {80: Device("A100", 164 << 10, 163 << 10), 90: Device("H100, H200", 228 << 10, 227 << 10)}
RESERVED = 1 << 10
"""Bytes of shared memory that the driver takes of each program."""


@dataclass(frozen=True)
class Resources:
    """A kernel as it was compiled for a case."""

    operation: str
    what: str
    kernel: str
    warps: int
    registers: int
    stack: int
    spills: int
    shared: int
    resident: int
    limit: str
    hgmma: int
    hmma: int
    async_copies: int
    fits: bool


class AbsentGpu:
    """Stands in for Triton's driver: says what GPU there would be, and has none."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(call: Callable[[], object], capability: int) -> list[tuple[str, Any]]:
    """(name, compiled kernel) of every kernel that a call would launch on a GPU of this compute capability."""
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(AbsentGpu(capability))
    launch, found = JITFunction.run, {}

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = launch(self, *args, **{**kwargs, "warmup": True})
        found[kernel.hash] = self.__name__, kernel
        return kernel

    most = DEVICES[capability].shared_memory_of_program
    with (
        patch.object(JITFunction, "run", compile_only),
        patch("hybrid.kernels.attention._shared_memory", lambda device: most),  # its tiles are chosen by what there is
    ):
        call()
    return list(found.values())


def resources_of(case: Case, name: str, kernel: Any, device: Device) -> Resources:
    """Read a compiled kernel's machine code."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage, code = (
            subprocess.run([knobs.nvidia.cuobjdump.path, option, cubin], capture_output=True, text=True, check=True)
            for option in ("--dump-resource-usage", "-sass")
        )
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage.stdout)}
    count = {name: len(re.findall(rf"\b{name}\b", code.stdout)) for name in ("HGMMA", "HMMA", "LDGSTS", "LDL", "STL")}
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    limits = {
        "registers": device.registers // (-(-used["REG"] * 32 // 256) * 256 * warps),
        "shared": device.shared_memory // (shared + RESERVED),
        "warps": device.warps // warps,
        "programs": device.programs,
    }
    limit = min(limits, key=lambda key: limits[key])
    return Resources(
        case.operation,
        case.what,
        name,
        warps,
        used["REG"],
        used["STACK"],
        count["LDL"] + count["STL"],
        shared,
        limits[limit],
        limit,
        count["HGMMA"],
        count["HMMA"],
        count["LDGSTS"],
        shared <= device.shared_memory_of_program and limits[limit] > 0,
    )


def show(found: list[Resources], failed: dict[str, str], capability: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else 170)
    table = Table(title=f"bfloat16, sizes of Qwen3.5-9B, sm_{capability} ({DEVICES[capability].names})")
    for name in ("operation", "case", "kernel"):
        table.add_column(name, overflow="fold")
    for name in ("warps", "registers", "stack", "spills", "shared", "resident", "matrix", "async"):
        table.add_column(name, justify="right")
    for index, row in enumerate(found):
        module, function = row.operation.split(".")
        if index and module != found[index - 1].operation.split(".")[0]:
            table.add_section()
        matrix = " ".join(f"{count} {name}" for name, count in (("HGMMA", row.hgmma), ("HMMA", row.hmma)) if count)
        style = "red" if not row.fits else "yellow" if row.spills else None
        table.add_row(
            function,
            row.what,
            row.kernel,
            str(row.warps),
            str(row.registers),
            str(row.stack or ""),
            str(row.spills or ""),
            f"{row.shared / 1024:.1f}" if row.shared else "",
            f"{row.resident} ({row.limit})",
            matrix,
            str(row.async_copies or ""),
            style=style,
        )
    console.print(table)
    for case, error in failed.items():
        console.print(f"[red]{case} does not compile:[/red]")
        console.print(error, markup=False, highlight=False)
    for row in found:
        if not row.fits:
            most = DEVICES[capability].shared_memory_of_program >> 10
            console.print(
                f"[red]{row.operation}, {row.what}: {row.kernel} does not fit {most} KiB of shared memory[/red]"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--capability", type=int, default=90, choices=sorted(DEVICES), help="compute capability times ten (default: 90)"
    )
    parser.add_argument(
        "--only", metavar="NAMES", default="", help="operations whose name contains one of these, by commas"
    )
    parser.add_argument("--brief", action="store_true", help="only the few cases that reach every kernel")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to a file too")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set, and an interpreted kernel has no machine code: unset it")
    names = [name.strip() for name in args.only.split(",")]
    cases = [case for case in all_cases() if any(name in case.operation for name in names)]
    if not cases:
        known = sorted({case.operation for case in all_cases()})
        parser.error(f"no operation's name contains any of {args.only!r}; there are {', '.join(known)}")
    found: list[Resources] = []
    failed: dict[str, str] = {}
    for case in tqdm([case for case in cases if case.brief or not args.brief], unit="case", disable=None, leave=False):
        try:
            kernels = compile_launches(case.call, args.capability)
        except Exception as error:  # whatever the compiler raises: the others are still worth knowing
            failed[f"{case.operation}, {case.what}".rstrip(", ")] = f"{type(error).__name__}: {error}"
            continue
        found += [resources_of(case, name, kernel, DEVICES[args.capability]) for name, kernel in kernels]
    show(found, failed, args.capability)
    if args.json:
        rows = [asdict(row) for row in found]
        result = {"capability": args.capability, "dtype": "bfloat16", "kernels": rows, "failed": failed}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if failed or not all(row.fits for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
