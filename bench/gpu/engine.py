"""The engine on a random model of Qwen3.5-9B's shape: hits, decode steps, requests that share a prefix, the proofs that
results do not depend on the cache or the batch, and what is run first of all."""

import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import Line, Medians, check, ratio, timed
from gpu import attention, kernels
from gpu.harness import Bench, Planned, Roofline, Timing, compare, profile
from torch import Tensor

from hybrid import CacheConfig, Engine, RequestOutput, SamplingParams
from hybrid.engine.build import LoadedModel, build_cache
from hybrid.engine.config import EngineConfig
from hybrid.kernels.ops import uses_triton
from hybrid.models.qwen3_5 import Qwen3_5ForCausalLM

WARM_STEPS = 4
SEATS = 64
"""Requests that may run at once."""


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
        _fill(name, parameter.data, generator)
    if uses_triton(bench.device.device):  # as when a checkpoint is loaded
        model.fuse_projections()
    return model.eval()


def _fill(name: str, values: Tensor, generator: torch.Generator) -> None:
    """Numbers of the size that trained ones have: activations neither vanish nor overflow in any number of layers."""
    if name.endswith("A_log"):
        values.uniform_(0, math.log(16), generator=generator)
    elif name.endswith("dt_bias"):
        values.uniform_(-6, -2, generator=generator)  # softplus of it: steps of 0.002 to 0.13
    elif "norm" in name:
        mean = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
        values.normal_(mean, 0.02, generator=generator)
    else:  # matrices, and the taps of the convolution: outputs are as large as inputs
        scale = 1.0 if name.endswith("embed_tokens.weight") else values.shape[-1] ** -0.5
        values.normal_(0, scale, generator=generator)


def make_engine(bench: Bench, *, deterministic: bool = False, graphs: bool = False, **settings: Any) -> Engine:
    """An engine on the random model, with a cache of its own that has these `settings` too; where not `graphs`, steps
    are launched kernel by kernel."""
    s = bench.sizes
    loaded = LoadedModel(model=bench.keep("model", lambda: random_model(bench)), device=bench.device.device)
    sizes: dict[str, Any] = {"page_size": s.page_size, "chunk_size": s.page_size, "memory": s.memory}
    config = CacheConfig(**sizes, deterministic=deterministic, **settings)
    seats = SEATS if not bench.rehearsal else 8
    limits = EngineConfig(max_num_seqs=seats, max_num_batched_tokens=s.batched_tokens, enforce_eager=not graphs)
    return Engine(loaded, build_cache(loaded, config), limits)


def prompts_of(bench: Bench, seed: int) -> Callable[[int], list[int]]:
    """Makes random prompts of a length: two of them share nothing."""
    rng, vocab = random.Random(seed), bench.sizes.config["vocab_size"]
    return lambda count: [rng.randrange(vocab) for _ in range(count)]


def first_token(engine: Engine, prompt: list[int]) -> RequestOutput:
    """Answer with one token."""
    return engine.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True), progress=False)[0]


def seconds_of(outputs: Sequence[RequestOutput]) -> list[float]:
    """Until the first token of each."""
    return [output.time_to_first_token for output in outputs if output.time_to_first_token is not None]


def roofline(bench: Bench) -> Iterator[dict[str, Any]]:
    """What the device is, and what it can do at best."""
    yield {"head": {"device": bench.device.describe()}}
    yield {"head": {"roofline": asdict(Roofline.measured(bench.device, bench.sizes))}}


def smoke(bench: Bench) -> Iterator[Planned]:
    """Every operation at one size against its twin, twice: the second time from a recorded graph."""
    if not bench.rehearsal:
        failed = compile_together(min(12, os.cpu_count() or 1) + 1, 0.4 * bench.left)
        print(f"{failed} processes that compile have failed", flush=True)
    small = replace(bench, sizes=bench.sizes.smoke)
    sections = (attention.decode_attention, attention.extend_attention, kernels.delta_step, kernels.chunk_rule)
    sections += (kernels.convolution, kernels.elementwise, kernels.state_copies, kernels.products, kernels.experts)
    for planned in chain.from_iterable(section(small) for section in sections):
        yield replace(planned, make=lambda make=planned.make: replace(make(), calls=()))


