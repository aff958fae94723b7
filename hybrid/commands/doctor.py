"""`hybrid doctor`: traffic, replayed on engines' schedulers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from tqdm import tqdm

from hybrid.commands.commands import API_KEY, Outcome, refuse_given
from hybrid.doctor.replay import replay
from hybrid.doctor.sessions import MAX_PAUSE
from hybrid.doctor.sizes import Sizes
from hybrid.doctor.text import Template
from hybrid.doctor.traffic import Traffic, anonymize, check_file
from hybrid.doctor.watch import watch
from hybrid.errors import ArgumentError, CheckpointError
from hybrid.models.loading import TINY
from hybrid.prompts.encode import load_tokenizer

MODEL = "32768,51511296"
"""Sizes of a Qwen3.5 with 4B parameters in bfloat16."""

OF_REPLAYS: dict[str, object] = {
    "model": None,
    "dtype": None,
    "memory": None,
    "engine": None,
    "block_size": None,
    "models": False,
    "concurrency": None,
    "prefill_rate": None,
    "decode_rate": None,
}
"""Options of a replay, and their defaults."""

OF_REPORTS: dict[str, object] = {
    "no_cures": False,
    "price": None,
    "users": None,
    "gap": None,
    "max_pause": MAX_PAUSE,
}
"""Options of a report, which `watch` does not make."""

OF_WATCH: dict[str, object] = {"within": 5.0, "api_key": None}

KEEPS = (
    "kept: which prompts share which beginnings (a salted hash of each 16 tokens and all before them), numbers of "
    "tokens, times since the first request, and hashes of namespaces; nothing else, and the salt is thrown away"
)


def run(args: argparse.Namespace, console: Console) -> Outcome:
    """Replay traffic, anonymize it, or compare it with a running server."""
    first, *rest = args.traffic
    if first == "watch":
        return _watch(args, console, rest)
    refuse_given(args, "it is of hybrid doctor watch", **OF_WATCH)
    if args.out is not None and not Path(args.out).parent.is_dir():
        raise ArgumentError(f"--out {args.out}: there is no folder {Path(args.out).parent}; make it first")
    template = Template(_tokenizer(args.tokenizer))
    if first == "anonymize":
        return _anonymize(args, console, template, rest)
    traffic = _read(args.traffic, template, args.gap, args.max_pause)
    report = replay(
        traffic,
        _sizes(args),
        args.engine or ["vllm", "sglang", "hybrid", "bound"],
        args.memory or ["24GiB"],
        concurrency=args.concurrency,
        models=args.models,
        cures=not args.no_cures,
        prefill_rate=args.prefill_rate,
        decode_rate=args.decode_rate,
        price=args.price,
        users=args.users,
        progress=True,
    )
    report.print(console)
    if args.out is not None:
        _write(args.out, report.write)
        console.print(f"wrote {args.out}: open it in a browser", markup=False, soft_wrap=True)
    return Outcome(True, report.to_json())


def _read(names: list[str], template: Template, gap: float | None = None, max_pause: float = MAX_PAUSE) -> Traffic:
    """Read files of traffic, with a bar on a terminal."""
    for name in names:
        check_file(Path(name))
    total = sum(Path(name).stat().st_size for name in names)
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, disable=None, leave=False) as bar:
        return Traffic.read(names, template, bar.update, gap=gap, max_pause=max_pause)


def _sizes(args: argparse.Namespace) -> Sizes:
    """The sizes of the model that is named."""
    dtype = getattr(torch, args.dtype) if args.dtype else None
    return replace(Sizes.of(args.model or MODEL, dtype), block_size=args.block_size)


def _tokenizer(name: str | None) -> object:
    """The tokenizer of a model; None: there is to be none."""
    if name is None:
        return None
    path = TINY if name == "tiny" else Path(name)
    if path.is_dir() and (found := load_tokenizer(path)) is not None:
        return found
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers and the hub's client raise many kinds
        shown = str(error).strip().partition("\n")[0][:200]
        raise CheckpointError(
            f"--tokenizer {name}: no tokenizer was found ({shown}); give a model's folder with tokenizer.json, or a "
            "hub id, or leave it out: texts are counted by words then"
        ) from error


def _write(path: str, write: Callable[[str], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ArgumentError(f"--out {path}: it cannot be written: {error.strerror}") from error


def _anonymize(args: argparse.Namespace, console: Console, template: Template, names: list[str]) -> Outcome:
    """Write hashes of a file of traffic."""
    refuse_given(args, "anonymize replays nothing", **OF_REPLAYS, **OF_REPORTS)
    if len(names) != 1:
        raise ArgumentError("hybrid doctor anonymize FILE --out HASHES: give one file of traffic")
    path = Path(names[0])
    out = args.out or f"{path.stem}.hashes.jsonl"
    if Path(out).exists() and Path(out).samefile(path):
        raise ArgumentError(f"--out {out}: it is the file that is read; give another name")

    count = 0

    def write(name: str) -> None:
        nonlocal count
        with open(name, "w", encoding="utf-8") as file:
            count = anonymize(path, file, template)

    _write(out, write)
    console.print(f"wrote {out}: {count:,} requests\n{KEEPS}", markup=False, soft_wrap=True)
    return Outcome(True, {"file": out, "requests": count})


def _watch(args: argparse.Namespace, console: Console, rest: list[str]) -> Outcome:
    """Read a running server's figures, and compare them with what a replay of its traffic predicts."""
    if not rest:
        raise ArgumentError("hybrid doctor watch URL [TRAFFIC]: give the address of a server, http://localhost:8000")
    refuse_given(args, "watch makes no report", out=None, **OF_REPORTS)
    if len(rest) == 1:
        refuse_given(args, "watch replays traffic where it is given", tokenizer=None, within=5.0, **OF_REPLAYS)
    figures = watch(rest[0], args.api_key or os.environ.get(API_KEY))
    console.print(str(figures), markup=False, soft_wrap=True)
    result = {"engine": figures.engine, "prompt_tokens": figures.num_tokens, "hit_tokens": figures.hit_tokens}
    if len(rest) == 1:
        return Outcome(True, result)
    traffic = _read(rest[1:], Template(_tokenizer(args.tokenizer)))
    engine = (args.engine or [figures.engine])[0]
    sizes, memory = _sizes(args), (args.memory or ["24GiB"])[0]
    if engine == "vllm" and figures.block_size is not None and args.block_size is None:
        sizes = replace(sizes, block_size=figures.block_size)
    if engine == "vllm" and figures.num_blocks is not None and not args.memory:
        memory = figures.num_blocks * sizes.vllm_groups(sizes.vllm_block_size)[2]
    if engine == "hybrid" and figures.sizes is not None and args.model is None:
        sizes = figures.sizes
    if engine == "hybrid" and figures.memory is not None and not args.memory:
        memory = figures.memory
    row = replay(
        traffic,
        sizes,
        engine,
        memory,
        concurrency=args.concurrency,
        models=args.models,
        cures=False,
        prefill_rate=args.prefill_rate,
        decode_rate=args.decode_rate,
    ).rows[0]
    apart = figures.hit_rate - row.hit_rate
    agrees = abs(apart) <= args.within
    console.print(
        f"replay of the traffic on {engine}: {row.hit_rate:.1f} %, so the server is {apart:+.1f} points from it: "
        + ("as predicted" if agrees else "look at what it does not know: its memory, its block size, other traffic"),
        soft_wrap=True,
    )
    return Outcome(agrees, {**result, "hit_rate": figures.hit_rate, "predicted": row.hit_rate})
