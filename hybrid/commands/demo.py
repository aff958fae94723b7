"""`hybrid demo`: a story in acts, each with the prefix cache and without it, on real text."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hybrid.cache.config import CacheConfig
from hybrid.commands.commands import Outcome
from hybrid.engine.engine import Engine
from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.observe.draw import LEGEND
from hybrid.prompts.encode import Prompt, encode

ANSWER = SamplingParams(max_new_tokens=24, logprobs=1)
QUESTIONS = (
    "What is an object's identity?",
    "Which objects are mutable?",
    "When is an object garbage collected?",
    "What are containers?",
)
FOLLOW_UP = "Explain that again, shorter."
BAR = 22
"""Characters of the longest bar."""


@dataclass(frozen=True)
class Act:
    """One act of the story: its requests, with the cache and without it.

    Attributes:
        title: what happens, in a few words.
        shows: what it shows, in a sentence.
        cached, plain: the answers with the cache and without it, in the same order.
        tree: drawing of the tree at its end.
    """

    title: str
    shows: str
    cached: list[RequestOutput]
    plain: list[RequestOutput]
    tree: str

    @property
    def speedup(self) -> float:
        """Median time to the first token without the cache over that with it."""
        return _first_token(self.plain) / _first_token(self.cached)

    @property
    def identical(self) -> bool:
        """Tokens and log-probabilities of all answers are equal bit by bit."""
        pairs = zip(self.cached, self.plain, strict=True)
        return all(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in pairs)


@dataclass(frozen=True)
class Verdict:
    """All acts together.

    Attributes:
        identical: tokens and log-probabilities of every answer are equal bit by bit.
        same_tokens: tokens of every answer are equal.
        saved_tokens: prompt tokens that were not computed, of `prompt_tokens`.
        speedups: per act, median time to the first token without the cache over that with it.
    """

    identical: bool
    same_tokens: bool
    prompt_tokens: int
    saved_tokens: int
    speedups: dict[str, float]


def _first_token(outputs: list[RequestOutput]) -> float:
    return median(output.time_to_first_token or 0.0 for output in outputs)


def document() -> str:
    """A text that ships with Python: the chapter on objects of the language reference."""
    from pydoc_data.topics import topics

    return topics["objects"]


class Demo:
    """The acts of the demo, on one checkpoint.

    Args:
        engine: its weights and tokenizer are used; caches are made anew.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine = engine
        self._text = document()
        self._has_chat = bool(engine.tokenizer is not None and engine.tokenizer.chat_template)
        pages = len(encode(engine.tokenizer, self._prompts(self._text)[0])) // engine.cache.config.page_size + 4
        self._large = self._engine(True, pages=12 * pages, states=64)
        self._small = self._engine(True, pages=2 * pages, states=10)
        self._plain = self._engine(False, pages=12 * pages, states=64)

    def run(self, report: Callable[[Act], None]) -> list[Act]:
        """Play all acts; each is reported when it is over."""
        acts: list[Act] = []
        self._load_code()

        def play(title: str, shows: str, engine: Engine, batches: list[list[Prompt]]) -> Act:
            cached = [output for prompts in batches for output in engine.generate(prompts, ANSWER, progress=False)]
            plain = [output for prompts in batches for output in self._plain.generate(prompts, ANSWER, progress=False)]
            acts.append(Act(title, shows, cached, plain, self.draw(engine)))
            report(acts[-1])
            return acts[-1]

        questions = self._prompts(self._text)
        first = play(
            "Four users ask about one document, at the same moment",
            "The document is computed once. A checkpoint is kept where the prompts part; three wait for it.",
            self._large,
            [questions],
        )
        play(
            "Each asks a second question",
            "The first prompt and its answer are cached: only the new question is computed.",
            self._large,
            [[self._next_turn(answer) for answer in first.cached]],
        )
        play(
            "Two of them ask again, in memory for two such prompts and few checkpoints",
            "What is least likely to be used again is evicted, and what is shared is kept.",
            self._small,
            [questions[:2]],
        )
        half = self._prompts(self._text[: len(self._text) // 2] + "\n\n[The rest is missing.]")
        play(
            "There, one user after another asks about the first half of the document",
            "Pages can be cut anywhere, a state cannot: the first makes the checkpoint, the next one uses it.",
            self._small,
            [half[:1], half[1:2]],
        )
        for engine in (self._large, self._small):
            engine.cache.audit()
        return acts

    def _load_code(self) -> None:
        """Answer something else first: code is compiled, or read from disk, once in a process."""
        question = list(range(2 * self.engine.cache.config.grid + 1))
        params = SamplingParams(max_new_tokens=2, ignore_eos=True)
        self.engine.generate([question, question[1:]], params, progress=False)

    def warm(self, engine: Engine, params: SamplingParams) -> None:
        """Run the prompts of the demo on an engine."""
        answers = engine.generate(self._prompts(self._text), params)
        engine.generate([self._next_turn(answer) for answer in answers], params)
        engine.generate(self._prompts(self._text[: len(self._text) // 2]), params)

    def run_plain(self) -> list[RequestOutput]:
        """The first two acts without the cache only."""
        first = self._plain.generate(self._prompts(self._text), ANSWER)
        return first + self._plain.generate([self._next_turn(answer) for answer in first], ANSWER)

    def draw(self, engine: Engine) -> str:
        """The tree of an engine's cache, as text."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        return engine.cache.draw(decode=tokenizer.decode, width=96)

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


def judge(acts: list[Act]) -> Verdict:
    """Compare all answers with the cache to those without it."""
    pairs = [pair for act in acts for pair in zip(act.cached, act.plain, strict=True)]
    return Verdict(
        identical=all(act.identical for act in acts),
        same_tokens=all(a.token_ids == b.token_ids for a, b in pairs),
        prompt_tokens=sum(output.usage.prompt_tokens for output, _ in pairs),
        saved_tokens=sum(output.usage.cached_tokens for output, _ in pairs),
        speedups={act.title: act.speedup for act in acts},
    )


def as_json(acts: list[Act], verdict: Verdict) -> dict[str, Any]:
    """The story for machines."""
    return {
        "acts": [
            {
                "title": act.title,
                "with_cache": [_as_row(output) for output in act.cached],
                "without_cache": [_as_row(output) for output in act.plain],
                "tree": act.tree,
            }
            for act in acts
        ],
        "verdict": asdict(verdict),
    }


def _as_row(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt_tokens": output.usage.prompt_tokens,
        "page_hit": output.usage.page_tokens,
        "usable_hit": output.usage.cached_tokens,
        "time_to_first_token": output.time_to_first_token,
        "tokens_per_second": output.tokens_per_second,
        "text": output.text,
        "explain": str(output.explain),
    }


# What people see


class Narrator:
    """Prints the story.

    Args:
        console: where to.
        verbose: print all answers, explanations and trees too.
    """

    def __init__(self, console: Console, verbose: bool) -> None:
        self._console = console
        self._verbose = verbose
        self._num_told = 0

    def tell(self, act: Act) -> None:
        """Print one act."""
        self._num_told += 1
        console = self._console
        console.print(f"[bold]{self._num_told}  {act.title}[/bold]")
        console.print(f"   [dim]{act.shows}[/dim]")
        console.print(self._table(act))
        if self._num_told == 1:
            console.print(
                "   [dim]pages: tokens whose keys and values are cached. usable: tokens up to a checkpoint of the "
                "state;\n   only these are not computed again.[/dim]"
            )
        if self._verbose:
            for output in act.cached:
                console.print(Text(f"   {output.explain}", style="dim"), soft_wrap=True)
                console.print(Text(f"   {' '.join(output.text.split())}"), soft_wrap=True)
        if self._verbose or self._num_told == 4:
            console.print(_indented(act.tree), markup=False, soft_wrap=True)
            console.print(f"   [dim]{LEGEND}[/dim]", soft_wrap=True)
        console.print()

    def _table(self, act: Act) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for name in ("", "prompt", "pages", "usable"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("first token, with the cache", no_wrap=True)
        table.add_column("without", no_wrap=True)
        longest = max(output.time_to_first_token or 0.0 for output in act.cached + act.plain)
        for cached, plain in zip(act.cached, act.plain, strict=True):
            usage = cached.usage
            table.add_row(
                " ", str(usage.prompt_tokens), str(usage.page_tokens), str(usage.cached_tokens),
                _bar(cached, longest, "green"), _bar(plain, longest, "yellow"),
            )  # fmt: skip
        return table

    def conclude(self, verdict: Verdict) -> None:
        """Print the verdict."""
        if verdict.identical:
            answers = "[bold green]identical bit by bit[/bold green], with the cache and without"
        elif verdict.same_tokens:
            answers = "[bold]the same tokens[/bold], with the cache and without"
        else:
            answers = "[bold red]NOT the same[/bold red] with the cache and without"
        share = verdict.saved_tokens / verdict.prompt_tokens
        lines = [
            f"answers              {answers}",
            f"prompt tokens saved  [bold]{verdict.saved_tokens} of {verdict.prompt_tokens}[/bold] ({share:.0%})",
            "first token          times as fast, median of each act:",
        ]
        lines += [f"  [bold]{speedup:>5.1f}[/bold]  {title}" for title, speedup in verdict.speedups.items()]
        self._console.print(Panel("\n".join(lines), title="verdict", title_align="left", width=96))


def _bar(output: RequestOutput, longest: float, colour: str) -> str:
    seconds = output.time_to_first_token or 0.0
    length = max(1, round(BAR * seconds / longest)) if longest else 1
    return f"[{colour}]{'█' * length}[/{colour}] {1000 * seconds:.0f} ms"


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.splitlines())


# The command


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Tell the story with the cache and without, and print the verdict."""
    demo = Demo(Engine.from_pretrained(args.model, dtype=args.dtype, cache=CacheConfig(memory="2GiB")))
    if args.no_cache:
        plain = demo.run_plain()
        for output in plain:
            console.print(
                f"{output.usage.prompt_tokens} tokens, first token {1000 * (output.time_to_first_token or 0):.0f} ms"
            )
        return Outcome(True, {"without_cache": [_as_row(output) for output in plain]})
    narrator = Narrator(console, args.verbose)
    acts = demo.run(narrator.tell)
    verdict = judge(acts)
    narrator.conclude(verdict)
    passed = verdict.identical or not demo.engine.deterministic
    return Outcome(passed, as_json(acts, verdict))
