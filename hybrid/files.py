"""Files of a checkpoint: whether one is there."""

from __future__ import annotations

import stat
from pathlib import Path

from hybrid.errors import CheckpointError


def is_file(path: Path) -> bool:
    """Whether a checkpoint has a file, which it may also lack.

    Raises:
        CheckpointError: something of that name is there, and is not a file that can be read: a folder, a pipe, a link
            that leads nowhere, as in a download of which parts were deleted. It is not taken for a file that is
            missing.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            with path.open("rb"):
                return True
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link to {str(path.readlink())!r:.200}, which is not there; download the checkpoint again"
            ) from error
        return False
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; check its permissions, or copy it again") from error
    kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
    raise CheckpointError(f"{path} is {kind}, and must be a file; remove it, or copy the checkpoint again")
