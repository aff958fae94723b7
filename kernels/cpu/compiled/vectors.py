"""What compiled operations are built from: numbers in memory of either type, functions whose order of operations is
fixed, and vectors of LANES numbers (whose sums and products are in `hybrid.kernels.cpu.compiled.tiles`).

Nothing here is left to the compiler's rounding: a product that is added is written as `fma`, sums run over `LANES`
partial sums that are added up as a tree. So bits do not depend on the width of the CPU's vectors, on a row's address
or on its neighbours.

bfloat16 numbers are 16 bits of memory (`uint16`); arithmetic is fp32. Two rows of them are multiplied in *pairs*, in
the order of the instruction that some CPUs have for it: elements 2i and 2i + 1 are added to sum i % LANES, the second
one first. At other levels (`target.LEVELS`) two `fma` do the same, with the same bits: numbers below the normal ones
are zeros to both (`compiled.team`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.target import HAS_PAIRS, HAS_WIDE_REGISTERS, LANES

_FLOAT, _HALF = ir.FloatType(), ir.IntType(16)
INT, LONG = ir.IntType(32), ir.IntType(64)
FLOATS = types.CPointer(types.float32)
_BYTES = ir.IntType(8).as_pointer()


ZERO = np.float32(0)

INDEX = np.int64(0)


def _prefer_wide(builder: Any) -> None:
    """Let LLVM use whole registers for the loops of a function: on some CPUs it prefers half of their width, which
    suits programs that have few such loops."""
    if HAS_WIDE_REGISTERS:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')  # llvmlite has no list of such attributes


@intrinsic
def numbers(context, address, kind):
    """A pointer to numbers of a kind at an address."""

    def generate(context, builder, signature, args):
        _prefer_wide(builder)
        return builder.inttoptr(args[0], args[1].type.as_pointer())

    return types.CPointer(kind)(types.int64, kind), generate


def are_pairs(kinds: types.Type) -> bool:
    """Whether rows are multiplied in pairs: those of the weight and those of x, whose kind is that of the output, are
    bfloat16. `kinds` is Numba's type of both."""
    return bool(kinds == types.UniTuple(types.uint16, 2))


@intrinsic
def rows_of_x(context, address, kinds):
    """A pointer to x at an address, as it is multiplied where the weight and the output have these kinds: fp32, but
    pairs of bfloat16 numbers where both are bfloat16, or, where the CPU does not multiply these, the bits of the fp32
    numbers of pairs (`hybrid.kernels.cpu.matmul`)."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    in_pairs = types.uint16 if HAS_PAIRS else types.int32
    return types.CPointer(in_pairs if are_pairs(kinds) else types.float32)(types.int64, kinds), generate


def _widened(builder: Any, value: Any, count: int | None = None) -> Any:
    """fp32 from a number, or a vector of `count` numbers, as it is in memory: fp32, bfloat16 or int8."""

    def of(element: Any) -> Any:
        return element if count is None else ir.VectorType(element, count)

    kind = value.type if count is None else value.type.element
    if isinstance(kind, ir.FloatType):
        return value
    if kind.width == 8:
        return builder.sitofp(value, of(_FLOAT))
    sixteen = INT(16) if count is None else ir.Constant(of(INT), [16] * count)
    return builder.bitcast(builder.shl(builder.zext(value, of(INT)), sixteen), of(_FLOAT))


def narrowed(builder: Any, value: Any, element: Any) -> Any:
    """A number, or a vector of numbers, as it is in memory: fp32, or bfloat16 rounded to the nearest, ties to even; NaN
    stays NaN."""
    if isinstance(element, ir.FloatType):
        return value
    count = value.type.count if isinstance(value.type, ir.VectorType) else None

    def of(kind: Any) -> Any:
        return kind if count is None else ir.VectorType(kind, count)

    def each(number: int) -> Any:
        return ir.Constant(of(INT), number if count is None else [number] * count)

    bits = builder.bitcast(value, of(INT))
    odd = builder.and_(builder.lshr(bits, each(16)), each(1))
    rounded = builder.add(builder.add(bits, odd), each(0x7FFF))
    quiet = builder.or_(bits, each(0x400000))
    bits = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(bits, each(16)), of(_HALF))


def size_of(element: Any) -> int:
    """Bytes of a number in memory."""
    return 4 if isinstance(element, ir.FloatType) else int(element.width) // 8


_aligned_alloc = types.ExternalFunction("aligned_alloc", types.int64(types.int64, types.int64))

release: Any = types.ExternalFunction("free", types.void(types.int64))
"""Give back memory that was allocated."""


@compiled_inline
def allocate(count):
    """The address, a multiple of 64, of memory for `count` fp32 numbers. Who takes it gives it back with `release`.

    Raises:
        MemoryError: there is none.
    """
    address = _aligned_alloc(64, (4 * count + 64) // 64 * 64)
    if address == 0:
        raise MemoryError
    return address


@intrinsic
def at(context, pointer, index):
    """A pointer to element `index`."""

    def generate(context, builder, signature, args):
        _prefer_wide(builder)
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), generate


@intrinsic
def get(context, pointer, index):
    """Element `index` as fp32."""

    def generate(context, builder, signature, args):
        _prefer_wide(builder)
        return _widened(builder, builder.load(builder.gep(args[0], [args[1]])))

    return types.float32(pointer, types.int64), generate


@intrinsic
def put(context, pointer, index, value):
    """Write element `index`, rounded to the type in memory."""

    def generate(context, builder, signature, args):
        _prefer_wide(builder)
        target, index, value = args
        builder.store(narrowed(builder, value, target.type.pointee), builder.gep(target, [index]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.float32), generate


@intrinsic
def fma(context, x, y, z):
    """`x * y + z` in fp32, rounded once."""

    def generate(context, builder, signature, args):
        return fma_of(builder, *args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def as_int(context, x):
    """The 32 bits of an fp32 number."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], INT)

    return types.int32(types.float32), generate


