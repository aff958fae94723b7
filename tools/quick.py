"""Use every command and every door once, on the model inside the package.

    python tools/quick.py

takes two minutes on two idle cores where operations are compiled: one prompt by each command, by the library, the
server, transformers and the mirror of vLLM's blocks, the demo, and parity in both types. It says what it has found and
how long each took, and ends with 1 where something is wrong. What a user meets first is what this runs; the tests look
closer.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}  # in other processes, too

import hybrid
from hybrid.commands.main import COMMANDS, main

ROOT = Path(__file__).resolve().parent.parent

PROMPT = "A list is a mutable sequence. " * 12 + "So"

MODEL = str(ROOT / "models" / "tiny")


class NotInstalledError(Exception):
    """Something is not installed here; the text says what runs it elsewhere."""


def command(*arguments: str) -> dict[str, Any]:
    """What a command prints with `--json`.

    Raises:
        RuntimeError: it has failed.
    """
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main([*arguments, "--json"])
    if status:
        said = f"{err.getvalue()}{out.getvalue()}"[-3000:]
        raise RuntimeError(f"hybrid {' '.join(arguments)}: exit status {status}\n{said}")
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def expect(what: str, holds: object) -> None:
    """Raise where something does not hold."""
    if not holds:
        raise RuntimeError(f"not so: {what}")


def library(folder: Path) -> str:
    """A prompt twice, and a file of what is cached."""
    with hybrid.Engine.from_pretrained("tiny", cache=hybrid.CacheConfig(memory="64MiB")) as engine:
        params = hybrid.SamplingParams(max_new_tokens=16)
        cold, hit = (engine.generate(PROMPT, params)[0] for _ in range(2))
        engine.save(folder / "a.hybrid")
    expect("a hit answers as a cold run", hit.token_ids == cold.token_ids)
    expect("the second time is a hit", hit.usage.cached_tokens >= 64)
    return f"{hit.usage.cached_tokens} of {hit.usage.prompt_tokens} tokens cached"


def generate(folder: Path) -> str:
    """The same prompt twice in a batch."""
    options = "--max-new-tokens", "16", "--memory", "64MiB"
    first, second = command("generate", "tiny", PROMPT, PROMPT, *options)["outputs"]
    expect("both answers are the same", first["text"] == second["text"])
    expect("they share the prompt", max(first["cached_tokens"], second["cached_tokens"]) >= 64)
    return repr(first["text"])[:60]


def tree(folder: Path) -> str:
    """A page for a browser."""
    command("tree", PROMPT, "--max-new-tokens", "2", "--out", str(folder / "tree.html"))
    return f"{(folder / 'tree.html').stat().st_size} bytes"


def cache(folder: Path) -> str:
    """The file that the library has saved, listed and computed again."""
    shown, checked = (command("cache", action, str(folder / "a.hybrid")) for action in ("show", "check"))
    expect("nothing differs", shown["checkpoints"] and checked["checked"] and not checked["wrong"])
    return f"{checked['checked']} checkpoints computed again"


def doctor(folder: Path) -> str:
    """Two requests, replayed."""
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps({"prompt": PROMPT * 9, "completion": "it is"}) + "\n" for _ in range(2)))
    return f"{len(command('doctor', str(log), '--models', '--no-cures')['replays'])} replays"


def models(folder: Path) -> str:
    """The families."""
    return f"{len(command('models')['families'])} families"


def stress(folder: Path) -> str:
    """Random requests with failures, on the model and on one of arithmetic."""
    command("stress", "--operations", "60", "--no-signals")
    return f"{command('stress', '--no-model', '--operations', '2000')['hits']} hits"


def demo(folder: Path) -> str:
    """The story."""
    found = command("demo")
    return f"{len(found['acts'])} acts"


def parity(folder: Path) -> str:
    """In the type that an engine chooses here, and in the other one."""
    first = command("parity")
    other = "float32" if first["dtype"] == "bfloat16" else "bfloat16"
    checks = [*first["checks"], *command("parity", "--dtype", other)["checks"]]
    return f"{len(checks)} checks, hits in {first['dtype']} and {other}"


def serve(folder: Path) -> str:
    """A chat over HTTP, twice."""
    return served("serve", "tiny", "--memory", "64MiB")


def fleet(folder: Path) -> str:
    """The same by a replica on Ray Serve."""
    if find_spec("ray") is None:
        raise NotInstalledError("Ray is not installed here: make fleet")
    return served("fleet", "serve", "tiny", "--memory", "64MiB", "--replicas", "1")


def served(*arguments: str) -> str:
    """What a server answers, which is then ended by SIGTERM."""
    port = 18000 + os.getpid() % 10000
    given = [sys.executable, "-m", "hybrid", *arguments, "--port", str(port)]
    with subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "hybrid serves" in line:
                break
        try:
            expect(f"it begins:\n{''.join(lines)}", lines and "hybrid serves" in lines[-1])
            body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
            usages = [_post(f"http://127.0.0.1:{port}/v1/chat/completions", body)["usage"] for _ in range(2)]
            cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
            expect("the second time is a hit", cached >= 64)
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
    expect("SIGTERM ends it with 0", process.returncode == 0)
    return f"{cached} of {usages[1]['prompt_tokens']} tokens cached"


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
    return found


def transformers(folder: Path) -> str:
    """`model.generate` of transformers, with the cache and without it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hybrid.models.torch_functions import use_torch_functions, without_kernels

    with without_kernels():  # those of fla need a GPU, whether there is one or not
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()
    use_torch_functions(model)
    prompt = AutoTokenizer.from_pretrained(MODEL)(PROMPT, return_tensors="pt").input_ids
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(prompt, **options)
    cached = hybrid.hf.PrefixCache(model, memory="64MiB", chunk_size=64)
    answers = [cached.generate(prompt, **options) for _ in range(2)]
    expect("a hit has the bits of a cold run", answers[0].equal(answers[1]))
    expect("greedy answers are those of transformers", answers[0].equal(plain))
    expect("the second time is a hit", cached.explanations[0].usable_hit >= 64)
    return f"{cached.explanations[0].usable_hit} of {prompt.shape[1]} tokens cached"


def mirror(folder: Path) -> str:
    """The tree beside an imitation of vLLM's blocks; inside vLLM itself: make vllm."""
    chosen = "tests/vllm/test_without_vllm.py", "-k", "policy or queue_hits or salts or pin"
    given = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    ended = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stdout[-3000:])
    return ended.stdout.strip().splitlines()[-1]


STEPS: tuple[Callable[[Path], str], ...] = (
    *(library, serve, transformers, mirror),
    *(generate, tree, cache, doctor, models, stress, demo, fleet, parity),
)
"""The doors, and the commands."""


def run() -> int:
    """Run every step; returns the exit status."""
    assert {each.name for each in COMMANDS} <= {step.__name__ for step in STEPS}, "a command has no step"
    started, failed = time.perf_counter(), []
    with TemporaryDirectory() as name:
        for step in STEPS:
            begun, mark = time.perf_counter(), "ok"
            try:
                found = step(Path(name))
            except NotInstalledError as missing:
                mark, found = "--", str(missing)
            except Exception as error:  # the others are run all the same
                mark, found = "!!", f"{type(error).__name__}: {error}"
                failed.append(step.__name__)
            print(f"{mark} {time.perf_counter() - begun:6.1f} s  {step.__name__:13} {found}", flush=True)
    print(f"{time.perf_counter() - started:.0f} s; " + (f"FAILED: {', '.join(failed)}" if failed else "all is well"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run())
