#!/usr/bin/env python
"""Our engine against transformers' own `generate`, on the same random Qwen3.5 of about 50M parameters, on a CPU.

    python bench/prefix_reuse.py [--runs 7] [--threads 1] [--json]

fp32, one thread, medians of runs that alternate between the sides. Each line is a ratio, with the mode that our side
ran in and the target that it should reach. Exit status 1 when a target is missed.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import Line, alternate, arguments, finish, machine, ratio, timed

from hybrid import CacheConfig, Engine, SamplingParams
from hybrid.engine.model_runner import Pending, Runner
from hybrid.engine.step import Step
from hybrid.hf.torch_functions import use_torch_functions

VOCAB = 8192
SHARED, NEW = 4096, 64
COLD = 1024
GROUP, GROUP_SHARED, GROUP_OWN, GROUP_NEW = 16, 1024, 32, 16
DECODED = 48

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


def save_random_model(path: Path, sizes: dict[str, int] | None = None) -> Any:
    """A random Qwen3.5, by default of about 50M parameters, saved by transformers; returns transformers' model."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(vocab_size=VOCAB, tie_word_embeddings=True, initializer_range=0.05, **(sizes or SIZES))
    model = Qwen3_5ForCausalLM(config).eval()
    use_torch_functions(model)
    model.save_pretrained(path)
    return model


class TimedRunner:
    """Computes steps by another runner on a CPU, and counts the seconds of passes and sampling."""

    def __init__(self, runner: Runner) -> None:
        self.seconds = 0.0
        self._runner = runner

    def plan(self, step: Step, under_way: Any) -> Any:
        return self._runner.plan(step, under_way)

    def launch(self, plan: Any) -> Pending:
        start = time.perf_counter()
        pending: Any = self._runner.launch(plan)
        pending.choose()
        self.seconds += time.perf_counter() - start
        return pending


class Sides:
    """The two sides: our engines, and transformers."""

    def __init__(self, path: Path, theirs: Any) -> None:
        self.theirs = theirs
        self.ours = Engine.from_pretrained(path, cache=CacheConfig(memory="1GiB"))
        self.fast = self.ours.with_cache(CacheConfig(memory="512MiB", deterministic=False))
        self._generator = torch.Generator().manual_seed(1)

    def ids(self, count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=self._generator).tolist()

    def group(self) -> list[list[int]]:
        shared = self.ids(GROUP_SHARED)
        return [shared + self.ids(GROUP_OWN) for _ in range(GROUP)]

    def first_token(self, engine: Engine, prompt: list[int]) -> float:
        output = engine.generate([prompt], SamplingParams(max_new_tokens=1), progress=False)[0]
        assert output.time_to_first_token is not None
        return output.time_to_first_token

    def decode(self, engine: Engine, count: int) -> float:
        """Seconds per token of `count` sequences together."""
        params = SamplingParams(max_new_tokens=DECODED, ignore_eos=True)
        outputs = engine.generate([self.ids(NEW) for _ in range(count)], params, progress=False)
        return 1 / statistics.median(output.tokens_per_second or 0.0 for output in outputs) / count

    def bookkeeping(self, count: int) -> tuple[float, float]:
        """Median seconds of what a step that decodes `count` sequences does besides computing, and of the whole."""
        fast = self.ours.with_cache(CacheConfig(memory="512MiB", deterministic=False))
        runner = TimedRunner(fast.runner)
        engine = Engine(fast.loaded, fast.cache, fast.config, runner=runner)
        for _ in range(count):
            engine.add_request(self.ids(NEW), SamplingParams(max_new_tokens=DECODED, ignore_eos=True))
        others, steps = [], []
        decoding: set[str] = set()
        while engine.has_work:
            runner.seconds = 0.0
            start = time.perf_counter()
            outputs = engine.step()
            spent = time.perf_counter() - start
            if len(decoding) == count == len(outputs):  # every sequence had its first token before
                others.append(spent - runner.seconds)
                steps.append(spent)
            decoding |= {output.request_id for output in outputs}
        return statistics.median(others), statistics.median(steps)

    def together(self, engine: Engine) -> float:
        engine.cache.clear()
        prompts, params = self.group(), SamplingParams(max_new_tokens=GROUP_NEW, ignore_eos=True)
        return timed(lambda: engine.generate(prompts, params, progress=False))

    def their_generate(self, prompts: list[list[int]], new: int) -> float:
        batch = torch.tensor(prompts)
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        return timed(lambda: self.theirs.generate(batch, attention_mask=torch.ones_like(batch), **options))

    def their_decode(self) -> float:
        prompt = [self.ids(NEW)]
        return (self.their_generate(prompt, DECODED + 1) - self.their_generate(prompt, 1)) / DECODED

    def their_group(self, batch: int) -> float:
        prompts = self.group()
        return sum(self.their_generate(prompts[at : at + batch], GROUP_NEW) for at in range(0, GROUP, batch))


