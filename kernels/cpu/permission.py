"""The system's permission to use the registers of AMX."""

import ctypes
import platform
import sys

_ARCH_PRCTL, _ASK, _TILES = 158, 0x1023, 18
"""Numbers on x86-64: of the system call, of what asks for registers, and of the data of tiles."""


def ask_for_tiles() -> bool:
    """Ask Linux for the registers of AMX, for all threads of the process and its forks; returns whether they may be
    used."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    refused: int = ctypes.CDLL(None).syscall(*map(ctypes.c_long, (_ARCH_PRCTL, _ASK, _TILES)))
    return refused == 0
