"""The dual-locked radix tree, and what decides what leaves it. Integers only: this room imports no torch."""

from hybrid.tree.lhd import LearnedHitDensity
from hybrid.tree.node import Checkpoint, Released
from hybrid.tree.tree import Tree

__all__ = ["Checkpoint", "LearnedHitDensity", "Released", "Tree"]
