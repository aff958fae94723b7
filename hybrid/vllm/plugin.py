"""The plugin that vLLM loads in every one of its processes, with this scheduler or without it. It only looks at the
version: what is wrong with a configuration is said when the scheduler is built."""

from __future__ import annotations

import logging
import sys

from hybrid.errors import VersionError
from hybrid.vllm.installed import refuse_unknown_version

logger = logging.getLogger("vllm.hybrid")


def register() -> None:
    """Look at the version of vLLM. Changes nothing, and never raises."""
    if "vllm" not in sys.modules:
        return
    try:
        refuse_unknown_version()
    except VersionError as error:
        logger.debug("%s", error)
