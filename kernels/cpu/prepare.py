"""Compile operations before they are needed.

    python -m hybrid.kernels.cpu.prepare

does so for all of them. Imports no torch.
"""

import logging
from collections.abc import Sequence

from tqdm import tqdm

from hybrid.kernels.cpu.functions import Function, all_functions
from hybrid.kernels.cpu.machine_code import compile_in_advance, missing

log: logging.Logger = logging.getLogger(__name__)

MESSAGE = "compiling operations for this CPU (once)"


def prepare(wanted: Sequence[Function], show: bool) -> None:
    """Load functions from Numba's cache, and compile those that are not in it, on all cores.

    Args:
        show: show a progress bar where some are compiled.
    """
    left = missing(wanted)
    if left:
        log.info("%s: %d of %d", MESSAGE, len(left), len(wanted))
        for _ in tqdm(compile_in_advance(left), total=len(left), desc=MESSAGE, unit="operation", disable=not show):
            pass


if __name__ == "__main__":
    prepare(all_functions(), show=True)
