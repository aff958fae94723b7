"""Lines of vLLM's log and metrics of its Prometheus registry that show what the mirror does."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

from hybrid.vllm.stats import MirrorStats

SECONDS = 1.0
"""Between two updates of the metrics while requests run."""

COUNTERS = {
    "lookups": "Requests that were looked up",
    "prompt_tokens": "Tokens of prompts that were given room",
    "hit_tokens": "Tokens of these that were found",
    "lru_switches": "How often LRU was ahead and has taken over, and the policy has come back",
    "evicted_pages": "Blocks of attention that were evicted",
    "set_apart": "Requests of which nothing more was cached, for want of free blocks",
    "ended_pins": "Pins that ended before their time, for want of free blocks",
    "bad_options": "Requests with options that are not known or have no such value",
}

COUNTERS_BY_KIND = {"evicted": "States that were evicted", "refused": "States that were not kept"}

GAUGES = {
    "lru_lead_tokens": "Tokens of prompts that LRU would have found, with the same states, less those that were",
    "lru_is_on": "1 while LRU has taken over",
    "states": "States that are cached",
    "pages": "Blocks of attention that are cached",
    "pins": "Pins that hold",
    "dismissed": "1 where the policy was dismissed for LRU",
    "failed": "1 where an error has put vLLM's own order back",
}


@cache
def _metrics() -> dict[str, Any]:
    """The metrics of this process. Their names do not have "vllm" in them: vLLM removes those that do."""
    from prometheus_client import Counter, Gauge

    labels = ["model_name", "engine"]
    made: dict[str, Any] = {}
    for name, text in COUNTERS.items():
        made[name] = Counter(f"hybrid_{name}", text, labels)
    for name, text in COUNTERS_BY_KIND.items():
        made[name] = Counter(f"hybrid_{name}_states", text, [*labels, "kind"])
    for name, text in GAUGES.items():
        made[name] = Gauge(f"hybrid_{name}", text, labels, multiprocess_mode="mostrecent")
    return made


class StatsReporter:
    """Shows a mirror's statistics.

    Args:
        stats: takes a snapshot.
        log: writes a line.
        model, engine: labels of the metrics, as vLLM has them.
        interval: seconds between two lines.
    """

    def __init__(
        self, stats: Callable[[], MirrorStats], log: Callable[..., None], model: str, engine: int, interval: float
    ) -> None:
        self._stats, self._log = stats, log
        self._labels = model, str(engine)
        self._interval = interval
        self._last_update, self._last_line = 0.0, time.monotonic()
        self._shown: dict[tuple[str, ...], int] = {}
        self._lookups_in_line = 0

    def tick(self, is_idle: bool) -> None:
        """Update the metrics and write a line, if it is time to.

        Args:
            is_idle: no request runs: what was done is shown now.
        """
        now = time.monotonic()
        if not is_idle and now - self._last_update < SECONDS:
            return
        self._last_update = now
        stats = self._stats()
        self._update(stats)
        if now - self._last_line >= self._interval and stats.lookups > self._lookups_in_line:
            self._last_line, self._lookups_in_line = now, stats.lookups
            self._log("hybrid: %s", stats.line())

    def _update(self, stats: MirrorStats) -> None:
        metrics = _metrics()
        for name in COUNTERS:
            self._count(metrics[name], getattr(stats, name), name)
        for name in COUNTERS_BY_KIND:
            for kind, number in getattr(stats, name).items():
                self._count(metrics[name], number, name, kind)
        lead = stats.lru_hit_tokens - stats.hit_tokens if stats.lru_hit_tokens is not None else 0
        values = {
            "lru_lead_tokens": lead,
            "lru_is_on": int(stats.lru_is_on),
            "dismissed": int(stats.policy_failure is not None),
            "failed": int(stats.failure is not None),
        }
        for name in GAUGES:
            metrics[name].labels(*self._labels).set(values.get(name, getattr(stats, name, 0)))

    def _count(self, metric: Any, number: int, name: str, *kind: str) -> None:
        before = self._shown.get((name, *kind), 0)
        metric.labels(*self._labels, *kind).inc(number - before)
        self._shown[name, *kind] = number