def measure(sides: Sides, runs: int) -> list[Line]:
    document = sides.ids(SHARED)
    ours, fast, few = sides.ours, sides.fast, max(2, runs // 2)
    lines = []
    sides.first_token(ours, [*document, *sides.ids(NEW)])
    t = alternate(
        runs,
        hit=lambda: sides.first_token(ours, [*document, *sides.ids(NEW)]),
        alone=lambda: sides.first_token(ours, sides.ids(NEW)),
    )
    name = f"first token: hit {SHARED} + {NEW} new, over {NEW} alone"
    lines += [ratio(name, t, "hit", "alone", 1.3, at_most=True, part="deterministic")]
    t = alternate(
        few,
        transformers=lambda: sides.their_generate([sides.ids(COLD)], 1),
        ours=lambda: sides.first_token(ours, sides.ids(COLD)),
        ours_fast=lambda: sides.first_token(fast, sides.ids(COLD)),
    )
    name = f"cold prefill of {COLD}, times as fast as transformers"
    lines += [ratio(name, t, "transformers", "ours", 1.0, part="deterministic")]
    t = alternate(
        runs,
        transformers=sides.their_decode,
        one=lambda: sides.decode(fast, 1),
        one_deterministic=lambda: sides.decode(ours, 1),
        eight=lambda: sides.decode(fast, 8),
        eight_deterministic=lambda: sides.decode(ours, 8),
    )
    lines += [ratio("decode of one, times as fast as transformers", t, "transformers", "one", 1.2, part="fast")]
    lines += [ratio("decode of eight, tokens per second over those of one", t, "one", "eight", 3.0, part="fast")]
    for count in ("one", "eight"):
        name = f"cost of deterministic mode: decode of {count}, times as slow"
        lines += [ratio(name, t, f"{count}_deterministic", count, at_most=True, part="both")]
    shares = zip(*(sides.bookkeeping(8) for _ in range(few)), strict=True)
    t = dict(zip(("bookkeeping", "step"), map(statistics.median, shares), strict=True))
    name = "bookkeeping, part of a step that decodes eight"
    lines += [ratio(name, t, "bookkeeping", "step", 0.05, at_most=True, part="fast")]
    batches = {f"transformers_batch_{size}": (lambda size=size: sides.their_group(size)) for size in (4, 16)}
    t = alternate(few, ours=lambda: sides.together(ours), ours_fast=lambda: sides.together(fast), **batches)
    name = f"{GROUP} requests sharing {GROUP_SHARED}, together, times as fast as transformers in its best batch"
    best = min(batches, key=lambda batch: t[batch] or 0.0)
    lines += [ratio(name, t, best, "ours", 4.0, part="deterministic")]
    ours.cache.audit()
    fast.cache.audit()
    return lines


def main() -> int:
    args = arguments(__doc__, runs=7, threads=True).parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        theirs = save_random_model(Path(folder))
        lines = measure(Sides(Path(folder), theirs), args.runs)
    return finish(lines, machine(), args.json, parameters=sum(parameter.numel() for parameter in theirs.parameters()))


if __name__ == "__main__":
    sys.exit(main())
