"""Random lives in which most answers are hits, and many of these came back from host memory or disk: every answer is
that of a cold run.

    OMP_NUM_THREADS=2 python bench/lives.py 0-40

Each seed is an engine with random settings and memory for few requests, whose users ask again, go on, send pictures
as pixels, leave, and come in threads of `AsyncEngine`; meanwhile it is dumped, loaded, restarted and cleared. At least
half of the answers of all seeds have to be hits, and a fifth restored. A failure names its seed and what came before.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from hybrid import AsyncEngine, RequestOutput, SamplingParams  # noqa: E402
from hybrid.cache.config import DEFAULT_PLACEMENT  # noqa: E402
from support.combinations import LONGEST, MODELS, PAIRWISE, InjectedError, Settings  # noqa: E402
from support.engines import assert_nothing_held  # noqa: E402
from support.lives import Life, Prompt  # noqa: E402

EVENTS = 12
"""Things that happen in a life."""

NAMESPACES = ("", "", "", "", "b")


def settings_of(seed: int) -> Settings:
    """The settings of a life: random, but with tiers, and a memory that cannot hold what is asked again."""
    rng = random.Random(seed)
    settings = PAIRWISE[seed % 100]
    settings["model"] = rng.choice([*(name for name in MODELS if "windows" not in name), "vision"])
    if "mtp" in (settings["speculation"] or "") and settings["model"] in ("vision", "state space", "odd sizes"):
        settings["speculation"] = "cache"
    if rng.random() < 0.7:
        settings.update(deterministic=True, state_dtype="float32")
    settings.update(
        memory=rng.choice(["two requests", "tight", "tight", "roomy"]),
        pages=rng.choice([0.5, 1]),
        host=rng.choice([2**20, 2**24]),
        disk=rng.choice([None, 2**22, 2**26]),
        placement=rng.choice([DEFAULT_PLACEMENT, ("turn_end", "prompt_end")]),
        seats=rng.choice([2, 3, 8]),
    )
    return settings


class ReturningLife(Life):
    """A life whose users ask again.

    Attributes:
        counts: answers, hits among them, hits that were restored, answers about pictures, users who left.
    """

    def __init__(self, seed: int, settings: Settings) -> None:
        super().__init__(seed, settings)
        self.counts: Counter[str] = Counter()
        self.started: list[Prompt] = []

    def prompt(self) -> Prompt:
        """One of a dozen, most often: as it was, or continued."""
        rng = self.rng
        if len(self.started) < 4 or rng.random() < 0.06:
            self.started.append(self._with_pictures() if self.settings["model"] == "vision" else self._long())
            return self.started[-1]
        before = rng.choice([*self.started, *self.seen[-8:]])
        if before.pictures:
            return Prompt(before.ids, text=f"{before.text}{rng.choice(['', '', ' And?'])}", pictures=before.pictures)
        room = LONGEST - len(before.ids)
        if room < 1:
            return rng.choice(self.started)
        return before if rng.random() < 0.5 else Prompt(before.ids + self.tokens(rng.randint(1, room)), before.images)

    def _long(self) -> Prompt:
        prompt = Prompt(self.tokens(self.rng.randint(max(2 * self.chunk, 60), LONGEST - 40)))
        return self.with_images(prompt) if self.rng.random() < 0.2 else prompt

    def _with_pictures(self) -> Prompt:
        few = tuple(self.rng.randrange(5) for _ in range(self.rng.choice([1, 1, 2])))
        prompt = Prompt((), text="What is to be seen?", pictures=few)
        output = self.cold_engine.generate([self.given(prompt)], SamplingParams(max_new_tokens=1), progress=False)[0]
        return Prompt(tuple(output.prompt_token_ids), text=prompt.text, pictures=few)

    def options(self, prompt: Prompt) -> Settings:
        found = super().options(prompt)
        found.pop("prompt_logprobs", None)  # such requests compute all of their prompts
        return found

    def compare(self, prompt: Prompt, options: Settings, output: RequestOutput) -> None:
        super().compare(prompt, options, output)
        self.counts["answers"] += 1
        self.counts["hits"] += output.usage.cached_tokens > 0
        self.counts["restored"] += "tokens restored from" in str(output.explain)
        self.counts["pictures"] += bool(prompt.pictures)

    def happen(self) -> None:
        """Something happens; then nothing is held that should not be."""
        self.rng.choices([self.step, self.users], [2, 3])[0]()
        assert_nothing_held(self.engine)

    def users(self) -> None:
        """Users of an `AsyncEngine`: some are slow, some leave before their answer ends."""
        rng = self.rng
        jobs = [one for _ in range(3) for one in self.requests()]
        plans = [(*job, rng.choice(NAMESPACES), rng.randint(0, 6) if rng.random() < 0.2 else None) for job in jobs]
        self.log.append(f"users: {[self.shown(*job) for job in jobs]}")

        async def user(
            engine: AsyncEngine, prompt: Prompt, options: Settings, namespace: str, leaves_after: int | None
        ) -> None:
            text, tokens, count = "", list[int](), 0
            async for output in engine.stream(self.given(prompt), SamplingParams(**options), namespace=namespace):
                text, tokens, count = text + output.delta, tokens + output.delta_token_ids, count + 1
                if leaves_after is not None and count > leaves_after:
                    self.counts["left"] += 1
                    return
            assert (text, tokens) == (output.text, output.token_ids)
            self.compare(prompt, options, output)

        def settle(engine: object) -> None:
            while self.engine.has_work:
                try:
                    self.engine.step()
                except InjectedError:
                    assert self.engine.is_retrying

        async def serve() -> None:
            engine = AsyncEngine(self.engine)
            await asyncio.wait_for(asyncio.gather(*(user(engine, *plan) for plan in plans)), 600)
            await engine.call(settle)
            await engine.close()

        asyncio.run(serve())
        self.engine = self.make()  # an engine belongs to the thread that has run it; copies on disk stay


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("seeds", help="FIRST-END: from the first to before the last")
    first, end = map(int, parser.parse_args().seeds.split("-"))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    total: Counter[str] = Counter()
    num_failures = 0
    for seed in range(first, end):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # pins that are too large
            life = ReturningLife(seed, settings_of(seed))
            try:
                for _ in range(EVENTS):
                    life.happen()
                life.engine.close()
            except Exception as error:
                num_failures += 1
                error.add_note(f"seed {seed}: " + "\n  ".join(life.log))
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                shutil.rmtree(life.makes.place, ignore_errors=True)
        total += life.counts
        print(f"seed {seed}: {dict(life.counts)}, {life.settings['model']}", flush=True)
    answers, hits, restored = (total[name] for name in ("answers", "hits", "restored"))
    print(
        f"{answers} answers, {hits / answers:.0%} hits, {restored / answers:.0%} restored; {num_failures} lives failed"
    )
    return int(num_failures > 0 or hits < answers / 2 or restored < answers / 5)


if __name__ == "__main__":
    sys.exit(main())
