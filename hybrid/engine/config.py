"""The settings of an engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hybrid import checks
from hybrid.checks import BOOLEANS, integers, numbers, optional, where
from hybrid.errors import ArgumentError
from hybrid.units import BYTES


@checks.known_names
@dataclass(frozen=True, kw_only=True)
class TenantConfig:
    """The weight and the limits of a sender of requests (`SamplingParams(tenant=...)`, or their namespace).

    Args:
        weight: how many tokens it is served in comparison with others that have requests waiting, whose weight is 1.
        max_running: number of its requests that run at once, at most; others of it wait. None: no limit.
        max_requests: number of its requests that wait and run, at most; another one is refused with `QueueFullError`.
            None: no limit.
        memory_share: part of the cache's memory: while what its requests left there takes more, it is evicted from
            before others. What several tenants use counts for the one whose request stored it last. None: no limit.

    Raises:
        ArgumentError: a value is out of range.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_requests: int | None = None
    memory_share: float | None = None

    def __post_init__(self) -> None:
        positive = optional(integers(1))
        checks.settings(
            self,
            weight=numbers("a positive number", lambda weight: 0 < weight < math.inf),
            max_running=positive,
            max_requests=positive,
            memory_share=optional(numbers("a part of the memory, as 0.25", lambda share: 0 < share <= 1)),
        )


@checks.known_names
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings for how an engine schedules requests and launches steps.

    Args:
        max_num_seqs: number of requests that run at once, at most.
        max_num_batched_tokens: number of tokens computed in one step, at most.
        max_waiting: number of requests that wait while as many run as can (`max_num_seqs`), at most; another one is
            refused with `QueueFullError`, by an `AsyncEngine` if it is to refuse (`when_full`). None: no limit.
        max_model_len: number of tokens of a prompt and its answer, at most; None: what the model takes.
        adapter_memory: bytes of all LoRA adapters together, at most, as "256MiB" or a number; they come on top of the
            cache's memory. None: no limit.
        prompt_templates: whether prompts may bring a chat template, which is a program that the engine runs: only where
            you write all prompts yourself.
        encoding_threads: number of threads that encode the prompts of an `AsyncEngine` (templates, tokens, grammars,
            images) beside the thread that computes; prompts of one tenant have all but one of them.
        encoding_memory: bytes of prompts that an `AsyncEngine` holds until they are encoded, at most, as "256MiB" or a
            number; another one is refused with `EncodingLimitError`. None: no limit.
        encoding_seconds: seconds that it may take until a prompt is encoded; after that it ends with
            `EncodingLimitError`. None: no limit.
        enforce_eager: launch steps operation by operation; otherwise they are captured where that is possible: as CUDA
            graphs on a GPU, decode steps also as programs of compiled operations on a CPU.
        overlap: launch the next step before the results of this one are waited for. None: on a GPU, and on a CPU where
            torch has several threads and the step was captured: the others compute while this one schedules the next.
        tenants: weights and limits of senders, by their names; others have a weight of 1 and no limits.
        audit: run `HybridCache.audit` after every step. Slow; for tests.

    Raises:
        ArgumentError: a value is out of range.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_waiting: int | None = None
    max_model_len: int | None = None
    adapter_memory: int | str | None = None
    prompt_templates: bool = False
    encoding_threads: int = 4
    encoding_memory: int | str | None = "1GiB"
    encoding_seconds: float | None = 60.0
    enforce_eager: bool = False
    overlap: bool | None = None
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict, hash=False)
    audit: bool = False

    def __post_init__(self) -> None:
        checks.settings(
            self,
            max_num_seqs=integers(1),
            max_num_batched_tokens=integers(1),
            max_waiting=optional(integers(1)),
            max_model_len=optional(integers(2)),
            adapter_memory=optional(BYTES),
            prompt_templates=BOOLEANS,
            encoding_threads=integers(1),
            encoding_memory=optional(BYTES),
            encoding_seconds=optional(numbers("a positive number", lambda seconds: seconds > 0)),
            enforce_eager=BOOLEANS,
            overlap=optional(BOOLEANS),
            tenants=where("a dict of hybrid.TenantConfig by name", _are_tenants),
            audit=BOOLEANS,
        )

    @property
    def adapter_bytes(self) -> int | None:
        """`adapter_memory` as a number of bytes, or None if there is no limit."""
        return optional(BYTES).read(self.adapter_memory)

    @property
    def encoding_bytes(self) -> int | None:
        """`encoding_memory` as a number of bytes, or None if there is no limit."""
        return optional(BYTES).read(self.encoding_memory)

    def weight_of(self, tenant: str) -> float:
        """The weight of a tenant."""
        own = self.tenants.get(tenant)
        return own.weight if own is not None else 1.0

    @property
    def memory_shares(self) -> dict[str, float]:
        """Shares of the cache's memory, of the tenants that have one."""
        return {name: own.memory_share for name, own in self.tenants.items() if own.memory_share is not None}

    def require_chunk(self, chunk_size: int) -> None:
        """Check that a step has room for one chunk and a token of every request.

        Raises:
            ArgumentError: it has not.
        """
        needed = chunk_size + self.max_num_seqs
        if self.max_num_batched_tokens < needed:
            raise ArgumentError(
                f"EngineConfig: max_num_batched_tokens must hold one chunk and a token of each request: at least "
                f"{needed} with max_num_seqs={self.max_num_seqs}, got {self.max_num_batched_tokens}"
            )


def _are_tenants(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(own, TenantConfig) for name, own in value.items()
    )
