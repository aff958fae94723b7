"""The story that `hybrid demo` tells: what the cache spares, on real text, and that the answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hybrid.cache.config import CacheConfig
from hybrid.engine.engine import Engine
from hybrid.engine.request import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.observe.draw import LEGEND, draw_tree
from hybrid.prompts.encode import Prompt, encode

__all__ = ["LEGEND", "Row", "Run", "Story", "Verdict", "as_json", "compare", "load_engine"]

ANSWER = SamplingParams(max_new_tokens=48, logprobs=1)
QUESTIONS = (
    "What is an object's identity?",
    "Which objects are mutable?",
    "When is an object garbage collected?",
    "What are containers?",
)
FOLLOW_UP = "Explain that again, shorter."
FIRST_WORDS = 44
STEPS_TO_PICTURE = 4


@dataclass(frozen=True)
class Row:
    """One request of the story."""

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
    """The story, told by one engine."""

    rows: list[Row] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    trees: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """With the cache against without.

    Attributes:
        identical: tokens and log-probabilities of every answer are equal bit by bit.
        spared_tokens: prompt tokens that were not computed, of `prompt_tokens`.
        faster: per stage, median time to the first token without the cache over that with it.
    """

    identical: bool
    same_tokens: bool
    prompt_tokens: int
    spared_tokens: int
    faster: dict[str, float]


def document() -> str:
    """A text that ships with Python: the chapter on objects of the language reference."""
    from pydoc_data.topics import topics

    return topics["objects"]


class Story:
    """The requests of the demo, on one checkpoint.

    Args:
        engine: its weights and tokenizer are used; each telling gets caches of its own.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._text = document()
        self._has_chat = bool(engine.tokenizer is not None and engine.tokenizer.chat_template)

    def tell(self, enabled: bool, told: Callable[[str, list[Row]], None]) -> Run:
        """All stages, with the cache or without. `told` hears of each stage as it is done."""
        run = Run()
        longest = self._room(self._prompts(self._text)[0])
        roomy = self._engine(enabled, pages=12 * longest, states=64)
        self._stages(roomy, run, "", told)
        if enabled:
            run.trees["after the branch"] = self._draw(roomy)
        small = self._engine(enabled, pages=2 * longest + 4, states=12)
        self._stages(small, run, ", small memory", told)
        if enabled:
            run.trees["in the small memory"] = self._draw(small)
        for engine in (roomy, small):
            engine.cache.audit()
        return run

    def _stages(self, engine: Engine, run: Run, suffix: str, told: Callable[[str, list[Row]], None]) -> None:
        def stage(name: str, prompts: list[Prompt], picture: str | None = None) -> list[RequestOutput]:
            outputs = self._answer(engine, prompts, run, picture)
            rows = [_row(name + suffix, output) for output in outputs]
            run.rows += rows
            run.outputs += outputs
            told(name + suffix, rows)
            return outputs

        first = stage("four questions, launched together", self._prompts(self._text))
        picture = "while the second turns run" if engine.cache.config.enabled and not suffix else None
        stage("a second turn of each", [self._next_turn(answer) for answer in first], picture)
        half = self._text[: len(self._text) // 2]
        stage("a branch in the middle of the document", self._prompts(half + "\n\n[The rest is missing.]")[:1])

    def _answer(self, engine: Engine, prompts: list[Prompt], run: Run, picture: str | None) -> list[RequestOutput]:
        """Answer prompts that come together, step by step; `picture`: draw the tree while they run."""
        requests = [engine.add_request(prompt, ANSWER) for prompt in prompts]
        outputs: dict[str, RequestOutput] = {}
        steps = 0
        while engine.has_work:
            outputs.update({output.request_id: output for output in engine.step()})
            steps += 1
            if picture is not None and steps == STEPS_TO_PICTURE:
                run.trees[picture] = self._draw(engine)
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

    def _room(self, prompt: Prompt) -> int:
        """Pages of the longest request."""
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
    """The verdict on two tellings of the story."""
    pairs = list(zip(cached.outputs, plain.outputs, strict=True))
    stages = dict.fromkeys(row.stage for row in cached.rows)
    return Verdict(
        identical=all(a.token_ids == b.token_ids and a.logprobs == b.logprobs for a, b in pairs),
        same_tokens=all(a.token_ids == b.token_ids for a, b in pairs),
        prompt_tokens=sum(row.prompt_tokens for row in cached.rows),
        spared_tokens=sum(row.usable_hit for row in cached.rows),
        faster={stage: _first_token(plain, stage) / _first_token(cached, stage) for stage in stages},
    )


def _first_token(run: Run, stage: str) -> float:
    return median(row.time_to_first_token for row in run.rows if row.stage == stage)


def as_json(cached: Run | None, plain: Run, verdict: Verdict | None) -> dict[str, Any]:
    """Everything that was told, for machines."""
    return {
        "with_cache": [asdict(row) for row in cached.rows] if cached else None,
        "without_cache": [asdict(row) for row in plain.rows],
        "trees": cached.trees if cached else None,
        "verdict": asdict(verdict) if verdict else None,
    }


def load_engine(model: str | Path) -> Engine:
    """The engine of the demo. Its own cache is small: every telling makes its own."""
    return Engine.from_pretrained(model, cache=CacheConfig(memory="2GiB"))
