"""A CPU needs none of the packages for GPUs: without them everything runs there, and a GPU's user is told what to
install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybrid import ArgumentError, Engine
from hybrid.kernels import ops

ROOT = Path(__file__).parent.parent

HIDES = """
import sys

class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("fla", "triton", "causal_conv1d"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hides())
"""

ENGINE = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
import hybrid
params, prompt = hybrid.SamplingParams(max_new_tokens=8), "A list is a mutable sequence of items. " * 20
cold, hit = (hybrid.Engine.from_pretrained("tiny", cache=hybrid.CacheConfig(memory="64MiB")) for _ in range(2))
hit.generate([prompt], params)
(expected,), (found,) = cold.generate([prompt], params), hit.generate([prompt], params)
assert found.text == expected.text and found.usage.cached_tokens > expected.usage.cached_tokens == 0
"""

INSIDE_TRANSFORMERS = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("models/tiny").eval()
ids = torch.arange(3, 203)[None]
plain = model.generate(ids, max_new_tokens=5, do_sample=False)
import hybrid
cache = hybrid.hf.PrefixCache(model, memory="64MiB", chunk_size=64)
answers = [cache.generate(ids, max_new_tokens=5, do_sample=False) for _ in range(2)]
assert cache.explanations[0].usable_hit > 0
assert all(torch.equal(answer, plain) for answer in answers)
"""


def run(code: str, folder: Path) -> str:
    """Return what a program prints where these packages are not found."""
    (folder / "sitecustomize.py").write_text(HIDES, encoding="utf-8")
    found = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    left_out = ("HYBRID_KERNELS", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": found, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_the_engine_runs_on_a_cpu_and_says_so_once(tmp_path: Path) -> None:
    printed = run(ENGINE, tmp_path)
    assert printed.count(ops.INSTALL_GPU) == 1


def test_the_cache_inside_transformers_runs_on_a_cpu(tmp_path: Path) -> None:
    run(INSIDE_TRANSFORMERS, tmp_path)


def test_a_gpu_without_triton_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRID_KERNELS", raising=False)
    monkeypatch.setattr(ops, "has_triton", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ArgumentError, match=r'pip install "hybrid-prefix-cache\[gpu\]"'):
        Engine.from_pretrained("tiny", device="cuda")
    with pytest.raises(RuntimeError, match="need Triton, which is not installed"):
        ops.implementation("rms_norm", torch.device("cuda"))
    ops.check_kernels(torch.device("cpu"))
    monkeypatch.setenv("HYBRID_KERNELS", "reference")
    ops.check_kernels(torch.device("cuda"))
