"""The HTML that a notebook shows: pages whose tags are closed, in which a text is a text."""

from html.parser import HTMLParser
from typing import Any

from hybrid import CacheConfig, CacheMemory, Engine, HybridCache, Key
from support.engines import answer, engine_on, greedy, ids


class Page(HTMLParser):
    """The tags and texts of a piece of HTML; every tag must be closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def shown(thing: Any) -> Page:
    """Return what a notebook shows of a thing."""
    return Page(thing._repr_html_())


def test_an_output_shows_its_answer_and_its_hit(tiny: Engine) -> None:
    engine = engine_on(tiny)
    answer(engine, ids(60), greedy(4))
    output = answer(engine, ids(60), greedy(9), namespace="")
    page = shown(output)
    assert "48 of 60 prompt tokens cached" in page.text
    assert output.text in page.text
    assert str(output.explain) in page.text
    assert "9 tokens, length" in page.text


def test_a_cache_shows_what_it_holds(tiny: Engine) -> None:
    engine = engine_on(tiny)
    answer(engine, ids(60), greedy(4), namespace="<script>alert(1)</script>")
    page = shown(engine.cache)
    stats = engine.cache.stats()
    assert f"{stats.pages_cached} cached" in page.text
    assert "script" not in page.tags
    assert "<script>alert(1)" in page.text
    engine.close()
    shown(engine.cache)


def test_a_cache_of_indices_shows_itself_too() -> None:
    cache = HybridCache(CacheMemory.of_indices(8, 4), CacheConfig(page_size=16, chunk_size=16))
    lease = cache.open(Key.of(ids(20), ""), 19, 20)
    assert lease is not None
    assert "2 in use" in shown(cache).text
