"""The engine for many tasks at once: asyncio."""

from hybrid.serve.async_engine import AsyncEngine

__all__ = ["AsyncEngine"]
