"""SGLang's caches without a GPU and without most of what SGLang depends on, for tests."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from hybrid.doctor.absent_packages import AbsentFinder


def imitate() -> None:
    """Have absent packages imported as mocks from now on."""
    if not any(isinstance(finder, AbsentFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AbsentFinder())


def require_sglang() -> None:
    """Skip a file of tests where SGLang is not installed; else have it imported without what it may lack."""
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        pytest.skip("needs SGLang, in an environment of its own: make sglang", allow_module_level=True)
    imitate()
