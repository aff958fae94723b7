"""Skipping a file of tests where vLLM is not installed."""

from importlib import metadata

import pytest


def require_vllm() -> None:
    """Skip a file of tests where vLLM is not installed."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        pytest.skip("needs vLLM, in an environment of its own: make vllm", allow_module_level=True)
