"""What surrounds the products of experts: the choice of experts, and the weighted sum of what they give.

What a row becomes depends on that row alone: sums are added up in the order of experts, or of their ranks.
"""

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.vectors import INDEX, ZERO, allocate, at, exp, fma, get, numbers, put, release, sigmoid


@compiled_inline
def _largest(x, count, best, top_k):
    """Write the places of the `top_k` largest of `count` numbers to `best`, the largest first, of equal ones the first.
    NaN is larger than nothing: what is written are places in any case."""
    found = 0
    for i in range(count):
        own = get(x, i)
        if found == top_k and not own > get(x, best[top_k - 1]):
            continue
        rank = found if found < top_k else top_k - 1
        while rank > 0 and own > get(x, best[rank - 1]):
            best[rank] = best[rank - 1]
            rank -= 1
        best[rank] = i
        found = min(found + 1, top_k)


def route_experts(args, kind, first, last):
    a = numbers(args, INDEX)
    logits, weights, experts = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], INDEX)
    of_row, count, top_k, normalises = a[3], a[4], a[5], a[6]
    for row in range(first, last):
        x, share, best = at(logits, row * of_row), at(weights, row * top_k), at(experts, row * top_k)
        _largest(x, count, best, top_k)
        most, total = get(x, best[0]), ZERO
        for rank in range(top_k):
            put(share, rank, exp(get(x, best[rank]) - most))
        if normalises:
            for rank in range(top_k):
                total += get(share, rank)
            for i in range(count):  # a row with NaN gives NaN, whichever are chosen
                total = total if get(x, i) == get(x, i) else get(x, i)
        else:
            for i in range(count):
                total += exp(get(x, i) - most)
        for rank in range(top_k):
            put(share, rank, get(share, rank) / total)


def combine_experts(args, kind, first, last):
    a = numbers(args, INDEX)
    y, places, weights, out = numbers(a[0], kind), numbers(a[1], INDEX), numbers(a[2], ZERO), numbers(a[3], kind)
    of_row, size, top_k = a[4], a[5], a[6]
    memory = allocate(size)
    total = numbers(memory, ZERO)
    for row in range(first, last):
        for i in range(size):
            put(total, i, ZERO)
        for rank in range(top_k):
            own, share = at(y, places[row * top_k + rank] * of_row), get(weights, row * top_k + rank)
            for i in range(size):
                put(total, i, fma(get(own, i), share, get(total, i)))
        for i in range(size):
            put(out, row * size + i, get(total, i))
    release(memory)


def add_shared(args, kind, first, last):
    a = numbers(args, INDEX)
    routed, shared, gate, out = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind), numbers(a[3], kind)
    size = a[4]
    for row in range(first, last):
        share = sigmoid(get(gate, row))
        for i in range(row * size, (row + 1) * size):
            put(out, i, fma(get(shared, i), share, get(routed, i)))
