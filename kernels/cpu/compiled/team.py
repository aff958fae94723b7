"""What the threads of a team do (`hybrid.kernels.cpu.team`), without the interpreter."""

from __future__ import annotations

import platform
import time
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hybrid.kernels.cpu.compiled.build import compiled_inline, type_of
from hybrid.kernels.cpu.compiled.vectors import INDEX, INT, LONG, at, numbers
from hybrid.kernels.cpu.kinds import SIGNATURES
from hybrid.kernels.cpu.team import (
    ASLEEP,
    BUSY,
    CLOSED,
    CLOSING,
    DONE,
    ENDED,
    GATE,
    HELPERS,
    JOB,
    JOBS,
    LINE,
    NUMBER,
    PATIENCE,
    POSTED,
    PROGRAM,
    SECONDS,
    SHARES,
    STOPPED,
    TAKEN,
    TASK,
    TASKS,
)

SPINS = 4096
"""Looks at what another thread changes before a thread lets others run."""


_BILLION = 1_000_000_000
_LIMIT, _CLOCK = int(PATIENCE * _BILLION), int(time.CLOCK_MONOTONIC)

_yield = types.ExternalFunction("sched_yield", types.int32())
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@intrinsic
def _call(context, address, signature, args, first, last):
    """Call a compiled operation by the address of its code; returns whether it failed."""

    def generate(context, builder, _, values):
        address, number, args, first, last = values
        convention, entry = context.call_conv, builder.basic_block
        end = builder.append_basic_block("end")
        found = [(INT(1), entry)]
        blocks = []
        for kind in map(type_of, SIGNATURES):
            block = builder.append_basic_block("call")
            builder.position_at_end(block)
            of_call = (types.int64, kind, types.int64, types.int64)
            code = builder.inttoptr(address, convention.get_function_type(types.none, of_call).as_pointer())
            given = (args, context.get_constant_undef(kind), first, last)
            status, _result = convention.call_function(builder, code, types.none, of_call, given)
            found.append((builder.zext(status.is_error, INT), builder.basic_block))
            builder.branch(end)
            blocks.append(block)
        builder.position_at_end(entry)
        switch = builder.switch(number, end)
        for index, block in enumerate(blocks):
            switch.add_case(LONG(index), block)
        builder.position_at_end(end)
        failed = builder.phi(INT)
        for value, block in found:
            failed.add_incoming(value, block)
        return failed

    return types.int32(types.int64, types.int64, types.int64, types.int64, types.int64), generate


_IS_X86, _IS_ARM = (platform.machine().lower() in names for names in (("x86_64", "amd64"), ("aarch64", "arm64")))

_FLUSHES = 0x8040 if _IS_X86 else 1 << 24
"""Bits of MXCSR (flush to zero, denormals are zero) and of FPCR (FZ)."""


def _function(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


@intrinsic
def _flush_subnormals(context):
    """Have this thread take subnormal numbers for 0, and compute 0 in their place: decays make many, and each costs as
    much as twenty others. Returns its modes of before, which `_put_back` is given: the rest of the thread is the
    user's."""

    def generate(context, builder, signature, values):
        if _IS_X86:
            place = cgutils.alloca_once(builder, INT)
            modes = builder.bitcast(place, ir.IntType(8).as_pointer())
            builder.call(_function(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), modes.type), [modes])
            before = builder.load(place)
            builder.store(builder.or_(before, INT(_FLUSHES)), place)
            builder.call(_function(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), modes.type), [modes])
            return builder.zext(before, LONG)
        if _IS_ARM:
            before = builder.call(_function(builder, "llvm.aarch64.get.fpcr", LONG), [])
            after = builder.or_(before, LONG(_FLUSHES))
            builder.call(_function(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), LONG), [after])
            return before
        return LONG(0)

    return types.int64(), generate


