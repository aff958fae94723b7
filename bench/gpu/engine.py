"""The engine on a random model of Qwen3.5-9B's shape: hits, decode steps, requests that share a prefix, and the proofs
that results do not depend on the cache or the batch."""

import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_bench import Bench, Check, Line, Result
from gpu_device import Timing
from torch import Tensor, nn

from hybrid import CacheConfig, Engine, RequestOutput, SamplingParams
from hybrid.engine.build import furnish
from hybrid.engine.cuda_graphs import DecodeGraphs
from hybrid.engine.model_runner import Runner
from hybrid.models.qwen3_5 import Qwen3_5ForCausalLM

WARM_STEPS = 4
SEATS = 64
"""Requests that may run at once."""

TESTS = ("test_kernels*.py", "test_graphs.py", "test_model.py", "test_engine.py")
NO_GPU = ("test_kernels_compile.py",)
"""Tests among them that compile for a GPU that is not there."""


def random_model(bench: Bench) -> Any:
    """The model with random weights, made on the device: no checkpoint is needed."""
    from transformers import Qwen3_5TextConfig

    s = bench.sizes
    config = Qwen3_5TextConfig(**s.config)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config, s.page_size)
    model = model.to(s.dtype).to_empty(device=bench.device.device)
    if config.tie_word_embeddings:
        model.tie_head()
    generator = torch.Generator(bench.device.device).manual_seed(1)
    for name, parameter in model.named_parameters():
        _fill(name, parameter, generator)
    return model.eval()


def _fill(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Numbers of the size that trained ones have: activations neither vanish nor overflow in any number of layers."""
    values = parameter.data
    if name.endswith("A_log"):
        values.uniform_(0, math.log(16), generator=generator)
    elif name.endswith("dt_bias"):
        values.uniform_(-6, -2, generator=generator)  # softplus of it: steps of 0.002 to 0.13
    elif name.endswith("linear_attn.norm.weight"):
        values.normal_(1, 0.02, generator=generator)
    elif "norm" in name:
        values.normal_(0, 0.02, generator=generator)
    elif name.endswith("embed_tokens.weight"):
        values.normal_(0, 1, generator=generator)
    else:  # matrices, and the taps of the convolution: what comes out is as large as what goes in
        values.normal_(0, values.shape[-1] ** -0.5, generator=generator)


def make_engine(bench: Bench, *, eager: bool = False, deterministic: bool = False, enabled: bool = True) -> Engine:
    """An engine on the random model, with a cache of its own."""
    s = bench.sizes
    model = bench.keep("model", lambda: random_model(bench))
    config = CacheConfig(
        enabled=enabled, page_size=s.page_size, chunk_size=s.page_size, memory=s.memory, deterministic=deterministic
    )
    cache, is_deterministic = furnish(model, config, bench.device.device, None)
    engine = Engine(
        model,
        None,
        cache,
        deterministic=is_deterministic,
        device=bench.device.device,
        max_num_seqs=SEATS if not bench.rehearsal else 8,
        max_num_batched_tokens=s.batched_tokens,
        enforce_eager=eager,
    )
    if bench.rehearsal and not eager:  # a CPU records nothing: what is recorded is run again instead
        graphs = DecodeGraphs(model, cache.kv, cache.state_tensors, engine.device, _runs_again)
        engine.runner = Runner(model, cache, engine.device, is_deterministic, graphs)
    return engine


def _runs_again(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    logits = run().clone()

    def replay() -> None:
        logits.copy_(run())

    return replay, logits


class Prompts:
    """Random prompts: two of them share nothing."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab = bench.sizes.config["vocab_size"]

    def __call__(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(count)]


def first_token(engine: Engine, prompt: list[int]) -> RequestOutput:
    """Answer with one token."""
    return engine.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True), progress=False)[0]


def seconds_of(output: RequestOutput) -> float:
    assert output.time_to_first_token is not None
    return output.time_to_first_token


def hit(bench: Bench) -> Iterator[Result]:
    """The first token after a long cached document, against that of the question alone."""
    s, ids = bench.sizes, Prompts(bench, 2)
    for mode, deterministic in (("fast", False), ("deterministic", True)):
        if not bench.has(45, f"hits, {mode}"):
            continue
        engine, document = make_engine(bench, deterministic=deterministic), ids(s.document)
        cold = [first_token(engine, ids(s.document)) for _ in range(2)][-1]  # the first one compiles
        first_token(engine, document)
        hits, alone = [], []
        for run in range(s.runs + 2):  # the first two warm up
            found = first_token(engine, document + ids(s.question))
            other = first_token(engine, ids(s.question))
            if run >= 2:
                hits.append(found)
                alone.append(other)
        cached = [output.usage.cached_tokens for output in hits]
        yield Check(
            f"hits, {mode}", set(cached) == {s.document}, f"cached tokens {sorted(set(cached))} of {s.document}"
        )
        medians = {
            name: statistics.median(seconds_of(output) for output in outputs)
            for name, outputs in (("hit", hits), ("alone", alone))
        }
        name = f"first token, {mode}: hit {s.document} + {s.question} new, over {s.question} alone"
        figures = {
            key: [seconds_of(output) for output in outputs] for key, outputs in (("hits", hits), ("alone", alone))
        }
        yield Line(name, medians["hit"] / medians["alone"], bench.asked(1.3), True, medians, figures)
        spent = seconds_of(cold)
        name = f"cold prefill of {s.document}, {mode}, tokens per second"
        yield Line(name, s.document / spent, None, False, {"prefill": spent})
        engine.cache.audit()
        del engine
        bench.device.release()


