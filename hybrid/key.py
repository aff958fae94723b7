"""Keys of the tree: token ids as bytes, in a namespace.

Ids are stored as the bytes of 32-bit integers. A child of a node is looked up by the bytes of its first page, and an
edge is compared with one `bytes.startswith`, which is one memcmp without a copy.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybrid.errors import ArgumentError

TOKEN_BYTES: int = array("i").itemsize
"""Bytes of one token id in a key."""


@dataclass(frozen=True, slots=True)
class Key:
    """A sequence of token ids in a namespace. Equal ids in different namespaces share nothing.

    Attributes:
        ids: the token ids, `TOKEN_BYTES` bytes each.
        namespace: a LoRA adapter, a cache salt, a tenant; a string.
        units: spans `(start, end)` of tokens that are one unit, such as the positions of an image: no match and no
            checkpoint ends inside one.
    """

    ids: bytes
    namespace: str = ""
    units: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        check_namespace(self.namespace)

    @classmethod
    def of(cls, ids: Sequence[int], namespace: str = "", units: Iterable[tuple[int, int]] = ()) -> "Key":
        """Create the key of token ids. Create it once per request: 128k ids from a list take 2 ms.

        Args:
            ids: token ids.
            namespace: keys in different namespaces share nothing.
            units: spans `(start, end)` that no match and no checkpoint may end inside; in any order, not overlapping.
                Equal ids must mean equal content: give the positions of different images different ids (a hash of the
                image, not one placeholder).

        Raises:
            ArgumentError: the namespace is not a string.
        """
        ids = ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
        return cls(ids.tobytes(), namespace, tuple(sorted(units)))

    def whole(self, num_tokens: int, step: int) -> int:
        """The largest multiple of `step`, up to `num_tokens`, that is not inside a unit."""
        num_tokens -= num_tokens % step
        for start, end in reversed(self.units):
            if start < num_tokens < end:
                num_tokens = start - start % step
        return num_tokens

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids) // TOKEN_BYTES


def check_namespace(namespace: object) -> None:
    """Refuse a namespace that is not a string: 1, 1.0 and True would be one namespace.

    Raises:
        ArgumentError: it is not a string.
    """
    if not isinstance(namespace, str):
        raise ArgumentError(f"a namespace must be a string, got {namespace!r}; use str() or leave it out")


def common_prefix(a: bytes, b: bytes, a_start: int, b_start: int, step: int, limit: int) -> int:
    """Length in bytes of the common prefix of `a[a_start:]` and `b[b_start:]`: a multiple of `step`, up to `limit`.

    A binary search with memcmp: 128k tokens take a few microseconds.
    """
    low, high = 0, min(len(a) - a_start, len(b) - b_start, limit) // step
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[b_start + low * step : b_start + middle * step], a_start + low * step):
            low = middle
        else:
            high = middle - 1
    return low * step
