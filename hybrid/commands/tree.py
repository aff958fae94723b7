"""`hybrid tree`: the prefix tree after some prompts, as text or as a page for a browser."""

from __future__ import annotations

import argparse

from rich.console import Console

from hybrid.cache.config import CacheConfig
from hybrid.commands.commands import Outcome
from hybrid.commands.demo import Demo
from hybrid.engine.engine import Engine
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import ArgumentError
from hybrid.observe.draw import LEGEND


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