class Steps:
    """Requests that decode together, step by step.

    Attributes:
        timing: of `Engine.step`, by the host's clock: the time between two tokens of a request.
        replay: of the recorded graph alone; None without one.
        tokens: of all requests together, in the middle of the measured steps.
        answers: what each decoded.
    """

    def __init__(self, bench: Bench, engine: Engine, prompts: Sequence[list[int]]) -> None:
        s, requests = bench.sizes, len(prompts)
        counted = WARM_STEPS + s.steps_timed
        before = sum(len(prompt) for prompt in prompts) // max(1, s.batched_tokens - requests) + requests
        params = SamplingParams(max_new_tokens=2 * before + counted + 16, ignore_eos=True)
        mine = [engine.add_request(prompt, params) for prompt in prompts]
        latest: dict[str, RequestOutput] = {}

        def step() -> float:
            start = time.perf_counter()
            outputs = engine.step()
            spent = time.perf_counter() - start
            latest.update({output.request_id: output for output in outputs})
            return spent

        while len(latest) < requests:
            step()
        for _ in range(WARM_STEPS):  # the first records the graph
            step()
        bench.device.synchronize()
        self.timing = Timing.of([step() for _ in range(s.steps_timed)], "clock")
        lengths = [output.usage.prompt_tokens + output.usage.completion_tokens for output in latest.values()]
        self.tokens = sum(lengths) - requests * s.steps_timed // 2
        self.answers = [latest[name].token_ids for name in mine]
        assert all(output.finish_reason is None for output in latest.values())
        graphs = engine.runner._graphs  # what is recorded is nobody's but the runner's, and is timed here alone
        self.replay: Timing | None = None
        for name in mine:
            engine.abort(name)
        if graphs is not None:
            last = [*graphs._recorded.values()][-1]
            self.replay = bench.device.time_launched(last.replay)
        engine.cache.clear()


def decode(bench: Bench) -> Iterator[Result]:
    """Steps in which everybody decodes, against the time in which the copy bandwidth reads what they must read."""
    s, ids = bench.sizes, Prompts(bench, 3)
    prompts = {shape: [ids(shape[1]) for _ in range(shape[0])] for shape in s.decoding}
    found: dict[tuple[str, tuple[int, int]], Steps] = {}
    modes: dict[str, dict[str, bool]] = {"fast": {}, "deterministic": {"deterministic": True}, "eager": {"eager": True}}
    for mode, settings in modes.items():
        if not bench.has(40, f"decode steps, {mode}"):
            continue
        engine = make_engine(bench, **settings)
        for shape in s.decoding:
            steps = found[mode, shape] = Steps(bench, engine, prompts[shape])
            target = 1.25 if mode == "fast" else None
            yield _over_reading(bench, f"decode step of {shape[0]}, {mode}", engine, steps, shape[0], target)
            fast = found.get(("fast", shape))
            if mode != "fast" and fast is not None:
                seconds = {mode: steps.timing.seconds, "fast": fast.timing.seconds}
                ratio = steps.timing.seconds / fast.timing.seconds
                yield Line(f"decode step of {shape[0]}, {mode} over fast", ratio, None, True, seconds)
        if mode == "deterministic":
            yield from _alone_or_together(bench, engine, prompts[s.decoding[-1]])
        del engine
        bench.device.release()


def _over_reading(bench: Bench, name: str, engine: Engine, steps: Steps, requests: int, target: float | None) -> Line:
    """A line: a step over what reading takes."""
    s, model = bench.sizes, engine.model
    spec = model.spec(model.config, s.dtype)
    embedding = model.model.embed_tokens.weight.data_ptr()
    tied = model.lm_head.weight.data_ptr() == embedding
    parameters = {p.data_ptr(): p.numel() * p.itemsize for p in model.parameters()}
    if not tied:  # of an embedding that is not the head too a few rows are read
        del parameters[embedding]
    kv = steps.tokens * spec.page_bytes(1)
    read = {"weights": sum(parameters.values()), "kv": kv, "states": requests * spec.state_bytes}
    floor = sum(read.values()) / bench.roofline.bandwidth
    seconds = {"step": steps.timing.seconds, "floor": floor}
    if steps.replay is not None:
        seconds["graph"] = steps.replay.seconds
    figures = {"bytes": read, "low": steps.timing.low, "high": steps.timing.high, "states are written too": True}
    return Line(
        f"{name}, over reading weights, KV and states",
        steps.timing.seconds / floor,
        bench.asked(target),
        True,
        seconds,
        figures,
    )


