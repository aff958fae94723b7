#!/usr/bin/env python
"""Seeded synthetic traces of requests for `hit_rate.py`: the same bytes on every machine.

    python bench/traces.py --out DIR [--only lmsys fewshot]

Writes `NAME.jsonl`: one request a line, sorted by time of arrival, with `session_id, turn_id, ts, input_tokens,
output_tokens, num_input_tokens, num_output_tokens`, as in the artifact of Marconi. The input of a turn is all before it
in its session, and new tokens. Lengths are drawn from clipped log-normal distributions; no request has more than 32768
tokens of input.

| trace | what it imitates |
|---|---|
| sharegpt | 100 long chats with long answers |
| lmsys | 100 chats of short turns; 8 % open with one of 8 popular prompts |
| swebench | 60 coding agents with a common system prompt, which drop old observations from the middle of the history |
| swebench_nc | the same agents, which only append |
| fewshot | 40 system prompts of Zipf popularity, 3 variants of examples each; a fifth of the requests has a next turn |

Three more are made against policies that learn; `hit_rate.py --adversarial` makes them itself, for memory of `MEMORY`:

| trace | what it does |
|---|---|
| scan | chats go on, and twice 400 prompts come that are never seen again |
| loop | prompts are repeated in turn, a tenth more of them than fit |
| switch | a loop, then prompts that are asked three times in short succession and never again |
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, CONTEXT = 32000, 32768
USER, ASSISTANT = [1, 29912, 4], [1, 29913, 5]
"""Tokens of the chat template before each message."""

Request = dict[str, Any]
Length = tuple[float, float, int, int]
"""Median, sigma, least and greatest of a clipped log-normal distribution."""


def draw(rng: np.random.Generator, length: Length) -> int:
    """A random length."""
    median, sigma, low, high = length
    return int(np.clip(np.round(np.exp(rng.normal(np.log(median), sigma))), low, high))


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    """Random token ids."""
    return rng.integers(3, VOCAB, count).tolist()


def some(rng: np.random.Generator, length: Length) -> list[int]:
    """Random token ids, a random number of them."""
    return tokens(rng, draw(rng, length))


def request(session: int, turn: int, ts: float, given: list[int], answer: list[int]) -> Request:
    return {"session_id": session, "turn_id": turn, "ts": ts, "input_tokens": given, "output_tokens": answer}


def chats(
    user: Length, answer: Length, *, mean_turns: float, popular_share: float, seed: int, scale: int = 1
) -> list[Request]:
    """A hundred chats, one begun each second; a user types 90 words a minute."""
    rng = np.random.default_rng(seed)
    popular = [some(rng, (200, 0.8, 30, 1500)) for _ in range(8)]
    made = []
    for session in range(100 * scale):
        ts, history = session / scale, []
        for turn in range(min(10 + int(rng.exponential(mean_turns)), 60)):
            asked = USER + some(rng, user)
            if turn == 0 and rng.random() < popular_share:
                asked = USER + popular[int(rng.zipf(1.6)) % 8] + tokens(rng, 6)
            answered = ASSISTANT + some(rng, answer)
            if len(history) + len(asked) + len(answered) > CONTEXT:
                break
            ts += len(asked) / 1.3 / 1.5 if turn else 0.0
            made.append(request(session, turn, ts, history + asked, answered))
            history = history + asked + answered
    return made


def agents(*, drops: bool, seed: int, kept: int = 5, scale: int = 1) -> list[Request]:
    """Sixty agents, one begun each two seconds. Those that drop keep the observations of the last `kept` turns."""
    rng = np.random.default_rng(seed)
    system = tokens(rng, 1400)
    made = []
    for session in range(60 * scale):
        ts, pairs = session / 0.5 / scale, []
        for turn in range(int(np.clip(rng.normal(32, 12), 6, 51))):
            history = [token for pair in pairs for message in pair for token in message]
            task = system + some(rng, (900, 0.7, 100, 6000)) if turn == 0 else some(rng, (350, 1.45, 12, 9000))
            asked, answered = USER + task, ASSISTANT + some(rng, (120, 0.8, 20, 1500))
            ts += float(rng.poisson(7.5)) if turn else 0.0
            if len(history) + len(asked) > CONTEXT:
                break
            made.append(request(session, turn, ts, history + asked, answered))
            if drops and sum(len(pair) == 2 for pair in pairs) > kept:
                pairs[-kept] = pairs[-kept][1:]
            pairs.append([asked, answered])
    return made


def fewshot(*, seed: int, groups: int = 40, scale: int = 1) -> list[Request]:
    """2000 requests or one more, four a second."""
    rng = np.random.default_rng(seed)
    systems = [tokens(rng, int(length)) for length in rng.integers(600, 6001, groups)]
    examples = [[some(rng, (800, 0.5, 100, 3000)) for _ in range(3)] for _ in range(groups)]
    weights = 1.0 / np.arange(1, groups + 1)
    weights /= weights.sum()
    short: Length = (80, 0.8, 4, 800)
    made: list[Request] = []
    session, ts = 0, 0.0
    while len(made) < 2000 * scale:
        ts += float(rng.exponential(1.0 / 4.0 / scale))
        group, variant = int(rng.choice(groups, p=weights)), int(rng.choice(3, p=[0.6, 0.3, 0.1]))
        asked = systems[group] + examples[group][variant] + USER + some(rng, (120, 0.8, 8, 1500))
        answered = ASSISTANT + some(rng, short)
        made.append(request(session, 0, ts, asked, answered))
        if rng.random() < 0.2:
            more, last = USER + some(rng, (60, 0.8, 4, 800)), ASSISTANT + some(rng, short)
            made.append(request(session, 1, ts + float(rng.exponential(20.0)), asked + answered + more, last))
        session += 1
    return made


def scan(*, seed: int, scale: int = 1) -> list[Request]:
    """Twelve chats of 1200 requests, at random; after each 400 of them 400 prompts that are never seen again."""
    rng = np.random.default_rng(seed)
    histories: list[list[int]] = [[] for _ in range(12)]
    made: list[Request] = []
    for _ in range(3 * scale):
        for _ in range(400):
            session = int(rng.integers(len(histories)))
            if len(histories[session]) > 12000:
                histories[session] = []
            asked, answered = histories[session] + USER + tokens(rng, 400), ASSISTANT + tokens(rng, 200)
            made.append(request(session, 0, float(len(made)), asked, answered))
            histories[session] = asked + answered
        for _ in range(400):
            made.append(request(len(made), 0, float(len(made)), tokens(rng, 2000), tokens(rng, 64)))
    return made[:-400]


def loop(*, seed: int, scale: int = 1, requests: int = 1200) -> list[Request]:
    """28 prompts of 4096 tokens in turn: with their states they need a tenth more than `MEMORY`."""
    rng = np.random.default_rng(seed)
    prompts = [tokens(rng, 4096 + 64) for _ in range(28)]
    made = []
    for at in range(requests * scale):
        made.append(request(at % len(prompts), 0, float(at), prompts[at % len(prompts)], tokens(rng, 16)))
    return made


def switch(*, seed: int, scale: int = 1) -> list[Request]:
    """The loop, and then 1200 requests for 400 prompts, each three times within sixteen requests."""
    rng = np.random.default_rng(seed + 1)
    made = loop(seed=seed, scale=scale, requests=1000)
    coming = []
    for at in range(400 * scale):
        asked = tokens(rng, 4096 + 64)
        coming += [(3.0 * at + float(delay), at, asked) for delay in (0, *rng.uniform(0, 16, 2))]
    for ts, session, asked in sorted(coming, key=lambda one: one[:2]):
        made.append(request(1000 + session, 0, 1000.0 * scale + ts, asked, tokens(rng, 16)))
    return made


MEMORY = 4.5
"""GB for which the adversarial traces are made, with Qwen3.5-4B's shape."""

