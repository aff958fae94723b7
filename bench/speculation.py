#!/usr/bin/env python
"""Decoding with drafts against decoding without them, on a CPU.

    python bench/speculation.py [--runs 5] [--only deterministic|fast] [--dtype float32] [--threads 1] [--json]

Seconds per token while all decode, of CPU with one thread, by the clock with several; medians of runs that alternate
between the sides, of the random model of `bench/model.py`, or the tiny one where that is said. For the line `edit` a
logits processor forces the known answer; running free the tiny one repeats itself. Status 1: a target missed.
"""

import random
import sys
import sysconfig
import time
from array import array
from collections import Counter
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path

import torch
from common import Line, alternate, arguments, finish, ratio
from model import VOCAB, greedy, ids, random_model

from hybrid import CacheConfig, Drafter, Engine, History, Key, SamplingParams, SpeculationConfig
from hybrid.speculation.cached import GramDrafter
from hybrid.speculation.grams import common_length

PROMPT, NEW, NEW_OF_EIGHT, CHANGED, MODES = 200, 128, 64, 0.04, {"deterministic": True, "fast": False}
MODULES = ("textwrap", "queue", "heapq", "shlex", "calendar", "csv", "fnmatch", "json/decoder")  # are continued
LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def source_of(module: str) -> str:
    return (LIBRARY / f"{module}.py").read_text(encoding="utf-8")


