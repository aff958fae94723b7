"""What memory holds, as compiled code names it: from the kinds of its arguments it is known what to compile."""

import torch

Kind = str | tuple[str, str]
"""Numba's name of a type of numbers, or those of two."""

INTEGER, FLOAT = "int64", "float32"

KINDS: dict[torch.dtype, str] = {torch.float32: FLOAT, torch.bfloat16: "uint16", torch.int8: "int8"}
"""The kind of numbers in memory of a type; arithmetic is fp32."""

SIGNATURES: tuple[Kind, ...] = (
    *KINDS.values(),
    *((first, second) for first in KINDS.values() for second in KINDS.values()),
)
"""The kinds that operations are compiled for: of one type of numbers, or of a weight and an output."""