@intrinsic
def as_float(context, x):
    """The fp32 number of 32 bits."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), generate


_LOG2E, _ROUND = np.float32(1.44269504), np.float32(12582912.0)
_LN2_HIGH, _LN2_LOW = np.float32(0.693145752), np.float32(1.42860677e-6)
_LARGEST, _SMALLEST = np.float32(88.0), np.float32(-87.0)
_C0, _C2, _C3 = np.float32(1.0), np.float32(0.5), np.float32(1 / 6)
_C4, _C5, _C6, _C7 = np.float32(1 / 24), np.float32(1 / 120), np.float32(1 / 720), np.float32(1 / 5040)


@compiled_inline
def exp(x):
    """e to the power of x in fp32, to two units in the last place. Below -87, where that is hardly a normal number, 0;
    above 88 that of 88; of NaN NaN."""
    x = _LARGEST if x > _LARGEST else x
    inside = _SMALLEST if x < _SMALLEST else x
    shifted = fma(inside, _LOG2E, _ROUND)  # the power of two is in its lowest bits
    power = shifted - _ROUND
    rest = fma(-power, _LN2_HIGH, inside)
    rest = fma(-power, _LN2_LOW, rest)
    y = fma(_C7, rest, _C6)
    y = fma(y, rest, _C5)
    y = fma(y, rest, _C4)
    y = fma(y, rest, _C3)
    y = fma(y, rest, _C2)
    y = fma(y, rest, _C0)
    y = fma(y, rest, _C0)
    y *= as_float(np.int32((as_int(shifted) + np.int32(127)) << np.int32(23)))
    return ZERO if x < _SMALLEST else y


@compiled_inline
def sigmoid(x):
    """The logistic function in fp32."""
    return _C0 / (_C0 + exp(-x))


_TWO = np.float32(2)
_S3, _S5, _S7, _S9 = np.float32(1 / 3), np.float32(1 / 5), np.float32(1 / 7), np.float32(1 / 9)
_S11, _S13, _S15 = np.float32(1 / 11), np.float32(1 / 13), np.float32(1 / 15)


@compiled_inline
def softplus(x):
    """log(1 + exp(x)) in fp32, to a few units in the last place; of NaN NaN.

    It is max(x, 0) + log(1 + e) with e = exp(-abs(x)), and log(1 + e) = 2 artanh(s) with s = e / (2 + e), which is at
    most 1/3: the first eight terms of the series are enough.
    """
    e = exp(-abs(x))
    s = e / (_TWO + e)
    square = s * s
    y = fma(_S15, square, _S13)
    y = fma(y, square, _S11)
    y = fma(y, square, _S9)
    y = fma(y, square, _S7)
    y = fma(y, square, _S5)
    y = fma(y, square, _S3)
    y = fma(y, square, _C0)
    return fma(_TWO * s, y, x if x > ZERO else ZERO)


# Vectors of LANES numbers

VECTOR = ir.VectorType(_FLOAT, LANES)
ZEROS = ir.Constant(VECTOR, [0.0] * LANES)


def fma_of(builder: Any, x: Any, y: Any, z: Any) -> Any:
    name = "llvm.fma.f32" if isinstance(x.type, ir.FloatType) else f"llvm.fma.v{x.type.count}f32"
    kind = ir.FunctionType(x.type, [x.type] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x, y, z])


def add_product_of(builder: Any, x: Any, y: Any, total: Any, is_paired: bool) -> Any:
    """`total` and the products of vectors, which are numbers or, where `is_paired`, what `load_pairs` returns."""
    if not (is_paired and HAS_PAIRS):
        return fma_of(builder, x, y, total)
    bits = ir.VectorType(INT, LANES)
    kind, name = ir.FunctionType(VECTOR, [VECTOR, bits, bits]), "llvm.x86.avx512bf16.dpbf16ps.512"
    add = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(add, [total, builder.bitcast(x, bits), builder.bitcast(y, bits)])


def load_pairs(builder: Any, pointer: Any, index: Any, mask: Any | None = None) -> list[Any]:
    """Vectors of `LANES` pairs of bfloat16 numbers from an index on, zeros where a mask has no bit: as they are, for a
    CPU that multiplies them, otherwise the second number of each and the first, as fp32."""
    vector = ir.VectorType(_HALF, 2 * LANES)
    at = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    if mask is None:
        value = builder.load(at)
        value.align = 2
    else:
        kind = ir.FunctionType(vector, [at.type, INT, mask.type, vector])
        load = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{2 * LANES}i16.p0")
        value = builder.call(load, [at, INT(2), mask, ir.Constant(vector, [0] * (2 * LANES))])
    bits = ir.VectorType(INT, LANES)
    if HAS_PAIRS:
        return [builder.bitcast(value, VECTOR)]
    pairs = builder.bitcast(value, bits)
    second = builder.and_(pairs, ir.Constant(bits, [-65536] * LANES))
    first = builder.shl(pairs, ir.Constant(bits, [16] * LANES))
    return [builder.bitcast(second, VECTOR), builder.bitcast(first, VECTOR)]


def load_lanes(builder: Any, pointer: Any, index: Any, mask: Any | None = None) -> Any:
    """`LANES` numbers from an index on as fp32; zeros where a mask has no bit."""
    element = pointer.type.pointee
    vector = ir.VectorType(element, LANES)
    at = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    size = size_of(element)
    if mask is None:
        value = builder.load(at)
        value.align = size
        return _widened(builder, value, LANES)
    kind = ir.FunctionType(vector, [at.type, INT, mask.type, vector])
    name = f"llvm.masked.load.v{LANES}{'f32' if size == 4 else f'i{8 * size}'}.p0"
    load = cgutils.get_or_insert_function(builder.module, kind, name)
    value = builder.call(load, [at, INT(size), mask, ir.Constant(vector, [0] * LANES)])
    return _widened(builder, value, LANES)


def store_lanes(builder: Any, value: Any, pointer: Any, index: Any, mask: Any | None = None) -> None:
    """Write a vector to fp32 numbers from an index on, where a mask has a bit."""
    at = builder.bitcast(builder.gep(pointer, [index]), VECTOR.as_pointer())
    if mask is None:
        builder.store(value, at, align=4)
        return
    kind = ir.FunctionType(ir.VoidType(), [VECTOR, at.type, INT, mask.type])
    store = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}f32.p0")
    builder.call(store, [value, at, INT(4), mask])


def first_lanes(builder: Any, count: Any, lanes: int = LANES) -> Any:
    """A mask of the first `count` of `lanes` lanes."""
    vector = ir.VectorType(INT, lanes)
    each = repeated(builder, builder.trunc(count, INT), lanes)
    return builder.icmp_signed("<", ir.Constant(vector, list(range(lanes))), each)


def repeated(builder: Any, value: Any, lanes: int = LANES) -> Any:
    """A vector of which every lane is a number."""
    nothing = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    one = builder.insert_element(nothing, value, INT(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(INT, lanes), [0] * lanes))


def phis(builder: Any, *incoming: tuple[Any, list[Any]]) -> list[Any]:
    """The vectors that a block has from each of the blocks before it."""
    merged = [builder.phi(VECTOR) for _ in incoming[0][1]]
    for block, values in incoming:
        for phi, value in zip(merged, values, strict=True):
            phi.add_incoming(value, block)
    return merged


def looped(
    builder: Any,
    first: Any,
    end: Any,
    start: list[Any],
    step: Callable[[Any, list[Any]], list[Any]],
    by: int = 1,
) -> list[Any]:
    """Vectors after `vectors = step(index, vectors)` for each index in `range(first, end, by)`: a loop that keeps them
    in registers."""
    entry = builder.basic_block
    loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", first, end), loop, after)
    builder.position_at_end(loop)
    index = builder.phi(LONG)
    index.add_incoming(first, entry)
    vectors = phis(builder, (entry, start))
    changed = step(index, vectors)
    last = builder.basic_block  # a step may have branches
    following = builder.add(index, LONG(by))
    index.add_incoming(following, last)
    for phi, value in zip(vectors, changed, strict=True):
        phi.add_incoming(value, last)
    builder.cbranch(builder.icmp_signed("<", following, end), loop, after)
    builder.position_at_end(after)
    return phis(builder, (entry, start), (last, changed))


LINE = 64
"""Bytes of memory that the CPU reads at once."""

NEAREST, NEAR = 3, 2
"""The first and the second cache."""


def prefetch(builder: Any, pointer: Any, index: Any, cache: int = NEAREST) -> None:
    """Ask for the cache line of element `index` to be in a cache; past the end of memory the CPU ignores it."""
    place = builder.bitcast(builder.gep(pointer, [index]), _BYTES)
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, INT, INT, INT])
    builder.call(
        cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0"),
        [place, INT(0), INT(cache), INT(1)],
    )
