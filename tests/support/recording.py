"""Captures a pass as a CUDA graph does, on a CPU: what is run again are its launches and operations, with the grids,
numbers and memory that they had, and none of its Python. Reading a tensor on the host is refused meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
"""Methods of tensors for which the host waits for a GPU."""

MEMORY = ("empty", "new_empty", "empty_like", "empty_strided")

launch_interpreted = InterpretedFunction.run


class HostReadError(RuntimeError):
    """A tensor was read on the host while a pass was captured."""


class Recording(TorchDispatchMode):
    """A recording of what a pass launches.

    Attributes:
        launches: runs each of them again, in order.
        kernels: names of the kernels among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Callable[[], object]] = []
        self.kernels: list[str] = []
        self._is_launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).split(".")[1] not in MEMORY:
            self.launches.append(partial(_again, partial(func, *args, **(kwargs or {})), result))
        return result

    def launch(self, kernel: Any, *args: Any, **options: Any) -> None:
        """A launch of an interpreted kernel."""
        run = partial(launch_interpreted, kernel, *args, **options)
        self.kernels.append(kernel.__name__)
        self.launches.append(run)
        self._is_launching = True
        with _disable_current_modes():
            run()
        self._is_launching = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is launched within this."""

        def refuse(name: str) -> Callable[..., Any]:
            method = getattr(Tensor, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                if not self._is_launching:
                    raise HostReadError(f"Tensor.{name}: operation not permitted when stream is capturing")
                return method(*args, **kwargs)

            return call

        def launched(kernel: Any, *args: Any, **options: Any) -> None:
            self.launch(kernel, *args, **options)

        refused = {name: refuse(name) for name in READS}
        with patch.object(InterpretedFunction, "run", launched), patch.multiple(Tensor, **refused), self:
            yield

    def replay(self) -> None:
        """Run everything again."""
        with torch.inference_mode():
            for run in self.launches:
                run()


def _again(run: Callable[[], Any], results: Any) -> None:
    """Run an operation again, into the memory of its results."""
    for result, fresh in zip(tree_leaves(results), tree_leaves(run()), strict=True):
        if isinstance(result, Tensor) and result.data_ptr() != fresh.data_ptr():  # equal: a view, or written in place
            result.copy_(fresh)


def records(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Captures a pass, as `hybrid.engine.capture.Capture`."""
    recording = Recording()
    with recording.recording():
        logits = run()
    return recording.replay, logits
