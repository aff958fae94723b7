"""An answer and a cache as a notebook shows them: HTML in which texts of prompts and answers are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hybrid.units import format_bytes

MAX_CHARACTERS = 4000
"""Characters of an answer that are shown, from its end."""


def bar(parts: Sequence[tuple[int, str, str]], total: int) -> str:
    """Draw a bar of coloured parts.

    Args:
        parts: (amount, colour, title) of each.
        total: what the whole bar stands for.
    """
    style = "display:inline-block;height:0.8em"
    spans = "".join(
        f'<span title="{escape(title)}" style="{style};width:{100 * amount / max(1, total):.2f}%;background:{colour}">'
        "</span>"
        for amount, colour, title in parts
    )
    return (
        '<div style="width:24em;max-width:100%;background:#8882;line-height:0;white-space:nowrap;overflow:hidden">'
        f"{spans}</div>"
    )


def table(title: str, rows: Sequence[tuple[str, str]], picture: str = "") -> str:
    """Make a table of names and values, under a title and a picture.

    Args:
        title, rows: texts.
        picture: HTML.
    """
    cells = "".join(
        f'<tr><td style="text-align:left">{escape(name)}</td><td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f"<div><b>{escape(title)}</b>{picture}<table>{cells}</table></div>"


def answer(text: str, num_cached: int, num_prompt: int, rows: Sequence[tuple[str, str]]) -> str:
    """Show an answer: its text, and how much of the prompt was cached.

    Args:
        text: of the answer.
        num_cached, num_prompt: tokens of the prompt, and those that were not computed.
        rows: names and values that are shown below.
    """
    shown = f"… {text[-MAX_CHARACTERS:]}" if len(text) > MAX_CHARACTERS else text
    picture = bar([(num_cached, "#4a90d9", f"{num_cached} tokens cached")], num_prompt)
    body = f'<pre style="white-space:pre-wrap">{escape(shown)}</pre>'
    return table(f"{num_cached} of {num_prompt} prompt tokens cached", rows, picture + body)


def memory(kinds: Sequence[tuple[str, int, str]], num_free: int, rows: Sequence[tuple[str, str]], tree: str) -> str:
    """Show a cache: what its memory holds, its figures, and its tree.

    Args:
        kinds: (name, bytes, colour) of what it holds.
        num_free: bytes that are free.
        rows: names and values.
        tree: drawn as text.
    """
    total = num_free + sum(num_bytes for _, num_bytes, _ in kinds)
    picture = bar([(size, colour, f"{name}: {format_bytes(size)}") for name, size, colour in kinds], total)
    drawn = f"<details><summary>tree</summary><pre>{escape(tree)}</pre></details>"
    return table(f"prefix cache, {format_bytes(total)}", rows, picture) + drawn
