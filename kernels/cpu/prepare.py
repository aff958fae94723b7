"""Compile operations before they are needed.

    python -m hybrid.kernels.cpu.prepare

does so for all of them. Imports no torch.
"""

import logging
from collections.abc import Sequence

from tqdm import tqdm

from hybrid.kernels.cpu.functions import SECONDS, SECONDS_OF_OTHERS, Function, all_functions
from hybrid.kernels.cpu.machine_code import compile_in_advance, cores, missing

log: logging.Logger = logging.getLogger(__name__)


def prepare(wanted: Sequence[Function], show: bool) -> None:
    """Load functions from Numba's cache, and compile those that are not in it, on all cores. That takes so long that it
    is a warning: without any setting of `logging` it is written to stderr.

    Args:
        show: show a counter where some are compiled, unless the warning is silenced.
    """
    left = missing(wanted)
    if left:
        seconds = sum(SECONDS.get(each.name, SECONDS_OF_OTHERS) for each in left) / min(cores(), len(left))
        text = "compiling %d operations for this CPU, which is done once: about %d seconds on %d idle cores"
        log.warning(text, len(left), max(1, round(seconds)), cores())
        is_hidden = not (show and log.isEnabledFor(logging.WARNING))
        for _ in tqdm(compile_in_advance(left), total=len(left), desc="compile", unit="operation", disable=is_hidden):
            pass


if __name__ == "__main__":
    prepare(all_functions(), show=True)
