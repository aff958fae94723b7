"""Images of machine code: what they compute, and what is left to LLVM's linker."""

import ctypes
import sys
from array import array
from platform import machine as name_of_machine

import pytest
import torch

pytest.importorskip("hybrid.kernels.cpu.machine_code")
if sys.platform != "linux" or name_of_machine() != "x86_64":
    pytest.skip("images are made on Linux and x86-64", allow_module_level=True)

import llvmlite.binding

from hybrid.kernels.cpu import delta_rule_step, image, llvm, tasks
from hybrid.kernels.cpu.compiled import build
from hybrid.kernels.cpu.compiled.link import RELOCATIONS, ObjectFile, link
from hybrid.kernels.cpu.functions import COMPILED, Function
from hybrid.kernels.cpu.kinds import INTEGER, SIGNATURES
from hybrid.kernels.cpu.team import compute
from support.tensors import same_bits

TABLE = """
@first = internal constant i32 5
@second = internal constant i32 7
@table = internal constant [2 x ptr] [ptr @first, ptr @second]
declare i32 @abs(i32)
define i32 @f(i64 %index, i32 %x) {
  %place = getelementptr [2 x ptr], ptr @table, i64 0, i64 %index
  %pointer = load ptr, ptr %place
  %value = load volatile i32, ptr %pointer
  %size = call i32 @abs(i32 %x)
  %sum = add i32 %value, %size
  ret i32 %sum
}
"""
"""`[5, 7][index] + abs(x)`, by way of addresses of constants."""

WRITES = """
@count = internal global i32 0
define i32 @f(i64 %index, i32 %x) {
  %before = load i32, ptr @count
  %after = add i32 %before, %x
  store i32 %after, ptr @count
  ret i32 %after
}
"""


def object_file(assembly: str) -> bytes:
    code: bytes = llvm.machine().emit_object(llvmlite.binding.parse_assembly(assembly))
    return code


def changed(code: bytes, place: int) -> bytes:
    """The code with another byte at a place."""
    return code[:place] + b"\x2a" + code[place + 1 :]


def test_an_image_runs_at_any_address() -> None:
    made = link(object_file(TABLE), "f")
    assert made is not None and made.pointers and [*made.symbols] == ["abs"]
    addresses = [image.load(image.unpacked(made.packed())) for _ in range(2)]
    assert len({*addresses}) == 2
    for address in addresses:
        f = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int32)(address)
        assert (f(0, -3), f(1, 4)) == (8, 11)


def test_what_is_not_known_is_left_to_llvm() -> None:
    known = object_file(TABLE)
    assert image.unpacked(known) is None
    relocations = next(section for section in ObjectFile(known).sections if section.type == RELOCATIONS)
    other_machine, other_format, other_relocation = (
        changed(known, 18),
        changed(known, 0),
        changed(known, relocations.offset + 8),
    )
    for code in (other_machine, other_format, other_relocation, object_file(WRITES)):
        assert link(code, "f") is None


def test_an_image_has_the_bits_of_llvms_linker() -> None:
    """Of a function that allocates, calls `expf` and has constants, vectors and addresses among them."""
    heads, key_dim, value_dim, tokens = 4, 24, 40, 3
    channels = heads * (2 * key_dim + value_dim)
    generator = torch.Generator().manual_seed(0)
    mixed, a, b, weight, rate, dt_bias, conv, recurrent = (
        torch.randn(*shape, generator=generator)
        for shape in (
            (tokens, channels),
            (tokens, heads),
            (tokens, heads),
            (channels, 4),
            (heads,),
            (heads,),
            (tokens, 3, channels),
            (tokens, heads, key_dim, value_dim),
        )
    )
    slots, before = torch.arange(tokens), (conv.clone(), recurrent.clone())
    recorded: list[tasks.Task] = []
    token = tasks.recorder.set(recorded.append)
    y = delta_rule_step.gated_delta_step(
        mixed, a, b, weight, rate, dt_bias, conv, recurrent, torch.arange(tokens + 1), slots, slots
    )
    tasks.recorder.reset(token)
    (task,) = recorded
    expected, args = [y.clone(), conv.clone(), recurrent.clone()], array("q", task.numbers)
    step = Function(f"{COMPILED}.delta_rule_step", "step", (INTEGER, task.kind, INTEGER, INTEGER))
    code = build.object_file(step)
    made = link(code, step.symbol)
    assert made is not None and {"aligned_alloc", "expf"} <= {*made.symbols} and made.pointers
    for address in (llvm.link(code, step.symbol), image.load(made)):
        y.fill_(float("nan"))
        conv.copy_(before[0])
        recurrent.copy_(before[1])
        compute(address, SIGNATURES.index(task.kind), args.buffer_info()[0], task.elements)
        assert all(map(same_bits, (y, conv, recurrent), expected))
