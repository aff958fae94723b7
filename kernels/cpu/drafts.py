"""What a predictor's passes over single tokens end with: so a chain of them needs no torch in between."""

import numpy as np
from torch import Tensor

from hybrid.kernels.cpu.machine_code import compiled
from hybrid.kernels.cpu.tasks import run
from hybrid.kernels.cpu.tiles import row_max
from hybrid.kernels.cpu.vectors import INDEX, KINDS, LANES, ZERO, allocate, at, exp, get, numbers, put, release


@compiled
def _choose_drafts(args, kind, first, last):  # type: ignore[no-untyped-def]
    a = numbers(args, INDEX)
    logits, hidden, tokens = numbers(a[0], ZERO), numbers(a[1], kind), numbers(a[2], INDEX)
    before, chances, vocab, size = numbers(a[3], kind), numbers(a[4], ZERO), a[5], a[6]
    whole = vocab // LANES * LANES
    memory = allocate(LANES)
    sums = numbers(memory, ZERO)
    for row in range(first, last):
        own = at(logits, row * vocab)
        most = row_max(own, whole) if whole else get(own, 0)
        for i in range(whole, vocab):
            most = max(most, get(own, i))
        token = 0
        while token < vocab - 1 and get(own, token) != most:
            token += 1
        for lane in range(LANES):
            put(sums, lane, ZERO)
        for i in range(0, whole, LANES):
            for lane in range(LANES):
                put(sums, lane, get(sums, lane) + exp(get(own, i + lane) - most))
        total = ZERO
        for lane in range(LANES):
            total += get(sums, lane)
        for i in range(whole, vocab):
            total += exp(get(own, i) - most)
        tokens[row] = token
        put(chances, row, np.float32(1) / total)
        source, target = at(hidden, row * size), at(before, row * size)
        for i in range(size):
            target[i] = source[i]
    release(memory)


def choose_drafts(logits: Tensor, hidden: Tensor, tokens: Tensor, before: Tensor, chances: Tensor) -> None:
    """Write the most probable token of each row, and what the pass over these tokens begins with.

    Args:
        logits: `[N, vocab]` fp32, contiguous.
        hidden: `[N, hidden_size]` the hidden states that the logits are of, contiguous.
        tokens: `[N]` int64; written.
        before: as `hidden`; they are copied there.
        chances: `[N]` fp32, the probabilities of the tokens; written. NaN where a logit is not finite.
    """
    (count, vocab), size = logits.shape, hidden.shape[1]
    addresses = tuple(tensor.data_ptr() for tensor in (logits, hidden, tokens, before, chances))
    run(_choose_drafts, KINDS[hidden.dtype], (*addresses, vocab, size), count, 1, 1)