@intrinsic
def _put_back(context, modes):
    """Give a thread the modes that it had."""

    def generate(context, builder, signature, values):
        if _IS_X86:
            place = cgutils.alloca_once_value(builder, builder.trunc(values[0], INT))
            modes = builder.bitcast(place, ir.IntType(8).as_pointer())
            builder.call(_function(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), modes.type), [modes])
        elif _IS_ARM:
            builder.call(_function(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), LONG), values)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _load(context, pointer, index):
    """A number that other threads write."""

    def generate(context, builder, signature, values):
        return builder.load_atomic(builder.gep(values[0], [values[1]]), "acquire", 8)

    return types.int64(pointer, types.int64), generate


def _changing(operation: str) -> Any:
    @intrinsic
    def change(context, pointer, index, value):
        """Change a number that other threads change; returns what it was before."""

        def generate(context, builder, signature, values):
            return builder.atomic_rmw(operation, builder.gep(values[0], [values[1]]), values[2], "seq_cst")

        return types.int64(pointer, types.int64, types.int64), generate

    return change


_add, _swap = _changing("add"), _changing("xchg")


@compiled_inline
def _cut(blocks, share, shares):
    """The block that a share begins with. Shares grow from the first one, a block or two in most operations, to the
    last: as the small ones are taken last, threads end an operation at nearly the same time."""
    if blocks < 2 * shares:
        return blocks * share // shares
    return blocks * share * (share + 1) // (shares * (shares + 1))


@compiled_inline
def _shares(program, index, threads):
    """The number of shares of a task, and of blocks that they consist of."""
    task = at(program, index * TASK)
    blocks = (task[2] + task[3] - 1) // task[3]
    return min(threads * SHARES, blocks, max(task[4], 1)), blocks


@compiled_inline
def _wait(spins):
    """Let others run, after many looks at what another thread changes. Returns how many there were."""
    if spins > SPINS:
        _yield()
    return spins + 1


@compiled_inline
def _run(program, count, progress, threads):
    """`_run_tasks` without subnormal numbers."""
    modes = _flush_subnormals()
    failed = _run_tasks(program, count, progress, threads)
    _put_back(modes)
    return failed


@compiled_inline
def _run_tasks(program, count, progress, threads):
    """Run `count` tasks together with other threads that do the same; returns whether one failed.

    Shares are taken from the last one on: the largest first, and of attention to a prompt the last tokens, which take
    longest.
    """
    program, progress, begun = numbers(program, INDEX), numbers(progress, INDEX), 0
    for index in range(count):
        task = at(program, index * TASK)
        elements, multiple = task[2], task[3]
        if threads == 1:
            if _call(task[0], task[1], task[5], 0, elements):
                return True
            continue
        shares, blocks = _shares(program, index, threads)
        own = TASKS + index * LINE
        share = shares - 1 - _add(progress, own + TAKEN, 1)
        while share >= 0:
            first = min(elements, _cut(blocks, share, shares) * multiple)
            last = min(elements, _cut(blocks, share + 1, shares) * multiple)
            if first < last and _call(task[0], task[1], task[5], first, last):
                _swap(progress, STOPPED, 1)  # the others would wait for ever
            _add(progress, own + DONE, 1)
            share = shares - 1 - _add(progress, own + TAKEN, 1)
        if task[6]:
            continue
        spins = 0
        for each in range(begun, index + 1):
            while _load(progress, TASKS + each * LINE + DONE) < _shares(program, each, threads)[0]:
                spins = _wait(spins)
        begun = index + 1
        if _load(progress, STOPPED):
            return True
    return False


@compiled_inline
def _take_part(shared, number):
    """Compute what is left of a program, unless it has ended, once the program before it has ended."""
    job, before, spins = at(shared, JOBS + number % 2 * JOB), at(shared, JOBS + (number - 1) % 2 * JOB), 0
    if _add(job, GATE, 1) < CLOSED and job[NUMBER] == number:
        while _load(before, ENDED) < number - 1:
            spins = _wait(spins)
        _run(job[PROGRAM], job[PROGRAM + 1], job[PROGRAM + 2], job[PROGRAM + 3])
        if _swap(job, ENDED, number) != number:
            _add(job, GATE, CLOSED)
    _add(job, GATE, -1)


