"""AMX on a CPU without it: a signal handler computes the instructions that the CPU does not know, as Intel's manual
describes them. So the machine code that a CPU with AMX would run is run here, slowly, by one thread."""

import ctypes
import signal

import numpy as np
from numba import cfunc, njit, types

from hybrid.kernels.cpu.compiled.vectors import as_float, fma, numbers

TILES, ROWS, ROW = 8, 16, 64

_memory = np.zeros(TILES * ROWS * ROW + 2 * ROW, np.uint8)
_STATE = (_memory.ctypes.data + ROW - 1) // ROW * ROW
_CONFIG = _STATE + TILES * ROWS * ROW

_REGISTERS = 40
"""Where the general registers begin in what a handler is given (`ucontext_t`)."""

_PLACES = np.array([13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7])
"""Of registers 0 to 15, as instructions number them, in that list."""

_RIP = 16

_BYTE, _HALF, _INT, _LONG, _FLOAT = np.uint8(0), np.uint16(0), np.int32(0), np.int64(0), np.float32(0)

_abort = types.ExternalFunction("abort", types.void())


_SMALLEST = np.float32(1.17549435e-38)


@njit
def _flushed(x):
    """0 in the place of a subnormal number, with its sign."""
    return x * np.float32(0) if abs(x) < _SMALLEST else x


@njit
def _rows(tile):
    return np.int64(numbers(_CONFIG + 48 + tile, _BYTE)[0])


@njit
def _bytes(tile):
    return np.int64(numbers(_CONFIG + 16 + 2 * tile, _HALF)[0])


@njit
def _add_products(total, x, y):
    """`tdpbf16ps`."""
    for row in range(_rows(total)):
        own = numbers(_STATE + (total * ROWS + row) * ROW, _FLOAT)
        left = numbers(_STATE + (x * ROWS + row) * ROW, _HALF)
        for column in range(_bytes(total) // 4):
            even, odd = np.float32(0), np.float32(0)
            for pair in range(_bytes(x) // 4):
                right = numbers(_STATE + (y * ROWS + pair) * ROW, _HALF)
                for place in range(2):
                    a = _flushed(as_float(np.int32(np.uint32(left[2 * pair + place]) << np.uint32(16))))
                    b = _flushed(as_float(np.int32(np.uint32(right[2 * column + place]) << np.uint32(16))))
                    if place == 0:
                        even = _flushed(fma(a, b, even))
                    else:
                        odd = _flushed(fma(a, b, odd))
            own[column] = _flushed(_flushed(own[column]) + _flushed(even + odd))


@njit
def _move(tile, address, stride, is_store):
    for row in range(_rows(tile)):
        own, memory = numbers(_STATE + (tile * ROWS + row) * ROW, _BYTE), numbers(address + row * stride, _BYTE)
        for place in range(_bytes(tile)):
            if is_store:
                memory[place] = own[place]
            else:
                own[place] = memory[place]
        if not is_store:
            for place in range(_bytes(tile), ROW):
                own[place] = np.uint8(0)


@njit
def _clear(tile):
    for place in range(ROWS * ROW):
        numbers(_STATE + tile * ROWS * ROW, _BYTE)[place] = np.uint8(0)


@cfunc(types.void(types.int32, types.int64, types.int64))
def _compute(_signal, _info, context):
    registers = numbers(context + _REGISTERS, _LONG)
    code = numbers(registers[_RIP], _BYTE)
    first, second, opcode, modes = np.int64(code[1]), np.int64(code[2]), code[3], np.int64(code[4])
    if code[0] != 0xC4 or first & 31 != 2:  # no VEX prefix of the map 0F38
        _abort()
    prefix, register, size = second & 3, modes >> 3 & 7, 5
    if modes >> 6 == 3:
        other = modes & 7
        if opcode == 0x49 and prefix == 0:
            for place in range(ROW):
                numbers(_CONFIG, _BYTE)[place] = np.uint8(0)
        elif opcode == 0x49 and prefix == 3:
            _clear(register)
        elif opcode == 0x5C and prefix == 2:
            _add_products(register, other, 15 - (second >> 3 & 15))
        else:
            _abort()
        registers[_RIP] += size
        return
    base, index, scale, is_without_base = modes & 7, np.int64(-1), np.int64(0), False
    if base == 4:
        more = np.int64(code[size])
        size += 1
        base, index, scale = more & 7, more >> 3 & 7, more >> 6
        is_without_base = base == 5 and modes >> 6 == 0
        index = index if first & 64 else index + 8
        index = -1 if index == 4 else index
    address = np.int64(0)
    if not is_without_base:
        address = registers[_PLACES[base if first & 32 else base + 8]]
    if modes >> 6 == 1:
        address += np.int64(np.int8(code[size]))
        size += 1
    elif modes >> 6 == 2 or is_without_base:
        for place in range(4):
            part = np.int64(np.int8(code[size + place])) if place == 3 else np.int64(code[size + place])
            address += part << (8 * place)
        size += 4
    stride = registers[_PLACES[index]] << scale if index >= 0 else np.int64(0)
    if opcode == 0x49 and prefix == 0:
        for place in range(ROW):
            numbers(_CONFIG, _BYTE)[place] = numbers(address, _BYTE)[place]
        for tile in range(TILES):
            _clear(tile)
    elif opcode == 0x4B and prefix == 3:
        _move(register, address, stride, False)
    elif opcode == 0x4B and prefix == 2:
        _move(register, address, stride, True)
    else:
        _abort()
    registers[_RIP] += size


class _Action(ctypes.Structure):
    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


_WITH_CONTEXT = 4  # SA_SIGINFO


def install() -> None:
    """Compute instructions of AMX in this process from now on."""
    action = _Action(handler=_compute.address, flags=_WITH_CONTEXT)
    assert ctypes.CDLL(None).sigaction(int(signal.SIGILL), ctypes.byref(action), None) == 0
