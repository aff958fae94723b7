"""`hybrid serve` beside llama-server, on the same random Qwen3.5: streams at once, with prompts of their own and with a
shared beginning.

    python bench/serve_llama.py --llama-server PATH --llama-source DIR

`--llama-source` is llama.cpp's source, whose converter writes the checkpoint as GGUF; `--llama-server` was built of
it. Both servers compute in bfloat16 with one thread, take turns, and get prompts as token ids. CPU time is that of all
threads of a server's process, for all streams of a run.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

VOCAB = 1024

CONVERT = """
import sys
source, *sys.argv[1:] = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
import conversion.base as base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"  # prompts come as ids
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""

CASES = {"own prompts": 0, "shared": 1, "shared, seen before": 2}


def write_model(folder: Path) -> None:
    """A random Qwen3.5 of 45M parameters in bfloat16, with the tokenizer of the small model."""
    import torch
    from model import SIZES
    from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(vocab_size=VOCAB, tie_word_embeddings=True, initializer_range=0.05, **SIZES)
    Qwen3_5ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tiny = Path(__file__).parent.parent / "models" / "tiny"
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)


class Served:
    """A server in a process of its own.

    Args:
        command: that starts it.
        port: that it listens on.
        path: of its completions.
    """

    def __init__(self, command: list[str], port: int, path: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        self._times = psutil.Process(self._process.pid)
        self._port = port
        self._path = path
        for _ in range(1200):
            if self._is_ready():
                return
            time.sleep(0.25)
        raise SystemExit(f"{command[0]} does not start")

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port)) as one:
                one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                return b"200" in one.recv(100)
        except OSError:
            return False

    def cpu_seconds(self) -> float:
        """CPU time of the process."""
        times = self._times.cpu_times()
        return float(times.user + times.system)

    async def stream(self, prompt: list[int], tokens: int) -> float:
        """Read one stream; returns the seconds to its first piece."""
        body = {"prompt": prompt, "max_tokens": tokens, "n_predict": tokens, "stream": True, "temperature": 0.0}
        body |= {"ignore_eos": True} | ({"cache_prompt": True} if self._path == "/completion" else {})
        if self._path != "/completion":
            del body["n_predict"]
        else:
            del body["max_tokens"]
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=2**20)
        head = f"POST {self._path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        began = time.perf_counter()
        writer.write(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        first = None
        while line := await reader.readline():
            if first is None and line.startswith(b"data: "):
                first = time.perf_counter() - began
            if line.startswith(b"data: [DONE]") or b'"stop":true' in line:
                break
        writer.close()
        if first is None:
            raise SystemExit(f"{self._path}: no stream")
        return first

    def run(self, prompts: list[list[int]], before: list[int] | None, tokens: int) -> dict[str, float]:
        """Answer prompts at once; of `before`, which is answered first, only what the prompts cost is counted."""

        async def together() -> list[float]:
            return await asyncio.gather(*(self.stream(prompt, tokens) for prompt in prompts))

        if before is not None:
            asyncio.run(self.stream(before, 1))
            self.settle()
        cpu, began = self.cpu_seconds(), time.perf_counter()
        firsts = asyncio.run(together())
        wall = time.perf_counter() - began
        self.settle()
        return {"cpu": self.cpu_seconds() - cpu, "wall": wall, "first": statistics.median(firsts)}

    def settle(self) -> None:
        """Wait until it takes no CPU time any more."""
        before = -1.0
        while (now := self.cpu_seconds()) > before + 0.02:
            before = now
            time.sleep(0.4)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    """Measure, and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", required=True, help="the program")
    parser.add_argument("--llama-source", required=True, help="llama.cpp's source")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt (default: 512)")
    parser.add_argument("--shared", type=int, default=384, help="of these, shared ones (default: 384)")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default: 32)")
    parser.add_argument("--runs", type=int, default=3, help="by turns (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = parser.parse_args()
    rng = random.Random(0)
    most = max(args.streams)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        gguf = folder / "model.gguf"
        converting = [sys.executable, "-c", CONVERT, args.llama_source, str(folder), "--outfile", str(gguf)]
        subprocess.run([*converting, "--outtype", "bf16", "--no-mtp"], check=True, capture_output=True)
        ports = free_port(), free_port()
        llama = [args.llama_server, "-m", str(gguf), "--port", str(ports[0]), "-np", str(most), "-t", "1", "-tb", "1"]
        llama += ["-c", str(most * (args.prompt + args.tokens + 64)), "--kv-unified"]
        ours = [sys.executable, "-m", "hybrid", "serve", str(folder), "--port", str(ports[1]), "--memory", "1GiB"]
        ours += ["--max-num-seqs", str(most), "--dtype", "bfloat16"]
        servers = {
            "llama-server": Served(llama, ports[0], "/completion"),
            "hybrid": Served(ours, ports[1], "/v1/completions"),
        }
        found: dict[str, Any] = {}
        try:
            for count in args.streams:
                for case, kind in CASES.items():
                    results: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
                    for run in range(args.runs + 1):  # the first is not counted
                        shared = [rng.randrange(300, VOCAB - 24) for _ in range(args.shared if kind else 0)]
                        rest = args.prompt - len(shared)
                        prompts = [shared + [rng.randrange(300, VOCAB - 24) for _ in range(rest)] for _ in range(count)]
                        before = [*shared, 300] if kind == 2 else None
                        for name in sorted(servers, reverse=run % 2 == 0):
                            result = servers[name].run(prompts, before, args.tokens)
                            if run:
                                results[name].append(result)
                    medians = {
                        name: {key: statistics.median(one[key] for one in many) for key in many[0]}
                        for name, many in results.items()
                    }
                    ratios = {key: medians["hybrid"][key] / value for key, value in medians["llama-server"].items()}
                    found[f"{count}, {case}"] = medians | {"ratios": ratios}
                    if not args.json:
                        text = "; ".join(
                            f"{key} {medians['hybrid'][key]:.3f} / {medians['llama-server'][key]:.3f} = {ratio:.2f}"
                            for key, ratio in ratios.items()
                        )
                        print(f"{count:3} streams, {case}: {text}", flush=True)
        finally:
            for server in servers.values():
                server.close()
        if args.json:
            print(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
