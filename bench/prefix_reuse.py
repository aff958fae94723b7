#!/usr/bin/env python
"""Our engine against transformers' own `generate`, on the same random Qwen3.5 of about 50M parameters, on a CPU.

    python bench/prefix_reuse.py [--runs 7] [--threads 1] [--json]

fp32, one thread, medians of runs that alternate between the sides. Each line is a ratio with the target it should
reach; a line says in which mode our side ran. Exit status 1 when a target is missed.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import hybrid.engine.model_runner
from hybrid import CacheConfig, Engine, SamplingParams
from hybrid.engine.scheduler import Step
from hybrid.hf.torch_functions import use_torch_functions

VOCAB = 8192
SHARED, NEW = 4096, 64
COLD = 1024
GROUP, GROUP_SHARED, GROUP_OWN, GROUP_NEW = 16, 1024, 32, 16
DECODED = 48


@dataclass(frozen=True)
class Line:
    """One figure.

    Attributes:
        ratio: of medians; `target` is the least of it, or the most where `at_most`.
        seconds: the medians behind it.
    """

    name: str
    ratio: float
    target: float | None
    at_most: bool
    mode: str
    seconds: dict[str, float]

    @property
    def reached(self) -> bool:
        if self.target is None:
            return True
        return self.ratio <= self.target if self.at_most else self.ratio >= self.target


SIZES: dict[str, int] = {
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""Of the model."""


