"""The tree as a page: one file that loads nothing, and works in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hybrid import Key
from support.pictures import cache_with, decode, serve, snapshot_of, tiered_cache

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

ACTIONS = """<script>
const found = {nodes: document.querySelectorAll(".node rect").length};
document.querySelector(".node rect").dispatchEvent(new MouseEvent("click", {bubbles: true}));
found.title = document.getElementById("title").textContent;
found.facts = document.getElementById("facts").textContent;
found.text = document.getElementById("text").textContent;
const colours = () => [...document.querySelectorAll("rect.bar")].map(bar => bar.getAttribute("fill")).join();
const before = colours(), select = document.getElementById("colour");
select.value = "hits"; select.dispatchEvent(new Event("change"));
found.recoloured = colours() !== before;
document.getElementById("fold").click();
found.folded = document.querySelectorAll(".node rect").length;
document.getElementById("open").click();
found.opened = document.querySelectorAll(".node rect").length;
const where = () => document.querySelector("#map svg g").getAttribute("transform"), place = where();
document.getElementById("map").dispatchEvent(new WheelEvent("wheel", {deltaY: -200, cancelable: true}));
found.zoomed = where() !== place;
found.lives = document.querySelectorAll("#lives g").length;
document.body.replaceChildren(JSON.stringify(found));
</script>"""

TIERS = """<script>
const chosen = document.getElementById("colour");
chosen.value = "tier"; chosen.dispatchEvent(new Event("change"));
const bars = [...document.querySelectorAll(".node")].filter(node => node.querySelector("rect.bar"));
const fill = node => node.querySelector("rect").getAttribute("fill");
const colour = has => [...new Set(bars.filter(node => has(nodes[+node.dataset.place])).map(fill))];
bars[0].dispatchEvent(new MouseEvent("click", {bubbles: true}));
const found = {
  here: colour(node => node.has_checkpoint), elsewhere: colour(node => !node.has_checkpoint),
  scale: document.getElementById("scale").textContent, chips: document.querySelectorAll("#scale .chip").length,
  facts: document.getElementById("facts").textContent, totals: document.getElementById("totals").textContent,
};
document.body.replaceChildren(JSON.stringify(found));
</script>"""


def shown_by_a_browser(page: str, path: Path) -> dict[str, Any]:
    """What a page with a script at its end leaves as its body: a JSON object."""
    assert BROWSER is not None
    path.write_text(page, encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    body = re.search(r"<body>\s*(\{.*\})\s*</body>", shown, re.DOTALL)
    assert body is not None, shown[-500:]
    found: dict[str, Any] = json.loads(body[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    return found


def test_a_page_loads_nothing_and_holds_the_snapshot(tmp_path: Path) -> None:
    cache = cache_with("abcdef", "abcdxx")
    path = tmp_path / "tree.html"
    page = cache.draw(path, decode=decode)
    assert path.read_text(encoding="utf-8") == page
    assert not re.search(r"""(src|href)\s*=|url\(|@import|fetch\(|import\(""", page)
    data = re.search(r"^const snapshot = (.*);$", page, re.MULTILINE)
    assert data is not None
    found = json.loads(data[1])
    assert [(node["start"], node["end"]) for node in found["nodes"]] == [(0, 4), (4, 6), (4, 6)]
    assert {node["text"] for node in found["nodes"]} == {"abcd", "ef", "xx"}


def test_text_of_a_prompt_is_never_markup() -> None:
    cache = cache_with("</script><script>alert(1)</script>")
    page = cache.draw(Path("/dev/null"), decode=decode)
    assert page.count("<script>") == page.count("</script>") == 1


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_shows_folds_colours_and_zooms(tmp_path: Path) -> None:
    cache = cache_with("abcdefgh", "abcdxx", "abcdxxyy", "abcdef<b>bold")
    for text in ("abcdef", "mnop"):
        serve(cache, text)
    evicted = Key.of([*map(ord, "mnop")], "")
    assert cache.open(evicted, 3, 4) is not None
    path = tmp_path / "tree.html"
    page = cache.draw(path, decode=decode)
    found = shown_by_a_browser(page.replace("</html>", ACTIONS + "</html>"), path)
    assert found["nodes"] == len(snapshot_of(cache).nodes) == found["opened"]
    assert found["folded"] < found["nodes"]
    assert found["title"].startswith("Node 0..")
    assert "pages" in found["facts"]
    assert found["recoloured"]
    assert found["zoomed"]


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_colours_checkpoints_by_tier(tmp_path: Path) -> None:
    path = tmp_path / "tree.html"
    page = tiered_cache().draw(path, decode=decode)
    found = shown_by_a_browser(page.replace("</html>", TIERS + "</html>"), path)
    assert len(found["here"]) == len(found["elsewhere"]) == 1
    assert found["here"] != found["elsewhere"]
    assert found["scale"] == "device host memory nowhere"
    assert found["chips"] == 3
    assert "also inhost memory" in found["facts"]
    assert "host memory: 3 pages and 3 checkpoints" in found["totals"]
