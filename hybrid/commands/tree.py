"""`hybrid tree`: the prefix tree after some prompts, as text or as a page for a browser."""

from __future__ import annotations

import argparse

from rich.console import Console

from hybrid.cache.config import CacheConfig
from hybrid.commands.arguments import integer
from hybrid.commands.command import MODEL_HELP, Command, Outcome
from hybrid.commands.demo import Demo
from hybrid.engine.engine import Engine
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import ArgumentError
from hybrid.observe.text import LEGEND


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid tree`."""
    add = parser.add_argument
    add("prompts", metavar="PROMPT", nargs="*", help="texts to continue first (default: the prompts of the demo)")
    add("--model", default="tiny", help=MODEL_HELP)
    add("--memory", default="8MiB", help="size of the cache (default: 8MiB, so that the demo's prompts do not all fit)")
    add("--max-new-tokens", type=integer(1), default=16, help="maximum length of an answer, in tokens (default: 16)")
    add("--out", metavar="FILE", help="write a page for a browser, tree.html for example, instead of text")


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Run the prompts, and draw the tree that they leave."""
    engine = Engine.from_pretrained(args.model, cache=CacheConfig(memory=args.memory))
    params = SamplingParams(max_new_tokens=args.max_new_tokens)
    if args.prompts:
        engine.generate(list(args.prompts), params)
    else:
        Demo(engine).warm(engine, params)
    decode = engine.tokenizer.decode if engine.tokenizer is not None else None
    if args.out is None:
        text = engine.cache.draw(decode=decode, width=console.width)
        console.print(text, markup=False, soft_wrap=True)
        console.print(LEGEND, soft_wrap=True)
        return Outcome(True, {"tree": text})
    try:
        engine.cache.draw(args.out, decode)
    except OSError as error:
        raise ArgumentError(f"--out {args.out}: the page cannot be written: {error.strerror}") from error
    console.print(f"wrote {args.out}: open it in a browser", markup=False, soft_wrap=True)
    return Outcome(True, {"page": args.out})


COMMAND = Command(
    name="tree",
    help="draw the prefix tree, as text or as a page for a browser",
    description=(
        "Run prompts, those of the demo by default, and draw the prefix tree that they leave in the cache: as text, or "
        "with --out as a page of one file, to zoom and fold, coloured by value, last use, hits, locks or tier, with "
        "the checkpoints that were evicted as a timeline. From Python: engine.cache.draw('tree.html')."
    ),
    add_arguments=add_arguments,
    run=run,
)
