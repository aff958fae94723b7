"""Pictures of the prefix tree: as text, and as a page for a browser."""

from __future__ import annotations

from pathlib import Path

from hybrid.checks import shown
from hybrid.errors import ArgumentError
from hybrid.observe.page import make_page
from hybrid.observe.snapshot import Decode, Snapshot
from hybrid.observe.text import draw_text

SUFFIXES = (".html", ".htm", "")
"""How the name of a page may end."""


def draw(snapshot: Snapshot, path: str | Path | None = None, decode: Decode | None = None, *, width: int = 100) -> str:
    """Draw a tree as text, or as a page that any browser opens: one file, without a server or a network.

    Args:
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
        snapshot = snapshot.with_text(decode)
    if path is None:
        return draw_text(snapshot, width=width)
    page = make_page(snapshot)
    Path(path).write_text(page, encoding="utf-8")
    return page
