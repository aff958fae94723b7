"""The counts of a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid.cache.explain import Explanation
from hybrid.units import format_bytes


@dataclass(slots=True)
class CacheStats:
    """Counts since the cache was made, and what it holds now.

    Attributes:
        requests, prompt_tokens, usable_tokens, page_tokens: requests recorded, the tokens of their prompts, those that
            did not have to be computed, and those whose pages were cached.
        evicted_pages, evicted_checkpoints: evicted to free memory.
        pages_free, pages_cached, pages_private: the pages by owner; they add up to `pages_total` where they do not
            share their memory with states. Where they do, free memory counts as free for both kinds.
        states_free, checkpoints, states_private: the state slots by owner; they add up to `states_total` where they do
            not share their memory with pages.
        moved_pages: pages (and states) that were moved together so that memory could go from one kind to the other.
        page_bytes, checkpoint_bytes: bytes of a page and of a checkpoint, 0 where the cache does not know them.
        pins: prefixes that are pinned.
        host_bytes_total, host_bytes_used, host_pages, host_checkpoints: what host memory may hold, and holds.
        host_bytes_offered, host_bytes_written: bytes that were evicted, and those of them that were copied to host
            memory.
        disk_bytes_total, disk_bytes_used, disk_pages, disk_checkpoints, disk_bytes_offered, disk_bytes_written: of the
            disk. What is used includes files of other processes and models; what is offered is what host memory
            did not keep; files have headers, which count as written.
        disk_failure: why the disk is not used now; None: it is, or there is none.
        disk_report: what was found in the directory at the start, and what of it was dropped.
        restored_checkpoints, restored_tokens, restored_bytes: what came back from there, and tokens that were not
            computed because of it.
        read_ahead_bytes, read_in_vain_bytes: read from disk for requests that were queued; read, and not used.
        tier_failures: copies and restores that failed; requests computed instead.
        damaged_copies: how many of them were not what had been copied, or held NaN or infinity: these are dropped.
        dropped_hits: prefixes that were dropped because passes that resumed from them gave NaN or infinity; their
            requests were computed without them.
        policy_failure: why the eviction policy was dismissed; None while it is in use.
        lru_is_on: LRU would have found more lately than the policy, and has taken over (docs/eviction.md, "The guard").
        lru_switches: how often it has taken over, and has given way again.
        lru_lead: tokens that LRU would have found more than were found on the device, of all requests; fewer: below 0.
        shares: by tenants that have a share of the memory, the part of it that they hold, and their share.
        resets: how often an exception left the bookkeeping inconsistent, and the cache was emptied
            (`HybridCache.reset`).
    """

    requests: int = 0
    prompt_tokens: int = 0
    usable_tokens: int = 0
    page_tokens: int = 0
    evicted_pages: int = 0
    evicted_checkpoints: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_private: int = 0
    states_total: int = 0
    states_free: int = 0
    checkpoints: int = 0
    states_private: int = 0
    page_bytes: int = 0
    checkpoint_bytes: int = 0
    moved_pages: int = 0
    pins: int = 0
    host_bytes_total: int = 0
    host_bytes_used: int = 0
    host_pages: int = 0
    host_checkpoints: int = 0
    host_bytes_offered: int = 0
    host_bytes_written: int = 0
    disk_bytes_total: int = 0
    disk_bytes_used: int = 0
    disk_pages: int = 0
    disk_checkpoints: int = 0
    disk_bytes_offered: int = 0
    disk_bytes_written: int = 0
    disk_failure: str | None = None
    disk_report: str = ""
    restored_checkpoints: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    read_ahead_bytes: int = 0
    read_in_vain_bytes: int = 0
    tier_failures: int = 0
    damaged_copies: int = 0
    dropped_hits: int = 0
    policy_failure: str | None = None
    lru_is_on: bool = False
    lru_switches: int = 0
    lru_lead: int = 0
    shares: dict[str, tuple[float, float]] = field(default_factory=dict)
    resets: int = 0

    def count(self, explanation: Explanation) -> None:
        """Count a request and its hit."""
        self.requests += 1
        self.prompt_tokens += explanation.asked
        self.usable_tokens += explanation.usable_hit
        self.page_tokens += explanation.page_hit

    @property
    def hit_rate(self) -> float:
        """Part of the prompt tokens that were not computed."""
        usable = self.usable_tokens  # read first: in another thread than the owner's both may grow meanwhile
        return min(1.0, usable / self.prompt_tokens) if self.prompt_tokens else 0.0

    @property
    def kinds(self) -> list[tuple[str, int, str]]:
        """List what the memory holds, as (name, bytes, colour of a picture)."""
        private = self.pages_private * self.page_bytes + self.states_private * self.checkpoint_bytes
        return [
            ("pages cached", self.pages_cached * self.page_bytes, "#4a90d9"),
            ("checkpoints", self.checkpoints * self.checkpoint_bytes, "#e8913a"),
            ("in use by requests", private, "#888888"),
        ]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """List the main figures, as (name, value) for people."""
        rows = [
            ("hit rate", f"{self.hit_rate:.1%} of {self.prompt_tokens} prompt tokens in {self.requests} requests"),
            ("pages", f"{self.pages_cached} cached, {self.pages_private} in use, {self.pages_free} free"),
            ("checkpoints", f"{self.checkpoints}, and {self.states_private} states in use"),
            ("evicted", f"{self.evicted_pages} pages, {self.evicted_checkpoints} checkpoints"),
            ("pins", str(self.pins)),
        ]
        if self.host_bytes_total:
            size, used = format_bytes(self.host_bytes_total), format_bytes(self.host_bytes_used)
            rows.append(
                ("host memory", f"{self.host_pages} pages, {self.host_checkpoints} checkpoints, {used} of {size}")
            )
        if self.disk_bytes_total:
            size, used = format_bytes(self.disk_bytes_total), format_bytes(self.disk_bytes_used)
            held = f"{self.disk_pages} pages, {self.disk_checkpoints} checkpoints, {used} of {size}"
            rows.append(("disk", f"{held}; {self.disk_failure}" if self.disk_failure else held))
        if self.host_bytes_total or self.disk_bytes_total:
            rows.append(("restored", f"{self.restored_tokens} tokens, {format_bytes(self.restored_bytes)}"))
        rows += [
            (f"held by {name}", f"{held:.1%} of the memory; its share is {own:.1%}")
            for name, (held, own) in self.shares.items()
        ]
        if self.lru_switches:
            now = "it is" if self.lru_is_on else "it is not"
            rows.append(("LRU", f"it was in place of the policy, or back, {self.lru_switches} times; now {now}"))
        return rows + ([("policy", self.policy_failure)] if self.policy_failure else [])
