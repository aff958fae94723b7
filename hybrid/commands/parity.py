"""`hybrid parity`: hits do not change results.

Logits are compared with transformers' own model, and hits with cold runs, bit by bit: repeated prompts, later turns,
branches, batches and pressure; drafts, right, wrong or absurd; prefixes of another engine, of a tier, or of a second
process, which shares nothing with this one, and computes while this one does what needs nothing of it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, product
from multiprocessing import get_context
from pathlib import Path
from shutil import copyfile, rmtree
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from hybrid.cache.config import CacheConfig
from hybrid.cache.stats import CacheStats
from hybrid.commands.commands import Outcome
from hybrid.commands.faults import computing_takes
from hybrid.commands.random_checkpoints import FAMILIES, add_random_predictor, is_comparable, write_random_checkpoint
from hybrid.commands.toy_model import Liar
from hybrid.engine.build import default_dtype, resolve_device
from hybrid.engine.engine import Engine
from hybrid.engine.output import RequestOutput
from hybrid.engine.planner import plan
from hybrid.engine.request import Request
from hybrid.engine.sampling_params import SamplingParams
from hybrid.engine.step import Part, Step
from hybrid.errors import ArgumentError, HybridError
from hybrid.kernels.ops import compiled_for
from hybrid.memory.memory import smallest_memory
from hybrid.models.layers import Linear
from hybrid.models.loading import TINY, has_predictor, open_checkpoint
from hybrid.models.moe import ExpertRouter, Experts
from hybrid.models.weights import stored_tensors
from hybrid.prompts.encode import EncodedPrompt
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.drafter import Drafter, History
from hybrid.tiers.transfer import Transfer
from hybrid.units import ceil_div

log: logging.Logger = logging.getLogger(__name__)

ANSWER = SamplingParams(max_new_tokens=24, logprobs=5, ignore_eos=True)
ONE_TOKEN = replace(ANSWER, max_new_tokens=1)
"""Parameters of requests that are to compute their prompts and are not compared."""

SLOWLY = 1.0
"""Seconds per token: every restore is worth it and has time, however busy the disk is."""


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        passed: whether it holds.
        hit_tokens: prompt tokens that the warm runs did not compute, None where hits do not matter. A scenario without
            hits fails.
        detail: the measurement in words.
    """

    name: str
    passed: bool
    hit_tokens: int | None
    detail: str