def save_random_model(path: Path) -> Any:
    """A random Qwen3.5 of about 50M parameters, written by transformers itself; returns transformers' model."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(vocab_size=VOCAB, tie_word_embeddings=True, initializer_range=0.05, **SIZES)
    model = Qwen3_5ForCausalLM(config).eval()
    use_torch_functions(model)
    model.save_pretrained(path)
    return model


class Sides:
    """The two sides: our engines, and transformers."""

    def __init__(self, path: Path, theirs: Any) -> None:
        self.theirs = theirs
        self.ours = Engine.from_pretrained(path, cache=CacheConfig(memory="1GiB"))
        self.fast = self.ours.with_cache(CacheConfig(memory="512MiB", deterministic=False))
        self._generator = torch.Generator().manual_seed(1)

    def ids(self, count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=self._generator).tolist()

    def first_token(self, engine: Engine, prompt: list[int]) -> float:
        output = engine.generate([prompt], SamplingParams(max_new_tokens=1), progress=False)[0]
        assert output.time_to_first_token is not None
        return output.time_to_first_token

    def decode(self, engine: Engine, count: int) -> float:
        """Seconds per token of `count` sequences together."""
        params = SamplingParams(max_new_tokens=DECODED, ignore_eos=True)
        outputs = engine.generate([self.ids(NEW) for _ in range(count)], params, progress=False)
        return 1 / statistics.median(output.tokens_per_second or 0.0 for output in outputs) / count

    def bookkeeping(self, engine: Engine) -> tuple[float, float]:
        """Seconds of bookkeeping (match, schedule, plan, commit, evict), and of the whole, per step that decodes eight
        sequences; medians over steps."""
        watch = Stopwatch(engine)
        for _ in range(8):
            engine.add_request(self.ids(NEW), SamplingParams(max_new_tokens=DECODED, ignore_eos=True))
        books, steps = [], []
        with watch:
            while engine.has_work:
                spent = timed(engine.step)
                if watch.decodes == 8:
                    books.append(watch.seconds)
                    steps.append(spent)
                watch.reset()
        return statistics.median(books), statistics.median(steps)

    def together(self, engine: Engine) -> float:
        engine.cache.clear()
        shared = self.ids(GROUP_SHARED)
        prompts = [shared + self.ids(GROUP_OWN) for _ in range(GROUP)]
        return timed(
            lambda: engine.generate(prompts, SamplingParams(max_new_tokens=GROUP_NEW, ignore_eos=True), progress=False)
        )

    def their_generate(self, prompts: list[list[int]], new: int) -> float:
        batch = torch.tensor(prompts)
        mask = torch.ones_like(batch)
        return timed(
            lambda: self.theirs.generate(
                batch, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False
            )
        )

    def their_decode(self) -> float:
        prompt = [self.ids(NEW)]
        return (self.their_generate(prompt, DECODED + 1) - self.their_generate(prompt, 1)) / DECODED

    def their_group(self, batch: int) -> float:
        shared = self.ids(GROUP_SHARED)
        prompts = [shared + self.ids(GROUP_OWN) for _ in range(GROUP)]
        return sum(self.their_generate(prompts[at : at + batch], GROUP_NEW) for at in range(0, GROUP, batch))


class Stopwatch:
    """Times what an engine does beside its forward passes, while it is entered."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine.scheduler
        self.seconds, self.decodes = 0.0, 0

    def reset(self) -> None:
        self.seconds, self.decodes = 0.0, 0

    def _timing(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = work(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            if isinstance(result, Step):
                self.decodes = sum(not part.is_prefill for part in result.parts)
            return result

        return timing

    def __enter__(self) -> None:
        for name in ("schedule", "commit", "finish"):
            setattr(self._scheduler, name, self._timing(getattr(self._scheduler, name)))
        runner = hybrid.engine.model_runner
        self._plan, runner.plan = runner.plan, self._timing(runner.plan)

    def __exit__(self, *_: object) -> None:
        for name in ("schedule", "commit", "finish"):
            delattr(self._scheduler, name)
        hybrid.engine.model_runner.plan = self._plan


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alternate(runs: int, bar: tqdm, **sides: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each side, the sides taking turns; the first turn only warms up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(runs + 1):
        for name, side in sides.items():
            spent = side()
            if run:
                times[name].append(spent)
        bar.update()
    return {name: statistics.median(values) for name, values in times.items()}


def measure(sides: Sides, runs: int) -> list[Line]:
    document = sides.ids(SHARED)
    ours, fast = sides.ours, sides.fast
    lines = []
    few = max(2, runs // 2)
    with tqdm(
        total=3 * (runs + 1) + 3 * (few + 1), desc="measuring", unit="run", disable=not sys.stderr.isatty()
    ) as bar:
        sides.first_token(ours, [*document, *sides.ids(NEW)])
        t = alternate(
            runs,
            bar,
            hit=lambda: sides.first_token(ours, [*document, *sides.ids(NEW)]),
            alone=lambda: sides.first_token(ours, sides.ids(NEW)),
        )
        name = f"first token: hit {SHARED} + {NEW} new, over {NEW} alone"
        lines.append(Line(name, t["hit"] / t["alone"], 1.3, True, "deterministic", t))
        t = alternate(
            few,
            bar,
            transformers=lambda: sides.their_generate([sides.ids(COLD)], 1),
            ours=lambda: sides.first_token(ours, sides.ids(COLD)),
            ours_fast=lambda: sides.first_token(fast, sides.ids(COLD)),
        )
        name = f"cold prefill of {COLD}, times as fast as transformers"
        lines.append(Line(name, t["transformers"] / t["ours"], 1.0, False, "deterministic", t))
        t = alternate(
            runs,
            bar,
            transformers=sides.their_decode,
            one=lambda: sides.decode(fast, 1),
            one_deterministic=lambda: sides.decode(ours, 1),
        )
        lines.append(
            Line("decode of one, times as fast as transformers", t["transformers"] / t["one"], 1.2, False, "fast", t)
        )
        cost = t["one_deterministic"] / t["one"]
        lines.append(Line("what deterministic mode costs: decode of one, times as slow", cost, None, True, "both", t))
        t = alternate(
            runs,
            bar,
            one=lambda: sides.decode(fast, 1),
            eight=lambda: sides.decode(fast, 8),
            eight_deterministic=lambda: sides.decode(ours, 8),
        )
        lines.append(
            Line("decode of eight, tokens per second over those of one", t["one"] / t["eight"], 3.0, False, "fast", t)
        )
        cost = t["eight_deterministic"] / t["eight"]
        lines.append(Line("what deterministic mode costs: decode of eight, times as slow", cost, None, True, "both", t))
        shares = [sides.bookkeeping(fast) for _ in range(few)]
        books, step = (statistics.median(values) for values in zip(*shares, strict=True))
        name = "bookkeeping, part of a step that decodes eight"
        lines.append(Line(name, books / step, 0.05, True, "fast", {"bookkeeping": books, "step": step}))
        batches = {f"transformers_batch_{size}": (lambda size=size: sides.their_group(size)) for size in (4, 16)}
        t = alternate(few, bar, ours=lambda: sides.together(ours), ours_fast=lambda: sides.together(fast), **batches)
        best = min(t[name] for name in batches)
        name = f"{GROUP} requests sharing {GROUP_SHARED}, together, times as fast as transformers in its best batch"
        lines.append(Line(name, best / t["ours"], 4.0, False, "deterministic", t))
    ours.cache.audit()
    fast.cache.audit()
    return lines


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="measured runs per side (default: 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        theirs = save_random_model(Path(folder))
        parameters = sum(parameter.numel() for parameter in theirs.parameters())
        lines = measure(Sides(Path(folder), theirs), args.runs)
    result = {
        "machine": machine(),
        "parameters": parameters,
        "lines": [{**asdict(line), "reached": line.reached} for line in lines],
    }
    if args.json:
        print(json.dumps(result))
    else:
        table = Table("", "figure", "ratio", "target", "mode", "medians")
        for line in lines:
            target = "" if line.target is None else f"{'<=' if line.at_most else '>='} {line.target}"
            medians = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in line.seconds.items())
            ratio = f"{line.ratio:.2f}" if line.ratio > 0.1 else f"{line.ratio:.4f}"
            table.add_row(
                "ok" if line.reached else "MISS",
                line.name,
                ratio,
                target,
                line.mode,
                medians,
            )
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(table)
        console.print(f"{parameters / 1e6:.1f}M parameters; {result['machine']}", highlight=False)
    return 0 if all(line.reached for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