def compile_together(count: int, seconds: float) -> int:
    """Compile kernels of `smoke` in some processes, which keep them in Triton's cache: one by one they take most of its
    time. What is missing after these seconds, or failed, is compiled where it is called. Returns how many failed."""
    tool, end = Path(__file__).with_name("resources.py"), time.perf_counter() + seconds
    shares = [[sys.executable, str(tool), "--share", str(index), str(count)] for index in range(count)]
    running = [subprocess.Popen(share, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for share in shares]
    failed = 0
    for process in running:
        try:
            failed += process.wait(max(0.0, end - time.perf_counter())) != 0
        except subprocess.TimeoutExpired:
            process.kill()
            failed += process.wait() != 0
    return failed


def first_steps(bench: Bench) -> Iterator[Line]:
    """A decode step of a model of few layers, launched and from a recorded graph, and a hit in deterministic mode."""
    small = replace(bench, sizes=bench.sizes.smoke)
    for deterministic in (False, True):
        yield from _eager_and_recorded(small, deterministic)
    yield from _alone_or_together(small, make_engine(small, deterministic=True, graphs=True))


def parity(bench: Bench) -> Iterator[Line]:
    """In deterministic mode a request gives the same bits alone, in a batch, after a hit, and from recorded graphs."""
    yield from _eager_and_recorded(bench, True)
    yield from _alone_or_together(bench, make_engine(bench, deterministic=True, graphs=not bench.rehearsal))


def _eager_and_recorded(bench: Bench, deterministic: bool) -> Iterator[Line]:
    """The logits of one decode step, launched kernel by kernel and from a graph. Fast mode may round differently."""
    made, ids = make_engine(bench, deterministic=deterministic, graphs=True), prompts_of(bench, 6)
    engine = Engine(made.loaded, made.cache, replace(made.config, overlap=False))  # no pass is under way when it ends
    waiting = {
        engine.add_request(ids(length), SamplingParams(max_new_tokens=8, ignore_eos=True))
        for length in (bench.sizes.question, 2 * bench.sizes.question + 1, 5)
    }
    while waiting:
        waiting -= {output.request_id for output in engine.step()}
    step, memory = engine.scheduler.schedule(), engine.cache
    runner: Any = engine.runner
    plan = runner.plan(step, None)
    tensors = [memory.kv, *memory.state_tensors.values()]
    before = [tensor.clone() for tensor in tensors]
    launched = engine.model(plan.on(bench.device.device)[0], memory.kv, memory.state_tensors).clone()
    for tensor, kept in zip(tensors, before, strict=True):
        tensor.copy_(kept)
    name = f"logits of a decode step, {'deterministic' if deterministic else 'fast'}"
    yield check(f"{name}, finite", bool(launched.isfinite().all()), "")
    if runner.graphs is not None:  # none in a rehearsal
        recorded = runner.graphs.run(plan).logits
        yield check(f"{name}, recorded", len(runner.graphs.graphs) == 1, "")
        yield compare(f"{name}, recorded against launched", recorded, launched, 0.0 if deterministic else 0.02)


def hit(bench: Bench) -> Iterator[Line | dict[str, Any]]:
    """The first token after a long cached document, against that of the question alone."""
    s, ids = bench.sizes, prompts_of(bench, 2)
    for mode, deterministic in (("fast", False), ("deterministic", True)):
        if not bench.has(25, f"hits, {mode}"):
            continue
        engine, document = make_engine(bench, deterministic=deterministic, graphs=True), ids(s.document)
        cold = [first_token(engine, ids(s.document)) for _ in range(2)][-1:]  # the first one compiles
        first_token(engine, document)
        pairs = [
            (first_token(engine, document + ids(s.question)), first_token(engine, ids(s.question)))
            for _ in range(s.runs + 2)
        ][2:]  # the first two warm up
        hits, alone = zip(*pairs, strict=True)
        cached = {output.usage.cached_tokens for output in hits}
        yield check(f"hits, {mode}", cached == {s.document}, f"cached tokens {sorted(cached)} of {s.document}")
        details = {"hit": seconds_of(hits), "alone": seconds_of(alone)}
        medians: Medians = {name: statistics.median(values) for name, values in details.items()}
        name = f"first token, {mode}: hit {s.document} + {s.question} new, over {s.question} alone"
        yield ratio(name, medians, "hit", "alone", bench.asked(1.3), at_most=True, details=details)
        (spent,) = seconds_of(cold)
        for side, value in {**medians, "cold": spent}.items():
            assert value is not None
            yield Line(f"first token, {mode}, {side}, ms", 1000 * value)
        yield Line(f"cold prefill of {s.document}, {mode}, tokens per second", s.document / spent)
        yield _profile(bench, f"a hit, {mode}", partial(first_token, engine, document + ids(s.question)))
        engine.cache.audit()
        del engine
        bench.device.release()


def restore(bench: Bench) -> Iterator[Line]:
    """The first token after a document that host memory has: its layers wait for their own contents, or for all."""
    s, ids = bench.sizes, prompts_of(bench, 7)
    for mode, graphs in (("launched", False), ("recorded", True)):  # which waits for all
        if not bench.has(25, f"restores, {mode}"):
            continue
        engine, document = make_engine(bench, graphs=graphs, host="4GiB"), ids(s.document)
        cache, arrivals = engine.cache, engine.cache.memory.uploads
        taken: dict[str, list[float]] = {"layers": [], "all": [], "device": [], "leaving": []}
        first_token(engine, document)
        for run, side in product(range(s.runs + 2), ("layers", "all", "device")):  # the first two runs warm up
            if side != "device":
                bench.device.synchronize()
                taken["leaving"].append(timed(partial(cache.allocator.evict, cache.tree.evict_all)))
            settles = patch.object(arrivals, "wait_for_layer", lambda layer, wait=arrivals.wait_for_all: wait())
            with settles if side == "all" else nullcontext():
                taken[side] += seconds_of([first_token(engine, document + ids(s.question))])[run < 2 :]
        restored = cache.stats().restored_tokens // s.document
        yield check(f"restores, {mode}", restored == 2 * (s.runs + 2), f"{restored} restored")
        medians: Medians = {name: statistics.median(values) for name, values in taken.items()}
        name, how = f"first token, {mode}: {s.document} + {s.question} restored from host memory", {"at_most": True}
        yield ratio(f"{name}, over a hit", medians, "layers", "device", bench.asked(1.3), details=taken, **how)
        if not graphs:
            yield ratio(f"{name} layer by layer, over waiting for all", medians, "layers", "all", **how)
        yield Line(
            f"evicting {s.document} tokens to host memory, {mode}, ms of the host",
            1000 * statistics.median(taken["leaving"]),
        )
        del engine, cache, arrivals
        bench.device.release()


def _profile(bench: Bench, name: str, run: Callable[[], object]) -> dict[str, Any]:
    """The kernels of a run; or why they are not known."""
    try:
        found = profile(bench.device, run)
    except Exception as error:  # a profiler may be missing or refused
        found = {"failed": f"{type(error).__name__}: {error}"[:300]}
    print(f"profile of {name}: { {key: value for key, value in found.items() if key != 'longest'} }", flush=True)
    return {"profile": {name: found}}


def decode_steps(
    bench: Bench, engine: Engine, prompts: Sequence[list[int]], **sampled: float
) -> tuple[Timing, int, dict[str, Any]]:
    """Decode requests together, step by step. Returns the timing of `Engine.step` by the host's clock, the tokens of
    all requests together in the middle of the measured steps, and the profile of one more."""
    s, requests = bench.sizes, len(prompts)
    before = sum(len(prompt) for prompt in prompts) // max(1, s.batched_tokens - requests) + requests
    params = SamplingParams(max_new_tokens=2 * before + WARM_STEPS + s.steps_timed + 16, ignore_eos=True, **sampled)
    mine = [engine.add_request(prompt, params) for prompt in prompts]
    latest: dict[str, RequestOutput] = {}

    def step() -> None:
        latest.update({output.request_id: output for output in engine.step()})

    while len(latest) < requests:
        step()
    for _ in range(WARM_STEPS):  # the first captures the graph
        step()
    bench.device.synchronize()
    timing = Timing.of([timed(step) for _ in range(s.steps_timed)], "clock")
    tokens = sum(output.usage.prompt_tokens + output.usage.completion_tokens for output in latest.values())
    assert all(output.finish_reason is None for output in latest.values())
    profile = _profile(bench, f"a decode step of {requests}", step)
    for name in mine:
        engine.abort(name)
    engine.step()  # returns the outputs of the aborted requests
    engine.cache.clear()
    return timing, tokens - requests * s.steps_timed // 2, profile


def decode(bench: Bench) -> Iterator[Line | dict[str, Any]]:
    """Steps in which all requests decode, against the time that the copy bandwidth takes for what they must move."""
    s, ids = bench.sizes, prompts_of(bench, 3)
    prompts = {shape: [ids(shape[1]) for _ in range(shape[0])] for shape in s.decoding}
    taken: dict[tuple[int, str], float | None] = {}
    for mode in ("fast", "sampled", "deterministic", "eager"):
        if not bench.has(20, f"decode steps, {mode}"):
            continue
        engine = make_engine(bench, deterministic=mode == "deterministic", graphs=mode != "eager")
        sampled = {"temperature": 0.8, "top_p": 0.95, "seed": 1} if mode == "sampled" else {}
        for shape in s.decoding:
            timing, tokens, profile = decode_steps(bench, engine, prompts[shape], **sampled)
            yield _over_moving(bench, f"decode step of {shape[0]}, {mode}", timing, tokens, shape[0])
            yield profile
            taken[shape[0], mode] = timing.seconds
            if mode != "fast":
                medians = {side: taken.get((shape[0], side)) for side in (mode, "fast")}
                yield ratio(f"decode step of {shape[0]}, {mode} over fast", medians, mode, "fast", at_most=True)
        del engine
        bench.device.release()


def _over_moving(bench: Bench, name: str, timing: Timing, tokens: int, requests: int) -> Line:
    """A line: a step over what moving its bytes takes."""
    model = bench.keep("model", lambda: random_model(bench))
    spec = model.spec(model.config, bench.sizes.dtype)
    parameters = {p.data_ptr(): p.numel() * p.itemsize for p in model.parameters()}
    embedding = model.model.embed_tokens.weight.data_ptr()
    if model.lm_head.weight.data_ptr() != embedding:  # of an embedding that is not the head too a few rows are read
        del parameters[embedding]
    states = {f"states {moved}": requests * spec.state_bytes for moved in ("read", "written")}
    moved = {"weights": sum(parameters.values()), "kv": tokens * spec.page_bytes(1), **states}
    medians: Medians = {"step": timing.seconds, "floor": bench.roofline.moving(sum(moved.values()))}
    details = {"bytes": moved, "low": timing.low, "high": timing.high}
    target, how = bench.asked(1.25 if name.endswith("fast") else None), {"at_most": True, "details": details}
    return ratio(f"{name}, over moving weights, KV and states", medians, "step", "floor", target, **how)


def _alone_or_together(bench: Bench, engine: Engine) -> Iterator[Line]:
    """In deterministic mode a request gives the same bits alone, in a batch, and after a hit."""
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=3)
    ids = prompts_of(bench, 3)
    chosen = [ids(bench.sizes.question * 3 + 5) for _ in range(bench.sizes.decoding[-1][0])]
    together = engine.generate(chosen, params, progress=False)
    engine.cache.clear()
    alone = engine.generate([chosen[-1]], params, progress=False)[0]
    again = engine.generate([chosen[-1]], params, progress=False)[0]
    engine.cache.clear()
    yield check("the second is a hit", again.usage.cached_tokens > 0, f"{again.usage.cached_tokens} cached tokens")
    for name, other in ((f"alone or among {len(chosen)}", together[-1]), ("a hit or cold", again)):
        same = other.token_ids == alone.token_ids and other.logprobs == alone.logprobs
        yield check(name, same, "the same bits" if same else "OTHER LOG-PROBABILITIES")


