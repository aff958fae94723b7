"""The dual-locked radix tree, and what decides what leaves it. Integers only: this room imports no torch."""

from hybrid.tree.tree import Tree

__all__ = ["Tree"]
