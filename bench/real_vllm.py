#!/usr/bin/env python
"""Real vLLM on a CPU with this scheduler and without: answers, hits, leaks, streams, aborts. No scheduler is imitated.

    .venv-vllm-cpu/bin/python bench/real_vllm.py                  # after make served; 25 minutes of CPU
    .venv-vllm-cpu/bin/python bench/real_vllm.py --models tiny --no-serve

Every model is served three times: without a prefix cache, by vLLM's own scheduler, and by this one, each time in a
process of its own, under a pool of blocks that is far too small for what comes: one request after the other, many at
once, several answers to a prompt, two LoRA adapters, requests that are aborted. Then `vllm serve` the same, over HTTP,
with streams of which some are broken off, by one engine and by two (data parallel). Answers must be those without a
prefix cache. Exit status 2 when anything is wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import ROOT, Line, arguments, check, finish, printed

SCHEDULER = "hybrid.vllm.Scheduler"

SIDES = ("none", "vllm", "hybrid")
"""Without a prefix cache, vLLM's own scheduler, this one."""

COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}

RANDOM: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {
        **COMMON,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "lfm2": {
        **COMMON,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_dim": 256,
        "block_dim": 256,
        "block_ff_dim": 256,
        "block_auto_adjust_ff_dim": False,
    },
    "nemotron_h": {
        **COMMON,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 1,
        "ssm_state_size": 16,
    },
}
"""Models with random weights, as transformers configures them. vLLM's attention on a CPU has heads of 32 and more."""

MODELS = ("tiny", *RANDOM)

POOL = {"tiny": 40}
"""Blocks: of 256 tokens for this one."""

SMALL_POOL = 60  # of 128 tokens

WIDTH = 16
ANSWER = 8
RANK = 8

APART = {token: token / 2**14 for token in range(1024)}
"""A bias of tokens by number: in bfloat16 two may be the most likely ones, and either is drawn. This parts them."""

WITHOUT_LORA = ("granitemoehybrid",)
"""vLLM computes experts with adapters by Triton, which has no CPU."""


def checkpoint(name: str, folder: Path) -> Path:
    """The folder of a model; random ones are made."""
    if name == "tiny":
        return ROOT / "models" / "tiny"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **RANDOM[name])).float()
    model.save_pretrained(folder / name)
    return folder / name


