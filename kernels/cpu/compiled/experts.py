"""What surrounds the products of experts: the choice of experts, their rows, and the weighted sum of what they give.

What a row becomes depends on that row alone: sums are added up in the order of experts, or of their ranks.
"""

import numpy as np

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.vectors import (
    INDEX,
    ZERO,
    allocate,
    as_float,
    at,
    exp,
    fma,
    get,
    numbers,
    put,
    release,
    sigmoid,
)

_LOWEST = np.float32(-np.inf)


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


def choose_experts(args, kind, first, last):
    """Rows `[first, last)`: each expert has the logistic function of its logit. A bias is added for the choice alone.
    Experts are in groups, of which those are chosen from whose two best make the highest sum."""
    a = numbers(args, INDEX)
    logits, bias, has_bias = numbers(a[0], kind), numbers(a[1], kind), a[1] != 0
    weights, experts = numbers(a[2], kind), numbers(a[3], INDEX)
    of_row, count, top_k, normalises, groups, top_groups = a[4], a[5], a[6], a[7], a[8], a[9]
    least, factor, size = as_float(np.int32(a[10])), as_float(np.int32(a[11])), a[5] // a[8]
    memory, places = allocate(2 * count + groups), allocate(2 * groups)
    scores, best_groups = numbers(memory, ZERO), numbers(places, INDEX)
    ranks, of_groups = at(scores, count), at(scores, 2 * count)
    for row in range(first, last):
        x, share, best = at(logits, row * of_row), at(weights, row * top_k), at(experts, row * top_k)
        missing = ZERO
        for i in range(count):
            missing = missing if get(x, i) == get(x, i) else get(x, i)
            put(scores, i, sigmoid(get(x, i)))
            put(ranks, i, get(scores, i) + get(bias, i) if has_bias else get(scores, i))
        if top_groups < groups:
            for group in range(groups):
                highest, second = _LOWEST, _LOWEST
                for i in range(group * size, (group + 1) * size):
                    own = get(ranks, i)
                    if own > highest:
                        highest, second = own, highest
                    elif own > second:
                        second = own
                put(of_groups, group, highest + second)
            _largest(of_groups, groups, best_groups, top_groups)
            for group in range(groups):
                is_chosen = False
                for rank in range(top_groups):
                    is_chosen = is_chosen or best_groups[rank] == group
                if not is_chosen:
                    for i in range(group * size, (group + 1) * size):
                        put(ranks, i, _LOWEST)
        _largest(ranks, count, best, top_k)
        total = missing
        for rank in range(top_k):
            put(share, rank, get(scores, best[rank]) + missing)
            total += get(share, rank)
        if normalises:
            for rank in range(top_k):
                put(share, rank, get(share, rank) / (total + least))
        for rank in range(top_k):
            put(share, rank, get(share, rank) * factor)
    release(memory)
    release(places)


def sort_by_expert(args, kind, first, last):
    """All pairs, by counting."""
    a = numbers(args, INDEX)
    experts, order, places, ends = (
        numbers(a[0], INDEX),
        numbers(a[1], INDEX),
        numbers(a[2], INDEX),
        numbers(a[3], INDEX),
    )
    pairs, count, of_prompts = a[4], a[5], a[6]
    for group in range(2 * count):
        ends[group] = 0
    for pair in range(pairs):
        ends[experts[pair] + (count if pair >= of_prompts else 0)] += 1
    before = 0
    for group in range(2 * count):  # for now where each begins
        own = ends[group]
        ends[group] = before
        before += own
    for pair in range(pairs):
        group = experts[pair] + (count if pair >= of_prompts else 0)
        order[ends[group]], places[pair] = pair, ends[group]
        ends[group] += 1


def take_pairs(args, kind, first, last):
    """The rows of the pairs at places `[first, last)`."""
    a = numbers(args, INDEX)
    x, output, order, of_row, size, top_k = (
        numbers(a[0], kind),
        numbers(a[1], kind),
        numbers(a[2], INDEX),
        a[3],
        a[4],
        a[5],
    )
    for place in range(first, last):
        source, target = at(x, order[place] // top_k * of_row), at(output, place * size)
        for i in range(size):
            target[i] = source[i]


def add_biases(args, kind, first, last):
    """The pairs at places `[first, last)`, each with the bias of its expert."""
    a = numbers(args, INDEX)
    y, biases, out = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind)
    experts, order, of_row, of_bias, size = numbers(a[3], INDEX), numbers(a[4], INDEX), a[5], a[6], a[7]
    for place in range(first, last):
        own, bias = at(y, place * of_row), at(biases, experts[order[place]] * of_bias)
        for i in range(size):
            put(out, place * size + i, get(own, i) + get(bias, i))


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
