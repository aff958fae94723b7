"""`hybrid demo`: requests on real text with the prefix cache and without it, and that the answers are the same."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from hybrid.cache.config import CacheConfig
from hybrid.commands.command import MODEL_HELP, Command, Outcome, escape
from hybrid.engine.engine import Engine
from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.observe.draw import LEGEND, draw_tree
from hybrid.prompts.encode import Prompt, encode

ANSWER = SamplingParams(max_new_tokens=48, logprobs=1)
QUESTIONS = (
    "What is an object's identity?",
    "Which objects are mutable?",
    "When is an object garbage collected?",
    "What are containers?",
)
FOLLOW_UP = "Explain that again, shorter."
FIRST_WORDS = 44
STEPS_BEFORE_DRAWING = 4


@dataclass(frozen=True)
class Row:
    """One request of the demo. Hits are in tokens, times in seconds."""

    stage: str
    prompt_tokens: int
    page_hit: int
    usable_hit: int
    time_to_first_token: float
    tokens_per_second: float
    first_words: str
    explain: str


@dataclass
class Run:
    """All requests of the demo, on one engine.

    Attributes:
        trees: drawings of the tree by the moment at which they were made.
    """

    rows: list[Row] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    trees: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """A run with the cache, compared with a run without it.

    Attributes:
        identical: tokens and log-probabilities of every answer are equal bit by bit.
        same_tokens: tokens of every answer are equal.
        saved_tokens: prompt tokens that were not computed, of `prompt_tokens`.
        speedups: per stage, median time to the first token without the cache over that with it.
    """

    identical: bool
    same_tokens: bool
    prompt_tokens: int
    saved_tokens: int
    speedups: dict[str, float]


Report = Callable[[str, list[Row]], None]
"""Called with the name of a stage and its requests, when the stage is done."""


def document() -> str:
    """A text that ships with Python: the chapter on objects of the language reference."""
    from pydoc_data.topics import topics

    return topics["objects"]


class Demo:
    """The requests of the demo, on one checkpoint.

    Args:
        engine: its weights and tokenizer are used; each run makes caches of its own.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine = engine
        self._text = document()
        self._has_chat = bool(engine.tokenizer is not None and engine.tokenizer.chat_template)

    def run(self, enabled: bool, report: Report) -> Run:
        """Run all stages, with the cache or without, first in a large memory and then in a small one."""
        run = Run()
        pages = self._longest_request(self._prompts(self._text)[0])
        large = self._engine(enabled, pages=12 * pages, states=64)
        self._run_stages(large, run, "", report)
        if enabled:
            run.trees["after the branch"] = self._draw(large)
        small = self._engine(enabled, pages=2 * pages + 4, states=12)
        self._run_stages(small, run, ", small memory", report)
        if enabled:
            run.trees["in the small memory"] = self._draw(small)
        for engine in (large, small):
            engine.cache.audit()
        return run

    def _run_stages(self, engine: Engine, run: Run, suffix: str, report: Report) -> None:
        def stage(name: str, prompts: list[Prompt], drawing: str | None = None) -> list[RequestOutput]:
            outputs = self._answer(engine, prompts, run, drawing)
            rows = [_row(name + suffix, output) for output in outputs]
            run.rows += rows
            run.outputs += outputs
            report(name + suffix, rows)
            return outputs

        first = stage("four questions, launched together", self._prompts(self._text))
        drawing = "while the second turns run" if engine.cache.config.enabled and not suffix else None
        stage("a second turn of each", [self._next_turn(answer) for answer in first], drawing)
        half = self._text[: len(self._text) // 2]
        stage("a branch in the middle of the document", self._prompts(half + "\n\n[The rest is missing.]")[:1])

    def _answer(self, engine: Engine, prompts: list[Prompt], run: Run, drawing: str | None) -> list[RequestOutput]:
        """Answer prompts that arrive together, step by step; `drawing`: draw the tree under this name on the way."""
        requests = [engine.add_request(prompt, ANSWER) for prompt in prompts]
        outputs: dict[str, RequestOutput] = {}
        steps = 0
        while engine.has_work:
            outputs.update({output.request_id: output for output in engine.step()})
            steps += 1
            if drawing is not None and steps == STEPS_BEFORE_DRAWING:
                run.trees[drawing] = self._draw(engine)
        return [outputs[request] for request in requests]

    def _prompts(self, text: str) -> list[Prompt]:
        asked = [f"{text}\n\n{question}" for question in QUESTIONS]
        if self._has_chat:
            return [[{"role": "user", "content": content}] for content in asked]
        return [f"{content}\nAnswer:" for content in asked]

    def _next_turn(self, answer: RequestOutput) -> Prompt:
        """The conversation with one more question: in tokens, as an agent or a chat server keeps it."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        follow_up = f"\nQuestion: {FOLLOW_UP}\nAnswer:"
        if self._has_chat:
            messages = [{"role": "user", "content": FOLLOW_UP}]
            follow_up = "\n" + tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return (
            answer.prompt_token_ids + answer.token_ids + list(tokenizer(follow_up, add_special_tokens=False).input_ids)
        )

    def _longest_request(self, prompt: Prompt) -> int:
        """Pages of the longest request: a prompt and its answer."""
        return len(encode(self.engine.tokenizer, prompt)) // self.engine.cache.config.page_size + 4

    def _engine(self, enabled: bool, pages: int, states: int) -> Engine:
        old = self.engine.cache.config
        page_bytes, state_bytes = self.engine.cache.unit_bytes
        config = CacheConfig(
            enabled=enabled,
            page_size=old.page_size,
            chunk_size=old.chunk_size,
            memory=pages * page_bytes + states * state_bytes,
            deterministic=old.deterministic,
        )
        return self.engine.with_cache(config)

    def _draw(self, engine: Engine) -> str:
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        return draw_tree(engine.cache, tokenizer.decode)


def _row(stage: str, output: RequestOutput) -> Row:
    words = " ".join(output.text.split())
    return Row(
        stage=stage,
        prompt_tokens=output.usage.prompt_tokens,
        page_hit=output.usage.page_tokens,
        usable_hit=output.usage.cached_tokens,
        time_to_first_token=output.time_to_first_token or 0.0,
        tokens_per_second=output.tokens_per_second or 0.0,
        first_words=words[:FIRST_WORDS] + ("…" if len(words) > FIRST_WORDS else ""),
        explain=output.explain,
    )


def compare(cached: Run, plain: Run) -> Verdict:
    """Compare a run with the cache to a run without it."""
    pairs = list(zip(cached.outputs, plain.outputs, strict=True))
    stages = dict.fromkeys(row.stage for row in cached.rows)
    return Verdict(
        identical=all(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in pairs),
        same_tokens=all(a.token_ids == b.token_ids for a, b in pairs),
        prompt_tokens=sum(row.prompt_tokens for row in cached.rows),
        saved_tokens=sum(row.usable_hit for row in cached.rows),
        speedups={stage: _first_token(plain, stage) / _first_token(cached, stage) for stage in stages},
    )


def _first_token(run: Run, stage: str) -> float:
    return median(row.time_to_first_token for row in run.rows if row.stage == stage)


def as_json(cached: Run | None, plain: Run, verdict: Verdict | None) -> dict[str, Any]:
    """Both runs and the verdict, for machines."""
    return {
        "with_cache": [asdict(row) for row in cached.rows] if cached else None,
        "without_cache": [asdict(row) for row in plain.rows],
        "trees": cached.trees if cached else None,
        "verdict": asdict(verdict) if verdict else None,
    }


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid demo`."""
    parser.add_argument("--model", default="tiny", help=MODEL_HELP)
    parser.add_argument("--no-cache", action="store_true", help="run without the prefix cache only")


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Run the demo with the cache and without, and print the verdict."""
    demo = Demo(Engine.from_pretrained(args.model, cache=CacheConfig(memory="2GiB")))

    def print_stage(stage: str, rows: list[Row]) -> None:
        console.print(_table(stage, rows))
        for row in rows:
            console.print(f"  [dim]{row.explain}[/dim]")
        console.print()

    if args.no_cache:
        return Outcome(True, as_json(None, demo.run(False, print_stage), None))
    console.rule("with the cache")
    cached = demo.run(True, print_stage)
    for moment, tree in cached.trees.items():
        console.rule(f"the tree {moment}")
        console.print(tree, markup=False, soft_wrap=True)
    console.print(LEGEND)
    console.rule("without the cache")
    plain = demo.run(False, lambda stage, rows: console.print(_table(stage, rows)))
    verdict = compare(cached, plain)
    console.rule("verdict")
    _print_verdict(verdict, console)
    passed = verdict.identical or not demo.engine.deterministic
    return Outcome(passed, as_json(cached, plain, verdict))


def _print_verdict(verdict: Verdict, console: Console) -> None:
    if verdict.identical:
        answers = "[bold]identical bit by bit[/bold]"
    else:
        answers = "[bold]the same tokens[/bold]" if verdict.same_tokens else "[bold red]NOT the same[/bold red]"
    console.print(f"answers: {answers}, with the cache and without")
    share = verdict.saved_tokens / verdict.prompt_tokens
    console.print(f"prompt tokens saved: [bold]{verdict.saved_tokens} of {verdict.prompt_tokens}[/bold] ({share:.0%})")
    for stage, speedup in verdict.speedups.items():
        console.print(f"first token [bold]{speedup:.1f} times[/bold] as fast: {stage}")


def _table(stage: str, rows: Sequence[Row]) -> Table:
    table = Table(title=stage, title_justify="left", title_style="bold")
    for name in ("prompt tokens", "page hit", "usable hit", "first token", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("answer begins")
    for row in rows:
        table.add_row(
            str(row.prompt_tokens),
            str(row.page_hit),
            str(row.usable_hit),
            f"{1000 * row.time_to_first_token:.0f} ms",
            f"{row.tokens_per_second:.0f}",
            escape(row.first_words),
        )
    return table


COMMAND = Command(
    name="demo",
    help="show the prefix cache at work on real text",
    description=(
        "Four questions about one long document, launched together; a second turn of each; a branch in the middle of "
        "the document; then the same in a memory that is too small for it. Everything is run once more without the "
        "cache, and times and answers are compared."
    ),
    add_arguments=add_arguments,
    run=run,
)