def adapters(model: Path, folder: Path) -> list[Path]:
    """The folders of two LoRA adapters of a model's attention, with random weights that change its answers."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(model / "model.safetensors", "pt") as file:
        shapes = {
            name.removesuffix(".weight"): file.get_slice(name).get_shape()
            for name in file.keys()  # noqa: SIM118 - it is no dictionary
            if name.endswith(("q_proj.weight", "v_proj.weight"))
        }
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made.append(folder / f"{model.name}-adapter-{seed}")
        made[-1].mkdir()
        tensors = {}
        for name, (outputs, inputs) in shapes.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, inputs) / inputs**0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, RANK)
        save_file(tensors, made[-1] / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
        (made[-1] / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def prompts(seed: int, number: int) -> list[list[int]]:
    """Prompts of which a third share four beginnings, and some continue one of them."""
    draw = random.Random(seed)

    def ids(low: int, high: int) -> list[int]:
        return [draw.randrange(5, 900) for _ in range(draw.randrange(low, high))]

    hot = [ids(900, 1300) for _ in range(4)]
    made = []
    for place in range(number):
        made.append(draw.choice(hot) + ids(20, 80) if place % 3 == 0 else ids(200, 900))
        if draw.random() < 0.1:
            hot[draw.randrange(4)] = made[-1][:1600]
    return made


def in_process(model: Path, side: str, blocks: int, folders: list[Path]) -> dict[str, Any]:
    """Serve all of it in this process. Returns answers by part, hits in percent, and what was found wrong."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    if json.loads((model / "config.json").read_text(encoding="utf-8"))["model_type"] in (
        "granitemoehybrid",
        "nemotron_h",
    ):
        # The kernel for CPUs returns no states from within a pass, which vLLM asks all kernels for Mamba-2 for: with a
        # prefix cache it fails, with any scheduler. Passes are split instead, as for other layers.
        from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

        del MambaMixer2.get_kv_cache_spec
    is_tiny = model.name == "tiny"
    options: dict[str, Any] = {"enable_prefix_caching": side != "none"}
    if side != "none":
        options |= {"mamba_cache_mode": "align", "num_gpu_blocks_override": blocks}
    if side == "hybrid":
        options["scheduler_cls"] = SCHEDULER
    if folders:
        options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    llm = LLM(
        model=str(model),
        dtype="bfloat16" if is_tiny else "float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=WIDTH,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **options,
    )
    core: Any = llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    answers: dict[str, list[list[int]]] = {}

    def keep(part: str, outputs: list[Any]) -> None:
        for output in outputs:
            answers.setdefault(part, []).extend([*one.token_ids] for one in output.outputs)

    def generate(part: str, given: list[list[int]], params: list[Any], loras: list[Any] | None = None) -> None:
        asked = [{"prompt_token_ids": ids} for ids in given]
        keep(part, llm.generate(asked, params, lora_request=loras, use_tqdm=False))

    short = SamplingParams(max_tokens=4, **greedy)
    for ids in prompts(5, 90):
        generate("one by one", [ids], [short])
    given = prompts(6, 150)
    generate("at once", given, [SamplingParams(max_tokens=ANSWER, **greedy)] * len(given))
    given = prompts(7, 12)
    several = {**greedy, "temperature": 1.0, "top_k": 1, "n": 3, "max_tokens": ANSWER, "logit_bias": APART}
    generate("n", given, [SamplingParams(**several)] * len(given))
    if folders:
        # The same prompts with either: what is cached of one is no hit of the other. None is without: on a CPU, vLLM
        # computes those that come beside others with the adapter that was loaded last.
        given = [ids for ids in prompts(10, 30) for _ in folders]
        loras = [LoRARequest(folder.name, n + 1, str(folder)) for n, folder in enumerate(folders)] * 30
        generate("adapters", given, [SamplingParams(max_tokens=ANSWER, **greedy)] * len(given), loras)
    engine, draw, done = llm.llm_engine, random.Random(8), {}
    given = prompts(9, 60)
    for place, ids in enumerate(given):
        engine.add_request(f"abort-{place}", {"prompt_token_ids": ids}, SamplingParams(max_tokens=ANSWER, **greedy))
    aborted = {f"abort-{place}" for place in draw.sample(range(60), 24)}
    waiting = sorted(aborted)
    while engine.has_unfinished_requests():
        done |= {one.request_id: one for one in engine.step() if one.finished and one.request_id not in aborted}
        if waiting and draw.random() < 0.3:
            engine.abort_request([waiting.pop()])
    keep("aborts", [done[f"abort-{place}"] for place in range(60) if f"abort-{place}" not in aborted])

    counted = {metric.name: metric.value for metric in llm.get_metrics() if metric.name.startswith("vllm:prefix_cache")}
    hit, asked = counted["vllm:prefix_cache_hits"], counted["vllm:prefix_cache_queries"]
    manager, mirror = scheduler.kv_cache_manager, getattr(scheduler, "mirror", None)
    pool = manager.block_pool
    wrong = [f"{leaked} blocks leaked"] if (leaked := pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()) else []
    if mirror is not None:
        wrong += mirror.tree.check()
        if mirror.failure is not None:
            wrong.append(repr(mirror.failure))
        if mirror.counts.hit_tokens != hit:
            wrong.append(f"{hit} tokens hit in vLLM, {mirror.counts.hit_tokens} in the mirror")
    elif loaded := [name for name in sys.modules if name.startswith(("hybrid.tree", "hybrid.mirror", "hybrid.vllm.m"))]:
        wrong.append(f"loaded without the flag: {loaded}")
    return {
        "answers": answers,
        "hits": round(100 * hit / asked, 1) if asked else 0.0,
        "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
        "scheduler": type(scheduler).__module__,
        "queue": type(pool.free_block_queue).__name__,
        "mirror": None if mirror is None else mirror.stats().to_json(),
        "wrong": wrong,
    }


