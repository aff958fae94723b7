"""The engine: prompts in, text out, the prefix cache in between."""

from hybrid.engine.engine import Engine

__all__ = ["Engine"]
