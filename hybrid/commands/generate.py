"""`hybrid generate`: continue prompts, and report for each what the cache held."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from hybrid.cache.config import CacheConfig
from hybrid.commands.command import Command, Outcome, escape
from hybrid.engine.engine import Engine
from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.prompts.encode import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid generate`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder, hub id, or 'tiny', the model inside the package")
    add("prompts", metavar="PROMPT", nargs="+", help="text to continue; several prompts run in one batch")
    add("--chat", action="store_true", help="apply the chat template: each prompt is a user message")
    add("--max-new-tokens", type=int, default=64, help="maximum length of an answer, in tokens (default: 64)")
    add("--temperature", type=float, default=0.0, help="0: greedy (default); 1: sample from the model's distribution")
    add("--top-k", type=int, default=0, help="sample from the k most likely tokens (default: 0, all)")
    add("--top-p", type=float, default=1.0, help="sample from the most likely tokens of this total probability")
    add("--seed", type=int, default=None, help="seed of the sampling: the same seed gives the same answer")
    add("--stop", action="append", default=[], help="text that ends an answer; may be repeated")
    add("--memory", default="1GiB", help="size of the cache: '512MiB', or a fraction of free memory (default: 1GiB)")
    add("--device", default=None, help="cuda or cpu (default: a GPU if there is one)")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", default=None, choices=dtypes, help="default: the checkpoint's on a GPU, float32 on a CPU")
    add("--no-cache", action="store_true", help="disable the prefix cache")


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Answer the prompts in one batch."""
    memory = float(args.memory) if args.memory.replace(".", "", 1).isdigit() else args.memory
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
    )
    config = CacheConfig(memory=memory, enabled=not args.no_cache)
    engine = Engine.from_pretrained(args.model, device=args.device, dtype=args.dtype, cache=config)
    prompts: list[Prompt] = [[{"role": "user", "content": text}] if args.chat else text for text in args.prompts]
    answers = list(zip(args.prompts, engine.generate(prompts, params), strict=True))
    for prompt, output in answers:
        console.print(f"[bold]{escape(prompt)}[/bold]{chr(10) if args.chat else ''}{escape(output.text)}")
        console.print(f"[dim]{output.usage.completion_tokens} tokens, {output.finish_reason}; {output.explain}[/dim]\n")
    return Outcome(True, {"outputs": [as_json(prompt, output) for prompt, output in answers]})


def as_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    """An answer for machines."""
    return {
        "prompt": prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.usage.prompt_tokens,
        "cached_tokens": output.usage.cached_tokens,
        "explain": output.explain,
    }


COMMAND = Command(
    name="generate",
    help="continue prompts",
    description="Continue prompts in one batch, and report for each how much of it was cached and why.",
    add_arguments=add_arguments,
    run=run,
)
