"""CPU time per token of an answer over HTTP, over that of the engine alone: 1, 16 and 64 streams.

Two processes take turns: one steps an engine, the other is `hybrid serve`, whose client is this process. Both run the
same prompts with the same settings; the CPU time is that of all threads of each.

    python bench/serve.py --runs 5
"""

import argparse
import asyncio
import base64
import io
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
        began, tokens, gap = time.process_time(), 0, 0.0
        latest: dict[str, float] = {}
        params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)
        for prompt in prompts(asked["count"], asked["run"]):
            engine.add_request(prompt, params)
        while engine.has_work:
            for output in engine.step():
                tokens += len(output.delta_token_ids)
                before, now = latest.get(output.request_id), time.perf_counter()
                gap, latest[output.request_id] = max(gap, now - before) if before is not None else gap, now
        print(json.dumps({"cpu": time.process_time() - began, "tokens": tokens, "gap": gap}), flush=True)


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


def besides() -> dict[str, tuple[str, bytes]]:
    """What arrives beside streams, by its name: a path and a body."""
    from PIL import Image

    from support.large_bodies import large_bodies

    message = {"role": "user", "content": "The with statement"}
    chat = {"model": "tiny", "messages": [message], "max_tokens": 1}
    fields = {f"field{n}": {"type": "string", "maxLength": 20} for n in range(300)}
    schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    def about(image: Image.Image, level: int) -> dict[str, Any]:
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=level)
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        return chat | {"messages": [{"role": "user", "content": parts}]}

    noise = Image.frombytes("RGB", (3900, 3900), os.urandom(3 * 3900 * 3900))
    long = {"model": "tiny", "prompt": "The with statement wraps the execution. " * 1_250_000, "max_tokens": 1}
    found = {
        "nothing": ("/v1/models", {}),
        "a body of 50 MB": ("/v1/completions", long),
        "one of 8 MB": ("/v1/completions", long | {"prompt": long["prompt"][:8_000_000]}),
        "a schema of 300 properties": ("/v1/chat/completions", chat | {"response_format": form}),
        "8000 x 8000 pixels": ("/v1/chat/completions", about(Image.new("RGB", (8000, 8000), (9, 9, 9)), 6)),
        "an image of 45 MB": ("/v1/chat/completions", about(noise, 0)),
    }
    largest = large_bodies(8 * 2**20, 2**18)
    read = {name: (path, body) for name, path, body in largest if "what it takes" in name or "unknown name" in name}
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in found.items()} | read


async def beside(port: int, run: int, path: str, body: bytes, args: argparse.Namespace) -> float:
    """The longest gap of four streams while something arrives."""
    reading = [asyncio.create_task(stream(port, prompt, args)) for prompt in prompts(4, run)]
    await asyncio.sleep(0.7)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readline()
    writer.close()
    return max(max(gaps) for _, gaps in await asyncio.gather(*reading))


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def loop_seconds(process: psutil.Process) -> float:
    """CPU time of a server's event loop, which runs in the first thread of its process."""
    return sum(one.user_time + one.system_time for one in process.threads() if one.id == process.pid)


def main() -> None:
    """Measure, and print a line for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--runs", type=int, default=5, help="of each, by turns (default: 5)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (default: 128)")
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--beside", action="store_true", help="gaps of streams while large bodies arrive, instead")
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
        for name, (path, body) in besides().items() if args.beside else ():
            gaps = [asyncio.run(beside(port, run, path, body, args)) for run in range(args.runs + 1)][1:]
            result[name] = {"median_ms": 1000 * statistics.median(gaps), "longest_ms": 1000 * max(gaps)}
            if not args.json:
                print(
                    f"{name}: {result[name]['median_ms']:.0f} ms, {result[name]['longest_ms']:.0f} at most", flush=True
                )
        args.streams = [] if args.beside else args.streams
        for count in args.streams:
            rates: dict[str, list[float]] = {"alone": [], "http": [], "loop": []}
            gaps, alone_gaps = [], []
            for run in range(args.runs + 1):  # the first one is not counted: what is compiled and captured
                alone.stdin.write(json.dumps({"count": count, "run": run}) + "\n")
                alone.stdin.flush()
                found = json.loads(alone.stdout.readline())
                before, before_in_loop = cpu_seconds(process), loop_seconds(process)
                tokens, gap = asyncio.run(over_http(port, count, run, args))
                settle(process)
                if run:
                    rates["alone"].append(1e6 * found["cpu"] / found["tokens"])
                    rates["http"].append(1e6 * (cpu_seconds(process) - before) / tokens)
                    rates["loop"].append(1e6 * (loop_seconds(process) - before_in_loop) / tokens)
                    gaps.append(gap)
                    alone_gaps.append(found["gap"])
            medians = {name: statistics.median(values) for name, values in rates.items()}
            ratio = statistics.median(h / a for h, a in zip(rates["http"], rates["alone"], strict=True))
            longest = {"http": 1000 * statistics.median(gaps), "alone": 1000 * statistics.median(alone_gaps)}
            result[str(count)] = medians | {"ratio": ratio, "longest_gap_ms": longest}
            if not args.json:
                text = f"{count:3} streams: {medians['alone']:7.0f} us a token alone, {medians['http']:7.0f} over HTTP"
                text += f" ({medians['loop']:.0f} in the event loop), ratio {ratio:.3f}"
                print(f"{text}; longest gap {longest['http']:.0f} ms, alone {longest['alone']:.0f}", flush=True)
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
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]
    main()
