"""`hybrid parity`: prefixes that were computed by another engine, or in another process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from tempfile import TemporaryDirectory

from hybrid.cache.config import CacheConfig
from hybrid.cache.stats import CacheStats
from hybrid.commands.judge import ANSWER, ONE_TOKEN, Check, Judge
from hybrid.engine.engine import Engine
from hybrid.engine.output import RequestOutput
from hybrid.tiers.transfer import Transfer
from hybrid.units import ceil_div


def files(judge: Judge, model: str | Path, dtype: str, process: Executor) -> list[Check]:
    """Prefixes go from one engine to another, by file and in memory, and to a second process, which makes engines of
    its own."""
    return [
        judge.attempt(saved_and_loaded),
        judge.attempt(prefilled_and_decoded),
        judge.attempt(in_a_second_process, model, dtype, process),
        judge.attempt(to_host_memory_and_back),
        judge.attempt(to_disk_and_back),
        judge.attempt(restarted, model, dtype, process),
    ]


def saved_and_loaded(judge: Judge) -> Check:
    """One engine answers and saves; another one loads, and answers prompts and second turns."""
    return _saved(judge, "saved and loaded by another engine", _load_and_generate)


def in_a_second_process(judge: Judge, model: str | Path, dtype: str, process: Executor) -> Check:
    """As `saved_and_loaded`, where another process loads, with an engine that it makes from the checkpoint."""

    def generate(_: Judge, path: Path, prompts: list[list[int]]) -> tuple[Transfer, list[RequestOutput]]:
        config = judge.engine.cache.config
        return process.submit(generate_from_file, str(model), dtype, config, path, prompts).result()

    return _saved(judge, "saved and loaded by a second process", generate)


def generate_from_file(
    model: str, dtype: str, config: CacheConfig, path: Path, prompts: list[list[int]]
) -> tuple[Transfer, list[RequestOutput]]:
    """What the second process does."""
    with Engine.from_pretrained(model, dtype=dtype, cache=config) as engine:
        loaded = engine.load(path)
        return loaded, engine.generate(prompts, ANSWER, progress=False)


def prefilled_and_decoded(judge: Judge) -> Check:
    """One engine computes prompts and hands over states, and the pages that the other one lacks, which decodes."""
    prefill, decode, shared = judge.warm(), judge.warm(), judge.ids(3 * judge.grid)
    decode.generate([shared + judge.ids(judge.grid)], ONE_TOKEN, progress=False)
    prompts = [shared + judge.ids(2 * judge.grid + 5), judge.ids(2 * judge.grid + 1)]
    prefill.generate(prompts, ONE_TOKEN, progress=False)
    outputs: list[RequestOutput] = []
    saved, complete = 0, True
    for prompt in prompts:
        part = prefill.dump([prompt], after=decode.explain(prompt).page_hit)
        saved += len(prefill.dump([prompt])) - len(part)
        complete = complete and not decode.load(part).skipped
        outputs += decode.generate([prompt], ANSWER, progress=False)
    whole = all(output.usage.cached_tokens >= 2 * judge.grid for output in outputs)
    return judge.check(
        "prefilled by one engine, decoded by another",
        outputs,
        ("a checkpoint was skipped", complete),
        ("pages that were there were handed over", saved > 0),
        ("a prompt was computed twice", whole),
    )


def to_host_memory_and_back(judge: Judge) -> Check:
    """Prompts and their second turns in a memory that holds few of them; host memory holds the rest."""
    warm = _few(judge, host="64MiB")
    return _evicted(judge, "evicted to host memory and back", warm)


def to_disk_and_back(judge: Judge) -> Check:
    """As `to_host_memory_and_back`, with a directory, from which the contents are read."""
    with TemporaryDirectory() as folder:
        warm = _few(judge, directory=Path(folder) / "cache")
        check = _evicted(judge, "evicted to disk and back", warm)
        warm.close()
    return check


def restarted(judge: Judge, model: str | Path, dtype: str, process: Executor) -> Check:
    """An engine answers, and is closed. One that another process makes from the checkpoint finds what it had in the
    directory, and answers the prompts and their second turns."""
    with TemporaryDirectory() as folder:
        first = _few(judge, host="1MiB", directory=Path(folder) / "cache")
        prompts = _conversations(judge, first, 3)
        first.close()
        later = process.submit(generate_after_restart, str(model), dtype, first.cache.config, prompts)
        outputs, stats = later.result()
    hits = all(output.usage.cached_tokens >= 2 * judge.grid for output in outputs)
    return judge.check(
        "restarted: a second process with the directory",
        outputs,
        ("a prompt was not hit", hits),
        *_sound(stats),
    )


def generate_after_restart(
    model: str, dtype: str, config: CacheConfig, prompts: list[list[int]]
) -> tuple[list[RequestOutput], CacheStats]:
    """What the second process does."""
    with Engine.from_pretrained(model, dtype=dtype, cache=config) as engine:
        outputs = [engine.generate([prompt], ANSWER, progress=False)[0] for prompt in prompts]
        engine.cache.audit()
        return outputs, engine.cache.stats()


def _few(judge: Judge, host: str | None = None, directory: Path | None = None) -> Engine:
    """An engine with tiers whose memory holds few prompts, but each of `_conversations` with its answer."""
    page_size = judge.engine.cache.config.page_size
    longest = ceil_div(5 * judge.grid + 3 * ANSWER.max_new_tokens, page_size)
    return judge.warm(14 * judge.grid // page_size, 5, longest=longest, host=host, directory=directory)


def _conversations(judge: Judge, engine: Engine, count: int) -> list[list[int]]:
    """Up to four prompts that an engine has answered, and then the second turns that continue them."""
    grid = judge.grid
    lengths = (4 * grid + 9, 2 * grid + grid // 2, 4 * grid + 10, 4 * grid + 11)[:count]
    prompts = [judge.ids(length) for length in lengths]
    turns = [engine.generate([prompt], ANSWER, progress=False)[0] for prompt in prompts]
    return prompts + [judge.next_turn(turn) for turn in turns]


def _evicted(judge: Judge, name: str, warm: Engine) -> Check:
    """Prompts and their second turns in an engine that cannot hold all of them."""
    outputs = []
    for prompt in _conversations(judge, warm, 4):
        if warm.cache.tiers is not None and warm.cache.tiers.disk is not None:
            warm.cache.tiers.disk.flush()  # what waits for the disk would be had from memory
        outputs += warm.generate([prompt], ANSWER, progress=False)
    warm.cache.audit()
    return judge.check(name, outputs, *_sound(warm.cache.stats()))


def _sound(stats: CacheStats) -> tuple[tuple[str, bool], ...]:
    return (
        ("nothing was restored", stats.restored_checkpoints > 0),
        ("a copy failed", stats.tier_failures == 0 and stats.disk_failure is None),
    )


Generate = Callable[[Judge, Path, list[list[int]]], tuple[Transfer, list[RequestOutput]]]


def _saved(judge: Judge, name: str, generate: Generate) -> Check:
    first = judge.warm()
    prompts = [judge.ids(4 * judge.grid + 9), judge.ids(2 * judge.grid + judge.grid // 2)]
    turns = first.generate(prompts, ANSWER, progress=False)
    second = [judge.next_turn(turn) for turn in turns]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "prefixes.hybrid"
        saved = first.save(path)
        loaded, outputs = generate(judge, path, prompts + second)
    whole = (loaded.checkpoints, loaded.pages, loaded.skipped) == (saved.checkpoints, saved.pages, {})
    hits = all(output.usage.cached_tokens >= 2 * judge.grid for output in outputs)
    return judge.check(name, outputs, ("the file was not loaded whole", whole), ("a prompt was not hit", hits))


def _load_and_generate(judge: Judge, path: Path, prompts: list[list[int]]) -> tuple[Transfer, list[RequestOutput]]:
    warm = judge.warm()
    loaded = warm.load(path)
    warm.cache.audit()
    return loaded, warm.generate(prompts, ANSWER, progress=False)
