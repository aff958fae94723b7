"""Machine code as an image: bytes that run at any address, but for a few places that are filled in there.

LLVM compiles to an object file, whose sections have to be laid out and refer to each other. Where code is compiled
that is done once (`hybrid.kernels.cpu.compiled.link`), so that a process that finds an image on disk needs no linker.
"""

from __future__ import annotations

import ctypes
import json
import mmap
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

ADDRESS = Struct("<Q")


class Image(NamedTuple):
    """Machine code of a function.

    Attributes:
        content: code and constants; nothing in it is written when it runs.
        entry: where the function begins in it. All places are numbers of bytes.
        pointers: where addresses of places in the content are; each holds the place.
        symbols: where the addresses of functions of the C library are, by name.
    """

    content: bytes
    entry: int
    pointers: list[int]
    symbols: dict[str, int]

    def packed(self) -> bytes:
        """The image as bytes."""
        return json.dumps(self[1:]).encode() + b"\n" + self.content


def unpacked(code: bytes) -> Image | None:
    """The image of what `packed` returned; None: it is something else, an object file."""
    if not code.startswith(b"["):
        return None
    head, _, content = code.partition(b"\n")
    return Image(content, *json.loads(head))


def load(image: Image) -> int:
    """Copy an image to memory of its own, which the process keeps, and return the address of its function.

    Raises:
        OSError: the system gives no memory, or none that code may be run in.
    """
    content, size = bytearray(image.content), -(-len(image.content) // mmap.PAGESIZE) * mmap.PAGESIZE
    address: int = _system().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANON, -1, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "no memory for compiled code")
    for place in image.pointers:
        ADDRESS.pack_into(content, place, address + ADDRESS.unpack_from(content, place)[0])
    for name, place in image.symbols.items():
        ADDRESS.pack_into(content, place, _address(name))
    ctypes.memmove(address, bytes(content), len(content))
    if _system().mprotect(address, size, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "the system lets no compiled code run")
    return address + image.entry


@lru_cache
def _address(name: str) -> int:
    """Where a function of the C library is."""
    found: int | None = ctypes.cast(_system()[name], ctypes.c_void_p).value
    assert found is not None
    return found


@lru_cache
def _system() -> Any:
    """The functions that the process sees, those of the C library among them."""
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype, found.mmap.argtypes = (
        ctypes.c_void_p,
        (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long),
    )
    found.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
