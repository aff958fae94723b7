"""How a packed row of `hybrid.kernels.packed_kv` lies in memory: what compiled code knows of it. No torch."""

SCALE_BYTES = 4
"""Bytes of a scale. Rows are multiples of it, so that every scale is aligned."""

FP8_MAX = 448.0
"""The largest number of e4m3."""
