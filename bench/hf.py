#!/usr/bin/env python
"""`hybrid.hf.PrefixCache` against transformers' plain `generate`, on the random Qwen3.5 of `bench/prefix_reuse.py`.

    python bench/hf.py [--runs 5] [--threads 1] [--clock wall] [--json]

fp32, runs that alternate between the sides: medians, and for prompts that nobody has seen means over lengths that lie
evenly in a chunk. Each line is a ratio with the target it should reach. With `--clock cpu` seconds are those of this
process, for a machine that others use too. Exit status 1 when a target is missed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from prefix_reuse import VOCAB, Line, alternate, machine, save_random_model
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

import hybrid
from hybrid.hf.prefix_cache import PrefixCache

TURN, ANSWER = 1301, 64
"""Three turns of so many tokens, and the answers between them: a chat of 4k tokens."""

SHORT = 64
"""A short last turn."""

CHUNK = 256
"""Tokens of a chunk in deterministic mode."""

COLD = (1024, 4096)
"""Tokens of prompts that nobody has seen, and up to a chunk more."""

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Tokens(BaseStreamer):
    """Notes when tokens came: `generate` puts the prompt, then token after token."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start = clock()
        self.seconds: list[float] = []

    def put(self, value: Tensor) -> None:
        self.seconds.append(self._clock() - self._start)

    def end(self) -> None:
        pass


class Sides:
    """transformers, and our cache in both modes."""

    def __init__(self, model: Any, clock: Callable[[], float]) -> None:
        self.model = model
        self.ours = PrefixCache(model, "512MiB")
        self.fine = PrefixCache(model, "512MiB", deterministic=False)
        self._clock = clock
        self._generator = torch.Generator().manual_seed(1)

    def ids(self, count: int) -> Tensor:
        return torch.randint(3, VOCAB, (1, count), generator=self._generator)

    def first_token(self, generate: Callable[..., Any], prompt: Tensor) -> float:
        streamer = Tokens(self._clock)
        generate(prompt, max_new_tokens=1, do_sample=False, streamer=streamer)
        return streamer.seconds[1]

    def answered(self, generate: Callable[..., Any], prompt: Tensor) -> float:
        start = self._clock()
        generate(prompt, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False)
        return self._clock() - start

    def two_turns(self) -> Tensor:
        """A chat of two turns, answered through both caches (the answers are the same within rounding)."""
        chat = self.ids(TURN)
        for _ in range(2):
            chat = self.ours.generate(chat, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False)
            self.fine.keep(chat[0].tolist())
            chat = torch.cat([chat, self.ids(TURN)], 1)
        return chat[:, :-TURN]


def over_a_chunk(sides: Sides, count: int, runs: int, bar: tqdm, **generates: Callable[..., Any]) -> dict[str, float]:
    """Mean seconds until a call returns, its answer kept, the sides taking turns. The lengths of the prompts are spread
    evenly over a chunk: where a prompt ends in its chunk decides how much of it is computed again with the answer."""
    totals = dict.fromkeys(generates, 0.0)
    for run in range(runs):
        length = count + run * CHUNK // runs
        for name, generate in generates.items():
            totals[name] += sides.answered(generate, sides.ids(length))
        bar.update()
    return {name: total / runs for name, total in totals.items()}


def measure(sides: Sides, runs: int) -> list[Line]:
    lines = []
    model, ours, fine = sides.model.generate, sides.ours.generate, sides.fine.generate
    with tqdm(total=2 * (runs + 1) + 2 * runs, desc="measuring", unit="run", disable=not sys.stderr.isatty()) as bar:
        chat = sides.two_turns()
        for new, target in ((TURN, 1.3), (SHORT, None)):
            t = alternate(
                runs,
                bar,
                third=lambda new=new: sides.first_token(ours, torch.cat([chat, sides.ids(new)], 1)),
                third_fine=lambda new=new: sides.first_token(fine, torch.cat([chat, sides.ids(new)], 1)),
                alone=lambda new=new: sides.first_token(model, sides.ids(new)),
            )
            name = f"first token of a third turn of {new} tokens after {chat.shape[1]}, over the turn alone"
            lines.append(Line(name, t["third"] / t["alone"], target, True, "deterministic", t))
            lines.append(Line(name, t["third_fine"] / t["alone"], target, True, "not deterministic", t))
        for count in COLD:
            t = over_a_chunk(sides, count, runs, bar, plain=model, cold=ours, cold_fine=fine)
            name = f"{ANSWER} tokens after {count} to {count + CHUNK} that nobody has seen, over plain generate"
            lines.append(Line(name, t["cold"] / t["plain"], 1.05, True, "deterministic", t))
            lines.append(Line(name, t["cold_fine"] / t["plain"], 1.05, True, "not deterministic", t))
    sides.ours.audit()
    sides.fine.audit()
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="measured runs per side (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="whose seconds (default: wall)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = save_random_model(Path(folder))
    lines = measure(Sides(model, CLOCKS[args.clock]), args.runs)
    result = {
        "machine": {**machine(), "clock": args.clock, "hybrid": hybrid.__version__},
        "lines": [{**asdict(line), "reached": line.reached} for line in lines],
    }
    if args.json:
        print(json.dumps(result))
    else:
        table = Table("", "figure", "ratio", "target", "mode", "seconds")
        for line in lines:
            seconds = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in line.seconds.items())
            target = "" if line.target is None else f"<= {line.target}"
            table.add_row("ok" if line.reached else "MISS", line.name, f"{line.ratio:.2f}", target, line.mode, seconds)
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(table)
        console.print(result["machine"], highlight=False)
    return 0 if all(line.reached for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
