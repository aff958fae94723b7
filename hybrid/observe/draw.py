"""Pictures of the prefix tree: as text, and as a page for a browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from hybrid.checks import shown
from hybrid.errors import ArgumentError
from hybrid.units import format_bytes

Decode = Callable[[list[int]], str]
"""Turns token ids into text."""

SUFFIXES = (".html", ".htm", "")
"""Endings of the name of a page."""


def draw(
    snapshot: dict[str, Any], path: str | Path | None = None, decode: Decode | None = None, *, width: int = 100
) -> str:
    """Draw a tree as text, or as a page that any browser opens: one file, without a server or a network.

    Args:
        snapshot: the tree at one moment, in types of JSON (`hybrid.cache.snapshot`).
        path: the page to write, `tree.html` for example; None: text.
        decode: turns token ids into text, `engine.tokenizer.decode` for example: nodes then show how their text begins.
        width: characters of a line of text, at most.

    Returns:
        The text, or the page.

    Raises:
        ArgumentError: the name is that of another kind of file, such as `tree.png`.
        OSError: the page cannot be written.
    """
    if path is not None and Path(path).suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"draw: the page is HTML; give a name such as 'tree.html', not {shown(str(path))}")
    if decode is not None:
        snapshot = with_text(snapshot, decode)
    if path is None:
        return draw_text(snapshot, width=width)
    page = make_page(snapshot)
    Path(path).write_text(page, encoding="utf-8")
    return page


def with_text(snapshot: dict[str, Any], decode: Decode) -> dict[str, Any]:
    """Add the text of each node's beginning. Ids that are not tokens, those of images and of the beginnings of segments
    (`hybrid.hf`), are left out."""
    nodes = [{**node, "text": decode([token for token in node["ids"] if token >= 0])} for node in snapshot["nodes"]]
    return {**snapshot, "nodes": nodes}


LEGEND = "● checkpoint   ○ tombstone (pages, no checkpoint)   ⚿ number of locks (pages, state)"

IN_ASCII = str.maketrans(
    {"●": "*", "○": "o", "⚿": "#", "└": "`", "├": "|", "│": "|", "─": "-", "“": '"', "”": '"', "…": "...", "×": "x"}
)
"""The characters of pictures where only ASCII can be shown: checkpoint and tombstone stay apart."""


def in_ascii(text: str) -> str:
    """Make text for a terminal that has ASCII alone; a character without another form is a question mark."""
    return text.translate(IN_ASCII).encode("ascii", "replace").decode()


MIN_SNIPPET = 12
"""Characters of text that are shown, at least."""


def draw_text(snapshot: dict[str, Any], *, width: int = 100, fold: bool = True) -> str:
    """Draw the tree, one line per node.

    Args:
        snapshot: the tree.
        width: characters of a line, at most (a tree that branches very deeply needs more).
        fold: a chain of nodes without branches is one line, with how many checkpoints and tombstones it has.
    """
    below: dict[int, list[int]] = {}
    for place, node in enumerate(snapshot["nodes"]):
        below.setdefault(node["parent"], []).append(place)
    lines: list[str] = []
    for namespace in dict.fromkeys(node["namespace"] for node in snapshot["nodes"]):
        lines.append(f"namespace {namespace!r}")
        tops = [place for place in below[-1] if snapshot["nodes"][place]["namespace"] == namespace]
        pending = [(place, "", place is tops[-1]) for place in reversed(tops)]
        while pending:
            place, indent, is_last = pending.pop()
            chain = [place]
            while fold and len(below.get(chain[-1], ())) == 1:
                chain.append(below[chain[-1]][0])
            head = f"{indent}{'└─ ' if is_last else '├─ '}"
            lines.append(head + _describe([snapshot["nodes"][node] for node in chain], snapshot, width - len(head)))
            parts = sorted(below.get(chain[-1], ()), key=lambda child: snapshot["nodes"][child]["end"])
            indent += "   " if is_last else "│  "
            pending += [(child, indent, child == parts[-1]) for child in reversed(parts)]
    if not lines:
        lines.append(f"(empty: what is shorter than a page of {snapshot['page_size']} tokens is not kept)")
    totals = snapshot["totals"]
    lines.append(
        f"pages: {totals['pages_cached']} cached, {totals['pages_private']} private, {totals['pages_free']} free; "
        f"states: {totals['checkpoints']} checkpoints, {totals['states_private']} private, "
        f"{totals['states_free']} free"
    )
    lines += [
        f"{tier['name']}: {tier['num_pages']} pages, {tier['num_checkpoints']} checkpoints, "
        f"{format_bytes(tier['num_bytes'])}"
        for tier in snapshot["tiers"][1:]
    ]
    return "\n".join(lines)


def _describe(chain: list[dict[str, Any]], snapshot: dict[str, Any], width: int) -> str:
    """Describe a chain of nodes in one line: range, pages, checkpoints, size, locks, and how its text begins."""
    first, last = chain[0], chain[-1]
    num_pages = sum(node["num_pages"] for node in chain)
    num_checkpoints = sum(node["has_checkpoint"] for node in chain)
    num_tombstones = len(chain) - num_checkpoints
    marks = [f"{count if len(chain) > 1 else ''}{mark}" for mark, count in _marks(num_checkpoints, num_tombstones)]
    parts = [f"{first['start']}..{last['end']}", f"{num_pages} page{'s' if num_pages != 1 else ''}", " ".join(marks)]
    elsewhere = [node["tiers"][0] for node in chain if node["tiers"] and not node["has_checkpoint"]]
    parts += [f"{elsewhere.count(name)} in {name}" for name in dict.fromkeys(elsewhere)]
    size = num_pages * snapshot["page_bytes"] + num_checkpoints * snapshot["checkpoint_bytes"]
    if size:
        parts.append(format_bytes(size))
    locks = (max(node["page_locks"] for node in chain), max(node["state_locks"] for node in chain))
    if locks[0]:
        parts.append(f"⚿ {locks[0]},{locks[1]}")
    line = "  ".join(parts)
    room = width - len(line) - 4
    if not first["text"] or room < MIN_SNIPPET:
        return line
    text = " ".join(first["text"].split())
    return f"{line}  “{text if len(text) <= room else text[: room - 1] + '…'}”"


def _marks(num_checkpoints: int, num_tombstones: int) -> list[tuple[str, int]]:
    return [(mark, count) for mark, count in (("●", num_checkpoints), ("○", num_tombstones)) if count]


PLACE = "/*SNAPSHOT*/null"
"""Text of the template that the snapshot replaces."""


def make_page(snapshot: dict[str, Any]) -> str:
    """Make the page. It loads nothing: what it shows and how is all in it."""
    template = files("hybrid.observe").joinpath("tree.html").read_text(encoding="utf-8")
    data = json.dumps(snapshot, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    # Text of prompts may hold anything, "</script>" too: inside a script no "<" may begin an element.
    return template.replace(PLACE, data.replace("<", "\\u003c"))