def sharing(bench: Bench) -> Iterator[Line]:
    """Requests that share the beginning of their prompts and arrive together, with the cache and without."""
    s, params = bench.sizes, SamplingParams(max_new_tokens=bench.sizes.group[-1], ignore_eos=True)
    count, shared, least, most, _ = s.group
    first: dict[str, list[float]] = {"cache on": [], "cache off": []}
    cached = 0
    for side in first:
        ids, rng = prompts_of(bench, 4), random.Random(5)  # both sides get the same prompts
        engine = make_engine(bench, enabled=side == "cache on")
        for run in range(min(s.runs, 3) + 1):  # the first warms up
            if not bench.has(20, f"sharing, {side}, run {run}"):
                return
            engine.cache.clear()
            document = ids(shared)
            prompts = [document + ids(rng.randint(least, most)) for _ in range(count)]
            outputs = engine.generate(prompts, params, progress=False)
            if run:
                first[side].append(statistics.median(seconds_of(outputs)))
                cached = max(cached, sum(output.usage.cached_tokens for output in outputs))
        engine.cache.audit()
        del engine
        bench.device.release()
    enough = cached >= (count - 1) * (shared // s.page_size * s.page_size)
    yield check("the shared part is computed once", enough, f"{cached} cached tokens in {count} requests")
    medians: Medians = {side: statistics.median(values) for side, values in first.items()}
    name, target = f"{count} requests sharing {shared}, median time to first token, off over on", bench.asked(5.0)
    yield ratio(name, medians, "cache off", "cache on", target, details={**first})
