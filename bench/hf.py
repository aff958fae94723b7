#!/usr/bin/env python
"""`hybrid.hf.PrefixCache` against transformers' plain `generate`, on the random Qwen3.5 of `bench/model.py`.

    python bench/hf.py [--runs 5] [--threads 1] [--json]
    python bench/hf.py --turn [--runs 15]                   # short turns and new prompts of three small models

fp32, seconds of CPU time, in runs that alternate between the sides: medians, and means over lengths that are spread
evenly over a chunk where it matters how full the last one is. Each line is a ratio, some with the target it should
reach. Exit status 1 when a target is missed.
"""

import copy
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import Line, Medians, alternate, arguments, finish, ratio
from model import ids, random_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

from hybrid.commands.random_checkpoints import FAMILIES
from hybrid.commands.random_checkpoints import random_model as random_of_family
from hybrid.hf.installed import as_argument
from hybrid.hf.prefix_cache import PrefixCache
from hybrid.models.loading import TINY
from hybrid.models.torch_functions import use_torch_functions

TURN, ANSWER, FEW = 1301, 64, 16
"""Tokens of each of three turns, of the answers between them (a chat of 4k tokens), and of those to the last turn."""

SHORT, OPENING, END = 64, 4, 2
"""Tokens of a short last turn, those after its end with which an answer begins, and the token that ends turns."""

CHUNK = 128
"""Tokens of a chunk in deterministic mode."""

COLD = (1024, 4096)
"""Tokens of new prompts, and up to a chunk more."""

CACHED, NEW, FOLLOWING = 1280, 512, 32
"""With `--turn`: tokens of a chat that is cached, those of a new prompt, and those of its answer."""

SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
}
"""Of the small model inside the package, a Qwen3.5; random ones of other families get the same."""

STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_d_state": 64}
OTHERS: dict[str, dict[str, Any]] = {
    "bamba": {**SMALL, **STATE_SPACE, "attn_layer_indices": [3]},
    "lfm2": {**SMALL, "layer_types": [*["conv"] * 3, "full_attention"], "block_auto_adjust_ff_dim": False},
}


class Tokens(BaseStreamer):
    """Records when tokens came: `generate` puts the prompt, then one token after another."""

    def __init__(self) -> None:
        self._start = time.process_time()
        self.seconds: list[float] = []

    def put(self, value: Tensor) -> None:
        self.seconds.append(time.process_time() - self._start)

    def end(self) -> None:
        pass


def prompt(count: int) -> Tensor:
    return torch.tensor([ids(count)])


def small_prompt(count: int) -> Tensor:
    """Of the small models, which have fewer tokens; none of them ends a turn."""
    return 3 + prompt(count) % (SMALL["vocab_size"] - 3)


def turn(count: int) -> Tensor:
    """Tokens that end a turn, and those with which an answer begins."""
    return torch.cat([prompt(count - OPENING - 1), torch.tensor([[END]]), prompt(OPENING)], 1)


def first_token(generate: Callable[..., Any], tokens: Tensor, past: DynamicCache | None = None) -> float:
    streamer = Tokens()
    generate(
        tokens, **({} if past is None else as_argument(past)), max_new_tokens=FEW, do_sample=False, streamer=streamer
    )
    return streamer.seconds[1]


def answered(generate: Callable[..., Any], tokens: Tensor) -> Any:
    """With an answer that ends its turn."""
    return generate(tokens, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, forced_eos_token_id=END)


