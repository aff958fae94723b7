"""The tree as text: chains folded, branches named where they part, no line too wide. And as a page: one file that loads
nothing, and works in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hybrid import CacheConfig, CacheMemory, Facts, HybridCache, Key, Policy
from hybrid.observe.draw import draw_text
from support.pictures import cache_with, decode, serve, snapshot_of, tiered_cache


def test_an_empty_cache() -> None:
    why = "what is shorter than a page of 2 tokens is not kept"
    assert cache_with().draw().startswith(f"(empty: {why})\npages: 0 cached")


def test_a_chain_is_one_line_and_branches_are_named_where_they_part() -> None:
    cache = cache_with("abcdef", "abcdefgh", "abcdefghaxyy", "abcdefghazzz")
    lines = cache.draw(decode=decode).splitlines()
    assert lines[0] == "namespace ''"
    assert lines[1].startswith("└─ 0..8  4 pages  2●")
    assert "“abcdefgh" not in lines[1]  # the edge's own beginning: the first node's text
    assert "“abcdef”" in lines[1]
    assert [line.split("“")[1] for line in lines[2:4]] == ["xyy”", "zzz”"]
    assert lines[4].startswith("pages: 8 cached")


def test_every_node_can_have_a_line() -> None:
    cache = cache_with("abcdef", "abcdefgh")
    snapshot = snapshot_of(cache)
    assert len(draw_text(snapshot).splitlines()) == 3
    assert len(draw_text(snapshot, fold=False).splitlines()) == 4


class LongestKept(Policy):
    """Evict the checkpoint of the shortest prompt first."""

    def rank(self, facts: Facts) -> float:
        return facts.num_tokens


def test_a_node_has_the_value_that_the_policy_gives_its_checkpoint() -> None:
    config = CacheConfig(page_size=2, chunk_size=2, eviction=LongestKept())
    cache = HybridCache(CacheMemory.of_indices(200, 50), config)
    for text in ("abcd", "abefgh"):
        serve(cache, text)
    found = {(node["end"], node["has_checkpoint"]): node["value"] for node in snapshot_of(cache)["nodes"]}
    assert found == {(2, False): None, (4, True): 4.0, (6, True): 6.0}


def test_locks_are_shown_while_a_request_runs() -> None:
    cache = cache_with("abcd")
    lease = cache.open(Key.of([*map(ord, "abcdx")], ""), 4, 5)
    assert lease is not None
    assert "⚿ 2,1" in cache.draw()
    cache.close(lease)
    assert "⚿" not in cache.draw()


def test_namespaces_stand_apart() -> None:
    cache = cache_with("abcd")
    serve(cache, "abcd", "other")
    drawn = cache.draw()
    assert drawn.count("└─ 0..4") == 2
    assert "namespace 'other'" in drawn


@pytest.mark.parametrize("width", [60, 100, 140])
def test_no_line_is_wider_than_asked(width: int) -> None:
    cache = cache_with("ab" * 40, "ab" * 20 + "c" * 40, "ab" * 20 + "cd" * 10 + "e" * 30)
    lines = cache.draw(decode=lambda ids: "long [text] \n" * 20, width=width).splitlines()
    assert max(len(line) for line in lines[:-1]) <= width
    assert len(lines) == 2 + 4


def test_what_is_in_another_tier_is_named() -> None:
    cache = tiered_cache()
    drawn = cache.draw()
    assert "1 in host memory" in drawn
    assert drawn.splitlines()[-1].startswith("host memory: ")
    snapshot = snapshot_of(cache)
    assert [tier["name"] for tier in snapshot["tiers"]] == ["device", "host memory"]
    assert snapshot["tiers"][1]["num_checkpoints"] == 3
    assert {(*node["tiers"],) for node in snapshot["nodes"]} == {("device",), ("host memory",)}
    assert all(node["has_checkpoint"] == ("device" in node["tiers"]) for node in snapshot["nodes"])
    assert [tier["name"] for tier in snapshot_of(cache_with("ab"))["tiers"]] == ["device"]


def test_drawing_changes_nothing() -> None:
    cache = cache_with("abcdef", "abcdxx")
    before = snapshot_of(cache)
    cache.draw()
    assert snapshot_of(cache) == before
    cache.audit()


def test_what_was_evicted_is_remembered_with_its_life() -> None:
    cache = cache_with("abcdef", "abcdef")
    cache.clear()
    snapshot = snapshot_of(cache)
    assert not snapshot["nodes"]
    (life,) = snapshot["lives"]
    assert (life["start"], life["end"], life["hits"]) == (0, 6, 1)
    assert life["stored_at"] <= life["used_at"] <= life["evicted_at"] == snapshot["now"]


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
    """Return what a page with a script at its end leaves as its body: a JSON object."""
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
