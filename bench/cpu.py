#!/usr/bin/env python
"""Our engine against llama.cpp and transformers on a CPU, on the same random Qwen3.5; deterministic mode against fast
mode; our threads; what a decode step consists of; a family of models against Qwen3.5.

    python bench/cpu.py [--llama SOURCE] [--large] [--dtype float32] [--only PART ...] [--json]
    python bench/cpu.py --family NAME [--dtype float32] [--cpu-time] [--json]

`--llama` is the folder `vendor/llama.cpp` of the source distribution of llama-cpp-python, built there; without it our
side runs alone. int8 is compared with its q8_0, int4 with its Q4_K_M, the others with the same type. With transformers,
in the faster of float32 and bfloat16, all types are compared at once. Medians of runs that alternate between the sides.
`--cpu-time` counts the CPU time of this process instead of the clock, for cores with other work: with one thread, and
not against llama.cpp's programs. Exit status 1 when a target is missed.

    cmake -B build -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF
    cmake --build build --target llama-bench llama-batched-bench llama-quantize llama-server

On a CPU with AMX gcc 12 optimises the configuration of its tiles away, and its programs crash; `_tile_loadconfig` needs
inline assembly there.
"""

import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch
from common import Line, Medians, alternate, arguments, finish, printed, ratio, timed
from model import (
    OF_FAMILIES,
    bytes_of_a_token,
    decode_step,
    first_token,
    greedy,
    ids,
    random_model,
    save_random_family,
)

from hybrid import CacheConfig, Engine
from hybrid.kernels import ops
from hybrid.kernels.cpu.delta_rule import chunk_gated_delta_rule
from hybrid.models import causal_lm, layers
from hybrid.models.torch_functions import use_torch_functions

