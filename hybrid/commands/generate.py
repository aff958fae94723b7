"""`hybrid generate`: continue prompts, and report for each what the cache held."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.text import Text

from hybrid.commands.commands import Outcome
from hybrid.commands.engine import adapters_of, cache_of, model_arguments
from hybrid.engine.engine import Engine
from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import ArgumentError
from hybrid.prompts.encode import Prompt


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Answer the prompts in one batch, and print the answers as they are computed."""
    adapters = adapters_of(args, args.model)
    if len(adapters) > 1:
        raise ArgumentError("generate: all prompts are answered with one adapter; give --adapter once")
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
        adapter=next(iter(adapters), None),
    )
    prompts: list[Prompt] = [[{"role": "user", "content": text}] if args.chat else text for text in args.prompts]
    cache = cache_of(args, enabled=not args.no_cache)
    with Engine.from_pretrained(args.model, cache=cache, **model_arguments(args)) as engine:
        for name, folder in adapters.items():
            engine.adapters.load(name, folder)
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
            end = ended.error or f"{summary(ended)}; {ended.explain}"
            self._print(Text(f"\n{end}\n", style="dim" if ended.error is None else "red"), "\n")

    def _print(self, text: Text, end: str) -> None:
        self._console.print(text, end=end, soft_wrap=True)


def summary(output: RequestOutput) -> str:
    """The length of an answer, how many of its tokens were drafted if any was, and why it ended."""
    usage = output.usage
    tokens = f"{usage.completion_tokens} token{'' if usage.completion_tokens == 1 else 's'}"
    drafts = f" ({usage.accepted_tokens} of {usage.drafted_tokens} drafts accepted)" if usage.drafted_tokens else ""
    return f"{tokens}{drafts}, {output.finish_reason}"


def as_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    """An answer for machines."""
    return {
        "prompt": prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.usage.prompt_tokens,
        "cached_tokens": output.usage.cached_tokens,
        "drafted_tokens": output.usage.drafted_tokens,
        "accepted_tokens": output.usage.accepted_tokens,
        "explain": str(output.explain),
        "error": output.error,
    }
