#!/usr/bin/env python
"""Check an SGLang server with `--radix-cache-backend hybrid`: ten minutes on one GPU.

    python -m sglang.launch_server --model-path MODEL --port 30000 --radix-cache-backend hybrid   # and once without
    python bench/gpu/sglang_server.py --url http://127.0.0.1:30000 --save with.json
    python bench/gpu/sglang_server.py --url http://127.0.0.1:30000 --compare with.json              # the server without

It sends prompts that share prefixes, twice, one by one and then all at once, and prints how many of their tokens were
cached. With `--compare` the greedy answers must be those that were saved. Exit status 1: an answer differs, or a prompt
that came again was not cached.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TEXT = "The cache keeps what it has seen, and a prompt that begins as another did need not be computed again. "


def prompts(number: int, repeats: int) -> list[str]:
    """Prompts of which every four share a long beginning."""
    return [f"Document {i // 4}. " + TEXT * repeats + f"Question {i % 4}: what is it about?" for i in range(number)]


def ask(url: str, prompt: str) -> tuple[str, int, int]:
    """A greedy answer, the tokens of the prompt, and how many of them were cached."""
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 32}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        answer = json.load(response)
    info = answer["meta_info"]
    return answer["text"], info["prompt_tokens"], info["cached_tokens"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--save", type=Path, help="write the answers to this file")
    parser.add_argument("--compare", type=Path, help="answers that these must equal")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=60, help="length of a prompt, in sentences")
    args = parser.parse_args()
    asked, answers, failed = prompts(args.prompts, args.repeats), [], False
    for name, at_once in (("first", 1), ("again", 1), ("all at once", len(asked))):
        with ThreadPoolExecutor(at_once) as pool:
            found = list(pool.map(lambda prompt: ask(args.url, prompt), asked))
        total, cached = (sum(column) for column in list(zip(*found, strict=True))[1:])
        print(f"{name}: {cached} of {total} prompt tokens cached")
        answers.append([text for text, _, _ in found])
        failed |= name != "first" and cached == 0
    if args.save:
        args.save.write_text(json.dumps(answers), encoding="utf-8")
    if args.compare:
        saved = json.loads(args.compare.read_text(encoding="utf-8"))
        differing = sum(ours != theirs for ours, theirs in zip(answers[0], saved[0], strict=True))
        print(f"{differing} of {len(asked)} first answers differ")
        failed |= differing > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
