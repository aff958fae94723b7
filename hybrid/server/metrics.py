"""Metrics in Prometheus' form, under vLLM's names where vLLM has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from hybrid.engine.stats import Histogram
from hybrid.server.call import Call
from hybrid.server.service import Server
from hybrid.server.tenants import Caller

OPEN_METRICS = "application/openmetrics-text"
"""The other form that there is."""

REASONS = ("stop", "length", "abort", "error")


async def metrics(server: Server, call: Call) -> None:
    """Answer `GET /metrics`. A tenant is shown its own counts alone."""
    registry = CollectorRegistry()
    registry.register(Collector(server, call.tenant))
    wanted = OPEN_METRICS if OPEN_METRICS.encode() in call.headers.get(b"accept", b"") else ""
    encode, kind = choose_encoder(wanted)  # which fails on versions that are none
    await call.respond(encode(registry), headers={"content-type": kind})


class Collector:
    """The metrics of a server at one moment.

    Args:
        server: that is asked.
        tenant: that asks.
    """

    def __init__(self, server: Server, tenant: Caller) -> None:
        self._server = server
        self._tenant = tenant
        self._names = ["model_name", "engine"]
        self._labels = [server.name, "0"]

    def collect(self) -> Iterator[Any]:
        """The metrics, as prometheus_client asks for them."""
        if self._tenant.sees_all:
            yield from self._of_the_engine()
        yield from self._of_tenants()

    def _gauge(self, name: str, text: str, value: float) -> Any:
        found = GaugeMetricFamily(name, text, labels=self._names)
        found.add_metric(self._labels, value)
        return found

    def _counter(self, name: str, text: str, value: float) -> Any:
        found = CounterMetricFamily(name, text, labels=self._names)
        found.add_metric(self._labels, value)
        return found

    def _histogram(self, name: str, text: str, values: Histogram) -> Any:
        found = HistogramMetricFamily(name, text, labels=self._names)
        counts, buckets = 0, []
        for bound, count in zip((*map(str, values.bounds), "+Inf"), values.counts, strict=True):
            counts += count
            buckets.append((bound, counts))
        found.add_metric(self._labels, buckets, values.total)
        return found

    def _of_the_engine(self) -> Iterator[Any]:
        engine, served = self._server.engine.stats(), self._server.engine.engine.cache
        cache = served.stats()
        used = engine.bytes_used / engine.bytes_total if engine.bytes_total else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests that have memory.", engine.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for memory.", engine.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Memory in use, of all; 1 is full.", used)
        yield self._counter("vllm:prefix_cache_queries", "Tokens of prompts, looked up.", cache.prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "Of these, tokens that were not computed.", cache.usable_tokens)
        yield self._counter("vllm:num_preemptions", "Requests that gave their memory back.", engine.retractions)
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts with a first token.", engine.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens of answers.", engine.completion_tokens)
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests that ended.", labels=[*self._names, "finished_reason"]
        )
        for reason, count in engine.finished.items():
            finished.add_metric([*self._labels, reason], count)
        yield finished
        text = "Seconds from a request to its first token."
        yield self._histogram("vllm:time_to_first_token_seconds", text, engine.time_to_first_token)
        text = "Seconds between two tokens of an answer."
        yield self._histogram("vllm:inter_token_latency_seconds", text, engine.time_between_tokens)
        yield self._histogram("vllm:time_per_output_token_seconds", text, engine.time_between_tokens)
        held = GaugeMetricFamily("hybrid:cache_bytes", "Memory by what it holds.", labels=[*self._names, "kind"])
        for name, size, _ in cache.kinds:
            held.add_metric([*self._labels, name], size)
        held.add_metric([*self._labels, "free"], engine.bytes_free)
        yield held
        token_bytes = cache.page_bytes / served.config.page_size
        yield self._gauge("hybrid:token_bytes", "Bytes of a token's part of a page.", token_bytes)
        yield self._gauge("hybrid:checkpoint_bytes", "Bytes of a checkpoint.", cache.checkpoint_bytes)
        text = "Tokens of prompts whose pages were cached."
        yield self._counter("hybrid:page_hit_tokens", text, cache.page_tokens)
        yield self._gauge("hybrid:checkpoints", "Checkpoints of recurrent state that are cached.", cache.checkpoints)
        yield self._counter("hybrid:evicted_checkpoints", "Checkpoints that were evicted.", cache.evicted_checkpoints)
        yield self._counter("hybrid:evicted_pages", "Pages that were evicted.", cache.evicted_pages)
        text = "1 while LRU, which would have found more lately, is in place of the policy of eviction."
        yield self._gauge("hybrid:lru_is_on", text, int(cache.lru_is_on))
        text = "How often LRU has taken over from the policy of eviction, and has given way again."
        yield self._counter("hybrid:lru_switches", text, cache.lru_switches)
        text = "Tokens of prompts that LRU would have found more than were found on the device."
        yield self._gauge("hybrid:lru_lead_tokens", text, cache.lru_lead)
        yield self._gauge("hybrid:pins", "Prefixes that are pinned.", cache.pins)
        yield self._counter(
            "hybrid:restored_tokens", "Tokens that came from host memory or disk.", cache.restored_tokens
        )

    def _of_tenants(self) -> Iterator[Any]:
        counts = self._server.records.counts
        names = sorted({name for name, _ in counts if self._tenant.sees_all or name == self._tenant.name})
        labels = [*self._names, "tenant"]
        requests = CounterMetricFamily("hybrid:requests", "Requests that ended.", labels=[*labels, "finished_reason"])
        tokens = CounterMetricFamily("hybrid:tokens", "Tokens of requests that ended.", labels=[*labels, "kind"])
        for name in names:
            for reason in REASONS:
                requests.add_metric([*self._labels, name, reason], counts[name, f"requests_{reason}"])
            for kind in ("prompt", "cached", "completion"):
                tokens.add_metric([*self._labels, name, kind], counts[name, f"{kind}_tokens"])
        yield requests
        yield tokens
        text = "Part of the cache's memory that tenants with a share of it take."
        held = GaugeMetricFamily("hybrid:memory_held", text, labels=labels)
        for name, (part, _) in self._server.engine.engine.cache.stats().shares.items():
            if self._tenant.sees_all or name == self._tenant.name:
                held.add_metric([*self._labels, name], part)
        yield held
