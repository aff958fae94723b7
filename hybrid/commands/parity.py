"""`hybrid parity`: hits do not change results.

Logits are compared with transformers' own model, and hits with cold runs, bit by bit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hybrid.cache.config import CacheConfig
from hybrid.commands.command import Outcome
from hybrid.commands.judge import ANSWER, ONE_TOKEN, Check, Judge
from hybrid.commands.parity_drafts import drafts
from hybrid.commands.parity_files import files
from hybrid.commands.random_checkpoints import FAMILIES, add_random_predictor, write_random_checkpoint
from hybrid.commands.second_process import predicted, rare_collections, second_process, transformers_logits
from hybrid.engine.build import resolve_device
from hybrid.engine.engine import Engine
from hybrid.engine.output import RequestOutput
from hybrid.engine.planner import plan
from hybrid.engine.request import Request
from hybrid.engine.sampling_params import SamplingParams
from hybrid.engine.step import Part, Step
from hybrid.kernels.ops import compiled_for
from hybrid.models.loading import TINY, has_predictor, open_checkpoint
from hybrid.prompts.encode import EncodedPrompt

TOLERANCE = 1e-4
"""Largest difference allowed between a logit and transformers', as a fraction of the logits' range, in float32."""

MAX_ERRORS = 1.5
"""Largest error allowed in another type, in errors of transformers' own model in that type."""


def repeated_prompt(judge: Judge) -> Check:
    """Prompts that were answered before."""
    warm, prompts = judge.warm(), [judge.ids(4 * judge.grid + 9), judge.ids(4 * judge.grid)]
    warm.generate(prompts, ANSWER, progress=False)
    return judge.check("a repeated prompt", warm.generate(prompts, ANSWER, progress=False))


