"""The settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid import checks
from hybrid.errors import ArgumentError
from hybrid.units import parse_memory


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine schedules requests and launches steps.

    Args:
        max_num_seqs: number of requests that run at once, at most.
        max_num_batched_tokens: number of tokens computed in one step, at most.
        max_waiting: number of requests that wait, at most; another one is refused with `QueueFullError`. None: no
            limit.
        max_model_len: number of tokens of a prompt and its answer, at most; None: what the model takes.
        adapter_memory: bytes of all LoRA adapters together, at most, as "256MiB" or a number; they come on top of the
            cache's memory. None: no limit.
        enforce_eager: launch steps operation by operation; otherwise they are captured where that is possible: as CUDA
            graphs on a GPU, decode steps also as programs of compiled operations on a CPU.
        overlap: launch the next step before the results of this one are waited for. None: on a GPU.
        audit: run `HybridCache.audit` after every step. Slow; for tests.

    Raises:
        ArgumentError: a value is out of range.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_waiting: int | None = None
    max_model_len: int | None = None
    adapter_memory: int | str | None = None
    enforce_eager: bool = False
    overlap: bool | None = None
    audit: bool = False

    def __post_init__(self) -> None:
        for name, low in (("max_num_seqs", 1), ("max_num_batched_tokens", 1)):
            self._set(name, checks.integer(f"EngineConfig: {name}", getattr(self, name), low))
        if self.max_waiting is not None:
            value = checks.integer("EngineConfig: max_waiting", self.max_waiting, 1, remedy=", or None")
            self._set("max_waiting", value)
        for name in ("enforce_eager", "audit"):
            self._set(name, checks.boolean(f"EngineConfig: {name}", getattr(self, name)))
        if self.overlap is not None:
            self._set("overlap", checks.boolean("EngineConfig: overlap", self.overlap))
        length = self.max_model_len
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 2):
            raise ArgumentError(
                f"EngineConfig: max_model_len must be an integer of at least 2, or None; got {length!r}"
            )
        if self.adapter_memory is not None and self.adapter_bytes is None:
            raise ArgumentError(
                f"EngineConfig: adapter_memory must be a positive number of bytes or a text as '256MiB', or None; got "
                f"{self.adapter_memory!r}"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def adapter_bytes(self) -> int | None:
        """`adapter_memory` as a number of bytes; None: no limit."""
        memory = parse_memory(self.adapter_memory) if isinstance(self.adapter_memory, str) else self.adapter_memory
        return memory if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0 else None

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