LARGE = {"hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 16, "linear_num_value_heads": 32}
"""What makes a model of 0.5B parameters of that of 51M."""

PROMPT, SHARED, OWN, STEPS = 1024, 4096, 64, 32
FOUR_BITS = "Q4_K_M"
CLIENTS, NEW, SERVER = 16, 16, "http://127.0.0.1:18113"

TYPES = ("float32", "bfloat16", "int8", "int4")

TARGETS: dict[str, tuple[float | None, ...]] = {"int8": (0.9, 0.9, 0.9, 0.9), "int4": (0.9, 0.7, None, None)}
"""Seconds of decode of one, a step of eight, a prefill and a hit over llama.cpp's."""

GOALS = {"prefill": {2: 1.7, 4: 2.8}, "step of eight": {2: 1.5, 4: 2.8}}
"""How many times as fast as one thread these numbers of threads are to be."""

PRODUCTS, REST, ALL = "products", "all else", "all"

NAMES = {
    "multiply": PRODUCTS,
    "widen": PRODUCTS,
    "arrange": PRODUCTS,
    "multiply_packed": PRODUCTS,
    "step": "gated_delta_step",
    "attend": "paged_attention",
    "torch": REST,
}
"""Operations that compiled functions with other names are parts of."""

CONVERT = """
import sys
source, model, file, kind = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
import convert_hf_to_gguf as program
from conversion.base import TextModel

def write_vocabulary(self):
    size, writer = self.hparams["vocab_size"], self.gguf_writer
    writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre("qwen2"), writer.add_token_merges(["t 0"])
    writer.add_token_list([f"t{number}" for number in range(size)]), writer.add_token_types([1] * size)

TextModel._set_vocab_gpt2 = write_vocabulary  # a random checkpoint has no tokenizer
sys.argv = ["convert", model, "--outfile", file, "--outtype", kind, "--no-mtp"]
program.main()
"""


PARTS = ("llama", "transformers", "modes", "server", "costs", "threads", "decays")


class Llama:  # its own benchmarks, on a checkpoint of ours
    def __init__(self, source: Path, checkpoint: Path, dtype: str, threads: int) -> None:
        self._programs, self._threads, self._file = source / "build" / "bin", threads, checkpoint / "model.gguf"
        kind = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0", "int4": "f32"}[dtype]
        command = [sys.executable, "-c", CONVERT, str(source), str(checkpoint), str(self._file), kind]
        subprocess.run(command, check=True, capture_output=True)
        if dtype == "int4":
            whole, self._file = self._file, checkpoint / "small.gguf"
            command = [str(self._programs / "llama-quantize"), str(whole), str(self._file), FOUR_BITS]
            subprocess.run(command, check=True, capture_output=True)

    def seconds(self, new: int, steps: int, depth: int = 0) -> float:
        """Of `new` prompt tokens, or of a decode step, after `depth` tokens."""
        found = self._run("llama-bench", "-p", new, "-n", steps, "-d", depth, "-r", 1, "-o", "jsonl")
        return float(found["samples_ns"][0]) / 1e9 / max(steps, 1)

    def of_eight(self) -> float:
        options = ("-c", 2048, "-npp", OWN, "-ntg", STEPS, "-npl", 8, "--output-format", "jsonl")
        return float(self._run("llama-batched-bench", *options)["t_tg"]) / STEPS

    @contextmanager
    def server(self) -> Iterator[Callable[[list[list[int]]], float]]:
        """Seconds of prompts that are sent at once to its server, which has a slot for each."""
        options = ("-t", self._threads, "-np", CLIENTS, "-c", CLIENTS * 2 * PROMPT, "--port", SERVER.rpartition(":")[2])
        command = [*map(str, (self._programs / "llama-server", "-m", self._file, *options))]

        def answer(prompt: list[int]) -> None:
            asked = {"prompt": prompt, "n_predict": NEW, "ignore_eos": True, "temperature": 0}
            with urlopen(Request(f"{SERVER}/completion", json.dumps(asked).encode())) as found:
                assert json.load(found)["tokens_predicted"] == NEW

        with (
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
            ThreadPoolExecutor(CLIENTS) as pool,
        ):
            try:
                while not _is_ready():
                    assert process.poll() is None, "llama-server ended"
                yield lambda prompts: timed(lambda: list(pool.map(answer, prompts)))
            finally:
                process.terminate()

    def _run(self, program: str, *options: object) -> dict[str, Any]:
        found: dict[str, Any] = printed([self._programs / program, "-m", self._file, "-t", self._threads, *options])
        return found


def _is_ready() -> bool:
    time.sleep(0.2)
    try:
        return bool(urlopen(f"{SERVER}/health").status == 200)
    except URLError:
        return False


def against_server(engine: Engine, llama: Llama | None, runs: int) -> list[Line]:
    """Requests that share a prefix, launched at once."""

    def group() -> list[list[int]]:
        shared = ids(PROMPT)
        return [shared + ids(OWN // 2) for _ in range(CLIENTS)]

    sides = {"ours": lambda: timed(lambda: engine.generate(group(), greedy(NEW), progress=False))}
    with nullcontext() if llama is None else llama.server() as seconds:
        sides |= {} if seconds is None else {"llama": lambda: seconds(group())}
        t: Medians = {"llama": None, **alternate(runs, **sides)}
    name = f"{CLIENTS} requests sharing {PROMPT}: seconds over llama-server's"
    return [ratio(name, t, "ours", "llama", 0.2, at_most=True)]


def how(dtype: str) -> dict[str, Any]:
    """Arguments of an engine; weights of eight and four bits are those of a model of float32."""
    return {"dtype": "float32", "load_dtype": dtype} if dtype.startswith("int") else {"dtype": dtype}


def prefill(engine: Engine, cached: tuple[int, ...] = ()) -> float:
    """Of a new prompt, or of new tokens after cached ones."""
    return first_token(engine, [*cached, *ids(OWN)] if cached else ids(PROMPT))


def against_llama(engine: Engine, llama: Llama | None, runs: int, dtype: str) -> list[Line]:
    document = tuple(ids(SHARED))
    prefill(engine, document)
    one, eight, prompt, hit = TARGETS.get(dtype, (0.9, 0.6, 0.8, 0.9))
    work: list[tuple[str, float | None, Callable[[], float], Callable[[Llama], float]]] = [
        ("decode of one", one, partial(decode_step, engine, 1, PROMPT, STEPS), lambda it: it.seconds(0, STEPS, PROMPT)),
        ("step of eight", eight, partial(decode_step, engine, 8, OWN, STEPS), Llama.of_eight),
        ("prefill", prompt, partial(prefill, engine), lambda it: it.seconds(PROMPT, 0)),
        ("hit", hit, partial(prefill, engine, document), lambda it: it.seconds(OWN, 0, SHARED)),
    ]
    lines = []
    for name, target, mine, theirs in work:
        sides = {"ours": mine} | ({} if llama is None else {"llama": lambda theirs=theirs: theirs(llama)})
        t: Medians = {"llama": None, **alternate(runs, **sides)}
        lines.append(ratio(f"{name}: seconds over llama.cpp's", t, "ours", "llama", target, at_most=True))
    return lines


class Transformers:
    """The same checkpoint in transformers' own model, in both types."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.models: list[Any] = []
        for dtype in (torch.float32, torch.bfloat16):
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
            use_torch_functions(model)
            self.models.append(model)

    def sides(self, work: Callable[[Any], float]) -> dict[str, Callable[[], float]]:
        """The work in each type."""
        return {f"transformers' {str(model.dtype)[6:]}": partial(work, model) for model in self.models}


@torch.inference_mode()
def their_prompt(model: Any) -> float:
    return timed(lambda: model(torch.tensor([ids(PROMPT)]), use_cache=True, logits_to_keep=1))


@torch.inference_mode()
def their_step(model: Any, requests: int, length: int, steps: int) -> float:
    """Median seconds of a step."""
    past = model(torch.tensor([ids(length) for _ in range(requests)]), use_cache=True, logits_to_keep=1).past_key_values
    token = torch.zeros(requests, 1, dtype=torch.int64)
    one = partial(model, token, past_key_values=past, use_cache=True)
    return statistics.median(timed(one) for _ in range(steps))


def their_hit(model: Any, past: Any) -> float:
    own = copy.deepcopy(past)  # the only copy that works: a cache is changed in place
    with torch.inference_mode():
        new = torch.tensor([ids(OWN)])
        return timed(lambda: model(new, past_key_values=own, use_cache=True, logits_to_keep=1))


def against_transformers(path: Path, runs: int, types: Sequence[str] = TYPES) -> list[Line]:
    """Seconds in each of our types over those of transformers in the faster of its types."""
    theirs, document = Transformers(path), tuple(ids(SHARED))
    with torch.inference_mode():
        past = {
            id(model): model(torch.tensor([document]), use_cache=True, logits_to_keep=1).past_key_values
            for model in theirs.models
        }
    engines = {dtype: Engine.from_pretrained(path, cache=CacheConfig(memory="512MiB"), **how(dtype)) for dtype in types}
    for engine in engines.values():
        prefill(engine, document)
    work: list[tuple[str, float | None, Callable[[Engine], float], Callable[[Any], float]]] = [
        ("prefill", 0.4, prefill, their_prompt),
        ("decode of one", 0.45, lambda it: decode_step(it, 1, OWN, STEPS), lambda it: their_step(it, 1, OWN, STEPS)),
        ("step of eight", None, lambda it: decode_step(it, 8, OWN, STEPS), lambda it: their_step(it, 8, OWN, STEPS)),
        ("hit", 0.6, lambda it: prefill(it, document), lambda it: their_hit(it, past[id(it)])),
    ]
    lines = []
    for name, target, mine, their in work:
        sides = {dtype: partial(mine, engine) for dtype, engine in engines.items()}
        t = alternate(runs, **sides, **theirs.sides(their))
        best = min(theirs.sides(their), key=lambda side: t[side] or 0.0)
        for dtype in types:
            own: Medians = {dtype: t[dtype], best: t[best]}
            lines.append(ratio(f"{name}, {dtype}: seconds over transformers'", own, dtype, best, target, at_most=True))
    return lines


def of_modes(engine: Engine, runs: int) -> list[Line]:
    """Seconds of deterministic mode over those of fast mode."""
    fast = engine.with_cache(CacheConfig(memory="1GiB", deterministic=False))
    works = {
        "prefill": prefill,
        "decode of one": lambda it: decode_step(it, 1, OWN, STEPS),
        "step of eight": lambda it: decode_step(it, 8, OWN, STEPS),
    }
    lines = []
    for name, work in works.items():
        t = alternate(runs, deterministic=partial(work, engine), fast=partial(work, fast))
        lines.append(ratio(f"{name}: deterministic over fast", t, "deterministic", "fast", 1.02, at_most=True))
    return lines


def of_threads(engine: Engine, runs: int, cores: int) -> list[Line]:
    lines = []
    works = {"prefill": partial(prefill, engine), "step of eight": partial(decode_step, engine, 8, OWN, STEPS)}
    for name, work in works.items():
        goals = {n: goal for n, goal in GOALS[name].items() if n <= cores}
        sides = {str(n): lambda n=n, work=work: (torch.set_num_threads(n), work())[1] for n in (1, *goals)}
        t = alternate(runs, **sides)
        lines += [ratio(f"{name}: 1 thread over {n}", t, "1", str(n), goal) for n, goal in goals.items()]
    return lines


@contextmanager
def watched() -> Iterator[Counter[str]]:
    """CPU time of the operations and products that are called from Python meanwhile."""
    spent: Counter[str] = Counter()

    def watch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.process_time()
            result = function(*args)
            spent[name] += time.process_time() - start
            return result

        return call

    choose, product = ops.implementation, watch(PRODUCTS, ops.linear)
    with (
        patch.object(ops, "implementation", lambda name, device: watch(name, choose(name, device))),
        patch.object(layers, "linear", product),
        patch.object(causal_lm, "linear", product),
    ):
        yield spent


def of_steps(engine: Engine, spent: Counter[str]) -> Counter[str]:
    """CPU time of a decode step and of what is watched in it, medians of the later half of an answer."""
    engine.add_request(ids(PROMPT), greedy(STEPS))
    found = []
    while engine.has_work:
        spent.clear()
        start = time.process_time()
        engine.step()
        found.append({**spent, ALL: time.process_time() - start})
    last = found[-STEPS // 2 :]
    return Counter({name: statistics.median(step[name] for step in last) for name in last[0]})


def costs(engine: Engine, load: Callable[[], Engine], dtype: str) -> list[Line]:
    """The operations of a decode step, in plain torch, as without Numba, and compiled."""
    found = of_steps(engine, Counter())
    runner: Any = engine.runner
    captured = runner.graphs  # None where nothing is compiled
    for name, t in ({} if captured is None else captured.graphs[-1].replay.seconds()).items():
        found[NAMES.get(name, name)] += t
    before: Counter[str] = Counter()
    if not dtype.startswith("int"):  # torch alone does not multiply with bytes
        with patch.dict("os.environ", HYBRID_KERNELS="reference"), watched() as spent:
            ops.choose_again()
            before = of_steps(load(), spent)
        ops.choose_again()
    for side in (before, found):
        side[REST] += 2 * side[ALL] - side.total()
    names = sorted(found | before, key=lambda name: -found[name])
    sides: dict[str, Medians] = {name: {"torch": before[name] or None, "compiled": found[name]} for name in names}
    return [ratio(f"decode step: {name}", t, "torch", "compiled") for name, t in sides.items()]


def decays(runs: int, tokens: int = PROMPT, heads: int = 16, size: int = 128, chunk: int = 64) -> list[Line]:
    """The delta rule of a prompt whose decays reach the end of fp32's range, over one in which nothing decays."""
    q, k, v = torch.randn(3, tokens, heads, size)
    k, b, one = torch.nn.functional.normalize(k, dim=-1), torch.zeros(tokens, heads), torch.ones(heads)
    state, places = torch.zeros(1, heads, size, size), (torch.tensor([0, tokens]), torch.zeros(1).long())
    rest = -one, 0 * one, state, *places, places[1], torch.empty(0, 3).long(), chunk

    def rule(a: float) -> float:
        return timed(lambda: chunk_gated_delta_rule(q, k, v, torch.full((tokens, heads), a), b, *rest))

    t = alternate(runs, far=lambda: rule(3.0), near=lambda: rule(-20.0))  # 3 in log per token: e^-87 after 29
    return [ratio("chunk rule: decays beyond e^-87 over none", t, "far", "near", 1.25, at_most=True)]


def of_family(name: str, options: dict[str, Any], runs: int) -> list[Line]:
    """Seconds of steps of a family, for each byte of weights that a token reads, over those of Qwen3.5."""
    lines = []
    with TemporaryDirectory() as folder:
        paths = {side: save_random_family(Path(folder) / side, side) for side in ("qwen3_5_text", name)}
        cache = CacheConfig(memory="1GiB")
        engines = {side: Engine.from_pretrained(path, cache=cache, **options) for side, path in paths.items()}
    works = {"decode of one": (1, PROMPT, 1.1), "step of eight": (8, OWN, None)}
    for work, (requests, length, target) in works.items():
        sides = {side: partial(decode_step, engine, requests, length, STEPS) for side, engine in engines.items()}
        t = alternate(runs, **sides)
        per_gb: Medians = {side: (t[side] or 0) / bytes_of_a_token(engine) * 1e9 for side, engine in engines.items()}
        runner: Any = engines[name].runner
        details = {
            "step_ms": 1000 * (t[name] or 0),
            "captured": runner.graphs is not None and bool(runner.graphs.graphs),
        }
        line = ratio(f"{work}: seconds per GB of weights", per_gb, name, "qwen3_5_text", target, at_most=True)
        lines.append(replace(line, details=details))
    prefills = {side: partial(prefill, engine) for side, engine in engines.items()}
    return [*lines, ratio("prefill", alternate(runs, **prefills), name, "qwen3_5_text")]


def main() -> int:
    parser = arguments(__doc__, runs=3, threads=True)
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp, built in its folder build")
    parser.add_argument("--large", action="store_true", help="a model of 0.5B parameters instead of 51M")
    parser.add_argument("--dtype", choices=TYPES, default="float32")
    parser.add_argument(
        "--family", choices=sorted(OF_FAMILIES), help="a family of models against Qwen3.5, and nothing else"
    )
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of this process instead of the clock")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, metavar="PART", help=", ".join(PARTS))
    args = parser.parse_args()
    if args.cpu_time:
        if args.threads > 1 or args.llama or (not args.family and {"server", "threads"} & set(args.only)):
            parser.error("--cpu-time is of one thread of this process: it goes with --family, or --only of others")
        time.perf_counter = time.process_time
    if args.family:
        torch.set_num_threads(args.threads)
        return finish(of_family(args.family, how(args.dtype), args.runs), args, model=args.family, dtype=args.dtype)
    with random_model(args, **(LARGE if args.large else {})) as (path, _):
        load = partial(Engine.from_pretrained, path, cache=CacheConfig(memory="2GiB"), **how(args.dtype))
        engine = load()
        llama = Llama(args.llama, path, args.dtype, args.threads) if args.llama else None
        parts = {
            "llama": lambda: against_llama(engine, llama, args.runs, args.dtype),
            "transformers": lambda: against_transformers(path, args.runs),
            "modes": lambda: of_modes(engine, args.runs),
            "server": lambda: against_server(engine, llama, args.runs),
            "costs": lambda: costs(engine, load, args.dtype),
            "threads": lambda: of_threads(engine, args.runs, os.cpu_count() or 1),
            "decays": lambda: decays(args.runs),
        }
        lines = [line for name, part in parts.items() if name in args.only for line in part()]
    return finish(lines, args, model="0.5B" if args.large else "51M", dtype=args.dtype)


if __name__ == "__main__":
    sys.exit(main())
