"""`hybrid generate`: continue prompts, and report for each what the cache held."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.text import Text

from hybrid.cache.config import CacheConfig
from hybrid.commands.arguments import add_dtype, integer
from hybrid.commands.command import Command, Outcome
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
    add("--max-new-tokens", type=integer(1), default=64, help="maximum length of an answer, in tokens (default: 64)")
    add("--temperature", type=float, default=0.0, help="0: greedy (default); 1: sample from the model's distribution")
    add("--top-k", type=integer(0), default=0, help="sample from the k most likely tokens (default: 0, all)")
    add("--top-p", type=float, default=1.0, help="sample from the most likely tokens of this total probability")
    add(
        "--seed",
        type=integer(0, 2**63 - 1),
        default=None,
        help="seed of the sampling: the same seed gives the same answer",
    )
    add("--stop", action="append", default=[], help="text that ends an answer; may be repeated")
    add("--memory", default="1GiB", help="size of the cache: '512MiB', or '50%%' of what is free (default: 1GiB)")
    add("--device", default=None, help="cuda or cpu (default: a GPU if there is one)")
    add_dtype(parser)
    add("--no-cache", action="store_true", help="disable the prefix cache")


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Answer the prompts in one batch, and print the answers as they are computed."""
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
    )
    config = CacheConfig(memory=args.memory, enabled=not args.no_cache)
    prompts: list[Prompt] = [[{"role": "user", "content": text}] if args.chat else text for text in args.prompts]
    with Engine.from_pretrained(args.model, device=args.device, dtype=args.dtype, cache=config) as engine:
        names = [engine.add_request(prompt, params) for prompt in prompts]
        screen = Screen(console, dict(zip(names, args.prompts, strict=True)), separator="\n" if args.chat else "")
        done: dict[str, RequestOutput] = {}
        while len(done) < len(names):
            for output in next_outputs(engine):
                screen.show(output)
                if output.finish_reason is not None:
                    done[output.request_id] = output
    outputs = [done[name] for name in names]
    result = [as_json(prompt, output) for prompt, output in zip(args.prompts, outputs, strict=True)]
    return Outcome(all(output.error is None for output in outputs), {"outputs": result})


def next_outputs(engine: Engine) -> list[RequestOutput]:
    """The outputs of a step. One that fails is tried again, until the request that is the reason has ended."""
    try:
        return engine.step()
    except Exception:
        if not engine.is_retrying:
            raise
        return []


class Screen:
    """Answers on a console, in the order of their prompts: the first as it comes, then what there is of the next.

    Args:
        console: where they are printed.
        prompts: by request id.
        separator: printed between a prompt and its answer.
    """

    def __init__(self, console: Console, prompts: dict[str, str], separator: str) -> None:
        self._console = console
        self._prompts = prompts
        self._separator = separator
        self._unseen: dict[str, str] = dict.fromkeys(prompts, "")
        self._ended: dict[str, RequestOutput] = {}
        self._current: str | None = None

    def show(self, output: RequestOutput) -> None:
        """Print what is new, if it is the turn of this output's request."""
        self._unseen[output.request_id] += output.delta
        if output.finish_reason is not None:
            self._ended[output.request_id] = output
        while self._unseen:
            name = next(iter(self._unseen))
            if self._current != name:
                self._current = name
                self._print(Text(self._prompts[name], style="bold"), self._separator)
            if self._unseen[name]:
                self._print(Text(self._unseen[name]), "")
                self._unseen[name] = ""
            if name not in self._ended:
                return
            ended = self._ended.pop(name)
            del self._unseen[name]
            count = ended.usage.completion_tokens
            tokens = f"{count} token{'' if count == 1 else 's'}"
            end = ended.error or f"{tokens}, {ended.finish_reason}; {ended.explain}"
            self._print(Text(f"\n{end}\n", style="dim" if ended.error is None else "red"), "\n")

    def _print(self, text: Text, end: str) -> None:
        self._console.print(text, end=end, soft_wrap=True)


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
        "error": output.error,
    }


COMMAND = Command(
    name="generate",
    help="continue prompts",
    description=(
        "Continue prompts in one batch, print the answers as they are computed, and report for each how much of it was "
        "cached and why."
    ),
    add_arguments=add_arguments,
    run=run,
)
