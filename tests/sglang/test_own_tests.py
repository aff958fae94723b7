"""SGLang's own unit tests of its cache on this backend: what passes on SGLang's core must pass, or it is said why."""

import os
from pathlib import Path
from typing import Any

import pytest

from support.sglang_absent import require_sglang

require_sglang()

from support.sglang_own import FILE, cases_of, run  # noqa: E402

PAGED = {"enable_mamba_extra_buffer": True, "mamba_cache_size": 60, "kv_size": 2048, "max_context_len": 2048}

CONFIGS: list[dict[str, Any]] = [
    {"page_size": 1},
    {"page_size": 1, **PAGED},
    *({"page_size": size, **PAGED} for size in (2, 4, 16, 32, 64, 128)),
    *({"page_size": size, "eviction_policy": name, **PAGED} for size in (4, 64) for name in ("lfu", "priority", "lhd")),
]
"""SGLang's own tests run on the first, and on pages of 4, 64 and 128."""

INSIDE = "looks into SGLang's Python core, at what is private there"
EXPLAINED = {
    "test_evict_cascade_parent_becomes_d_leaf": INSIDE,  # its set of leaves that can be evicted
    "test_tombstone_cleanup_respects_locked_parent": INSIDE,  # calls a method of it, which 0.5.23 has changed
}
"""Tests that fail on this backend, and why that is right."""


def test_sglangs_own_tests_pass_or_are_explained() -> None:
    given = os.environ.get("SGLANG_SOURCE", "")
    if not Path(given, FILE).is_file():
        pytest.skip("needs SGLang's repository in SGLANG_SOURCE: `make sglang` fetches it where it can be reached")
    python, hybrid = (dict(cases_of(Path(given), backend)) for backend in ("python", "hybrid"))
    num_valid, failures = 0, []
    for config in CONFIGS:
        theirs = {**config, "eviction_policy": config.get("eviction_policy", "lru").replace("lhd", "lru")}
        for name in python:
            if run(python[name], name, **theirs) == "":
                num_valid += 1
                failure = run(hybrid[name], name, **config)
                if failure:
                    failures.append((name, EXPLAINED.get(name, "not explained"), failure, config))
    print(f"{num_valid} runs are valid, {num_valid - len(failures)} pass;", *failures, sep="\n")
    assert num_valid >= 200
    assert [failure for failure in failures if failure[0] not in EXPLAINED or "no attribute" not in failure[2]] == []
    assert len(failures) < num_valid / 10
