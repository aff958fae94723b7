"""The folder whose adapters callers may load."""

from __future__ import annotations

from pathlib import Path

from hybrid.errors import ArgumentError
from hybrid.server.errors import HttpError


class AdapterFolder:
    """The folder below which adapters may be loaded at run time.

    Args:
        path: of it.

    Raises:
        ArgumentError: there is no such folder.
    """

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_dir():
            raise ArgumentError(
                f"--adapter-dir must be a folder, of which others hold an adapter each; got {path!s:.200}"
            )
        self._path = Path(path).resolve()

    def find(self, name: str) -> Path:
        """The folder of an adapter, by its path in this one or its whole path, all of whose files are below this one.

        Raises:
            HttpError: it is elsewhere, or not there.
        """
        try:
            found = (self._path / name).resolve()
            is_below = found != self._path and all(
                file.resolve().is_relative_to(self._path) for file in (found, *found.iterdir())
            )
        except (OSError, ValueError, RuntimeError):  # not there; a zero byte; links in a circle
            is_below = False
        if not is_below:
            text = f"lora_path must be a folder of an adapter below the server's --adapter-dir; got {name!r:.200}"
            raise HttpError(404, text, "lora_path", "adapter_not_found")
        return found
