"""Engines with random settings, of which every two values meet in few lives, and what goes wrong in them on purpose."""

import atexit
import functools
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from hybrid import CacheConfig, Drafter, Engine, EngineConfig, History, MemoryBudgetError, SpeculationConfig
from hybrid.commands.random_checkpoints import add_random_predictor, write_random_checkpoint
from hybrid.commands.toy_model import Liar
from hybrid.memory.memory import MIN_STATE_SLOTS
from support.checkpoints import byte_tokenizer
from support.peft_adapters import TARGETS, make_adapter
from support.vision import vision_model, write_vision_checkpoint

Settings = dict[str, Any]

LONGEST = 150
"""Tokens of a prompt, at most."""

MODELS = {
    "tiny": ("", 16, "float32"),
    "tiny in bfloat16": ("", 32, "bfloat16"),
    "dense": ("qwen3_5_text", 16, "float32"),
    "odd sizes": ("qwen3_5_text, odd sizes", 16, "float32"),
    "experts": ("qwen3_next", 32, "float32"),
    "state space": ("bamba", 16, "float32"),
    "short windows": ("gemma3_text", 64, "float32"),
    "long windows": ("gemma3_text, odd sizes, tied, scaled", 16, "float32"),
}
"""The family of the random checkpoint ("": the model inside the package), the chunk size, and the type."""

WITH_PICTURES = {"vision": ("Qwen3_5", 16, "float32")}
"""Likewise, a model that takes pictures: `bench/lives.py` has it."""

WITH_PREDICTOR = ("tiny", "tiny in bfloat16", "dense", "experts")

DEFAULT_PLACEMENT = ("branch", "turn_end", "prompt_end", "anchor", "geometric")

AXES: dict[str, Sequence[Any]] = {
    "model": [*MODELS],
    "deterministic": [True, True, False],
    "overlap": [True, False],
    "enforce_eager": [True, False],
    "speculation": [None, "cache", "mtp", "cache+mtp", "known", "liar"],
    "max_drafts": [1, 3, 7, 20],
    "pages": [0.25, 0.5, 1, 2],
    "memory": ["one request", "two requests", "tight", "roomy", "fixed", "share"],
    "kv_dtype": ["auto", "auto", "int8", "fp8"],
    "state_dtype": ["float32", "float32", "bfloat16", "int8"],
    "host": [None, 20_000, 2**20],
    "disk": [None, 60_000, 2**20],
    "eviction": ["lhd", "lru", "lfu", "fifo", "mru", "filo", "priority", "flop_aware"],
    "placement": [DEFAULT_PLACEMENT, ("turn_end",), ("prompt_end", "branch"), ("geometric",), ()],
    "seats": [1, 2, 3, 8],
    "budget": [1, 2, 5],
    "fails": [0.0, 0.0, 0.02],
    "verify_contents": [False, True],
}
"""The values of each option. `pages` are tokens of a page in chunks, `budget` chunks of a step."""

TRIES = 30
"""Random settings of which the one with the most pairs that did not occur yet is taken."""


def settled(settings: Settings) -> Settings:
    """Settings that contradict each other, made possible."""
    if settings["state_dtype"] != "float32":
        settings["deterministic"] = False
        if settings["memory"] in ("fixed", "share"):
            settings["memory"] = "tight"
    if settings["model"] not in WITH_PREDICTOR and "mtp" in (settings["speculation"] or ""):
        settings["speculation"] = "cache"
    return settings


class Pairwise:
    """Random settings, each of which has as many pairs of values as possible that those before it did not have.

    Args:
        axes: the values of every option.
        settle: makes settings that contradict each other possible.
    """

    def __init__(self, axes: Mapping[str, Sequence[Any]], settle: Callable[[Settings], Settings]) -> None:
        self._axes = axes
        self._settle = settle
        self._seen: set[Any] = set()
        self._made: list[Settings] = []

    def __getitem__(self, index: int) -> Settings:
        while len(self._made) <= index:
            rng = random.Random(len(self._made))
            best = max((self._draw(rng) for _ in range(TRIES)), key=lambda one: len(self.pairs(one) - self._seen))
            self._seen |= self.pairs(best)
            self._made.append(best)
        return dict(self._made[index])

    def _draw(self, rng: random.Random) -> Settings:
        return self._settle({name: rng.choice(values) for name, values in self._axes.items()})

    @staticmethod
    def pairs(settings: Settings) -> set[Any]:
        """The pairs of values in some settings."""
        return set(combinations(sorted((name, repr(value)) for name, value in settings.items()), 2))


