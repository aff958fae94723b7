#!/usr/bin/env python
"""Our engine against transformers' own `generate`, on the same random Qwen3.5 of about 50M parameters, on a CPU.

    python bench/prefix_reuse.py [--runs 7] [--threads 1] [--json]

fp32, one thread, medians of runs that alternate between the sides. Each line is a ratio, with the mode that our side
ran in and the target that it should reach. Exit status 1 when a target is missed.
"""

import statistics
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from common import Line, alternate, arguments, finish, ratio, timed
from model import decode_step, first_token, greedy, ids, random_model

from hybrid import CacheConfig, Engine

SHARED, NEW = 4096, 64
COLD = 1024
GROUP, GROUP_SHARED, GROUP_OWN, GROUP_NEW = 16, 1024, 32, 16
DECODED = 48


def group() -> list[list[int]]:
    shared = ids(GROUP_SHARED)
    return [shared + ids(GROUP_OWN) for _ in range(GROUP)]


def together(engine: Engine) -> float:
    """Seconds of a group of requests that share the beginning of their prompts."""
    engine.cache.clear()
    prompts = group()
    return timed(lambda: engine.generate(prompts, greedy(GROUP_NEW), progress=False))


def theirs(model: Any, prompts: list[list[int]], new: int) -> float:
    """Seconds of transformers."""
    batch = torch.tensor(prompts)
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    return timed(lambda: model.generate(batch, attention_mask=torch.ones_like(batch), **options))


def their_decode(model: Any) -> float:
    prompt = [ids(NEW)]
    return (theirs(model, prompt, DECODED + 1) - theirs(model, prompt, 1)) / DECODED


def their_group(model: Any, batch: int) -> float:
    prompts = group()
    return sum(theirs(model, prompts[at : at + batch], GROUP_NEW) for at in range(0, GROUP, batch))


def bookkeeping(engine: Engine, count: int) -> tuple[float, float]:
    """Median seconds of what a step that decodes `count` sequences does besides computing, and of the whole."""
    launch, computing = engine.runner.launch, [0.0]

    def timed_launch(plan: Any) -> Any:
        start = perf_counter()
        pending: Any = launch(plan)
        pending.tokens()
        computing[0] = perf_counter() - start
        return pending

    others, steps = [], []
    for _ in range(count):
        engine.add_request(ids(NEW), greedy(DECODED))
    with patch.object(engine.runner, "launch", timed_launch):
        begun = set[str]()
        while engine.has_work:
            start = perf_counter()
            outputs = engine.step()
            spent = perf_counter() - start
            if len(begun) == count == len(outputs):  # every sequence had its first token before
                others.append(spent - computing[0])
                steps.append(spent)
            begun |= {output.request_id for output in outputs}
    return statistics.median(others), statistics.median(steps)


def measure(path: Path, model: Any, runs: int) -> list[Line]:
    ours = Engine.from_pretrained(path, dtype="float32", cache=CacheConfig(memory="1GiB"))
    fast = ours.with_cache(CacheConfig(memory="1GiB", deterministic=False))
    document, few, lines = ids(SHARED), max(2, runs // 2), []
    first_token(ours, document + ids(NEW))
    t = alternate(
        runs,
        hit=lambda: first_token(ours, document + ids(NEW)),
        alone=lambda: first_token(ours, ids(NEW)),
    )
    name = f"first token: hit {SHARED} + {NEW} new, over {NEW} alone"
    lines += [ratio(name, t, "hit", "alone", 1.3, at_most=True, part="deterministic")]
    t = alternate(
        few,
        transformers=lambda: theirs(model, [ids(COLD)], 1),
        ours=lambda: first_token(ours, ids(COLD)),
        ours_fast=lambda: first_token(fast, ids(COLD)),
    )
    name = f"cold prefill of {COLD}, times as fast as transformers"
    lines += [ratio(name, t, "transformers", "ours", 1.3, part="deterministic")]
    t = alternate(
        runs,
        transformers=lambda: their_decode(model),
        one=lambda: decode_step(fast, 1, NEW, DECODED),
        one_deterministic=lambda: decode_step(ours, 1, NEW, DECODED),
        eight=lambda: decode_step(fast, 8, NEW, DECODED) / 8,
        eight_deterministic=lambda: decode_step(ours, 8, NEW, DECODED) / 8,
    )
    lines += [ratio("decode of one, times as fast as transformers", t, "transformers", "one", 2.0, part="fast")]
    lines += [ratio("decode of eight, tokens per second over those of one", t, "one", "eight", 3.0, part="fast")]
    for count in ("one", "eight"):
        name = f"cost of deterministic mode: decode of {count}, times as slow"
        lines += [ratio(name, t, f"{count}_deterministic", count, at_most=True, part="both")]
    own = fast.with_cache(CacheConfig(memory="512MiB", deterministic=False))
    shares = zip(*(bookkeeping(own, 8) for _ in range(few)), strict=True)
    t = dict(zip(("bookkeeping", "step"), map(statistics.median, shares), strict=True))
    name = "bookkeeping, part of a step that decodes eight"
    lines += [ratio(name, t, "bookkeeping", "step", 0.05, at_most=True, part="fast")]
    batches = {f"transformers_batch_{size}": partial(their_group, model, size) for size in (4, 16)}
    t = alternate(few, ours=lambda: together(ours), ours_fast=lambda: together(fast), **batches)
    name = f"{GROUP} requests sharing {GROUP_SHARED}, together, times as fast as transformers in its best batch"
    lines += [ratio(name, t, min(batches, key=lambda batch: t[batch] or 0.0), "ours", 4.0, part="deterministic")]
    ours.cache.audit()
    fast.cache.audit()
    return lines


def main() -> int:
    args = arguments(__doc__, runs=7, threads=True).parse_args()
    with random_model(args) as (path, model):
        return finish(measure(path, model, args.runs), args, parameters=model.num_parameters())


if __name__ == "__main__":
    sys.exit(main())
