"""The prefix tree as a page of one file: `tree.html`, a template, with the snapshot in it."""

from __future__ import annotations

import json
from importlib.resources import files

from hybrid.observe.snapshot import Snapshot

PLACE = "/*SNAPSHOT*/null"
"""What the template has where the snapshot goes."""


def make_page(snapshot: Snapshot) -> str:
    """The page. It loads nothing: what it shows and how is all in it."""
    template = files("hybrid.observe").joinpath("tree.html").read_text(encoding="utf-8")
    data = json.dumps(snapshot.as_json(), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    # Text of prompts may hold anything, "</script>" too: inside a script no "<" may begin an element.
    return template.replace(PLACE, data.replace("<", "\\u003c"))
