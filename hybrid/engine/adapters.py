"""The LoRA adapters of an engine: loaded and dropped at run time, each with a name and a namespace of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrid.checks import shown
from hybrid.errors import ArgumentError, MemoryBudgetError
from hybrid.key import MAX_NAMESPACE_CHARACTERS, check_namespace
from hybrid.models.adapters import Adapter, load_adapter, name_adapter
from hybrid.units import format_bytes

MAX_NAME_CHARACTERS = 256
"""The maximum length of the name of an adapter."""

MARK = "\0adapter "
"""Beginning of the namespaces of adapters."""


class Adapters(Mapping[str, Adapter]):
    """Adapters by name. `SamplingParams(adapter=name)` uses one.

    Args:
        model: that they belong to.
        max_bytes: of all adapters together; None: no limit.
        in_use: the adapters of requests that wait or run.
        check_owner: raises in a thread that may not change the engine.
    """

    def __init__(
        self,
        model: Any,
        max_bytes: int | None,
        in_use: Callable[[], Iterable[Adapter | None]],
        check_owner: Callable[[], None],
    ) -> None:
        self._model = model
        self._max_bytes = max_bytes
        self._in_use = in_use
        self._check_owner = check_owner
        self._loaded: dict[str, Adapter] = {}

    def __getitem__(self, name: str) -> Adapter:
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters, on the device of the model, beside the memory of the cache."""
        return sum(adapter.num_bytes for adapter in self._loaded.values())

    def load(self, name: str, path: str | Path) -> Adapter:
        """Load an adapter from a folder of PEFT, while other requests may run.

        What requests with it cache is in a namespace of its own, named by the contents of its files: an adapter that is
        dropped and loaded again finds what it cached, and one with other weights under the same name does not.

        Raises:
            ArgumentError: the name is not a text, or is in use, or the path is none.
            CheckpointError: the folder holds no adapter that fits the model.
            MemoryBudgetError: `EngineConfig.adapter_memory` does not suffice. It was not loaded.
            OwnershipError: another thread owns the engine.
        """
        self._check(name)
        if not isinstance(path, str | Path) or not str(path):
            raise ArgumentError(f"the path of an adapter is that of a folder of PEFT; got {shown(path)}")
        return self.add(name, load_adapter(Path(path), self._model))

    def _check(self, name: str) -> None:
        """Check that an adapter may get a name now."""
        self._check_owner()
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise ArgumentError(
                f"the name of an adapter is a text of 1 to {MAX_NAME_CHARACTERS} characters; got {name!r:.99}"
            )
        if name in self._loaded:
            raise ArgumentError(f"an adapter named {name!r} is loaded; unload it first, or choose another name")

    def add(self, name: str, adapter: Adapter) -> Adapter:
        """Give a name to an adapter that `models.adapters.load_adapter` has read for this model, in any thread.

        Raises:
            ArgumentError, MemoryBudgetError, OwnershipError: as `load`.
        """
        self._check(name)
        total = self.num_bytes + adapter.num_bytes
        if self._max_bytes is not None and total > self._max_bytes:
            raise MemoryBudgetError(
                f"adapter {name!r} has {format_bytes(adapter.num_bytes)}, and all adapters would have "
                f"{format_bytes(total)} of {format_bytes(self._max_bytes)}; unload another one, or set "
                f"EngineConfig(adapter_memory={total})"
            )
        self._loaded = {**self._loaded, name: adapter}  # other threads may look names up
        return adapter

    def declare(self, name: str, path: str | Path) -> None:
        """Know an adapter with which another process computes: its name, and how what is cached with it is named.

        Raises:
            CheckpointError: the folder holds no adapter.
        """
        self._loaded[name] = name_adapter(Path(path))

    def unload(self, name: str) -> None:
        """Drop an adapter, and free its memory.

        Raises:
            ArgumentError: there is none of that name, or requests use it.
            OwnershipError: another thread owns the engine.
        """
        self._check_owner()
        adapter = self.named(name)
        users = sum(used is adapter for used in self._in_use())
        if users:
            raise ArgumentError(f"{users} requests use the adapter {name!r}; wait until they have ended, or abort them")
        self._loaded = {other: kept for other, kept in self._loaded.items() if other != name}

    def named(self, name: str) -> Adapter:
        """The adapter of a name.

        Raises:
            ArgumentError: there is none.
        """
        if not isinstance(name, str) or name not in self._loaded:
            known = ", ".join(map(repr, self._loaded)) or "none"
            raise ArgumentError(f"no adapter named {name!r:.99} is loaded (loaded: {known}); use engine.adapters.load")
        return self._loaded[name]


def namespace_of(adapter: Adapter | None, namespace: str) -> str:
    """The namespace in which requests with an adapter share what is cached, within one of theirs.

    Raises:
        ArgumentError: the caller's is not a string, is too long, or begins with the mark of those of adapters.
    """
    check_namespace(namespace, MAX_NAMESPACE_CHARACTERS)
    if namespace.startswith(MARK):
        raise ArgumentError(
            f"a namespace may not begin with {MARK!r}, which marks those of adapters; got {namespace!r:.99}"
        )
    return namespace if adapter is None else f"{MARK}{adapter.digest}\0{namespace}"


def split_namespace(name: str) -> tuple[str | None, str]:
    """The digest of the adapter, or None, and the caller's namespace, of which `namespace_of` made a name."""
    if not name.startswith(MARK):
        return None, name
    digest, _, namespace = name.removeprefix(MARK).partition("\0")
    return digest, namespace
