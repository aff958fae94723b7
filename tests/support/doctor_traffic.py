"""Texts, messages and logged requests for tests of the doctor."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid.doctor.past import Fact
from hybrid.doctor.request import LoggedRequest, hashed

WORDS = ["the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with"]
TOOLS = [{"type": "function", "function": {"name": f"tool_{n}", "description": "does " * 60}} for n in range(8)]


def prose(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + str(rng.randrange(1000)) for _ in range(count))


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def logged(messages: list[Any], answer: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"request": {"messages": list(messages), **more}, "response": {"choices": [{"message": answer}]}}


def written(folder: Path, lines: list[Any]) -> Path:
    """A file of logged requests."""
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def turns(count: int) -> Iterator[tuple[LoggedRequest, Fact]]:
    """Requests of eight conversations in turns, three of which share a beginning."""
    rng = random.Random(1)
    shared = [rng.randrange(32000) for _ in range(2500)]
    histories = [list(shared) if n < 3 else [] for n in range(8)]
    for n in range(count):
        history = histories[rng.randrange(8)]
        history += [rng.randrange(32000) for _ in range(rng.randrange(30, 2500))]
        num_prompt = len(history)
        history += [rng.randrange(32000) for _ in range(rng.randrange(1, 120))]
        yield LoggedRequest(hashed(history), num_prompt, len(history), n * 0.4), Fact()
        if len(history) > 9000:
            history.clear()