def _alone_or_together(bench: Bench, engine: Engine, prompts: Sequence[list[int]]) -> Iterator[Result]:
    """In deterministic mode a request gives the same bits alone, in a batch, and after a hit."""
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=3)
    chosen = [prompt[: bench.sizes.question * 3 + 5] for prompt in prompts]
    together = engine.generate(chosen, params, progress=False)
    engine.cache.clear()
    alone = engine.generate([chosen[-1]], params, progress=False)[0]
    again = engine.generate([chosen[-1]], params, progress=False)[0]
    engine.cache.clear()
    same = together[-1].token_ids == alone.token_ids and together[-1].logprobs == alone.logprobs
    yield Check(f"alone or among {len(chosen)}", same, "the same bits" if same else "OTHER LOG-PROBABILITIES")
    same = again.token_ids == alone.token_ids and again.logprobs == alone.logprobs and again.usage.cached_tokens > 0
    told = f"{again.usage.cached_tokens} cached tokens; {'the same bits' if same else 'OTHER LOG-PROBABILITIES'}"
    yield Check("a hit or cold", same, told)


def sharing(bench: Bench) -> Iterator[Result]:
    """Requests that share the beginning of their prompts and come all at once, with the cache and without."""
    s = bench.sizes
    count, shared, least, most, new = s.group
    times: dict[str, list[float]] = {"on": [], "off": []}
    whole: dict[str, list[float]] = {"on": [], "off": []}
    cached = 0
    for side in times:
        ids, dice = Prompts(bench, 4), random.Random(5)  # both sides get the same prompts
        engine = make_engine(bench, enabled=side == "on")
        for run in range(min(s.runs, 3) + 1):  # the first warms up
            if not bench.has(20, f"sharing with the cache {side}, run {run}"):
                break
            engine.cache.clear()
            document = ids(shared)
            prompts = [document + ids(dice.randint(least, most)) for _ in range(count)]
            start = time.perf_counter()
            outputs = engine.generate(prompts, SamplingParams(max_new_tokens=new, ignore_eos=True), progress=False)
            if run:
                whole[side].append(time.perf_counter() - start)
                times[side].append(statistics.median(seconds_of(output) for output in outputs))
                if side == "on":
                    cached = sum(output.usage.cached_tokens for output in outputs)
        engine.cache.audit()
        del engine
        bench.device.release()
    if not (times["on"] and times["off"]):
        return
    enough = cached >= (count - 1) * (shared // s.page_size * s.page_size)
    yield Check("the shared part is computed once", enough, f"{cached} cached tokens in {count} requests")
    name = f"{count} requests sharing {shared}"
    for what, spent, target in (("median time to first token", times, 5.0), ("all of them", whole, None)):
        medians = {f"cache {side}": statistics.median(values) for side, values in spent.items()}
        ratio = medians["cache off"] / medians["cache on"]
        yield Line(f"{name}, {what}, off over on", ratio, bench.asked(target), False, medians, dict(spent))


def parity(bench: Bench) -> Iterator[Result]:
    """`hybrid parity` on the model inside the package, in fp32: against transformers, and hits bit by bit."""
    from hybrid.commands import parity as proof
    from hybrid.models.loading import open_checkpoint

    config = CacheConfig(memory="2GiB" if not bench.rehearsal else "64MiB", deterministic=True)
    engine = Engine.from_pretrained("tiny", device=bench.device.device, dtype="float32", cache=config)
    judge = proof.Judge(engine)

    def told(check: proof.Check) -> Check:
        hits = "" if check.hit_tokens is None else f"; {check.hit_tokens} tokens hit"
        return Check(check.name, check.passed, check.detail + hits)

    if not bench.rehearsal:
        yield from map(told, proof.against_transformers(engine, open_checkpoint("tiny").path, judge))
    yield from (told(scenario(judge)) for scenario in proof.SCENARIOS[: 1 if bench.rehearsal else None])


def tests(bench: Bench) -> Iterator[Result]:
    """The tests that a GPU can run, in a process of their own."""
    bench.kept.clear()
    bench.device.release()
    patterns = TESTS if not bench.rehearsal else ("test_pool.py",)
    found = {path for pattern in patterns for path in (bench.root / "tests").glob(pattern)}
    files = sorted(str(path) for path in found if path.name not in NO_GPU)
    path = os.pathsep.join(entry for entry in sys.path if entry and Path(entry) != bench.root / "bench")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}  # ./kernels must not be found by its name
    limit = max(30.0, bench.left - 10)
    try:
        ended = subprocess.run(
            command, cwd=bench.root, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as error:
        told = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else str(error.stdout)
        bench.skipped.append(f"tests that did not end in {limit:.0f} s: {told[-1500:]}")
        return
    tail = (ended.stdout + ended.stderr).strip()[-6000:]
    yield Check("pytest on the device", ended.returncode == 0, tail)
