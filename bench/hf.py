#!/usr/bin/env python
"""`hybrid.hf.PrefixCache` against transformers' plain `generate`, on the random Qwen3.5 of `bench/prefix_reuse.py`.

    python bench/hf.py [--runs 5] [--threads 1] [--json]

fp32, runs that alternate between the sides: medians, and for new prompts means over lengths that are spread evenly over
a chunk. Each line is a ratio with the target it should reach. Exit status 1 when a target is missed.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Line, Medians, alternate, arguments, finish, machine, ratio, timed
from prefix_reuse import VOCAB, save_random_model
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hybrid.hf.prefix_cache import PrefixCache

TURN, ANSWER, FEW = 1301, 64, 16
"""Tokens of each of three turns, of the answers between them (a chat of 4k tokens), and of those to the last turn."""

SHORT = 64
"""Tokens of a short last turn."""

CHUNK = 128
"""Tokens of a chunk in deterministic mode."""

COLD = (1024, 4096)
"""Tokens of new prompts, and up to a chunk more."""


class Tokens(BaseStreamer):
    """Records when tokens came: `generate` puts the prompt, then one token after another."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: list[float] = []

    def put(self, value: Tensor) -> None:
        self.seconds.append(time.perf_counter() - self._start)

    def end(self) -> None:
        pass


class Sides:
    """transformers, and our cache in both modes."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.ours = PrefixCache(model, "512MiB")
        self.fine = PrefixCache(model, "512MiB", deterministic=False)
        self._generator = torch.Generator().manual_seed(1)

    def ids(self, count: int) -> Tensor:
        return torch.randint(3, VOCAB, (1, count), generator=self._generator)

    def first_token(self, generate: Callable[..., Any], prompt: Tensor) -> float:
        streamer = Tokens()
        generate(prompt, max_new_tokens=FEW, do_sample=False, streamer=streamer)
        return streamer.seconds[1]

    def answered(self, generate: Callable[..., Any], prompt: Tensor) -> float:
        return timed(lambda: generate(prompt, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False))

    def two_turns(self) -> Tensor:
        """A chat of two turns, answered through both caches (the answers are the same within rounding)."""
        chat = self.ids(TURN)
        for _ in range(2):
            chat = self.ours.generate(chat, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False)
            self.fine.keep(chat[0].tolist())
            chat = torch.cat([chat, self.ids(TURN)], 1)
        return chat[:, :-TURN]

    def over_a_chunk(self, count: int, runs: int, **generates: Callable[..., Any]) -> Medians:
        """Mean seconds until a call returns, its answer kept, the sides taking turns. The lengths of the prompts are
        spread evenly over a chunk: where a prompt ends in its chunk decides how much of it is computed again."""
        totals = dict.fromkeys(generates, 0.0)
        for run in range(runs):
            for name, generate in generates.items():
                totals[name] += self.answered(generate, self.ids(count + run * CHUNK // runs))
        return {name: total / runs for name, total in totals.items()}


def measure(sides: Sides, runs: int) -> list[Line]:
    lines = []
    model, ours, fine = sides.model.generate, sides.ours.generate, sides.fine.generate

    def both(name: str, t: Medians, over: str, under: str, target: float | None) -> None:
        for side, mode in ((over, "deterministic"), (f"{over}_fine", "not deterministic")):
            lines.append(ratio(name, t, side, under, target, at_most=True, part=mode))

    chat = sides.two_turns()
    for new, target in ((TURN, 1.3), (SHORT, None)):
        t = alternate(
            runs,
            third=lambda new=new: sides.first_token(ours, torch.cat([chat, sides.ids(new)], 1)),
            third_fine=lambda new=new: sides.first_token(fine, torch.cat([chat, sides.ids(new)], 1)),
            alone=lambda new=new: sides.first_token(model, sides.ids(new)),
        )
        name = f"first token of a third turn of {new} tokens after {chat.shape[1]}, over the turn alone"
        both(name, t, "third", "alone", target)
    for count in COLD:
        t = sides.over_a_chunk(count, runs, plain=model, cold=ours, cold_fine=fine)
        name = f"{ANSWER} tokens after a new prompt of {count} to {count + CHUNK}, over plain generate"
        both(name, t, "cold", "plain", 1.05)
    sides.ours.audit()
    sides.fine.audit()
    return lines


def main() -> int:
    args = arguments(__doc__, runs=5, threads=True).parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = save_random_model(Path(folder))
    lines = measure(Sides(model), args.runs)
    return finish(lines, machine(), args.json)


if __name__ == "__main__":
    sys.exit(main())
