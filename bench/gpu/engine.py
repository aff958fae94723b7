"""The engine on a random model of Qwen3.5-9B's shape: hits, decode steps, requests that share a prefix, and the proofs
that results do not depend on the cache or the batch."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from common import Check, Line, Result
from gpu.harness import Bench, Timing
from torch import Tensor, nn

from hybrid import CacheConfig, Engine, RequestOutput, SamplingParams
from hybrid.engine.build import LoadedModel, build_cache
from hybrid.engine.config import EngineConfig
from hybrid.engine.cuda_graphs import CudaCapture, DecodeGraphs
from hybrid.engine.model_runner import ModelRunner
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
    else:  # matrices, and the taps of the convolution: outputs are as large as inputs
        values.normal_(0, values.shape[-1] ** -0.5, generator=generator)


class Replays:
    """Captures graphs for an engine; a CPU has none, and runs again.

    Attributes:
        latest: replays the graph that was captured last; None: there is none.
    """

    def __init__(self, device: torch.device) -> None:
        self.latest: Callable[[], None] | None = None
        self._capture = CudaCapture(device) if device.type == "cuda" else _runs_again

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.latest, logits = self._capture(run)
        return self.latest, logits


def _runs_again(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    logits = run().clone()

    def replay() -> None:
        logits.copy_(run())

    return replay, logits


def make_engine(
    bench: Bench, *, deterministic: bool = False, enabled: bool = True, replays: Replays | None = None
) -> Engine:
    """An engine on the random model, with a cache of its own.

    Args:
        replays: captures its graphs; None: steps are launched kernel by kernel.
    """
    s, device = bench.sizes, bench.device.device
    model = bench.keep("model", lambda: random_model(bench))
    config = CacheConfig(
        enabled=enabled, page_size=s.page_size, chunk_size=s.page_size, memory=s.memory, deterministic=deterministic
    )
    loaded = LoadedModel(model=model, device=device)
    cache = build_cache(loaded, config)
    seats = SEATS if not bench.rehearsal else 8
    limits = EngineConfig(max_num_seqs=seats, max_num_batched_tokens=s.batched_tokens, enforce_eager=True)
    if replays is None:
        return Engine(loaded, cache, limits)
    if deterministic:
        model.make_batch_invariant()
    graphs = DecodeGraphs(model, cache.kv, cache.state_tensors, device, replays)
    return Engine(loaded, cache, limits, runner=ModelRunner(model, cache, device, deterministic, graphs))


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


def seconds_of(outputs: Sequence[RequestOutput]) -> list[float]:
    """Until the first token of each."""
    return [output.time_to_first_token for output in outputs if output.time_to_first_token is not None]


def hit(bench: Bench) -> Iterator[Result]:
    """The first token after a long cached document, against that of the question alone."""
    s, ids = bench.sizes, Prompts(bench, 2)
    for mode, deterministic in (("fast", False), ("deterministic", True)):
        if not bench.has(45, f"hits, {mode}"):
            continue
        engine, document = make_engine(bench, deterministic=deterministic), ids(s.document)
        cold = [first_token(engine, ids(s.document)) for _ in range(2)][-1:]  # the first one compiles
        first_token(engine, document)
        pairs = [
            (first_token(engine, document + ids(s.question)), first_token(engine, ids(s.question)))
            for _ in range(s.runs + 2)
        ][2:]  # the first two warm up
        hits, alone = zip(*pairs, strict=True)
        cached = {output.usage.cached_tokens for output in hits}
        yield Check(f"hits, {mode}", cached == {s.document}, f"cached tokens {sorted(cached)} of {s.document}")
        details = {"hit": seconds_of(hits), "alone": seconds_of(alone)}
        medians = {name: statistics.median(values) for name, values in details.items()}
        name = f"first token, {mode}: hit {s.document} + {s.question} new, over {s.question} alone"
        value = medians["hit"] / medians["alone"]
        yield Line(name, value, bench.asked(1.3), True, medians=medians, details=details)
        (spent,) = seconds_of(cold)
        name = f"cold prefill of {s.document}, {mode}, tokens per second"
        yield Line(name, s.document / spent, medians={"prefill": spent})
        engine.cache.audit()
        del engine
        bench.device.release()


class Steps:
    """Requests that decode together, step by step.

    Attributes:
        timing: of `Engine.step`, by the host's clock: the time between two tokens of a request.
        tokens: of all requests together, in the middle of the measured steps.
    """

    def __init__(self, bench: Bench, engine: Engine, prompts: Sequence[list[int]]) -> None:
        s, requests = bench.sizes, len(prompts)
        before = sum(len(prompt) for prompt in prompts) // max(1, s.batched_tokens - requests) + requests
        params = SamplingParams(max_new_tokens=2 * before + WARM_STEPS + s.steps_timed + 16, ignore_eos=True)
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
        for _ in range(WARM_STEPS):  # the first captures the graph
            step()
        bench.device.synchronize()
        self.timing = Timing.of([step() for _ in range(s.steps_timed)], "clock")
        lengths = [output.usage.prompt_tokens + output.usage.completion_tokens for output in latest.values()]
        self.tokens = sum(lengths) - requests * s.steps_timed // 2
        assert all(output.finish_reason is None for output in latest.values())
        for name in mine:
            engine.abort(name)
        engine.step()  # returns the outputs of the aborted requests
        engine.cache.clear()


def decode(bench: Bench) -> Iterator[Result]:
    """Steps in which all requests decode, against the time that the copy bandwidth takes for what they must read."""
    s, ids = bench.sizes, Prompts(bench, 3)
    prompts = {shape: [ids(shape[1]) for _ in range(shape[0])] for shape in s.decoding}
    fast: dict[tuple[int, int], float] = {}
    for mode in ("fast", "deterministic", "eager"):
        if not bench.has(40, f"decode steps, {mode}"):
            continue
        replays = None if mode == "eager" else Replays(bench.device.device)
        engine = make_engine(bench, deterministic=mode == "deterministic", replays=replays)
        for shape in s.decoding:
            steps = Steps(bench, engine, prompts[shape])
            seconds = steps.timing.seconds
            yield _over_reading(bench, f"decode step of {shape[0]}, {mode}", engine, steps, shape[0], replays)
            if mode == "fast":
                fast[shape] = seconds
            elif shape in fast:
                name, medians = f"decode step of {shape[0]}, {mode} over fast", {mode: seconds, "fast": fast[shape]}
                yield Line(name, seconds / fast[shape], None, True, medians=medians)
        if mode == "deterministic":
            yield from _alone_or_together(bench, engine, prompts[s.decoding[-1]])
        del engine
        bench.device.release()


def _over_reading(
    bench: Bench, name: str, engine: Engine, steps: Steps, requests: int, replays: Replays | None
) -> Line:
    """A line: a step over what reading takes."""
    model = bench.keep("model", lambda: random_model(bench))
    spec = model.spec(model.config, bench.sizes.dtype)
    parameters = {p.data_ptr(): p.numel() * p.itemsize for p in model.parameters()}
    embedding = model.model.embed_tokens.weight.data_ptr()
    if model.lm_head.weight.data_ptr() != embedding:  # of an embedding that is not the head too a few rows are read
        del parameters[embedding]
    kv = steps.tokens * spec.page_bytes(1)
    read = {"weights": sum(parameters.values()), "kv": kv, "states": requests * spec.state_bytes}
    timing = steps.timing
    medians = {"step": timing.seconds, "floor": sum(read.values()) / bench.roofline.bandwidth}
    if replays is not None and replays.latest is not None:
        medians["graph"] = bench.device.time_launched(replays.latest).seconds
    details = {"bytes": read, "low": timing.low, "high": timing.high, "states are written too": True}
    target = bench.asked(1.25 if name.endswith("fast") else None)
    name = f"{name}, over reading weights, KV and states"
    return Line(name, timing.seconds / medians["floor"], target, True, medians={**medians}, details=details)


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
    detail = f"{again.usage.cached_tokens} cached tokens; {'the same bits' if same else 'OTHER LOG-PROBABILITIES'}"
    yield Check("a hit or cold", same, detail)


def sharing(bench: Bench) -> Iterator[Result]:
    """Requests that share the beginning of their prompts and arrive together, with the cache and without."""
    s = bench.sizes
    count, shared, least, most, new = s.group
    times: dict[str, list[float]] = {"on": [], "off": []}
    whole: dict[str, list[float]] = {"on": [], "off": []}
    cached = 0
    for side in times:
        ids, rng = Prompts(bench, 4), random.Random(5)  # both sides get the same prompts
        engine = make_engine(bench, enabled=side == "on")
        for run in range(min(s.runs, 3) + 1):  # the first warms up
            if not bench.has(20, f"sharing with the cache {side}, run {run}"):
                break
            engine.cache.clear()
            document = ids(shared)
            prompts = [document + ids(rng.randint(least, most)) for _ in range(count)]
            start = time.perf_counter()
            outputs = engine.generate(prompts, SamplingParams(max_new_tokens=new, ignore_eos=True), progress=False)
            if run:
                whole[side].append(time.perf_counter() - start)
                times[side].append(statistics.median(seconds_of(outputs)))
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
        value = medians["cache off"] / medians["cache on"]
        yield Line(f"{name}, {what}, off over on", value, bench.asked(target), medians=medians, details=dict(spent))
