#!/usr/bin/env python
"""What each Triton kernel takes of a GPU that need not be there: registers, spills, shared memory, tensor cores.

    python bench/gpu/resources.py [--json resources.json]   # every kernel at the sizes of Qwen3.5-9B, for an H100
    python bench/gpu/resources.py --share 0 8               # one of 8 shares of what smoke compiles, to Triton's cache

The cases of `bench/gpu/run.py` are called on CPU tensors in bfloat16 without contents; each launch becomes a
compilation by the assembler that comes with triton, and nothing is computed. Columns:
registers per thread, at most 255; stack: bytes per thread that did not fit into them; spills: instructions that read or
write the stack; shared: bytes of shared memory per program; resident: programs that a multiprocessor holds at once, and
what limits them; instructions for tensor cores (hgmma: Hopper's own), and for copies to shared memory that overlap with
arithmetic, as the assembler is given them.

Exit status 1 when a kernel does not compile or does not fit the device. Compiled kernels are kept in Triton's cache
(TRITON_CACHE_DIR), so that a second run takes seconds.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # not this folder: what is found as `kernels` is taken for another package
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    __import__("hybrid")  # that of this checkout, which need not be installed
    sys.path[0] += "/bench"

from common import print_table
from gpu import attention, kernels
from gpu.harness import Bench, Cpu, Roofline
from gpu.sizes import COMPILED, FULL, Sizes

from hybrid.kernels.ops import OPS

SECTIONS = (kernels.elementwise, kernels.state_copies, kernels.products, kernels.experts, attention.decode_attention)
SECTIONS += (attention.extend_attention, kernels.convolution, kernels.chunk_rule, kernels.delta_step)

CAPABILITY = 90
SHARED_MEMORY, SHARED_MEMORY_OF_PROGRAM, RESERVED, REGISTERS, WARPS = 228 << 10, 227 << 10, 1 << 10, 65536, 64
"""Of an H100 or H200: what a multiprocessor has, how many bytes of it one program may take and the driver takes."""

Row = dict[str, Any]
"""A kernel as it was compiled for a case."""

COLUMNS = ("operation", "case", "kernel", "warps", "registers", "stack", "spills", "shared", "resident", "limit")
COLUMNS += ("hgmma", "hmma", "async_copies", "fits")


class AbsentGpu:
    """In the place of Triton's driver: names the GPU to compile for, and has none."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return CAPABILITY  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """The operations, in the place of `hybrid.kernels.ops`: a call compiles what it would launch.

    Attributes:
        found: (operation, kernel's name, compiled kernel) of every kernel that was not compiled before.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, str, Any]] = []
        self._seen: set[str] = set()
        self._operation = ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = OPS[name]

        def call(*args: Any, batch_invariant: bool = True) -> Any:
            self._operation = f"{op.file}.{name}"
            return op.kernel(*args)

        return call

    def launched(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of Triton's launch: compiles only."""

        def compile_only(function: Any, *args: Any, **kwargs: Any) -> Any:
            kernel = launch(function, *args, **{**kwargs, "warmup": True})
            if kernel.hash not in self._seen:
                self._seen.add(kernel.hash)
                self.found.append((self._operation, function.__name__, kernel))
            return kernel

        return compile_only


def resources_of(operation: str, case: str, name: str, kernel: Any) -> Row:
    """What a compiled kernel takes, by the assembler's word, and which instructions it was given."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin]
        usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
        used = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
        code = ""
        if used["STACK"]:  # without a stack nothing is spilled; to disassemble takes as long as to compile
            code = subprocess.run([tool[0], "-sass", cubin], capture_output=True, text=True, check=True).stdout
    spills = len(re.findall(r"\b(LDL|STL)\b", code))
    count = [
        len(re.findall(name, kernel.asm["ptx"])) for name in (r"\bwgmma\.mma_", r"\bmma\.sync", r"\bcp\.async\.c[ag]")
    ]
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    limits = {
        32: "programs",
        REGISTERS // (-(-used["REG"] * 32 // 256) * 256 * warps): "registers",
        SHARED_MEMORY // (shared + RESERVED): "shared",
        WARPS // warps: "warps",
    }
    resident = min(limits)
    fits = shared <= SHARED_MEMORY_OF_PROGRAM and resident > 0
    memory = (used["REG"], used["STACK"], spills, shared, resident, limits[resident])
    values = (operation, case, name, warps, *memory, *count, fits)
    return dict(zip(COLUMNS, values, strict=True))


def compile_all(sizes: Sizes = COMPILED, share: tuple[int, int] = (0, 1)) -> Iterator[Row | str]:
    """Every kernel once, with the first case that launches it; or what does not compile. Of a share (index, count) the
    cases are compiled, and nothing more."""
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(AbsentGpu())
    compiler = Compiler()
    bench = Bench(Cpu(), sizes, Roofline(1, 1), 0, True, compiler, is_blank=True)
    with (
        patch.object(JITFunction, "run", compiler.launched(JITFunction.run)),
        # the tiles of attention depend on this
        patch("hybrid.kernels.triton.attention._shared_memory", lambda device: SHARED_MEMORY_OF_PROGRAM),
    ):
        every = [planned for section in SECTIONS for planned in section(bench)]
        for planned in every[share[0] :: share[1]]:
            try:
                case = planned.make()
                for calls in (case.calls, *case.variants.values()):
                    for call in calls[:1]:
                        call()
            except Exception as error:  # anything that the compiler raises: the others are still worth knowing
                yield f"{planned.name} does not compile: {type(error).__name__}: {error}"
            for found in compiler.found if share == (0, 1) else ():
                yield resources_of(found[0], planned.name, *found[1:])
            compiler.found.clear()


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to a file too")
    parser.add_argument("--share", nargs=2, type=int, metavar=("INDEX", "COUNT"), help="compile a share for smoke")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set, and an interpreted kernel has no machine code: unset it")
    if args.share:
        return len([*compile_all(FULL.smoke, tuple(args.share))])
    found, failed = list[Row](), list[str]()
    for result in compile_all():
        failed.append(result) if isinstance(result, str) else found.append(result)
    print_table(COLUMNS, [row.values() for row in found], failed)
    if args.json:
        result = {"capability": CAPABILITY, "dtype": "bfloat16", "kernels": found, "failed": failed}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if failed or not all(row["fits"] for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