def differing(one: dict[str, list[Any]], other: dict[str, list[Any]]) -> dict[str, int]:
    """The number of answers that differ, by part."""
    return {part: sum(a != b for a, b in zip(one[part], other[part], strict=True)) for part in one}


# vllm serve


@contextmanager
def server(
    model: Path, side: str, blocks: int, folder: Path, ranks: int = 1
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run `vllm serve`, with one engine or several. Yields its address, and its process."""
    port = random.randrange(20_000, 40_000)
    command = [Path(sys.executable).with_name("vllm"), "serve", model, "--port", port, "--enforce-eager"]
    command += ["--max-model-len", 2048, "--max-num-seqs", WIDTH, "--served-model-name", "served"]
    if ranks > 1:
        command += ["--data-parallel-size", ranks, "--api-server-count", 1]
    if side == "none":
        command += ["--no-enable-prefix-caching"]
    else:
        command += ["--enable-prefix-caching", "--mamba-cache-mode", "align", "--num-gpu-blocks-override", blocks]
    if side == "hybrid":
        command += ["--scheduler-cls", SCHEDULER]
    metrics, package = folder / f"metrics-{side}-{ranks}", folder / "vllm-cpu.dist-info"
    metrics.mkdir()
    package.mkdir(exist_ok=True)  # the command looks for the version of "vllm", of which the package is "vllm-cpu"
    (package / "METADATA").write_text(f"Name: vllm\nVersion: {version('vllm-cpu')}+cpu\n", encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / f"serve-{side}-{ranks}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*map(str, command)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "VLLM_LOGGING_LEVEL": "INFO",
                "PROMETHEUS_MULTIPROC_DIR": str(metrics),
                "PYTHONPATH": path,
            },
        )
        try:
            yield f"http://127.0.0.1:{port}", process
        except Exception as error:
            shown = Path(log.name).read_text(encoding="utf-8")[-3000:]
            raise RuntimeError(f"vllm serve, {side}:\n{shown}") from error
        finally:
            process.terminate()
            process.wait(600)


async def over_http(address: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Send what is to be served, many at once. Returns answers, and the server's metrics."""
    import aiohttp

    connections = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(address, connector=connections, timeout=aiohttp.ClientTimeout(600)) as session:

        async def text(place: int, ids: list[int]) -> str:
            """The answer as a stream or in one piece; every fifth stream is broken off after its first part."""
            asked = {"model": "served", "prompt": ids, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
            asked["logit_bias"] = APART
            if place % 2:
                async with session.post("/v1/completions", json=asked) as response:
                    return str((await response.json())["choices"][0]["text"])
            parts = []
            async with session.post("/v1/completions", json={**asked, "stream": True}) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        parts.append(json.loads(line[6:])["choices"][0]["text"])
                        if place % 10 == 0:
                            return ""
            return "".join(parts)

        for _ in range(2400):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}")
            try:
                async with session.get("/health") as response:
                    if response.ok:
                        break
            except aiohttp.ClientError:
                await asyncio.sleep(0.5)
        answers = await asyncio.gather(*(text(place, ids) for place, ids in enumerate(prompts(11, 200))))
        await asyncio.sleep(2)
        answers += await asyncio.gather(*(text(place, ids) for place, ids in enumerate(prompts(11, 60))))
        async with session.get("/metrics") as response:
            metrics = await response.text()
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line and not line.startswith("#"))
    return {"answers": answers, "metrics": {name: float(value) for name, value in values.items()}}


