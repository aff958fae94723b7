"""Sessions of coding agents, made up, in the form of kv-cache-tester."""

import json
from pathlib import Path
from typing import Any

BLOCK = 64


def write_sessions(folder: Path, count: int = 3, turns: int = 6) -> Path:
    """Write sessions, a file each; the third has other tools than the others. Two have a subagent."""
    for number in range(count):
        tools = 1536 if number != 2 else 1600
        names = iter(range(1, 1 << 20))
        blocks = [next(names) for _ in range(3000 // BLOCK)]
        requests: list[dict[str, Any]] = []
        for turn in range(turns):
            blocks += [next(names) for _ in range(8 + 3 * turn)]
            think = 60.0 if turn == 3 else 5.0
            one = {"t": 20.0 * turn, "type": "n", "in": len(blocks) * BLOCK + 20, "out": 130, "hash_ids": list(blocks)}
            requests.append({**one, "stop": "tool_use", "api_time": 3.0, "think_time": think})
            if turn == 2 and number != 2:
                requests.append(subagent(20.0 * turn + 4.0, names))
        value = {"id": f"s{number}", "block_size": BLOCK, "hash_id_scope": "local", "tool_tokens": tools}
        text = json.dumps({**value, "system_tokens": 2048 - 1536, "requests": requests})
        (folder / f"session_{number}.json").write_text(text, encoding="utf-8")
    return folder


def subagent(start: float, names: Any) -> dict[str, Any]:
    """A subagent with two requests; the first 1024 tokens are its tools."""
    blocks = [next(names) for _ in range(1200 // BLOCK)]
    more = [*blocks, *(next(names) for _ in range(6))]
    parts = [(0.0, blocks), (6.0, more)]
    made = [
        {"t": at, "type": "n", "in": len(ids) * BLOCK, "out": 90, "hash_ids": ids, "stop": "tool_use", "api_time": 2.0}
        for at, ids in parts
    ]
    sizes = {"tool_tokens": 900, "system_tokens": 124}
    return {"t": start, "type": "subagent", "agent_id": "agent_001", **sizes, "requests": made}
