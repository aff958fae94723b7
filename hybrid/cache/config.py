"""Settings of the prefix cache."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from hybrid import checks
from hybrid.errors import ArgumentError, MemoryBudgetError
from hybrid.memory.memory import CacheMemory
from hybrid.tree.policies import Eviction, policy_of
from hybrid.units import byte_count, format_bytes, parse_memory

PLACEMENTS = ("branch", "turn_end", "prompt_end", "anchor", "geometric")
"""Places where checkpoints can be put."""

DEFAULT_PLACEMENT = PLACEMENTS
"""Places where checkpoints are put by default."""

GPU_MEMORY = 0.9
"""The part of a GPU's free memory that a cache allocates by default; the rest is for the temporaries of a pass."""

CPU_MEMORY = 4 * 2**30
"""Bytes that a cache allocates on a CPU by default."""


@checks.known_names
@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Settings of the prefix cache.

    Args:
        enabled: keep the prefixes of finished and running requests. If not, every request computes its whole prompt.
        page_size: tokens per page of KV.
        chunk_size: tokens per chunk of the linear layers. Checkpoints are at multiples of both sizes.
        memory: memory for pages and states together: a number of bytes, a string such as "512MiB" or "2GB", or a
            fraction of the memory that is free on the device (0.5). None: 0.9 of what the weights leave free on a GPU,
            4 GiB on a CPU.
        host: memory of the host for copies of what is evicted, in addition: a number of bytes, or a string such as
            "16GiB". It is used as it is needed. None: there is none.
        disk: bytes on disk for copies of what is evicted and not kept in host memory, as for `host`. Later processes
            find them. None: there are none.
        directory: where they are. It is made if it is not there, only its owner may use it, and processes may share it.
        directory_readable: also write the token ids of prefixes there, so that `hybrid cache show` can list them.
            If not, nothing of a prompt is in the directory but digests, keys and values.
        state_share: None: pages and states share `memory`, and the eviction policy decides how. A number: the fixed
            part of it that holds states.
        eviction: what is evicted first: "lhd" (learned hit density), "lru", "lfu", "fifo", "mru", "filo", "priority",
            "flop_aware", with options as in "flop_aware:alpha=0.5" or {"name": "flop_aware", "alpha": 0.5}; or an
            instance of your own subclass of `hybrid.Policy`.
        placement: where checkpoints are placed, in addition to the positions that a request names: any of "branch"
            (where a request leaves what is cached), "turn_end", "prompt_end", "anchor" (in between, far apart: what is
            left of a long prompt that is trimmed from its end), "geometric" (in between, while memory is free).
        state_dtype: how checkpoints are stored: "float32" as they are; "bfloat16" or "int8" smaller, which changes
            results slightly, and which deterministic mode does not accept.
        kv_dtype: how an engine keeps keys and values in pages: "auto" as the model computes them; "fp8" (e4m3) or
            "int8" in a byte per element, with a scale per token and head. Attention computes in the model's type either
            way. Answers differ slightly from those of "auto"; hits and cold runs do not differ from each other.
        deterministic: make the output of a hit bitwise that of a cold run, whatever else is in the batch.
            None: on for CPU, off for GPU.
        seed: seed of the eviction policy's random samples.
        priority_cap: how far the priorities of one tenant reach across to others, in steps that each double what a
            checkpoint is worth to "lhd". 0: a request's priority weighs against requests of its own tenant only.
        verify_contents: take a digest of each page and checkpoint when it is committed, so that `audit(contents=True)`
            can find what was changed since. Reads everything that is committed once; off, it costs nothing.

    Raises:
        ArgumentError: a value is out of range.
    """

    enabled: bool = True
    page_size: int = 64
    chunk_size: int = 64
    memory: int | float | str | None = None
    host: int | str | None = None
    disk: int | str | None = None
    directory: str | Path | None = None
    directory_readable: bool = False
    state_share: float | None = None
    eviction: Eviction = "lhd"
    placement: Sequence[str] = DEFAULT_PLACEMENT
    state_dtype: str = "float32"
    kv_dtype: str = "auto"
    deterministic: bool | None = None
    seed: int = 0
    priority_cap: int = 0
    verify_contents: bool = False

    def __post_init__(self) -> None:
        for name in ("enabled", "verify_contents", "directory_readable"):
            self._set(name, checks.boolean(f"CacheConfig: {name}", getattr(self, name)))
        if self.deterministic is not None:
            self._set("deterministic", checks.boolean("CacheConfig: deterministic", self.deterministic))
        for name in ("page_size", "chunk_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 4096 or value & (value - 1):
                raise ArgumentError(
                    f"CacheConfig: {name} must be a power of two from 1 to 4096, got {checks.shown(value)}"
                )
        self._set("seed", checks.integer("CacheConfig: seed", self.seed, 0))
        self._set("priority_cap", checks.integer("CacheConfig: priority_cap", self.priority_cap, 0, 100))
        if self.state_share is not None and not 0 < checks.number("CacheConfig: state_share", self.state_share) < 1:
            raise ArgumentError(
                f"CacheConfig: state_share must be between 0 and 1, got {checks.shown(self.state_share)}"
            )
        self._check_names()
        if self.memory is not None:
            self._amount()
        for name in ("host", "disk"):
            if getattr(self, name) is not None:
                self._set(name, byte_count(f"CacheConfig: {name}", getattr(self, name)))
        self._check_directory()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_names(self) -> None:
        if not isinstance(self.placement, str | Sequence):
            raise ArgumentError(
                f"CacheConfig: placement must be a tuple of {', '.join(PLACEMENTS)}; got {checks.shown(self.placement)}"
            )
        names = self.placement.split(",") if isinstance(self.placement, str) else self.placement
        self._set("placement", tuple(names))
        unknown = [name for name in self.placement if name not in PLACEMENTS]
        if unknown:
            raise ArgumentError(
                f"CacheConfig: unknown placement {checks.shown(unknown[0])}; the placements are: "
                f"{', '.join(PLACEMENTS)}"
            )
        try:
            policy_of(self.eviction)  # refuses an unknown one here, before a model is loaded
        except ArgumentError as error:
            raise ArgumentError(f"CacheConfig: {error}") from None
        if not isinstance(self.state_dtype, str) or self.state_dtype not in checks.STATE_DTYPE_NAMES:
            raise ArgumentError(
                f"CacheConfig: state_dtype must be one of {', '.join(checks.STATE_DTYPE_NAMES)}, got "
                f"{checks.shown(self.state_dtype)}"
            )
        if not isinstance(self.kv_dtype, str) or self.kv_dtype not in checks.KV_DTYPE_NAMES:
            raise ArgumentError(
                f"CacheConfig: kv_dtype must be one of {', '.join(checks.KV_DTYPE_NAMES)}, got "
                f"{checks.shown(self.kv_dtype)}"
            )
        if self.state_dtype != "float32":
            if self.deterministic:
                raise ArgumentError(
                    f"CacheConfig: state_dtype={self.state_dtype!r} changes results; deterministic mode needs 'float32'"
                )
            if self.state_share is not None:
                raise ArgumentError(
                    f"CacheConfig: state_dtype={self.state_dtype!r} needs one budget for all: state_share=None"
                )

    @property
    def grid(self) -> int:
        """Checkpoints are at multiples of this many tokens."""
        return math.lcm(self.page_size, self.chunk_size)

    def memory_bytes(self, free: int, on_gpu: bool = False) -> int:
        """The budget in bytes.

        Args:
            free: bytes that are free on the device.
            on_gpu: whether the device is a GPU: it decides the default.

        Raises:
            ArgumentError: `memory` is not an amount.
            MemoryBudgetError: the budget exceeds `free`.
        """
        amount = (GPU_MEMORY if on_gpu else CPU_MEMORY) if self.memory is None else self._amount()
        if isinstance(amount, float):
            amount = int(amount * free)
        if amount > free:
            asked = "the default" if self.memory is None else f"memory={self.memory!r}"
            raise MemoryBudgetError(
                f"CacheConfig: {asked} is {format_bytes(amount)}, but only {format_bytes(free)} "
                "is free; choose less, or a fraction of what is free such as memory=0.5"
            )
        return amount

    def _check_directory(self) -> None:
        if self.directory is not None:
            if not isinstance(self.directory, str | Path) or not str(self.directory):
                raise ArgumentError(
                    "CacheConfig: directory must be a path, such as '~/.cache/hybrid'; got "
                    f"{checks.shown(self.directory)}"
                )
            try:
                self._set("directory", Path(self.directory).expanduser())
                if b"\0" in os.fsencode(self.directory):
                    raise ValueError("it has a zero byte")
            except (RuntimeError, ValueError) as error:  # a RuntimeError: a user after ~ who is not known
                raise ArgumentError(
                    f"CacheConfig: directory={checks.shown(self.directory)} cannot be a path: {error!s:.200}"
                ) from error
        if (self.directory is None) != (self.disk is None):
            raise ArgumentError(
                "CacheConfig: disk and directory belong together, as in disk='100GiB', directory='~/.cache/hybrid'; "
                f"got disk={checks.shown(self.disk)} and directory={checks.shown(self.directory)}"
            )

    def _amount(self) -> int | float:
        """`memory` as a number of bytes, or as a fraction (a float up to 1)."""
        amount = self.memory
        if isinstance(amount, str):
            try:
                return parse_memory(amount)
            except ArgumentError as error:
                raise ArgumentError(f"CacheConfig: memory is {error}") from None
        try:
            exact = checks.number("memory", amount)
        except ArgumentError:
            exact = -1.0
        if not 0 < exact < math.inf or (exact > 1 and exact != int(exact)):
            raise ArgumentError(
                "CacheConfig: memory must be a whole number of bytes, a string such as '512MiB' or '50%', or a "
                f"fraction up to 1.0; got {checks.shown(amount)}"
            )
        return int(amount) if isinstance(amount, Integral) else exact if exact <= 1 else int(exact)


def settings_of(memory: object, config: CacheConfig | None) -> CacheConfig:
    """The configuration of a cache over a memory; None: the defaults.

    Raises:
        ArgumentError: one of them is of another type.
    """
    if not isinstance(memory, CacheMemory):
        raise ArgumentError(
            "HybridCache: memory must be a CacheMemory, as CacheMemory.of_indices(num_pages, num_states) or "
            f"CacheMemory.of_bytes makes it; got {checks.shown(memory)}"
        )
    if config is not None and not isinstance(config, CacheConfig):
        raise ArgumentError(
            f"HybridCache: config must be a CacheConfig, such as CacheConfig(page_size=16), or None; got "
            f"{checks.shown(config)}"
        )
    return config if config is not None else CacheConfig()
