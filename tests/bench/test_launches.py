"""The launches of a pass of the model, counted without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_launches_of_a_model_with_the_layers_of_qwen() -> None:
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "launches.py"), "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "HYBRID_"))}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    lines = {line["name"]: line for line in json.loads(ended.stdout)["lines"]}
    for what, most in (("decode step", 313), ("prefill of 64", 401)):
        for mode in ("fast", "deterministic"):
            line = lines[f"{what}, {mode}, launches"]
            assert line["value"] <= most
            assert line["medians"]["small operations"] <= 7
        assert lines[f"{what}, fast, launches"]["medians"]["products"] == 129
        # in deterministic mode our own kernels multiply, the same weights
        kernels = lines[f"{what}, deterministic, launches"]["details"]["kernels"]
        assert sum(count for name, count in kernels.items() if name in ("_decode_kernel", "_prompt_kernel")) == 129