def second_turn(judge: Judge) -> Check:
    """Conversations that continue: the history is prompt and answer of the turn before."""
    warm, outputs = judge.warm(), []
    longest = 4 * judge.grid + 9
    turns = warm.generate([judge.ids(longest), judge.ids(2 * judge.grid + judge.grid // 2)], ANSWER, progress=False)
    for _ in range(2):
        turns = warm.generate([judge.next_turn(turn) for turn in turns], ANSWER, progress=False)
        outputs += turns
    beyond_prompt = any(output.usage.cached_tokens > longest for output in outputs)
    return judge.check("a second and a third turn", outputs, ("no answer was hit", beyond_prompt))


def branch(judge: Judge) -> Check:
    """Prompts that leave a cached document at other places than its checkpoints."""
    warm, document = judge.warm(), judge.ids(8 * judge.grid)
    warm.generate([document], ONE_TOKEN, progress=False)
    outputs = []
    for own, cut in enumerate((3 * judge.grid + 5, 3 * judge.grid + 5, 2 * judge.grid, 7 * judge.grid - 1), 3):
        outputs += warm.generate([document[:cut] + judge.ids(judge.grid + own)], ANSWER, progress=False)
    return judge.check("a branch in the middle", outputs)


def sharing(judge: Judge) -> list[list[int]]:
    """Prompts that share their beginning, up to a place in a chunk, and end a few tokens after a multiple of the grid,
    one after it, on it, and in between."""
    grid, shared = judge.grid, judge.ids(4 * judge.grid + 11)
    return [shared + judge.ids(own) for own in (3, grid - 10, 40, 2 * grid - 11, 90)]


def busy_batch(judge: Judge) -> Check:
    """Requests that arrive while others decode. They leave the prompt that was answered before on the grid."""
    warm, prompts = judge.warm(), sharing(judge)
    warm.generate([prompts[0][: 4 * judge.grid] + judge.ids(5)], ONE_TOKEN, progress=False)
    outputs: dict[str, RequestOutput] = {}
    for prompt in prompts:
        warm.add_request(prompt, ANSWER)
        for _ in range(3):
            outputs.update({output.request_id: output for output in warm.step()})
    while warm.has_work:
        outputs.update({output.request_id: output for output in warm.step()})
    return judge.check("a request joins a busy batch", list(outputs.values()))


def memory_pressure(judge: Judge) -> Check:
    """More requests than the memory holds: eviction and retraction.

    Every request needs one more page while it decodes. How many are admitted depends on the sizes of a page and a
    state, so that sizes are tried until one is retracted. The first suffices for all families. The second time some
    prompts are those of the first time, and others share what these share.
    """
    page_size = judge.engine.cache.config.page_size
    longest = -(-(6 * judge.grid + 24) // page_size)
    shared, evicted, retracted = judge.ids(4 * judge.grid), False, False
    outputs: list[RequestOutput] = []
    for percent in (225, 250, 300, 200, 175, 150, 125, 110):
        warm = judge.warm(pages=longest * percent // 100, states=5, longest=longest)
        outputs = []
        for missing_of_each in ((20, 14, 9, 5), (20, 15, 10, 5)):
            prompts = [shared + judge.ids(judge.grid - missing) for missing in missing_of_each]
            outputs += warm.generate([*prompts, judge.ids(6 * judge.grid - 8)], ANSWER, progress=False)
        stats = warm.cache.stats()
        warm.cache.audit()
        evicted = stats.evicted_pages > 0 and stats.evicted_checkpoints > 0
        retracted = warm.scheduler.num_retractions > 0
        if evicted and retracted:
            break
    return judge.check(
        "under memory pressure", outputs, ("nothing was evicted", evicted), ("no request was retracted", retracted)
    )


def launched_together(judge: Judge) -> Check:
    """Requests that arrive together and share a prefix that is not cached."""
    outputs = judge.warm().generate(sharing(judge), ANSWER, progress=False)
    shared_by_all = sum(output.usage.cached_tokens >= 4 * judge.grid for output in outputs) == len(outputs) - 1
    return judge.check("launched together", outputs, ("the shared part was computed more than once", shared_by_all))


SCENARIOS: tuple[Callable[[Judge], Check], ...] = (
    repeated_prompt,
    second_turn,
    branch,
    busy_batch,
    memory_pressure,
    launched_together,
)


def compared_with_transformers(judge: Judge) -> list[int]:
    """The prompt whose logits are compared with those of transformers' own model.

    In a random checkpoint two experts may be as likely but for rounding, which then chooses among them: the prompt of
    seed 0 has no such token in any family, that of another seed may.
    """
    return judge.ids(4 * judge.grid + 36)


def against_transformers(judge: Judge, expected: torch.Tensor, rounded: torch.Tensor | None = None) -> list[Check]:
    """Compare logits of a prompt in one pass, in chunks, and of decoded tokens with `[tokens, vocab]` logits of
    transformers' own model in fp32.

    Args:
        rounded: its logits in the type of the judge's engine, where that is another: errors are compared.
    """
    ids = compared_with_transformers(judge)
    decoded = 12
    ways = {
        "logits of a prompt in one pass": len(ids),
        "logits of a prompt in chunks": judge.engine.cache.config.chunk_size,
        "logits of decoded tokens": len(ids) - decoded,
    }
    checks = []
    for name, share in ways.items():
        ours = prompt_logits(judge.warm(), ids, share)
        checks.append(
            compare_logits(name, ours, expected) if rounded is None else compare_errors(name, ours, rounded, expected)
        )
    return checks


def prompt_logits(engine: Engine, ids: list[int], share: int) -> torch.Tensor:
    """`[len(ids), vocab]` logits of every token, computed in prompt parts of `share` tokens; the remainder token by
    token if it does not fill a chunk."""
    request = Request("parity", EncodedPrompt(ids), SamplingParams(), len(ids) + 1)
    lease = engine.cache.open(request.key(), 0, len(ids))
    assert lease is not None
    config, logits, start = engine.cache.config, [], 0
    while start < len(ids):
        is_prefill = start == 0 or (start % config.chunk_size == 0 and start + share <= len(ids))
        end = min(start + share, len(ids)) if is_prefill else start + 1
        step = Step([Part(request, lease, start, end, is_prefill)])
        batch, _ = plan(step, config.page_size, config.chunk_size, engine.deterministic).on(engine.device)
        every_row = replace(batch, sample_rows=torch.arange(end - start, device=engine.device))
        logits.append(engine.model(every_row, engine.cache.kv, engine.cache.state_tensors))
        engine.cache.advance(lease, end)
        start = end
    engine.cache.close(lease)
    return torch.cat(logits).cpu()


def compare_logits(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> Check:
    """Compare logits `[tokens, vocab]`: largest difference, and the most likely token where it is clear."""
    bound = TOLERANCE * float(theirs.max() - theirs.min())
    worst = float((ours - theirs).abs().max())
    top = theirs.topk(2, dim=-1).values
    clear = top[:, 0] - top[:, 1] > bound
    same = bool((ours.argmax(-1) == theirs.argmax(-1))[clear].all())
    top_token = "the same most likely token" if same else "ANOTHER most likely token"
    detail = f"largest difference {worst:.2e}, allowed {bound:.2e}; {top_token} in {int(clear.sum())} clear rows"
    return Check(name, worst <= bound and same, None, detail)


def compare_errors(name: str, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> Check:
    """Compare the errors of logits `[tokens, vocab]`, ours and transformers' in the same type: their root mean squares,
    as a fraction of that of the exact logits."""
    scale = exact.square().mean().sqrt()
    our_error, their_error = (float((logits - exact).square().mean().sqrt() / scale) for logits in (ours, theirs))
    detail = f"error {our_error:.1e}, of transformers {their_error:.1e}, allowed {MAX_ERRORS} times as much"
    return Check(name, our_error <= MAX_ERRORS * their_error, None, detail)


@dataclass(frozen=True)
class Preparation:
    """CPU seconds from a checkpoint to an engine at full speed.

    Attributes:
        loading: reading and converting the checkpoint, without the rest, and without importing torch and transformers.
        importing: of the modules that run compiled code.
        compiling: what the first request takes more than the same one in a second engine: code is read from disk.
            Where it was not there it was compiled while the model was loaded, by other processes.
    """

    loading: float
    importing: float
    compiling: float


@dataclass(frozen=True)
class Parity:
    """The result for one checkpoint.

    Attributes:
        checks: the lines of the table.
        preparation: what it took to start; None: it was not measured.
    """

    checks: list[Check]
    preparation: Preparation | None = None

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The result for machines."""
        return {"passed": self.passed, **asdict(self)}


def run_parity(model: str | Path, seed: int = 0, dtype: str = "float32") -> Parity:
    """Run every check on a checkpoint, in a type.

    Raises:
        CheckpointError: the path holds no usable checkpoint.
    """
    with second_process(open_checkpoint(model).path) as process:
        return check_all(model, seed, dtype, process)


def check_all(model: str | Path, seed: int, dtype: str, process: Executor) -> Parity:
    """Run every check on a checkpoint; `process` computes what a second process does, most of it meanwhile."""
    started = time.process_time()
    compiled_for("tasks", torch.empty(0, device=resolve_device(None)))  # imports what runs compiled code
    imported = time.process_time()
    engine = Engine.from_pretrained(model, dtype=dtype, cache=CacheConfig(memory="2GiB", deterministic=True))
    loaded, judge = time.process_time(), Judge(engine, seed)
    preparation, checkpoint = prepared(judge, loaded - imported, imported - started), open_checkpoint(model)
    ids, types = compared_with_transformers(judge), dict.fromkeys(("float32", dtype))
    theirs = [process.submit(transformers_logits, checkpoint.path, ids, each) for each in types]
    others = process.submit(predicted, str(model), seed, dtype) if has_predictor(checkpoint) else None
    checks = [judge.attempt(scenario) for scenario in SCENARIOS]
    checks += [each.check(judge) for each in drafts(judge)] + files(judge, model, dtype, process)
    checks = against_transformers(judge, *(torch.from_numpy(each.result()) for each in theirs)) + checks
    if others is not None:
        checks += [each.check(judge) for each in others.result()]
    return Parity(checks, preparation)


def prepared(judge: Judge, seconds: float, importing: float) -> Preparation:
    """What it took to start: `seconds` of CPU time for the engine, those of `importing` before it, and what the first
    request takes more than the next one. No request may have been computed before."""
    prompt, times = judge.ids(2 * judge.grid + 3), []
    for _ in range(2):
        warm, started = judge.warm(), time.process_time()
        warm.generate([prompt], ANSWER, progress=False)
        times.append(time.process_time() - started)
    parts = seconds, importing, max(0.0, times[0] - times[1])
    return Preparation(*(round(part, 3) for part in parts))


def run_all_families(seed: int = 0, dtype: str = "float32") -> dict[str, Parity]:
    """Run every check on a small random checkpoint of every family, in a type."""
    results = {}
    with TemporaryDirectory() as folder, second_process(TINY) as process:
        for at, name in enumerate(FAMILIES):
            path = write_random_checkpoint(Path(folder) / str(at), name, seed)
            if name.startswith("qwen"):  # the others have none
                add_random_predictor(path)
            results[name] = check_all(path, seed, dtype, process)
    return results


# The command


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Run the checks, and print one table per checkpoint."""
    with rare_collections():
        if args.all_families:
            families = run_all_families(args.seed, args.dtype)
        else:
            families = {args.model: run_parity(args.model, args.seed, args.dtype)}
    for model, result in families.items():
        table = Table("", "check", "hit tokens", "measured", title=f"parity of {model}")
        for check in result.checks:
            mark = "[green]ok[/green]" if check.passed else "[red]MISS[/red]"
            table.add_row(mark, check.name, "" if check.hit_tokens is None else str(check.hit_tokens), check.detail)
        if (took := result.preparation) is not None:
            table.caption = (
                f"CPU time: loading {took.loading:.2f} s, importing what runs compiled code {took.importing:.2f} s, "
                f"compiling {took.compiling:.2f} s"
            )
        console.print(table)
    results = {model: result.as_json() for model, result in families.items()}
    passed = all(result.passed for result in families.values())
    return Outcome(passed, {"passed": passed, "families": results} if args.all_families else results[args.model])