def over_a_chunk(count: int, runs: int, **generates: Callable[..., Any]) -> Medians:
    """Mean seconds until a call returns, its answer kept, the sides taking turns. The lengths of the prompts are spread
    evenly over a chunk: where a prompt ends in its chunk decides how much of it is computed again."""
    totals = dict.fromkeys(generates, 0.0)
    for run in range(runs):
        for name, generate in generates.items():
            given, start = prompt(count + run * CHUNK // runs), time.process_time()
            answered(generate, given)
            totals[name] += (time.process_time() - start) / runs
    return {**totals}


class Sides:
    """transformers, and our cache in both modes."""

    def __init__(self, model: Any) -> None:
        self.model = model
        model.generation_config.eos_token_id = END
        self.ours = PrefixCache(model, "512MiB")
        self.fine = PrefixCache(model, "512MiB", deterministic=False)

    @torch.no_grad()
    def carried(self, chat: Tensor) -> DynamicCache:
        """A cache of transformers that holds these tokens."""
        past = DynamicCache(config=self.model.config)
        self.model(input_ids=chat, **as_argument(past), logits_to_keep=1)
        return past

    def two_turns(self) -> Tensor:
        """A chat of two turns, answered through one cache. The other one keeps the same."""
        chat = turn(TURN)
        for _ in range(2):
            chat = answered(self.ours.generate, chat)
            self.fine.keep(chat[0].tolist())
            chat = torch.cat([chat, turn(TURN)], 1)
        return chat[:, :-TURN]


def measure(sides: Sides, runs: int) -> list[Line]:
    lines = []
    model, ours, fine = sides.model.generate, sides.ours.generate, sides.fine.generate

    def both(name: str, t: Medians, over: str, under: str, target: float | None) -> None:
        for side, mode in ((over, "deterministic"), (f"{over}_fine", "not deterministic")):
            lines.append(ratio(name, t, side, under, target, at_most=True, part=mode))

    chat = sides.two_turns()
    t = alternate(
        runs,
        third=lambda: first_token(ours, torch.cat([chat, prompt(TURN)], 1)),
        third_fine=lambda: first_token(fine, torch.cat([chat, prompt(TURN)], 1)),
        alone=lambda: first_token(model, prompt(TURN)),
    )
    name = f"first token of a third turn of {TURN} tokens after {chat.shape[1]}, over the turn alone"
    both(name, t, "third", "alone", 1.3)
    lines += measure_short_turn(sides, chat, runs)
    for count in COLD:
        t = over_a_chunk(count, runs, plain=model, cold=ours, cold_fine=fine)
        name = f"{ANSWER} tokens after a new prompt of {count} to {count + CHUNK}, over plain generate"
        both(name, t, "cold", "plain", 1.05)
    sides.ours.audit()
    sides.fine.audit()
    return lines


def measure_short_turn(sides: Sides, chat: Tensor, runs: int) -> list[Line]:
    """`generate` leaves a cache carried by hand with all tokens but the last one; of another one that is there too."""
    left, whole = sides.carried(chat[:, :-1]), sides.carried(chat)
    cut = chat[:, : -ANSWER // 2]  # the last answer was cut off: no token ends it

    def short(generate: Callable[..., Any], before: Tensor, past: DynamicCache | None = None) -> float:
        return first_token(generate, torch.cat([before, turn(SHORT)], 1), copy.deepcopy(past))

    t = alternate(
        runs,
        third=partial(short, sides.ours.generate, chat),
        cut=partial(short, sides.ours.generate, cut),
        fine=partial(short, sides.fine.generate, chat),
        carried=partial(short, sides.model.generate, chat, left),
        whole=partial(short, sides.model.generate, chat, whole),
        alone=partial(short, sides.model.generate, chat[:, :0]),
    )
    name, alone = f"first token of a third turn of {SHORT} tokens after {chat.shape[1]}", "over the turn alone"
    by_hand = "a DynamicCache carried by hand"
    lines = [
        ratio(f"{name}, {alone}", t, side, "alone", target, at_most=True, part=part)
        for side, target, part in (
            ("third", 1.3, "deterministic"),
            ("cut", None, "deterministic, answer cut off"),
            ("fine", 1.2, "not deterministic"),
            ("carried", None, by_hand),
            ("whole", None, f"{by_hand}, last token computed"),
        )
    ]
    for side, part in (("third", "deterministic"), ("fine", "not deterministic")):
        lines.append(ratio(f"{name}, over {by_hand}", t, side, "carried", part=part))
    return lines


def small_models() -> Iterator[tuple[str, Any]]:
    """Models of transformers in which a short turn is mostly Python."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    use_torch_functions(model)
    yield "qwen3_5_text", model
    for name, sizes in OTHERS.items():
        yield name, random_of_family(replace(FAMILIES[name], settings={**FAMILIES[name].settings, **sizes}))


def measure_small(name: str, model: Any, runs: int) -> list[Line]:
    """The first token of a short turn after a chat that is cached, by us and by hand, and new prompts."""
    sides, chat = Sides(model), small_prompt(CACHED)
    plain, ours = model.generate, sides.ours.generate
    sides.ours.keep(chat[0].tolist())
    past = sides.carried(chat)

    def after(generate: Callable[..., Any], before: Tensor, carried: DynamicCache | None = None) -> float:
        return first_token(generate, torch.cat([before, small_prompt(SHORT)], 1), copy.deepcopy(carried))

    def answered_in(generate: Callable[..., Any]) -> float:
        given, start = small_prompt(NEW), time.process_time()
        generate(given, max_new_tokens=FOLLOWING, min_new_tokens=FOLLOWING, do_sample=False)
        return time.process_time() - start

    t = alternate(
        runs,
        hit=partial(after, ours, chat),
        by_hand=partial(after, plain, chat, past),
        alone=partial(after, plain, chat[:, :0]),
    )
    if sides.ours.explanations[0].usable_hit < CACHED:
        raise RuntimeError(f"{name}: {sides.ours.explanations[0]}")
    cold = alternate(
        runs,
        first=lambda: first_token(ours, small_prompt(NEW)),
        plain_first=lambda: first_token(plain, small_prompt(NEW)),
        cold=partial(answered_in, ours),
        plain=partial(answered_in, plain),
    )
    sides.ours.audit()
    parameters = sum(each.numel() for each in model.parameters())
    part = f"{name}, {parameters / 1e6:.2f}M parameters"
    told: dict[str, Any] = {"part": part, "details": {"parameters": parameters}}
    short = f"first token of {SHORT} tokens after {CACHED}, over the turn alone"
    return [
        ratio(f"{short}: a hit", t, "hit", "alone", 1.3, at_most=True, **told),
        ratio(f"{short}: a DynamicCache carried by hand", t, "by_hand", "alone", **told),
        ratio(f"first token of a new prompt of {NEW}, over plain generate", cold, "first", "plain_first", **told),
        ratio(f"{FOLLOWING} tokens after a new prompt of {NEW}, over plain generate", cold, "cold", "plain", **told),
    ]


def of_small_models(args: Namespace) -> list[Line]:
    torch.set_num_threads(args.threads)
    return [line for name, model in small_models() for line in measure_small(name, model, args.runs)]


def main() -> int:
    parser = arguments(__doc__, runs=5, threads=True)
    parser.add_argument("--turn", action="store_true", help="short turns and new prompts of small models, alone")
    args = parser.parse_args()
    if args.turn:
        return finish(of_small_models(args), args)
    with random_model(args) as (_, model):
        return finish(measure(Sides(model), args.runs), args)


if __name__ == "__main__":
    sys.exit(main())