def served(model: Path, folder: Path, blocks: int) -> list[Line]:
    """The lines of `vllm serve`, with one engine and with two."""
    runs: dict[str, dict[str, Any]] = {}
    for side in SIDES:
        with server(model, side, blocks, folder) as started:
            runs[side] = asyncio.run(over_http(*started))
        runs[side]["log"] = (folder / f"serve-{side}-1.log").read_text(encoding="utf-8")

    def metric(side: str, name: str) -> float:
        return sum(value for key, value in runs[side]["metrics"].items() if key.split("{")[0] == name)

    lines = []
    for side in SIDES[1:]:
        wrong = sum(a != b for a, b in zip(runs["none"]["answers"], runs[side]["answers"], strict=True))
        lines.append(
            check(f"vllm serve, {side}: answers", not wrong, f"{wrong} of {len(runs[side]['answers'])} differ")
        )
    hits, asked = (metric("hybrid", f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
    own = metric("hybrid", "hybrid_hit_tokens_total")
    lines.append(check("vllm serve, hybrid: hits in /metrics", hits == own > 0, f"{hits} and {own} of {asked}"))
    ours = sum("hybrid:" in line for line in runs["hybrid"]["log"].splitlines())
    lines.append(check("vllm serve, hybrid: lines of log", ours > 1, str(ours)))
    theirs = sum("hybrid" in line for line in runs["vllm"]["log"].splitlines())
    names = [name for name in runs["vllm"]["metrics"] if name.startswith("hybrid")]
    lines.append(check("vllm serve without the flag: nothing of ours", not theirs and not names, f"{theirs}, {names}"))
    return lines + data_parallel(model, folder, blocks, runs["none"]["answers"])


def data_parallel(model: Path, folder: Path, blocks: int, expected: list[str]) -> list[Line]:
    """The lines of `vllm serve` with two engines, each with a scheduler and a mirror of its own.

    Args:
        expected: the answers without a prefix cache.
    """
    with server(model, "hybrid", blocks, folder, ranks=2) as started:
        run = asyncio.run(over_http(*started))
    wrong = sum(a != b for a, b in zip(expected, run["answers"], strict=True))

    def by_engine(name: str) -> list[float]:
        found = {key: value for key, value in run["metrics"].items() if key.split("{")[0] == name}
        return [sum(value for key, value in found.items() if f'engine="{engine}"' in key) for engine in (0, 1)]

    hits, own = by_engine("vllm:prefix_cache_hits_total"), by_engine("hybrid_hit_tokens_total")
    failed = by_engine("hybrid_failed")
    return [
        check("two engines: answers", not wrong, f"{wrong} of {len(run['answers'])} differ"),
        check("two engines: hits of each in /metrics", hits == own and min(own) > 0, f"{hits} and {own}"),
        check("two engines: no mirror has failed", not any(failed), str(failed)),
    ]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=MODELS, help="the models (default: all)")
    parser.add_argument("--no-serve", action="store_true", help="leave vllm serve out")
    parser.add_argument("--one", nargs="+", metavar="GIVEN", help="one run, printed as JSON")
    args = parser.parse_args()
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if args.one:
        folder, side, blocks, *loras = args.one
        print(json.dumps(in_process(Path(folder), side, int(blocks), [*map(Path, loras)])))
        return 0
    lines = []
    with tempfile.TemporaryDirectory() as made:
        for name in args.models:
            model, blocks = checkpoint(name, Path(made)), POOL.get(name, SMALL_POOL)
            start = time.perf_counter()
            loras = [] if name in WITHOUT_LORA else adapters(model, Path(made))
            runs = {side: printed([sys.executable, __file__, "--one", model, side, blocks, *loras]) for side in SIDES}
            hits = {side: run["hits"] for side, run in runs.items()}
            for side in SIDES[1:]:
                found = differing(runs["none"]["answers"], runs[side]["answers"])
                lines.append(check(f"{name}, {side}: answers", not any(found.values()), f"differ: {found}"))
                lines.append(check(f"{name}, {side}: sound", not runs[side]["wrong"], str(runs[side]["wrong"])))
            lines.append(check(f"{name}: hits", hits["hybrid"] > hits["vllm"], str(hits)))
            own = runs["vllm"]["scheduler"].startswith("vllm.") and runs["vllm"]["queue"] == "FreeKVCacheBlockQueue"
            lines.append(check(f"{name}: without the flag", own, f"{time.perf_counter() - start:.0f} s"))
        if not args.no_serve:
            lines += served(ROOT / "models" / "tiny", Path(made), POOL["tiny"])
    return finish(lines, args)


if __name__ == "__main__":
    sys.exit(main())
