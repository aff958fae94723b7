"""CPU time per token of an answer over HTTP, over that of the engine alone: 1, 16 and 64 streams.

Two processes take turns: one steps an engine, the other is `hybrid serve`, whose client is this process. Both run the
same prompts with the same settings; the CPU time is that of all threads of each.

    python bench/serve.py --runs 5
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

WORDS = ["the", "with", "statement", "wraps", "execution", "of", "a", "block", "and", "class", "def", "return"]


def prompts(count: int, run: int) -> list[str]:
    """Prompts of 30 words, other ones for each run and number."""
    return [" ".join(WORDS[(run * 7 + at * 3 + word * word) % len(WORDS)] for word in range(30)) for at in range(count)]


def engine_alone(args: argparse.Namespace) -> None:
    """Answer lines of `{"count": ..., "run": ...}` with CPU seconds and tokens."""
    from hybrid import CacheConfig, Engine, EngineConfig, SamplingParams

    config = EngineConfig(max_num_seqs=64)
    engine = Engine.from_pretrained(args.model, cache=CacheConfig(memory=args.memory), config=config)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began, tokens = time.process_time(), 0
        params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
        for prompt in prompts(asked["count"], asked["run"]):
            engine.add_request(prompt, params)
        while engine.has_work:
            for output in engine.step():
                tokens += len(output.delta_token_ids)
        print(json.dumps({"cpu": time.process_time() - began, "tokens": tokens}), flush=True)


async def stream(port: int, prompt: str, args: argparse.Namespace) -> tuple[int, list[float]]:
    """Read one stream; returns its number of tokens and the seconds between its pieces."""
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": args.tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    gaps: list[float] = []
    usage, before = b"", time.perf_counter()
    while b"[DONE]" not in (piece := await reader.read(65536)):
        if not piece:
            raise SystemExit("a stream ended early")
        now = time.perf_counter()
        gaps.append(now - before)
        before, usage = now, piece
    usage += piece
    writer.close()
    found = json.loads(usage[usage.rindex(b'"usage":') + 8 : usage.rindex(b"}\n\ndata: [DONE]")])
    return found["completion_tokens"], gaps[1:]


async def over_http(port: int, count: int, run: int, args: argparse.Namespace) -> tuple[int, float]:
    """Read streams together; returns their tokens, and the longest time between two pieces."""
    found = await asyncio.gather(*(stream(port, prompt, args) for prompt in prompts(count, run)))
    return sum(tokens for tokens, _ in found), max(max(gaps) for _, gaps in found)


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measure, and print a line for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--runs", type=int, default=5, help="of each, by turns (default: 5)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (default: 128)")
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--engine-alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine_alone:
        return engine_alone(args)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    own = [sys.executable, __file__, "--engine-alone", "--model", args.model, "--memory", args.memory]
    alone = subprocess.Popen(
        [*own, "--tokens", str(args.tokens)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    command = [sys.executable, "-m", "hybrid", "serve", args.model, "--port", "0", "--memory", args.memory]
    server = subprocess.Popen(
        [*command, "--max-num-seqs", "64"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert alone.stdin is not None and alone.stdout is not None and server.stdout is not None
    try:
        alone.stdout.readline()
        port = int(server.stdout.readline().split("127.0.0.1:")[1].split()[0])
        process = psutil.Process(server.pid)
        result: dict[str, Any] = {}
        for count in args.streams:
            rates: dict[str, list[float]] = {"alone": [], "http": []}
            gaps = []
            for run in range(args.runs + 1):  # the first one is not counted: what is compiled and captured
                alone.stdin.write(json.dumps({"count": count, "run": run}) + "\n")
                alone.stdin.flush()
                found = json.loads(alone.stdout.readline())
                before = cpu_seconds(process)
                tokens, gap = asyncio.run(over_http(port, count, run, args))
                settle(process)
                if run:
                    rates["alone"].append(1e6 * found["cpu"] / found["tokens"])
                    rates["http"].append(1e6 * (cpu_seconds(process) - before) / tokens)
                    gaps.append(gap)
            medians = {name: statistics.median(values) for name, values in rates.items()}
            ratio = statistics.median(h / a for h, a in zip(rates["http"], rates["alone"], strict=True))
            result[str(count)] = medians | {"ratio": ratio, "longest_gap_ms": 1000 * statistics.median(gaps)}
            if not args.json:
                text = f"{count:3} streams: {medians['alone']:7.0f} us a token alone, {medians['http']:7.0f} over HTTP"
                print(f"{text}, ratio {ratio:.3f}; longest gap {1000 * statistics.median(gaps):.0f} ms", flush=True)
        if args.json:
            print(json.dumps(result))
    finally:
        alone.stdin.close()
        server.terminate()
        server.wait()
        alone.wait()


def settle(process: psutil.Process) -> None:
    """Wait until a server has replayed its answers: it takes no CPU time any more."""
    before = -1.0
    while (now := cpu_seconds(process)) > before:
        before = now
        time.sleep(0.3)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
