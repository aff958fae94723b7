"""The most likely tokens of rows of logits, of equal ones the first."""

import numpy as np

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.tiles import row_max, row_sum
from hybrid.kernels.cpu.compiled.vectors import INDEX, ZERO, allocate, at, exp, get, numbers, put, release
from hybrid.kernels.cpu.kinds import ENDED, FOLLOWED, LEFT, LEFT_OUT, VERIFIED
from hybrid.kernels.cpu.target import LANES


@compiled_inline
def _first_largest(own, vocab):
    """The largest number of a row, and its first place."""
    whole, token = vocab // LANES * LANES, 0
    most = row_max(own, whole) if whole else get(own, 0)
    for i in range(whole, vocab):
        most = max(most, get(own, i))
    while token < vocab - 1 and get(own, token) != most:
        token += 1
    return most, token


def most_likely(args, kind, first, last):
    """Tokens `[first, last)`."""
    a = numbers(args, INDEX)
    logits, tokens, vocab, of_row, not_finite = numbers(a[0], kind), numbers(a[1], INDEX), a[2], a[3], a[4]
    whole = vocab // LANES * LANES
    for row in range(first, last):
        own = at(logits, row * of_row)
        total = row_sum(own, whole) if whole else ZERO
        for i in range(whole, vocab):
            total += get(own, i)
        _, token = _first_largest(own, vocab)
        tokens[row] = token if total - total == ZERO else not_finite  # NaN and infinity remain in a sum


def choose_drafts(args, kind, first, last):
    a = numbers(args, INDEX)
    logits, hidden, tokens = numbers(a[0], ZERO), numbers(a[1], kind), numbers(a[2], INDEX)
    before, chances, vocab, size = numbers(a[3], kind), numbers(a[4], ZERO), a[5], a[6]
    whole = vocab // LANES * LANES
    memory = allocate(LANES)
    sums = numbers(memory, ZERO)
    for row in range(first, last):
        own = at(logits, row * vocab)
        most, token = _first_largest(own, vocab)
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