class Wrong(Drafter):
    """Drafts other tokens than those that come next."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers = answers

    def propose(self, history: History, limit: int) -> tuple[list[int], range]:
        done = len(history) - history.prompt_len
        known = self.answers[history[0]][done : done + limit]
        return [token ^ 1 for token in known], range(-1, len(known) - 1)


def forced(answer: list[int], own: list[int], row: torch.Tensor) -> torch.Tensor:
    """A row of logits of which the token of a known answer is chosen."""
    return row.index_fill(0, torch.tensor(answer[len(own)]), 1e6)


def decode(engine: Engine, prompts: list[list[int]], params: SamplingParams, usage: Counter[str], own: str) -> float:
    """Seconds per token from the last first token on, in a namespace, while all decode; `usage` adds up drafts."""
    for prompt in prompts:
        engine.add_request(prompt, params, namespace=own)
    outputs, start, before, clock = {}, 0.0, 0, time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    while not any(output.finish_reason for output in outputs.values()):
        outputs.update({output.request_id: output for output in engine.step()})
        if not start and len(outputs) == len(prompts):
            start, before = clock(), sum(len(output.token_ids) for output in outputs.values())
    spent = clock() - start
    for output in outputs.values():
        usage.update(drafted=output.usage.drafted_tokens, accepted=output.usage.accepted_tokens)
    while engine.has_work:  # the rest, and replays
        engine.step()
    return spent / (sum(len(output.token_ids) for output in outputs.values()) - before)


def apart(engine: Engine, prompts: list[list[int]], params: SamplingParams, usage: Counter[str], own: str) -> float:
    """The mean of `decode` for one prompt at a time."""
    return sum(decode(engine, [prompt], params, usage, own) for prompt in prompts) / len(prompts)


class Mode:
    """The lines of one mode."""

    def __init__(self, name: str, path: Path | str, dtype: str, runs: int) -> None:
        self.lines: list[Line] = []
        self.config = CacheConfig(memory="256MiB", deterministic=MODES[name])
        load = partial(Engine.from_pretrained, path, dtype=dtype, cache=self.config)
        self.plain = load()
        self.loaded = {"cache": self.plain, **({"mtp": load(speculation="mtp")} if path == "tiny" else {})}
        self._name, self._runs = name, runs

    def compare(
        self, name: str, prompts: list[list[int]], params: SamplingParams, target: float, *drafters: str | Drafter
    ) -> None:
        """The line of decoding with drafts, times as fast as without; for wrong ones times as slow. Both engines have
        answered before: where answers are regenerated they are cached, in other lines each run has its namespace."""
        usage: Counter[str] = Counter()
        engine, run = self.loaded["mtp" if "mtp" in drafters else "cache"], apart if "apart" in name else decode
        warm = engine.with_cache(self.config, speculation=SpeculationConfig(drafters=drafters))
        spaces, is_slower = repeat("") if name == "regenerate" else map(str, count()), "slow" in name
        for space in islice(spaces, 2):
            run(warm, prompts, params, Counter(), space)
        t = alternate(
            self._runs,
            none=lambda: run(self.plain, prompts, params, Counter(), ""),
            drafts=lambda: run(warm, prompts, params, usage, next(spaces)),
        )
        name = f"{name}, {len(prompts)} ({usage['accepted']} of {usage['drafted']} accepted)"
        sides = ("drafts", "none") if is_slower else ("none", "drafts")
        self.lines.append(ratio(name, t, *sides, target, at_most=is_slower, part=self._name))

    def of_random_model(self) -> list[Line]:
        for many, faster, new in ((1, 4.0, NEW), (8, 1.3, NEW_OF_EIGHT)):
            params = greedy(new)
            prompts = [[seed, *ids(PROMPT - 1)] for seed in range(many)]
            answers = [output.token_ids for output in self.plain.generate(prompts, params, progress=False)]
            self.compare("regenerate", prompts, params, faster, "cache")
            self.compare("never right, times as slow", prompts, params, 1.03, Wrong(dict(enumerate(answers))))
        document, changes = ids(NEW), random.Random(0)
        edited = [token if changes.random() > CHANGED else changes.randrange(VOCAB) for token in document]
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logits_processors=(partial(forced, edited),))
        self.compare("edit, forced", [document], params, 3.0, "cache")
        return self.lines

    def of_tiny_model(self) -> list[Line]:
        text = source_of("bisect")[:900]
        quoting = self.plain.tokenizer(text + "\n\n" + text[:90]).input_ids
        params = greedy(NEW)
        self.compare("tiny, free running", [quoting], params, 1.3, "cache")
        prompts = [self.plain.tokenizer(source_of(name)[:700]).input_ids for name in MODULES]
        self.compare("tiny, mtp, apart", prompts, params, 1.0, "mtp")
        self.compare("tiny, mtp", prompts, params, 1.0, "mtp")
        first, usage = SpeculationConfig(drafters=("mtp",), max_drafts=1, adaptive=False), Counter[str]()
        decode(self.loaded["mtp"].with_cache(self.config, speculation=first), prompts, params, usage, "")
        share = usage["accepted"] / usage["drafted"]
        self.lines.append(Line("tiny, mtp, share of first drafts accepted", share, 0.6, part=self._name))
        return self.lines


def of_drafting() -> list[Line]:
    """Drafting over the standard library's source in the tiny model's tokens; memory."""
    tiny, drafter = Engine.from_pretrained("tiny", cache=CacheConfig(memory="8MiB")), GramDrafter()
    tokens = seconds = 0.0
    for file in sorted(LIBRARY.glob("*.py"))[:60]:
        known = array("i", tiny.tokenizer(source_of(file.stem)[:20_000]).input_ids)
        own, start = known[:1], time.process_time()
        history = History(own, 1, "", partial(Key.of, known))
        while len(own) < len(known):  # as an answer that is accepted wherever the drafts are right
            drafts, *_ = drafter.propose(history, 7)
            after = known[len(own) : len(own) + 8]
            own.extend(after[: common_length(array("i", drafts), after) + 1])
        drafter.end(history)
        tokens, seconds = tokens + len(known), seconds + time.process_time() - start
    size = Line("index, bytes per token", drafter.num_bytes / drafter.num_tokens, 24, at_most=True)
    # Qwen3.5-9B in bfloat16: 24 linear layers, each 16 heads of q and k, 32 of v, all of 128, two gates per head of v
    log = Line("memory for 7 drafts, MiB", 7 * 24 * 2 * ((2 * 16 + 32) * 128 + 2 * 32) / 2**20, 8, at_most=True)
    return [Line(f"drafting, us per token of {tokens:,.0f}", 1e6 * seconds / tokens, 10, at_most=True), size, log]


def main() -> int:
    parser = arguments(__doc__, runs=5, threads=True)
    parser.add_argument("--only", choices=MODES, help="one mode alone")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    lines: list[Line] = []
    with random_model(args) as (path, _):
        for name in [args.only] if args.only else MODES:
            lines += Mode(name, path, args.dtype, args.runs).of_random_model()
            lines += Mode(name, "tiny", args.dtype, args.runs).of_tiny_model()
    return finish([*lines, *of_drafting()], args, dtype=args.dtype)


if __name__ == "__main__":
    sys.exit(main())
