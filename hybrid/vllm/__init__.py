"""This project's tree and eviction inside vLLM: `--scheduler-cls hybrid.vllm.Scheduler`.

vLLM's lookup, block pool and workers stay. What needs vLLM is imported when its engine asks for the scheduler.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Scheduler"]


def __getattr__(name: str) -> Any:
    """Import the scheduler when it is asked for: the plugin is imported in every process of vLLM."""
    if name == "Scheduler":
        from hybrid.vllm.scheduler import Scheduler

        return Scheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