ADVERSARIAL: dict[str, Callable[..., list[Request]]] = {
    "scan": partial(scan, seed=5),
    "loop": partial(loop, seed=6),
    "switch": partial(switch, seed=7),
}

TRACES: dict[str, Callable[..., list[Request]]] = {
    "sharegpt": partial(chats, (50, 1.2, 4, 4000), (300, 0.8, 8, 2000), mean_turns=12.0, popular_share=0.02, seed=1),
    "lmsys": partial(chats, (25, 1.2, 4, 4000), (180, 0.8, 8, 2000), mean_turns=4.0, popular_share=0.08, seed=2),
    "swebench": partial(agents, drops=True, seed=3),
    "swebench_nc": partial(agents, drops=False, seed=3),
    "fewshot": partial(fewshot, seed=4),
}


def make(name: str, seed: int | None = None, scale: int = 1) -> list[Request]:
    """The requests of a trace, in order of arrival; with another seed than the trace's own they are others alike.

    Args:
        scale: times as many sessions, in the same time.
    """
    given = {} if seed is None else {"seed": seed}
    made = sorted(
        {**TRACES, **ADVERSARIAL}[name](scale=scale, **given),
        key=lambda one: (one["ts"], one["session_id"], one["turn_id"]),
    )
    for one in made:
        one |= {"num_input_tokens": len(one["input_tokens"]), "num_output_tokens": len(one["output_tokens"])}
    return made


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("traces"), help="the folder to write to (default: traces)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*TRACES, *ADVERSARIAL],
        default=list(TRACES),
        help="traces (default: the first five)",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        made = make(name)
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made), encoding="utf-8")
        print(f"{name}: {len(made)} requests, {sum(one['num_input_tokens'] for one in made)} tokens of input")
    return 0


if __name__ == "__main__":
    sys.exit(main())
