"""The figures of a running server, from its page of metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.error import URLError
from urllib.request import Request, urlopen

from hybrid.doctor.sizes import Sizes
from hybrid.errors import ArgumentError

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+([-+0-9.eE]+)", re.MULTILINE)
"""A sample of a page of metrics: its name and its value."""

COUNTERS = {
    "vllm": (
        ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
        ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
    ),
    "sglang": (("sglang:prompt_tokens_total",), ("sglang:cached_tokens_total",)),
}
"""By engine: the names of the tokens of prompts, and of those that were cached. `hybrid serve` has vLLM's."""

OWN = "hybrid:cache_bytes", "hybrid:token_bytes", "hybrid:checkpoint_bytes"
"""Of `hybrid serve` alone: its memory by what it holds, and the bytes of a token and of a checkpoint."""

BLOCKS = "block_size", "num_gpu_blocks"
"""Labels of vLLM's configuration of its cache."""

TIMEOUT = 10.0
"""Seconds that a server has to answer."""


@dataclass(frozen=True)
class Figures:
    """The figures of a server since it started.

    Attributes:
        engine: which one it is.
        num_tokens, hit_tokens: tokens of prompts, and those that were cached.
        block_size, num_blocks: tokens of a block, and the number of blocks, as vLLM shows them; None: it does not.
        memory, sizes: bytes of the cache, and the model's, as `hybrid serve` shows them; None: another server.
    """

    engine: str
    num_tokens: int
    hit_tokens: int
    block_size: int | None = None
    num_blocks: int | None = None
    memory: int | None = None
    sizes: Sizes | None = None

    @property
    def hit_rate(self) -> float:
        """Hits in percent of the tokens of prompts."""
        return 100 * self.hit_tokens / max(1, self.num_tokens)

    def __str__(self) -> str:
        return f"{self.engine}: {self.hit_tokens:,} of {self.num_tokens:,} tokens of prompts hit, {self.hit_rate:.1f} %"


def watch(url: str, api_key: str | None = None) -> Figures:
    """Read a server's figures.

    Args:
        url: of the server, or of its page of metrics.
        api_key: of a server that needs one.

    Raises:
        ArgumentError: it does not answer, or it is the page of no engine that is known.
    """
    if not url.startswith(("http://", "https://")):
        raise ArgumentError(f"{url}: not the address of a server; give it as http://localhost:8000")
    page = url if url.rstrip("/").endswith("/metrics") else url.rstrip("/") + "/metrics"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(page, headers=headers), timeout=TIMEOUT) as answer:
            text = answer.read().decode(errors="replace")
    except (URLError, OSError, ValueError) as error:
        raise ArgumentError(
            f"{page}: no answer ({error}); is the server up, and does it show metrics? SGLang needs --enable-metrics, "
            "a server with keys --api-key"
        ) from error
    return figures_of(text, page)


def figures_of(text: str, page: str) -> Figures:
    """Find the figures in a page of metrics. Samples of several engines or workers are added up.

    Raises:
        ArgumentError: it is the page of no engine that is known.
    """
    totals: dict[str, float] = {}
    for name, value in LINE.findall(text):
        totals[name] = totals.get(name, 0.0) + float(value)
    for engine, names in COUNTERS.items():
        found = [next((totals[name] for name in each if name in totals), None) for each in names]
        if found[0] is not None:
            blocks = [
                re.search(rf'^vllm:cache_config_info.*[{{,]{name}="(\d+)"', text, re.MULTILINE) for name in BLOCKS
            ]
            size, number = (int(match[1]) if match else None for match in blocks)
            counts = int(found[0]), int(found[1] or 0)
            if all(name in totals for name in OWN):
                memory, token_bytes, state_bytes = (int(totals[name]) for name in OWN)
                return Figures("hybrid", *counts, memory=memory, sizes=Sizes(token_bytes, state_bytes))
            return Figures(engine, *counts, size, number)
    known = ", ".join(names[0][0] for names in COUNTERS.values())
    raise ArgumentError(f"{page}: none of the counters that are known is there: {known}")