class Judge:
    """Runs requests warm, and each of them cold and alone, and compares.

    Args:
        engine: its weights are used; every scenario gets a cache of its own.
        seed: of the random prompts.
    """

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine: Engine = engine
        self._seed = seed
        config = engine.cache.config
        self.grid: int = config.grid
        self._config = CacheConfig(
            page_size=config.page_size, chunk_size=config.chunk_size, kv_dtype=config.kv_dtype, deterministic=True
        )
        self._answers: dict[tuple[tuple[int, ...], SamplingParams], RequestOutput] = {}
        self._cold = engine.with_cache(replace(self._config, enabled=False), size=(256, 16))

    def ids(self, count: int) -> list[int]:
        """The random token ids of this length. Scenarios whose prompts have equal lengths ask for the same ones, which
        are answered cold once; what is warm each computes in a cache of its own."""
        rng = random.Random(f"{self._seed} {count}")
        return [rng.randrange(self.engine.model.config.vocab_size) for _ in range(count)]

    def next_turn(self, output: RequestOutput) -> list[int]:
        """The prompt that continues an answer: half a chunk and a few tokens more."""
        return output.prompt_token_ids + output.token_ids + self.ids(self.grid // 2 + 3)

    def warm(
        self,
        pages: int = 256,
        states: int = 64,
        speculation: SpeculationConfig | None = None,
        longest: int = 0,
        host: str | None = None,
        directory: Path | None = None,
    ) -> Engine:
        """An engine with an empty cache of its own: one budget, the size of `pages` and `states`, or the smallest there
        is. Where no request of `longest` pages would fit into the pieces of that budget, because pages are small
        compared with a state, it has pools of these sizes; with a tier, which has no pools, the smallest budget into
        which one fits."""
        page_bytes, state_bytes = self.engine.cache.unit_bytes
        memory = pages * page_bytes + states * state_bytes
        least = smallest_memory(max(longest, 1), page_bytes, state_bytes, None)
        if longest and memory < least and host is None and directory is None:
            return self.engine.with_cache(self._config, size=(pages, states), speculation=speculation)
        config = replace(self._config, memory=max(memory, least), host=host)
        if directory is not None:
            config = replace(config, disk="1GiB", directory=directory)
        return self.engine.with_cache(config, speculation=speculation)

    def cold(self, prompt: list[int], params: SamplingParams = ANSWER) -> RequestOutput:
        """The answer to a prompt alone, without a cache and without drafts."""
        known = (tuple(prompt), params)
        if known not in self._answers:
            self._answers[known] = self._cold.generate([prompt], params, progress=False)[0]
        return self._answers[known]

    def differences(self, outputs: list[RequestOutput], params: SamplingParams = ANSWER) -> list[str]:
        """The outputs that differ from a cold run of the same prompt alone, in a token or in a log-probability."""
        wrong = []
        for output in outputs:
            cold = self.cold(output.prompt_token_ids, params)
            assert cold.usage.cached_tokens == 0
            if cold.token_ids != output.token_ids:
                wrong.append(f"{output.request_id}: tokens differ")
            elif cold.logprobs != output.logprobs:
                wrong.append(f"{output.request_id}: log-probabilities differ")
        return wrong

    def attempt(self, scenario: Callable[..., Check], *given: object) -> Check:
        """The check of a scenario. It fails with the error in words where the scenario raises one of ours."""
        try:
            return scenario(self, *given)
        except HybridError as error:
            return Check(scenario.__name__.replace("_", " "), False, None, f"{type(error).__name__}: {error}")

    def check(self, name: str, outputs: list[RequestOutput], *conditions: tuple[str, bool]) -> Check:
        """A scenario passes if its outputs equal cold runs, something was hit, and its own conditions hold.

        Args:
            conditions: (message, holds) of each further condition.
        """
        hits = sum(output.usage.cached_tokens for output in outputs)
        wrong = (
            self.differences(outputs)
            + ([] if hits else ["nothing was hit"])
            + [message for message, holds in conditions if not holds]
        )
        detail = "; ".join(wrong) if wrong else f"{len(outputs)} requests, bitwise equal"
        return Check(name, not wrong, hits, detail)


TOLERANCE = 1e-4
"""Largest difference allowed between a logit and transformers', as a fraction of the logits' range, in float32. Of
quantized weights, too, on the numbers that they stand for: products with them have the bits of products with these
numbers, so that nothing but the rounding of sums is left."""

ROUNDINGS = 3
"""That difference of quantized weights, in what random changes of their last bits make of transformers' own model,
where this is more, and no more than that times `TOLERANCE`. A sum of n products in eight parts is rounded as if weights
had changed by sqrt(n / 16) / 2 times that, in either model: three times in both together with rows of 288 columns,
which are longer than those here."""

MAX_ERRORS = 1.5
"""Largest error allowed in another type, in errors of transformers' own model in that type; and with quantized weights,
in its errors with weights that are changed at random by as much."""

MAX_ERRORS_OF_EXPERTS = 3
"""The same with quantized weights, where experts are chosen: their number and not their error is chance in the few rows
that take another expert, so that nine times as many are three times the error."""

CHANGES = ("changed", "changed once more", "changed again")
"""Names of the checkpoints that are changed at random: the error of one alone is chance in a small model."""

LARGEST_ERRORS = {"int8": 0.4, "int4": 1.3}
"""Errors of quantized weights that are too large whatever random changes make, as fractions of the logits: those of
logits that have nothing to do with each other differ by the square root of 2."""


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
    state, so that sizes are tried until one is retracted. The first suffices for all families; where a state is as
    large as many pages, what is left beside a state that several requests share has room for what they need, and fewer
    states do. The second time some prompts are those of the first time, and others share what these share.
    """
    page_size = judge.engine.cache.config.page_size
    longest = -(-(6 * judge.grid + 24) // page_size)
    shared, evicted, retracted = judge.ids(4 * judge.grid), False, False
    outputs: list[RequestOutput] = []
    for states, percent in product((5, 4, 3), (225, 250, 300, 200, 175, 150, 125, 110)):
        warm = judge.warm(pages=longest * percent // 100, states=states, longest=longest)
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


OF_VARIANTS: tuple[Callable[[Judge], Check], ...] = (repeated_prompt, busy_batch, memory_pressure)
"""The scenarios of a checkpoint that differs from another one of its type in sizes and storage."""


def compared_with_transformers(judge: Judge) -> list[int]:
    """The prompt whose logits are compared with those of transformers' own model.

    In a random checkpoint two experts may be as likely but for rounding, which then chooses among them: the prompt of
    seed 0 has no such token in any family, that of another seed may.
    """
    return judge.ids(4 * judge.grid + 36)


def against_transformers(
    judge: Judge, expected: torch.Tensor, rounded: torch.Tensor | None = None, nudged: torch.Tensor | None = None
) -> list[Check]:
    """Compare logits of a prompt in one pass, in chunks, and of decoded tokens with `[tokens, vocab]` logits of
    transformers' own model in fp32.

    Args:
        rounded: its logits in the type of the judge's engine, where that is another: errors are compared.
        nudged: its logits with random changes of the last bits of quantized weights.
    """
    ids, decoded = compared_with_transformers(judge), 12
    ways = {
        "logits of a prompt in one pass": len(ids),
        "logits of a prompt in chunks": judge.engine.cache.config.chunk_size,
        "logits of decoded tokens": len(ids) - decoded,
    }
    checks = []
    for name, share in ways.items():
        ours = prompt_logits(judge.warm(), ids, share)
        checks.append(
            compare_logits(name, ours, expected, nudged)
            if rounded is None
            else compare_errors(name, ours, rounded, expected, chooses_experts(judge.engine))
        )
    return checks


def chooses_experts(engine: Engine) -> bool:
    """Tell whether a model has mixtures of experts."""
    return any(isinstance(module, ExpertRouter) for module in engine.model.modules())


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


def compare_logits(name: str, ours: torch.Tensor, theirs: torch.Tensor, nudged: torch.Tensor | None = None) -> Check:
    """Compare logits `[tokens, vocab]`: largest difference, and the most likely token where it is clear.

    Args:
        nudged: theirs with random changes of the last bits of weights.
    """
    bound = TOLERANCE * float(theirs.max() - theirs.min())
    if nudged is not None:
        bound = min(max(bound, ROUNDINGS * float((nudged - theirs).abs().max())), ROUNDINGS * bound)
    worst = float((ours - theirs).abs().max())
    top = theirs.topk(2, dim=-1).values
    clear = top[:, 0] - top[:, 1] > bound
    same = bool((ours.argmax(-1) == theirs.argmax(-1))[clear].all())
    top_token = "the same most likely token" if same else "ANOTHER most likely token"
    detail = f"largest difference {worst:.2e}, allowed {bound:.2e}; {top_token} in {int(clear.sum())} clear rows"
    return Check(name, worst <= bound and same, None, detail)


ROWS = torch.tensor([0.5, 0.9], dtype=torch.float32)
"""The rows, in order of their errors, that are compared where experts are chosen: the middle one, and the one that nine
tenths are no worse than."""


def compare_errors(
    name: str, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, has_experts: bool = False
) -> Check:
    """Compare the errors of logits `[tokens, vocab]`, ours and transformers' in the same type: their root mean squares,
    as a fraction of that of the exact logits.

    Two experts may be as likely but for rounding. Where another one is chosen, a row's error is ten times that of the
    others, in either model, and a few such rows are most of the root mean square of all: which they are is chance. So
    with experts rows are compared by themselves: rounding is alike in all of them.
    """
    scale = exact.square().mean().sqrt()
    found = []
    for logits in (ours, theirs):
        rows = (logits - exact).square().mean(-1)
        found.append((rows.sqrt().quantile(ROWS) if has_experts else rows.mean(0, keepdim=True).sqrt()) / scale)
    texts = [" and ".join(f"{error:.1e}" for error in errors.tolist()) for errors in found]
    what = "error of the middle row and of nine tenths" if has_experts else "error"
    detail = f"{what} {texts[0]}, of transformers {texts[1]}, allowed {MAX_ERRORS} times as much"
    return Check(name, bool((found[0] <= MAX_ERRORS * found[1]).all()), None, detail)


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
        dtype: the type that hits were computed in.
        preparation: what it took to start; None: it was not measured.
    """

    checks: list[Check]
    dtype: str
    preparation: Preparation | None = None

    @property
    def passed(self) -> bool:
        """Tell whether every check passed."""
        return all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The result for machines."""
        return {"passed": self.passed, **asdict(self)}


CACHE = CacheConfig(memory="2GiB", deterministic=True)
"""The cache of the engine whose weights are used."""

Note = Callable[[str], object]
"""Shows what is checked now."""


def _quiet(text: str) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Types:
    """The types that checks are run in.

    Attributes:
        dtype: of the model.
        load_dtype: what its weights are quantized to; None: they have the model's type.
    """

    dtype: str
    load_dtype: str | None = None

    def engine(self, model: str | Path, cache: CacheConfig, **others: Any) -> Engine:
        """An engine of these types."""
        return Engine.from_pretrained(model, dtype=self.dtype, load_dtype=self.load_dtype, cache=cache, **others)


def types_of(model: str | Path, dtype: str | None, load_dtype: str | None) -> list[Types]:
    """The types that a checkpoint is checked in: hits in the first one, logits in all.

    Args:
        dtype: None: the one that an engine chooses for it here, and float32.
    """
    if dtype is not None:
        return [Types(dtype, load_dtype)]
    served, _ = default_dtype(open_checkpoint(model), resolve_device(None))
    return [Types(name, load_dtype) for name in dict.fromkeys((str(served).removeprefix("torch."), "float32"))]


def run_parity(
    model: str | Path, seed: int = 0, dtype: str | None = None, load_dtype: str | None = None, note: Note = _quiet
) -> Parity:
    """Run every check on a checkpoint.

    Args:
        dtype: of the model; None: the one that an engine chooses for it here, and logits are compared in float32 too.
        load_dtype: what its weights are quantized to; None: they have the model's type.
        note: called with what is checked next.

    Raises:
        CheckpointError: the path holds no usable checkpoint.
    """
    with second_process(open_checkpoint(model).path) as process:
        return check_all(model, seed, types_of(model, dtype, load_dtype), process, note)


def check_all(
    model: str | Path,
    seed: int,
    types: Sequence[Types],
    process: Executor,
    note: Note = _quiet,
    is_variant: bool = False,
) -> Parity:
    """Run every check on a checkpoint, in the first of the types, and compare logits in the others too."""
    result = check_served(model, seed, types[0], process, note, is_variant)
    for other in types[1:]:  # whose engine needs the memory of the one before
        note(f"logits in {other.dtype}")
        judge = Judge(other.engine(model, CACHE), seed)
        logits = compared_logits(judge, other, submitted_logits(judge, open_checkpoint(model).path, other, process))
        result = replace(result, checks=logits + result.checks)
    return result


def check_served(
    model: str | Path, seed: int, types: Types, process: Executor, note: Note = _quiet, is_variant: bool = False
) -> Parity:
    """Run every check on a checkpoint in types; `process` computes what a second process does, most of it meanwhile.

    Args:
        is_variant: it differs in sizes and storage alone from one that every check is run on: `OF_VARIANTS` are run,
            and logits are compared.
    """
    note("loading the model")
    checkpoint, started = open_checkpoint(model), time.process_time()
    compiled_for(
        "tasks", torch.empty(0, device=resolve_device(None), dtype=torch.float32)
    )  # imports what runs compiled code
    imported = time.process_time()
    engine = types.engine(model, CACHE)
    loaded, judge = time.process_time(), Judge(engine, seed)
    preparation = prepared(judge, loaded - imported, imported - started)
    theirs = submitted_logits(judge, checkpoint.path, types, process)
    drafted = not is_variant and has_predictor(checkpoint)
    others = process.submit(predicted, str(model), seed, types) if drafted else None
    checks, scenarios = [], OF_VARIANTS if is_variant else SCENARIOS
    for at, scenario in enumerate(scenarios, 1):
        note(f"hits against cold runs, {at} of {len(scenarios)}: {scenario.__name__.replace('_', ' ')}")
        checks.append(judge.attempt(scenario))
    if not is_variant:
        note("drafts: right ones, wrong ones, and some that are none")
        checks += [each.check(judge) for each in drafts(judge)] + files(judge, model, types, process)
    note("logits against those of transformers")
    checks = compared_logits(judge, types, theirs) + checks
    if others is not None:
        checks += [each.check(judge) for each in others.result()]
    return Parity(checks, types.dtype, preparation)


def submitted_logits(
    judge: Judge, path: Path, types: Types, process: Executor
) -> dict[str, Future[np.ndarray[Any, Any]]]:
    """What transformers computes, by name: logits of the numbers that are computed with here, in float32 (`"exact, as
    here"`), and in the model's type where that is another (`"rounded"`). Of quantized weights also logits of the
    checkpoint as it is, in float32 (`"exact"`), of some that are changed at random by as much as rounding changes it,
    in the model's type (`CHANGES`), and where that is float32, of the numbers computed with, with other last bits
    (`"nudged"`)."""
    ids, generator = compared_with_transformers(judge), torch.Generator().manual_seed(0)
    folder = Path(mkdtemp()) if types.load_dtype is not None else None

    def written(name: str, maker: Callable[..., torch.Tensor]) -> Path:
        if folder is None:
            return path
        write_numbers(judge.engine, path, folder / name, partial(maker, generator))
        return folder / name

    numbers = written("numbers", represented)
    asked = {"exact, as here": (numbers, "float32")}
    if types.dtype != "float32":
        asked["rounded"] = numbers, types.dtype
    elif folder is not None:
        asked["nudged"] = written("nudged", nudged_at_random), "float32"
    if folder is not None:
        for draw in CHANGES:
            asked[draw] = written(draw, changed_at_random), types.dtype
        asked["exact"] = path, "float32"
    found = {name: process.submit(transformers_logits, of, ids, dtype) for name, (of, dtype) in asked.items()}
    if folder is not None:
        found["exact"].add_done_callback(lambda _: rmtree(folder))  # jobs are computed in order
    return found


def compared_logits(judge: Judge, types: Types, theirs: Mapping[str, Future[np.ndarray[Any, Any]]]) -> list[Check]:
    """Compare a judge's logits with those of `submitted_logits`; each line names the type."""
    logits = {name: torch.from_numpy(each.result()) for name, each in theirs.items()}
    checks = against_transformers(judge, logits["exact, as here"], logits.get("rounded"), logits.get("nudged"))
    if types.load_dtype is not None:
        changed = [logits[draw] for draw in CHANGES]
        checks.append(of_quantization(judge, logits["exact"], changed, types.load_dtype))
    return [replace(check, name=f"{check.name}, {types.dtype}") for check in checks]


def represented(generator: torch.Generator, module: Linear | Experts, name: str, exact: torch.Tensor) -> torch.Tensor:
    """The numbers that the quantized weight of a name stands for; `exact` are those of the checkpoint."""
    return module.numbers(name)


def nudged_at_random(
    generator: torch.Generator, module: Linear | Experts, name: str, exact: torch.Tensor
) -> torch.Tensor:
    """The numbers that a quantized weight stands for, each changed by up to a unit of its last bit in float32."""
    numbers = module.numbers(name)
    return numbers * (1 + 2.0**-22 * (torch.rand(numbers.shape, generator=generator, dtype=torch.float32) - 0.5))


def changed_at_random(
    generator: torch.Generator, module: Linear | Experts, name: str, exact: torch.Tensor
) -> torch.Tensor:
    """The numbers of the checkpoint, each changed as rounding might: by up to half of its step, evenly, which is the
    step over the square root of 12 in root mean square."""
    return exact + module.steps(name) * (torch.rand(exact.shape, generator=generator, dtype=torch.float32) - 0.5)


Numbers = Callable[[Linear | Experts, str, torch.Tensor], torch.Tensor]
"""Makes the numbers of a weight, by the module that has it quantized and its name there, of what the checkpoint has."""


def write_numbers(engine: Engine, path: Path, folder: Path, numbers_of: Numbers) -> None:
    """Write a checkpoint again, with other numbers in place of the weights that an engine has quantized."""
    folder.mkdir(parents=True, exist_ok=True)
    model = engine.loaded.model
    for file in path.glob("*.json"):
        if not file.name.endswith(".index.json"):
            copyfile(file, folder / file.name)
    on_disk = {name: each.tensor() for name, each in stored_tensors(path).items()}
    for name, module in model.named_modules():
        for own in module.scales if isinstance(module, Linear | Experts) else ():
            ways = type(model).layouts(f"{name}.{own}", model.config)
            sources = max(ways, key=lambda way: sum(source.name in on_disk for source in way))
            exact = torch.empty(module.steps(own).shape, dtype=torch.float32)
            places = []
            for source in sources:
                tensor = on_disk[source.name] = on_disk[source.name].float()
                rows: Any = slice(None) if source.rows is None else source.rows
                exact[source.at] = tensor[rows].mT if source.transposed else tensor[rows]
                places.append((source, tensor, rows))
            numbers = numbers_of(module, own, exact)
            for source, tensor, rows in places:
                tensor[rows] = numbers[source.at].mT if source.transposed else numbers[source.at]
    save_file(on_disk, folder / "model.safetensors", {"format": "pt"})


def of_quantization(judge: Judge, exact: torch.Tensor, changed: Sequence[torch.Tensor], load_dtype: str) -> Check:
    """Compare errors of logits of quantized weights with those of checkpoints that are changed at random.

    Args:
        exact: logits of the checkpoint in transformers in float32.
        changed: of checkpoints that are changed, in transformers in the type of the model.
    """
    ids = compared_with_transformers(judge)
    ours, scale = prompt_logits(judge.warm(), ids, len(ids)), exact.square().mean().sqrt()
    error, expected = (
        float((torch.stack([*logits]) - exact).square().mean().sqrt() / scale) for logits in ([ours], changed)
    )
    factor = MAX_ERRORS_OF_EXPERTS if chooses_experts(judge.engine) else MAX_ERRORS
    bound = min(factor * expected, LARGEST_ERRORS[load_dtype.partition(":")[0]])
    detail = f"error {error:.1e}, by random changes of the same size {expected:.1e}, allowed {bound:.1e}"
    return Check(f"{load_dtype} against the checkpoint", error <= bound, None, detail)


def prepared(judge: Judge, seconds: float, importing: float) -> Preparation:
    """Measure what it took to start: `seconds` of CPU time for the engine, those of `importing` before it, and what the
    first request takes more than the next one. No request may have been computed before."""
    prompt, times = judge.ids(2 * judge.grid + 3), []
    for _ in range(2):
        warm, started = judge.warm(), time.process_time()
        warm.generate([prompt], ANSWER, progress=False)
        times.append(time.process_time() - started)
    parts = seconds, importing, max(0.0, times[0] - times[1])
    return Preparation(*(round(part, 3) for part in parts))


def run_families(
    families: Sequence[str] = (),
    seed: int = 0,
    dtype: str | None = None,
    load_dtype: str | None = None,
    note: Note = _quiet,
) -> dict[str, Parity]:
    """Run every check on a small random checkpoint of families, and some of them on its variants. Those that the
    installed transformers computes otherwise than they were trained are left out, with a warning.

    Args:
        families: their model types, such as "bamba"; empty: all.
        dtype: as in `run_parity`, as `load_dtype` and `note` are.

    Raises:
        ArgumentError: there is no such family.
    """
    known = dict.fromkeys(name.partition(",")[0] for name in FAMILIES)
    if unknown := [family for family in families if family not in known]:
        raise ArgumentError(f"hybrid parity: --family must be one of {', '.join(known)}; got {unknown[0]!r:.100}")
    chosen, results = [name for name in FAMILIES if not families or name.partition(",")[0] in families], {}
    with TemporaryDirectory() as folder, second_process(TINY) as process:
        for at, name in enumerate(chosen):
            if not is_comparable(name):
                log.warning("%s is left out: this transformers computes it otherwise than it was trained", name)
                continue
            path = write_random_checkpoint(Path(folder) / str(at), name, seed)
            if name.startswith(("qwen3_5", "qwen3_next")):  # the others have none
                add_random_predictor(path)
            types, of_family = types_of(path, dtype, load_dtype), partial(_note_of, name, note)
            results[name] = check_all(path, seed, types, process, of_family, is_variant="," in name)
    return results


def _note_of(name: str, note: Note, text: str) -> None:
    note(f"{name}: {text}")


SAMPLED = replace(ANSWER, temperature=1.2, top_p=0.9, seed=3)

MODES = {"greedy": ANSWER, "sampled": SAMPLED}
"""Parameters of answers with drafts, by mode."""


class KnownAnswers(Drafter):
    """Drafts the known answers to prompts, every n-th token of them replaced by another.

    Args:
        answers: by prompt.
        wrong_every: n; 0: none is wrong.
        stride: of three calls it drafts in this many.
        as_tree: a wrong token comes before each token of the answer, and one follows it.
    """

    def __init__(
        self,
        answers: dict[tuple[int, ...], list[int]],
        wrong_every: int = 0,
        stride: int = 3,
        as_tree: bool = False,
    ) -> None:
        self._as_tree = as_tree
        self._answers = answers
        self._wrong_every = wrong_every
        self._stride = stride
        self._calls = 0

    def propose(self, history: History, limit: int) -> tuple[Sequence[int], Sequence[int]]:
        """Propose what comes next, as far as it is known."""
        self._calls += 1
        tokens = self.following(history, limit) if self._calls % 3 < self._stride else []
        if self._wrong_every:
            start = len(history)
            tokens = [token ^ ((start + at) % self._wrong_every == 0) for at, token in enumerate(tokens)]
        if self._as_tree:
            return self._tree(tokens, limit)
        return tokens, range(-1, len(tokens) - 1)

    @staticmethod
    def _tree(tokens: list[int], limit: int) -> tuple[list[int], list[int]]:
        """Tokens each of which has a wrong one before and after it with the same parent, in order."""
        drafts: list[int] = []
        parents: list[int] = []
        last = -1
        for token in tokens[: limit // 3]:
            drafts += [token ^ 1, token, token ^ 2]
            parents += [last, last, last]
            last = len(drafts) - 2
        return drafts, parents

    def following(self, history: History, limit: int) -> list[int]:
        """The next tokens of the answer."""
        done = len(history) - history.prompt_len
        return self._answers.get(tuple(history[: history.prompt_len]), [])[done : done + limit]


@dataclass(frozen=True)
class Drafted:
    """Outputs that were computed with drafts, to be compared.

    Attributes:
        name: of the check.
        outputs: of the requests.
        params: of all of them.
        conditions: (message, holds) of each further condition.
    """

    name: str
    outputs: list[RequestOutput]
    params: SamplingParams
    conditions: tuple[tuple[str, bool], ...] = ()

    def check(self, judge: Judge) -> Check:
        """Outputs must be those without drafts and without a cache, and drafts must have been computed."""
        drafted = sum(output.usage.drafted_tokens for output in self.outputs)
        accepted = sum(output.usage.accepted_tokens for output in self.outputs)
        wrong = judge.differences(self.outputs, self.params)
        wrong += [message for message, holds in self.conditions if not holds]
        if not drafted:
            wrong.append("nothing was drafted")
        equal = f"{len(self.outputs)} requests, bitwise equal; {accepted} of {drafted} drafts accepted"
        hits = sum(output.usage.cached_tokens for output in self.outputs)
        return Check(self.name, not wrong, hits, "; ".join(wrong) or equal)


def drafts(judge: Judge) -> list[Drafted]:
    """Drafts of every kind, greedy and sampled, each cold and as a hit, with retraction and aborts in between."""
    answers = _answers(judge)
    right = KnownAnswers(answers)
    drafters: dict[str, Drafter] = {
        "right": right,
        "half right": KnownAnswers(answers, wrong_every=3),
        "wrong": KnownAnswers(answers, wrong_every=1),
        "right ones in every third pass": KnownAnswers(answers, stride=1),
        "trees": KnownAnswers(answers, as_tree=True),
        "half right trees": KnownAnswers(answers, wrong_every=3, as_tree=True),
        "lies": Liar(0, judge.engine.model.config.vocab_size, right.following),
    }
    found = [each for name, drafter in drafters.items() for each in _drafted(judge, f"drafts: {name}", drafter)]
    return [*found, regenerated(judge), *under_pressure(judge)]


def predictor(judge: Judge) -> list[Drafted]:
    """Drafts of the checkpoint's own predictor, alone and with others, where the judge's engine was loaded with it."""
    tree = KnownAnswers(_answers(judge), wrong_every=2, stride=2, as_tree=True)
    found = _drafted(judge, "drafts of the predictor", "mtp")
    found += _drafted(judge, "drafts of the predictor and trees", tree, "mtp")
    return [*found, _next_turns(judge), *under_pressure(judge, "mtp")]


def _next_turns(judge: Judge) -> Drafted:
    """Turns that continue answers, whose drafts are predicted from what a hit brings."""
    warm = judge.warm(speculation=SpeculationConfig(drafters=("cache", "mtp"), adaptive=False))
    prompts = [judge.ids(2 * judge.grid + judge.grid // 2), judge.ids(4 * judge.grid)]
    outputs = warm.generate(prompts, ANSWER, progress=False)
    for _ in range(2):
        outputs += warm.generate([judge.next_turn(turn) for turn in outputs[-2:]], ANSWER, progress=False)
    is_hit = all(output.usage.cached_tokens > 0 for output in outputs[2:])
    return Drafted("drafts of the predictor in later turns", outputs, ANSWER, (("a turn was not a hit", is_hit),))


def _requests(judge: Judge) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, and how each is answered."""
    lengths = 2 * judge.grid + 9, judge.grid // 2
    return [(judge.ids(length + at), params) for at, params in enumerate(MODES.values()) for length in lengths]


def _answers(judge: Judge) -> dict[tuple[int, ...], list[int]]:
    """The answers to `_requests`, by their prompts."""
    return {tuple(prompt): judge.cold(prompt, params).token_ids for prompt, params in _requests(judge)}


def _drafted(judge: Judge, name: str, drafter: Drafter | str, *others: str) -> list[Drafted]:
    """The same requests twice, the second time as hits. Those of all modes run together; each mode has its check."""
    warm = judge.warm(speculation=SpeculationConfig(drafters=(drafter, *others), adaptive=False))
    requests = _requests(judge)
    prompts, asked = [prompt for prompt, _ in requests], [params for _, params in requests]
    outputs = [output for _ in range(2) for output in warm.generate(prompts, asked, progress=False)]
    return _by_mode(name, [*zip(outputs, asked * 2, strict=True)])


def regenerated(judge: Judge) -> Drafted:
    """Answers that are generated again, with drafts from the cache. One answer crosses two multiples of the grid."""
    warm = judge.warm(speculation=SpeculationConfig(adaptive=False))
    params = replace(ANSWER, max_new_tokens=judge.grid + judge.grid // 2)
    prompts = [judge.ids(4 * judge.grid - 9), judge.ids(2 * judge.grid)]
    warm.generate(prompts, params, progress=False)
    outputs = warm.generate(prompts, params, progress=False)
    share = sum(output.usage.accepted_tokens for output in outputs) > sum(len(o.token_ids) for o in outputs) / 2
    return Drafted("answers again, drafts from the cache", outputs, params, (("few were accepted", share),))


def under_pressure(judge: Judge, *others: str) -> list[Drafted]:
    """Chains, trees and lies in a memory that is too small: requests are retracted, and some aborted in the middle.

    Sizes and lies are tried until one is retracted. The first, which hold little more than one request, suffice for all
    families in float32; where pages are half as large the memory of a state holds more of them, and one less does, and
    where pages are empty two less.
    """
    page_size = judge.engine.cache.config.page_size
    shared = judge.ids(4 * judge.grid)
    prompts = [shared + judge.ids(judge.grid - missing) for missing in (2, 5, 9, 14, 20)]
    asked = {tuple(prompt): params for prompt, params in zip(prompts, cycle(MODES.values()), strict=False)}
    right = KnownAnswers({prompt: judge.cold(list(prompt), params).token_ids for prompt, params in asked.items()})
    longest = -(-(6 * judge.grid + ANSWER.max_new_tokens) // page_size)
    outputs: list[RequestOutput] = []
    retracted = False
    for percent, states, seed in product((110, 125, 150, 175, 200, 225, 250, 300), (5, 4, 3), range(3)):
        liar = Liar(seed, judge.engine.model.config.vocab_size, right.following)
        own = SpeculationConfig(drafters=(liar, *others), adaptive=False)
        warm = judge.warm(longest * percent // 100, states, own, longest)
        aborted = warm.add_request(judge.ids(judge.grid), ANSWER)
        names = [warm.add_request(list(prompt), params) for prompt, params in asked.items()]
        outputs = []
        for step in range(10_000):
            outputs += [output for output in warm.step() if output.finish_reason == "length"]
            if step == 2:
                warm.abort(aborted)
            if not warm.has_work:
                break
        warm.cache.audit()
        outputs = [output for output in outputs if output.request_id in names]
        retracted = warm.scheduler.num_retractions > 0
        if retracted:
            break
    complete = len(outputs) == len(prompts)
    conditions = (("no request was retracted", retracted), ("an answer is missing", complete))
    name = " and ".join(("drafts under memory pressure", *others))
    return _by_mode(name, [(output, asked[tuple(output.prompt_token_ids)]) for output in outputs], conditions)


def _by_mode(
    name: str, outputs: Sequence[tuple[RequestOutput, SamplingParams]], conditions: tuple[tuple[str, bool], ...] = ()
) -> list[Drafted]:
    """Outputs, each with how it was chosen: a check for each mode."""
    return [
        Drafted(f"{name}, {mode}", [output for output, given in outputs if given is params], params, conditions)
        for mode, params in MODES.items()
    ]


def files(judge: Judge, model: str | Path, types: Types, process: Executor) -> list[Check]:
    """Prefixes go from one engine to another, by file and in memory, and to a second process, which makes engines of
    its own."""
    return [
        judge.attempt(saved_and_loaded),
        judge.attempt(prefilled_and_decoded),
        judge.attempt(in_a_second_process, model, types, process),
        judge.attempt(to_host_memory_and_back),
        judge.attempt(to_disk_and_back),
        judge.attempt(restarted, model, types, process),
    ]


def saved_and_loaded(judge: Judge) -> Check:
    """One engine answers and saves; another one loads, and answers prompts and second turns."""
    return _saved(judge, "saved and loaded by another engine", _load_and_generate)


def in_a_second_process(judge: Judge, model: str | Path, types: Types, process: Executor) -> Check:
    """Save and load where another process loads, with an engine that it makes from the checkpoint."""

    def generate(_: Judge, path: Path, prompts: list[list[int]]) -> tuple[Transfer, list[RequestOutput]]:
        config = judge.engine.cache.config
        return process.submit(generate_from_file, str(model), types, config, path, prompts).result()

    return _saved(judge, "saved and loaded by a second process", generate)


def generate_from_file(
    model: str, types: Types, config: CacheConfig, path: Path, prompts: list[list[int]]
) -> tuple[Transfer, list[RequestOutput]]:
    """Load and answer, in the second process."""
    with types.engine(model, config) as engine:
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


@computing_takes(SLOWLY)
def to_host_memory_and_back(judge: Judge) -> Check:
    """Prompts and their second turns in a memory that holds few of them; host memory holds the rest."""
    warm = _few(judge, host="64MiB")
    return _evicted(judge, "evicted to host memory and back", warm)


@computing_takes(SLOWLY)
def to_disk_and_back(judge: Judge) -> Check:
    """Evict to a directory, from which the contents are read."""
    with TemporaryDirectory() as folder:
        warm = _few(judge, directory=Path(folder) / "cache")
        check = _evicted(judge, "evicted to disk and back", warm)
        warm.close()
    return check


@computing_takes(SLOWLY)
def restarted(judge: Judge, model: str | Path, types: Types, process: Executor) -> Check:
    """An engine answers, and is closed. One that another process makes from the checkpoint finds what it had in the
    directory, and answers the prompts and their second turns."""
    with TemporaryDirectory() as folder:
        first = _few(judge, host="1MiB", directory=Path(folder) / "cache")
        prompts = _conversations(judge, first, 3)
        first.close()
        later = process.submit(generate_after_restart, str(model), types, first.cache.config, prompts)
        outputs, stats = later.result()
    hits = all(output.usage.cached_tokens >= 2 * judge.grid for output in outputs)
    return judge.check(
        "restarted: a second process with the directory",
        outputs,
        ("a prompt was not hit", hits),
        *_sound(stats),
    )


@computing_takes(SLOWLY)
def generate_after_restart(
    model: str, types: Types, config: CacheConfig, prompts: list[list[int]]
) -> tuple[list[RequestOutput], CacheStats]:
    """Answer with what the directory holds, in the second process."""
    with types.engine(model, config) as engine:
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


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for cyclic garbage rarely: what transformers and torch import is a million objects,
    all of which each full collection visits, and engines are freed without it."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100 * thresholds[0], *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def second_process(model: str | Path) -> Iterator[Executor]:
    """A process that imports what an engine needs while this one works, and looks for garbage as rarely. It computes
    one job at a time, in order; of those that wait none is begun after an error."""
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=gc.set_threshold, initargs=gc.get_threshold()) as process:
        process.submit(_import, str(model))
        try:
            yield process
        except BaseException:
            process.shutdown(cancel_futures=True)
            raise


def _import(model: str) -> None:
    open_checkpoint(model)


def transformers_logits(path: Path, ids: Sequence[int], dtype: str = "float32") -> np.ndarray[Any, Any]:
    """`[tokens, vocab]` logits of a prompt, computed by transformers' own model in a type, in fp32.

    They are numbers of NumPy, which go from one process to another by value.
    """
    from transformers import AutoModelForCausalLM

    from hybrid.models.torch_functions import use_torch_functions, without_kernels

    with without_kernels():  # "eager": their grouped product refuses rows that are not multiples of 16 bytes
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()
    use_torch_functions(theirs)
    with torch.inference_mode():
        logits: np.ndarray[Any, Any] = theirs(input_ids=torch.tensor([ids])).logits[0].float().numpy()
    return logits


def predicted(model: str, seed: int, types: Types) -> list[Drafted]:
    """Answers with drafts of the checkpoint's own predictor."""
    config = CacheConfig(memory="64MiB", deterministic=True)
    engine = types.engine(model, config, speculation="mtp")
    return predictor(Judge(engine, seed))


# The command


def verdict(results: Mapping[str, Parity]) -> str:
    """One line: whether all checks passed, and which did not."""
    missed = [f"{check.name} ({model})" for model, one in results.items() for check in one.checks if not check.passed]
    count = sum(len(one.checks) for one in results.values())
    if missed:
        return f"[red]{len(missed)} of {count} checks MISSED[/red]: {', '.join(missed)}"
    return f"[green]all {count} checks passed[/green]: hits are bitwise cold runs, logits those of transformers"


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Run the checks, and print one table per checkpoint."""
    with rare_collections(), console.status("") as status:  # in a terminal
        how = args.seed, args.dtype, args.load_dtype, status.update
        of_families = args.all_families or bool(args.family)
        families = run_families(args.family, *how) if of_families else {args.model: run_parity(args.model, *how)}
    for model, result in families.items():
        table = Table("", "check", "hit tokens", "measured", title=f"parity of {model}, hits in {result.dtype}")
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
    console.print(verdict(families))
    return Outcome(passed, {"passed": passed, "families": results} if of_families else results[args.model])