PAIRWISE = Pairwise(AXES, settled)
"""The settings of each seed."""


# Models


@functools.cache
def folder() -> Path:
    """Checkpoints and adapters of this process, removed at its end."""
    path = Path(tempfile.mkdtemp(prefix="combinations-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def checkpoint(family: str) -> Path:
    """A random checkpoint with a tokenizer, and a predictor where families have one."""
    path = folder() / family.replace(" ", "-")
    if family == "Qwen3_5":
        return write_vision_checkpoint(path, vision_model(family), byte_tokenizer())
    write_random_checkpoint(path, family)
    if family in ("qwen3_5_text", "qwen3_next"):
        add_random_predictor(path)
    byte_tokenizer().save_pretrained(path, save_jinja_files=False)
    return path


@functools.cache
def base(name: str, with_predictor: bool) -> Engine:
    """The engine whose weights all lives of a model share."""
    family, chunk, dtype = {**MODELS, **WITH_PICTURES}[name]
    return Engine.from_pretrained(
        checkpoint(family) if family else "tiny",
        device="cpu",
        dtype=dtype,
        cache=CacheConfig(page_size=16, chunk_size=chunk, memory="16MiB"),
        speculation="mtp" if with_predictor else None,
    )


@functools.cache
def adapter_folders() -> dict[str, Path]:
    """Two adapters of the model "dense"."""
    from transformers import AutoModelForCausalLM

    path = checkpoint("qwen3_5_text")
    targets = {"one": TARGETS, "two": ["q_proj", "v_proj", "up_proj"]}
    return {
        name: make_adapter(
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), folder() / f"adapter-{name}", seed, own
        )
        for seed, (name, own) in enumerate(targets.items())
    }


# What goes wrong on purpose


class InjectedError(Exception):
    """A pass that fails."""


@dataclass
class Failing:
    """A runner whose passes fail now and then: before they are launched, after it, or when they are waited for."""

    inner: Any
    rng: random.Random
    chance: float

    def plan(self, step: Any, before: Any) -> Any:
        return self.inner.plan(step, before.inner if isinstance(before, FailingPass) else before)

    def launch(self, plan: Any) -> Any:
        kind = self.rng.randrange(3) if self.rng.random() < self.chance else None
        if kind == 0:
            raise InjectedError("before the pass")
        launched = self.inner.launch(plan)
        if kind == 1:
            raise InjectedError("after the pass")
        return FailingPass(launched) if kind == 2 else launched


@dataclass
class FailingPass:
    inner: Any

    def results(self) -> Any:
        self.inner.results()
        raise InjectedError("waiting for the pass")


class Known(Drafter):
    """Drafts trees of the answers that follow a history, with wrong tokens among them.

    Attributes:
        sequences: prompts with their answers.
    """

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._rng = rng
        self._vocab_size = vocab_size
        self.sequences: list[list[int]] = []

    def following(self, history: Sequence[int], limit: int) -> list[list[int]]:
        """Return what followed it in the sequences."""
        own = list(history)
        return [s[len(own) : len(own) + limit] for s in self.sequences if s[: len(own)] == own and len(s) > len(own)]

    def propose(self, history: History, limit: int) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        for path in self.following(history, limit)[-3:]:
            last = -1
            for token in path:
                if self._rng.random() < 0.3:
                    tokens.append(self._rng.randrange(self._vocab_size))
                    parents.append(last)
                tokens.append(token)
                parents.append(last)
                last = len(tokens) - 1
        return tokens, parents


# Engines


class Makes:
    """Makes the engines of a life.

    Args:
        settings: of a seed.
        rng: of what settings leave open.

    Attributes:
        chunk, page_size: tokens of a chunk and of a page.
        base: the engine with the weights.
        known: drafts what was answered.
        place: a folder for copies on disk.
        is_adapted: there are adapters "one" and "two".
    """

    def __init__(self, settings: Settings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self.base: Engine = base(settings["model"], "mtp" in (settings["speculation"] or ""))
        self.chunk: int = self.base.cache.config.chunk_size
        self.page_size: int = max(1, int(settings["pages"] * self.chunk))
        self.known: Known = Known(rng, self.base.model.config.vocab_size)
        self.place: Path = Path(tempfile.mkdtemp(dir=folder()))
        self.is_adapted: bool = settings["model"] == "dense"

    def cold(self) -> Engine:
        """An engine that keeps nothing."""
        config = CacheConfig(
            page_size=self.page_size,
            chunk_size=self.chunk,
            enabled=False,
            kv_dtype=self._settings["kv_dtype"],
            deterministic=self._settings["deterministic"],
        )
        size = 8 * (2 * LONGEST // self.page_size + 2), 16
        return self._adapted(self.base.with_cache(config, size=size, config=EngineConfig(overlap=False)))

    def engine(self, page_bytes: int, state_bytes: int) -> Engine:
        """An engine with the settings.

        Args:
            page_bytes, state_bytes: of a page and of a state.
        """
        own = self._settings
        limits = EngineConfig(
            max_num_seqs=own["seats"],
            max_num_batched_tokens=own["budget"] * self.chunk + own["seats"],
            overlap=own["overlap"],
            enforce_eager=own["enforce_eager"],
            audit=True,
        )
        cache, size = self._cache(page_bytes, state_bytes)
        while True:
            try:
                first = self.base.with_cache(cache, size=size, config=limits)
                break
            except MemoryBudgetError:
                assert size is None
                cache = replace(cache, memory=int(1.2 * cache.memory_bytes(2**40)))
        runner = Failing(first.runner, random.Random(self._rng.random()), own["fails"])
        made = Engine(first.loaded, first.cache, first.config, runner=runner, speculation=self._speculation())
        return self._adapted(made)

    def _cache(self, page_bytes: int, state_bytes: int) -> tuple[CacheConfig, tuple[int, int] | None]:
        own, longest = self._settings, math.ceil((LONGEST + 40) / self.page_size)
        size = None
        pages, states = {
            "one request": (longest, 2),
            "two requests": (2 * longest, 5),
            "tight": (2 * longest, 8),
            "roomy": (20 * longest, 60),
            "share": (3 * longest, 12),
            "fixed": (0, 0),
        }[own["memory"]]
        if own["memory"] == "fixed":
            size = self._rng.randint(longest, 3 * longest), max(MIN_STATE_SLOTS, self._rng.randint(2, 12))
        config = CacheConfig(
            page_size=self.page_size,
            chunk_size=self.chunk,
            memory=max(1, pages * page_bytes + states * state_bytes),
            eviction=own["eviction"],
            placement=own["placement"],
            kv_dtype=own["kv_dtype"],
            state_dtype=own["state_dtype"],
            host=own["host"],
            disk=own["disk"],
            directory=None if own["disk"] is None else self.place / "disk",
            deterministic=own["deterministic"],
            verify_contents=own["verify_contents"],
            state_share=0.4 if own["memory"] == "share" else None,
        )
        return config, size

    def _speculation(self) -> SpeculationConfig | None:
        own, name = self._settings, self._settings["speculation"]
        if name is None:
            return None
        drafters: tuple[str | Drafter, ...] = tuple(name.split("+"))
        if name == "known":
            drafters = (self.known,)
        elif name == "liar":

            def right(history: History, limit: int) -> list[int]:
                return [*(self.known.following(history, limit) or [[]])[0], *[0] * limit][:limit]

            drafters = (Liar(self._rng.randrange(2**30), self.base.model.config.vocab_size, right),)
        is_adaptive = self._rng.random() < 0.4
        return SpeculationConfig(drafters=drafters, max_drafts=own["max_drafts"], adaptive=is_adaptive)

    def _adapted(self, engine: Engine) -> Engine:
        for name, path in adapter_folders().items() if self.is_adapted else ():
            engine.adapters.load(name, path)
        return engine
