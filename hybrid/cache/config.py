"""Settings of the prefix cache."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hybrid import checks
from hybrid.checks import BOOLEANS, Rule, RuleError, integers, is_integer, numbers, one_of, optional
from hybrid.errors import ArgumentError, MemoryBudgetError
from hybrid.memory.memory import CacheMemory
from hybrid.tree.policies import Eviction, policy_of
from hybrid.units import BYTES, amounts, format_bytes

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
        checks.settings(
            self,
            enabled=BOOLEANS,
            page_size=SIZES,
            chunk_size=SIZES,
            host=optional(BYTES),
            disk=optional(BYTES),
            directory=optional(PATHS),
            directory_readable=BOOLEANS,
            state_share=optional(numbers("between 0 and 1", lambda share: 0 < share < 1)),
            placement=PLACES,
            state_dtype=one_of(*checks.STATE_DTYPE_NAMES),
            kv_dtype=one_of(*checks.KV_DTYPE_NAMES),
            deterministic=optional(BOOLEANS),
            seed=integers(0),
            priority_cap=integers(0, 100),
            verify_contents=BOOLEANS,
        )
        optional(AMOUNTS).check("CacheConfig: memory", self.memory)  # as it was given it is shown where it is too much
        try:
            policy_of(self.eviction)  # refuses an unknown one here, before a model is loaded
        except ArgumentError as error:
            raise ArgumentError(f"CacheConfig: {error}") from None
        if self.state_dtype != "float32":
            if self.deterministic:
                raise ArgumentError(
                    f"CacheConfig: state_dtype={self.state_dtype!r} changes results; deterministic mode needs 'float32'"
                )
            if self.state_share is not None:
                raise ArgumentError(
                    f"CacheConfig: state_dtype={self.state_dtype!r} needs one budget for all: state_share=None"
                )
        if (self.directory is None) != (self.disk is None):
            raise ArgumentError(
                "CacheConfig: disk and directory belong together, as in disk='100GiB', directory='~/.cache/hybrid'; "
                f"got disk={checks.shown(self.disk)} and directory={checks.shown(self.directory)}"
            )

    @property
    def grid(self) -> int:
        """Checkpoints are at multiples of this many tokens."""
        return math.lcm(self.page_size, self.chunk_size)

    def memory_bytes(self, free: int, on_gpu: bool = False) -> int:
        """Compute the budget in bytes.

        Args:
            free: bytes that are free on the device.
            on_gpu: whether the device is a GPU: it decides the default.

        Raises:
            ArgumentError: `memory` is not an amount.
            MemoryBudgetError: the budget exceeds `free`.
        """
        amount = (GPU_MEMORY if on_gpu else CPU_MEMORY) if self.memory is None else AMOUNTS.read(self.memory)
        if isinstance(amount, float):
            amount = int(amount * free)
        if amount > free:
            asked = "the default" if self.memory is None else f"memory={self.memory!r}"
            raise MemoryBudgetError(
                f"CacheConfig: {asked} is {format_bytes(amount)}, but only {format_bytes(free)} "
                "is free; choose less, or a fraction of what is free such as memory=0.5"
            )
        return amount


def _is_size(value: object) -> bool:
    return is_integer(value) and 1 <= (size := int(value)) <= 4096 and not size & (size - 1)


SIZES: Rule[int] = Rule("a power of two from 1 to 4096", _is_size, int)
"""Tokens of a page, and of a chunk."""


AMOUNTS: Rule[int | float] = amounts(
    "a whole number of bytes, a string such as '512MiB' or '50%', or a fraction up to 1.0",
    Rule(
        "",
        numbers("", lambda amount: 0 < amount < math.inf and (amount <= 1 or amount == int(amount))).accepts,
        lambda amount: int(amount) if is_integer(amount) or amount > 1 else float(amount),
    ),
)
"""Amounts of memory: numbers of bytes, and fractions, which are floats up to 1."""


def _read_path(value: str | Path) -> Path:
    try:
        path = Path(value).expanduser()
        if b"\0" in os.fsencode(path):
            raise ValueError("it has a zero byte")
    except (RuntimeError, ValueError) as error:  # a RuntimeError: a user after ~ who is not known
        raise RuleError(f"cannot be a path: {error!s:.200}; got {checks.shown(value)}") from error
    return path


def _read_placement(value: str | Sequence[str]) -> tuple[str, ...]:
    names = tuple(value.split(",") if isinstance(value, str) else value)
    for name in names:
        if name not in PLACEMENTS:
            raise RuleError(f"has no {checks.shown(name)}; the placements are: {', '.join(PLACEMENTS)}")
    return names


PATHS = Rule(
    "a path, such as '~/.cache/hybrid'", lambda value: isinstance(value, str | Path) and str(value), _read_path
)

PLACES = Rule(f"a tuple of {', '.join(PLACEMENTS)}", lambda value: isinstance(value, str | Sequence), _read_placement)


def settings_of(memory: object, config: CacheConfig | None) -> CacheConfig:
    """Check the configuration of a cache over a memory; None: the defaults.

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
