"""Every function that is compiled, and for what kinds of numbers. No torch: what compiles does without it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hybrid.kernels.cpu.kinds import BYTE, FLOAT, HALF, INTEGER, Kind
from hybrid.kernels.cpu.target import HAS_TILES

COMPILED = f"{__package__}.compiled"
"""The package of what is compiled."""

NUMBERS = (FLOAT, HALF)
"""Kinds of numbers x that are computed with."""

PRODUCTS = ((FLOAT, FLOAT), (HALF, FLOAT), (HALF, HALF), (BYTE, FLOAT), (BYTE, HALF))
"""Kinds of a weight and of x that can be multiplied."""

WHOLE_PRODUCTS = ((BYTE, HALF),)
"""Those that are computed in whole numbers."""

OF_NUMBERS = {
    "attention": ("attend", "advance_rings"),
    "delta_rule": ("rule", "step", "delta_gates"),
    "elementwise": (
        "norm_rotate_store",
        "rms_norm",
        "add_rms_norm",
        "gated_rms_norm",
        "silu_and_mul",
        "sigmoid_and_mul",
        "gelu_and_mul",
        "bounded_silu_and_mul",
        "gate_rows",
        "squared_relu",
        "silu",
        "add",
        "mul",
        "scale",
        "rotary",
        "rotate",
        "rotate_pairs",
    ),
    "convolution": ("convolve", "convolve_tokens"),
    "state_space": ("scan", "advance", "time_steps", "add_skip", "grouped_gated_norm"),
    "recurrences": ("delta_tokens", "scan_tokens", "lru_tokens"),
    "matmul": ("arrange", "make_panels"),
    "drafts": ("choose_drafts",),
    "experts": ("take_pairs", "add_biases", "combine_experts", "add_shared"),
    "memory": ("shift", "take", "copy"),
}
"""Functions of one kind of numbers, by module."""

OF_PRODUCTS = {"matmul": ("multiply_panels", "multiply")}

TILE_PRODUCTS = ((HALF, HALF), (BYTE, HALF)) if HAS_TILES else ()
"""Products that AMX computes, where it is used, in place of these functions."""

OF_TILES = {"amx": ("multiply_tiles",)}

OF_FLOATS = {
    "drafts": ("most_likely", "continue_chains"),
    "experts": ("route_experts", "choose_experts", "sort_by_expert"),
    "elementwise": ("softmax", "log_softmax", "soft_cap"),
    "memory": ("fill",),
}

OF_HALVES = {"memory": ("widen", "narrow")}

OF_PACKED = {"packed_weights": ("multiply_packed", "unpack_rows")}
"""Functions of the scales of a weight of four bits and of an output: both in one of `NUMBERS`."""

SECONDS = {
    "attend": 6,
    "multiply_packed": 4,
    "multiply_panels": 4,
    "rule": 3,
    "multiply": 3,
    "step": 3,
    "scan": 2,
    "lead": 1,
}
"""CPU time that it takes to compile those that take long: they are compiled first, so that processes end together."""

SECONDS_OF_OTHERS = 0.25

OF_INTEGERS = {"team": {"lead": 5, "help": 2, "post": 6, "end": 2, "repeat": 4, "compute": 4}}
"""Functions that are called from Python, with numbers of arguments."""


class Function(NamedTuple):
    """A function that is compiled for kinds of arguments.

    Attributes:
        module: that it is in, a name that can be imported.
        name: of it there.
        arguments: their kinds.
    """

    module: str
    name: str
    arguments: tuple[Kind, ...]


def functions(numbers: str, has_bytes: bool, is_packed: bool) -> list[Function]:
    """Return the functions that are needed to compute with a kind of numbers.

    Args:
        has_bytes: weights are int8.
        is_packed: weights have four bits.
    """
    products = [pair for pair in PRODUCTS if pair[1] == numbers and (has_bytes or pair[0] != BYTE)]
    packed = _of_packed((numbers,)) if is_packed else ()
    return _sorted([*_with(OF_NUMBERS, (numbers,)), *_of_products(products), *packed, *_of_any_numbers()])


def all_functions() -> list[Function]:
    """Every function for every kind."""
    products = *_of_products(PRODUCTS), *_of_packed(NUMBERS)
    return _sorted([*_with(OF_NUMBERS, NUMBERS), *products, *_of_any_numbers()])


def _of_packed(kinds: Sequence[str]) -> Iterator[Function]:
    yield from _with(OF_PACKED, [(scales, kind) for scales in NUMBERS for kind in kinds])


def _of_products(pairs: Sequence[Kind]) -> Iterator[Function]:
    tiles = [pair for pair in pairs if pair in TILE_PRODUCTS]
    whole = [pair for pair in pairs if pair in WHOLE_PRODUCTS and pair not in tiles]
    yield from _with(OF_PRODUCTS, [pair for pair in pairs if pair not in (*tiles, *whole)])
    yield from _with({"byte_weights": ("multiply_bytes",)}, whole)
    yield from _with({"byte_weights": ("round_rows",)}, (HALF,) if whole else ())
    yield from _with(OF_TILES, tiles)
    yield from _with({"amx": ("make_tiles",)}, (HALF,) if tiles else ())


def _sorted(found: list[Function]) -> list[Function]:
    return sorted(found, key=lambda each: -SECONDS.get(each.name, 0))


def _of_any_numbers() -> Iterator[Function]:
    for module, counts in OF_INTEGERS.items():
        for name, count in counts.items():
            yield Function(f"{COMPILED}.{module}", name, (INTEGER,) * count)
    yield from _with(OF_FLOATS, (FLOAT,))
    yield from _with(OF_HALVES, (HALF,))


def _with(names: Mapping[str, Sequence[str]], kinds: Sequence[Kind]) -> Iterator[Function]:
    """Operations (`hybrid.kernels.cpu.tasks`) for each of the kinds."""
    for module, own in names.items():
        for name in own:
            for kind in kinds:
                yield Function(f"{COMPILED}.{module}", name, (INTEGER, kind, INTEGER, INTEGER))