@compiled_inline
def _slot_of(pages, place, page_size):
    """The slot of the keys and values of the token at a place of a sequence."""
    return pages[place // page_size] * page_size + place % page_size


def accept_drafts(args, kind, first, last):
    """All requests, as one element."""
    a = numbers(args, INDEX)
    drafted, chosen, requests, slots = (
        numbers(a[0], INDEX),
        numbers(a[1], INDEX),
        numbers(a[2], INDEX),
        numbers(a[3], INDEX),
    )
    count, rows = a[4], a[5]
    reads, writes = slots, at(slots, rows)
    for row in range(rows):
        reads[row], writes[row] = LEFT_OUT, -1
    for request in range(count):
        own = at(requests, request * VERIFIED)
        start, drafts, known, beyond, boundary = own[0], own[1], own[2], own[3], own[4]
        right, state = 0, known
        while right < drafts and chosen[start + right] == drafted[start + right + 1]:
            right += 1
            reads[start + right] = -1
        if right > 0:
            reads[start + 1] = known
            if 0 <= boundary < right:
                state = beyond
                if boundary > 0:
                    writes[start + boundary] = known
            writes[start + right] = state
        own[6], own[7] = right, state


def begin_chains(args, kind, first, last):
    """All requests, as one element."""
    a = numbers(args, INDEX)
    chosen, positions, lengths = numbers(a[0], INDEX), numbers(a[1], INDEX), numbers(a[2], INDEX)
    table, requests = numbers(a[3], INDEX), numbers(a[4], INDEX)
    columns, own_table = numbers(a[5], INDEX), numbers(a[6], INDEX)
    count, of_column, width, own_width, page_size = a[7], a[8], a[9], a[10], a[11]
    for request in range(count):
        own = at(requests, request * VERIFIED)
        row, ends = own[0] + own[6], own[5]
        place, slot = lengths[row], -1
        for page in range(own_width):
            own_table[request * own_width + page] = table[row * width + page] if page < width else 0
        columns[5 * of_column + request] = ends
        if place < ends:
            slot = _slot_of(at(table, row * width), place, page_size)
            ends = place + 1
        columns[request] = max(chosen[row], 0)  # it may be none
        columns[of_column + request] = positions[row] + 1
        columns[2 * of_column + request], columns[3 * of_column + request] = slot, ends
        columns[4 * of_column + request] = own[7]


def continue_chains(args, kind, first, last):
    """All rows, as one element."""
    a = numbers(args, INDEX)
    columns, table = numbers(a[0], INDEX), numbers(a[1], INDEX)
    count, of_column, width, page_size = a[2], a[3], a[4], a[5]
    chances, beliefs, control = numbers(a[6], ZERO), numbers(a[7], ZERO), numbers(a[8], INDEX)
    tokens, found, kinds, passes = numbers(a[9], INDEX), numbers(a[10], ZERO), a[11], a[12]
    done, most = min(control[0], passes - 1), ZERO
    for row in range(count):
        chance, place, slot, rate = get(chances, row), columns[3 * of_column + row], -1, ZERO
        tokens[done * count + row] = columns[row]
        put(found, done * count + row, chance)
        if chance > ZERO:  # it may be NaN
            rate = get(beliefs, 1 + count + row * kinds + min(int(chance * kinds), kinds - 1))
        reached = get(beliefs, 1 + row) * rate
        put(beliefs, 1 + row, reached)
        most = max(most, reached)
        if place < columns[5 * of_column + row]:  # else what is computed is of no use, and must see its pages alone
            slot = _slot_of(at(table, row * width), place, page_size)
            place += 1
        columns[of_column + row] += 1
        columns[2 * of_column + row], columns[3 * of_column + row], columns[4 * of_column + row] = slot, place, -1
    control[0], control[1] = done + 1, int(most < get(beliefs, 0))


@compiled_inline
def _is_end(ends, count, token):
    """Whether a token is one of `count`."""
    found = False
    for place in range(count):
        found = found or ends[place] == token
    return found


@compiled_inline
def _write_rows(a, request):
    """The numbers of the next round of a request, with as many drafts as `requests` has."""
    tokens, chosen, positions = numbers(a[0], INDEX), numbers(a[1], INDEX), numbers(a[2], INDEX)
    lengths, slots, reads, writes = (
        numbers(a[3], INDEX),
        numbers(a[6], INDEX),
        numbers(a[7], INDEX),
        numbers(a[8], INDEX),
    )
    own, known = at(numbers(a[5], INDEX), request * VERIFIED), at(numbers(a[9], INDEX), request * FOLLOWED)
    source, chain = at(numbers(a[10], INDEX), request * a[21]), numbers(a[15], INDEX)
    count, width, has_chains, page_size, empty = a[18], a[20], a[24] > 0, a[26], a[27]
    start, drafts = own[0], own[1]
    pages, token, position = (
        at(numbers(a[4], INDEX), start * width),
        chosen[start + own[6]],
        positions[start] + own[6] + 1,
    )
    for draft in range(known[0] + 1):
        row = start + draft
        if draft > drafts:  # it is computed in vain
            tokens[row], positions[row], lengths[row], slots[row], reads[row] = 0, 0, 1, -1, empty
        else:
            if draft > 0:
                token = chain[(draft - 1) * count + request] if has_chains else source[known[3] + draft - 1]
            place = known[2] - 1 + draft
            tokens[row], positions[row], lengths[row] = token, position + draft, place + 1
            slots[row], reads[row] = _slot_of(pages, place, page_size), -1
        writes[row] = -1
    reads[start] = writes[start] = own[2]
    own[3], own[4], own[6], own[7] = -1, -1, 0, 0


@compiled_inline
def _may_have(a, request, drafts):
    """Whether a request has room for as many drafts, of which none ends its answer."""
    known, ends = at(numbers(a[9], INDEX), request * FOLLOWED), at(numbers(a[11], INDEX), request * a[22])
    source, chain = at(numbers(a[10], INDEX), request * a[21]), numbers(a[15], INDEX)
    may = known[2] + drafts <= known[1]
    for draft in range(drafts):
        token = chain[draft * a[18] + request] if a[24] > 0 else source[known[3] + draft]
        may = may and not _is_end(ends, a[22], token)
    return may


def next_round(args, kind, first, last):
    """All requests, as one element."""
    a = numbers(args, INDEX)
    tokens, chosen, requests, followed = (
        numbers(a[0], INDEX),
        numbers(a[1], INDEX),
        numbers(a[5], INDEX),
        numbers(a[9], INDEX),
    )
    control, log, claims = numbers(a[12], INDEX), numbers(a[13], INDEX), numbers(a[14], ZERO)
    chain, claimed, passes = numbers(a[15], INDEX), numbers(a[16], ZERO), numbers(a[17], INDEX)
    count, rows, most_rounds, most_passes = a[18], a[19], a[23], a[24]
    done, stop, drafted, is_left = control[0], 0, 0, False
    own_log, found = at(log, done * a[25]), min(passes[0], most_passes) if most_passes > 0 else 0
    for row in range(rows):
        own_log[2 * row], own_log[2 * row + 1] = tokens[row], chosen[row]
    counts = at(own_log, 2 * rows)
    counts[2 * count] = found
    for place in range(found * count):
        counts[2 * count + 1 + place] = chain[place]
        put(claims, done * most_passes * count + place, get(claimed, place))
    for request in range(count):
        own, known = at(requests, request * VERIFIED), at(followed, request * FOLLOWED)
        source, right = at(numbers(a[10], INDEX), request * a[21]), own[6]
        counts[2 * request], counts[2 * request + 1] = own[1], right
        token = chosen[own[0] + right]
        known[2] += right + 1
        known[3] += right
        if known[3] < known[4] and source[known[3]] == token:
            known[3] += 1
        else:
            known[4] = known[3]
        own[1] = min(known[0], found if most_passes > 0 else known[4] - known[3])
        if token < 0 or known[2] > known[1] or _is_end(at(numbers(a[11], INDEX), request * a[22]), a[22], token):
            stop = ENDED
        if not _may_have(a, request, own[1]):
            stop = ENDED
        is_left = is_left or (most_passes == 0 and own[1] < known[0])
        drafted += own[1]
    if done + 1 == most_rounds:
        stop = ENDED
    if stop == 0 and (is_left or drafted == 0):
        stop = LEFT
    control[0], control[1] = done + 1, stop
    if stop == 0:
        for request in range(count):
            _write_rows(a, request)


def resume_rounds(args, kind, first, last):
    """All requests, as one element."""
    a = numbers(args, INDEX)
    requests, followed, control = numbers(a[5], INDEX), numbers(a[9], INDEX), numbers(a[12], INDEX)
    stop = 0
    for request in range(a[18]):
        own, known = at(requests, request * VERIFIED), at(followed, request * FOLLOWED)
        own[1] = min(known[0], known[4] - known[3])
        if not _may_have(a, request, own[1]):
            stop = ENDED
    control[1] = stop
    if stop == 0:
        for request in range(a[18]):
            _write_rows(a, request)