@compiled_inline
def _end(shared, number):
    """Compute what is left of a program and of the one before it, and wait until no thread is at work on it."""
    _take_part(shared, number - 1)
    _take_part(shared, number)
    job, spins = at(shared, JOBS + number % 2 * JOB), 0
    while _load(job, GATE) != CLOSED and _load(job, NUMBER) == number:
        spins = _wait(spins)


@compiled_inline
def _begin(shared, program, count, progress, threads):
    """Let the threads begin with a program after those that they have; returns its number. The caller has `BUSY`."""
    number = _load(shared, POSTED) + 1
    _end(shared, number - 2)  # its place is needed
    job = at(shared, JOBS + number % 2 * JOB)
    job[PROGRAM], job[PROGRAM + 1], job[PROGRAM + 2], job[PROGRAM + 3] = program, count, progress, threads
    _swap(job, NUMBER, number)
    _add(job, GATE, -CLOSED)
    _swap(shared, POSTED, number)
    return number


def lead(shared, program, count, progress, threads):
    """Run a program with the threads of a team that are awake, after what was posted, or alone where it has another
    caller. No thread is at work on it when this returns, or raises because a task failed."""
    shared = numbers(shared, INDEX)
    if threads == 1 or _swap(shared, BUSY, 1):
        if _run(program, count, progress, 1):
            raise MemoryError
        return
    _end(shared, _begin(shared, program, count, progress, threads))
    _swap(shared, BUSY, 0)
    if numbers(progress, INDEX)[STOPPED]:
        raise MemoryError


def post(shared, program, count, progress, threads, number):
    """Let the threads of a team that are awake run a program, after what was posted before. Writes its number, or 0
    where the team has another caller, and nothing was done."""
    shared, number = numbers(shared, INDEX), numbers(number, INDEX)
    if _swap(shared, BUSY, 1):
        number[0] = 0
        return
    number[0] = _begin(shared, program, count, progress, threads)
    _swap(shared, BUSY, 0)


def end(shared, number):
    """Compute what is left of a program that was posted. No thread is at work on it when this returns."""
    _end(numbers(shared, INDEX), number)


def repeat(program, count, times, stop):
    """Run a program in this thread up to `times` times, until it writes another number than 0 to `stop`."""
    stop = numbers(stop, INDEX)
    for _ in range(times):
        if _run(program, count, 0, 1):
            raise MemoryError
        if stop[0]:
            return


def compute(code, signature, args, elements):
    """Run one task in this thread."""
    modes = _flush_subnormals()
    failed = _call(code, signature, args, 0, elements)
    _put_back(modes)
    if failed:
        raise MemoryError


@compiled_inline
def _nanoseconds(place):
    """A clock that only goes forward, read by way of two numbers in memory."""
    _clock(_CLOCK, place)
    read = numbers(place, INDEX)
    return read[0] * _BILLION + read[1]


def help(address, number):
    """Take part in every program that has a thread of this number, until there was none for a while."""
    shared, clock = numbers(address, INDEX), address + 8 * (HELPERS + number * LINE + SECONDS)
    own, spins, seen, since = HELPERS + number * LINE, 0, 0, _nanoseconds(clock)
    _swap(shared, own + ASLEEP, 0)
    while not _load(shared, CLOSING):
        posted = _load(shared, POSTED)
        if posted != seen:
            seen = max(seen + 1, posted - 1)
            if number < at(shared, JOBS + seen % 2 * JOB)[PROGRAM + 3] - 1:
                _take_part(shared, seen)
                spins, since = 0, _nanoseconds(clock)
            continue
        spins += 1
        if spins > SPINS:
            _yield()
            if _nanoseconds(clock) - since > _LIMIT:
                _swap(shared, own + ASLEEP, 1)
                if _load(shared, POSTED) == seen:  # who posts looks whether it sleeps afterwards
                    return
                _swap(shared, own + ASLEEP, 0)
