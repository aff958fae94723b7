"""One request of traffic, as engines see it: hashes of its prefixes, and when it came."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

UNIT = 16
"""Tokens of a hash. Blocks of vLLM, and pages of SGLang and of ours, are multiples of it."""

HASH_BYTES = 8

MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of a request in a recorded session.

    Attributes:
        session, conversation: numbers; a session has a conversation for its main agent and one for each subagent.
        after: numbers of the requests, in order of arrival, without whose answers it does not come.
        pause: seconds between the last of these answers and it.
        stop: reason for which its answer ended; "": not known.
        next_in: seconds from the end of its answer, as recorded, to the next request of its conversation; None: it is
            the last.
    """

    session: int
    conversation: int
    after: tuple[int, ...] = ()
    pause: float = 0.0
    stop: str = ""
    next_in: float | None = None


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request.

    Attributes:
        hashes: of the prompt and its answer, one for each `UNIT` tokens and one for a rest: a hash of all tokens up to
            there. Unsigned 64-bit integers.
        num_prompt: tokens of the prompt.
        num_tokens: tokens of the prompt and of the answer.
        time: of arrival, in seconds; None: not known.
        namespace: a tenant, a salt or an adapter; requests in different ones share nothing.
        turn: its place in a recorded session; None: it is of none.
    """

    hashes: array[int]
    num_prompt: int
    num_tokens: int
    time: float | None = None
    namespace: str = ""
    turn: Turn | None = None

    @property
    def salt(self) -> int:
        """The number that hashes of its namespace are mixed with; 0 for the namespace ""."""
        if not self.namespace:
            return 0
        return int.from_bytes(blake2b(self.namespace.encode(), digest_size=HASH_BYTES).digest(), "little")

    def blocks(self, size: int, end: int) -> list[int]:
        """Hashes of the prefixes that are whole blocks, in the request's namespace.

        Args:
            size: tokens of a block, a multiple of `UNIT`.
            end: tokens that are looked at.
        """
        step, salt = size // UNIT, self.salt
        found = self.hashes[step - 1 : end // size * step : step]
        return [number ^ salt for number in found] if salt else found.tolist()


def hashed(ids: Sequence[int], key: bytes = b"") -> array[int]:
    """The hashes of token ids: each of all ids up to there.

    Args:
        key: a secret of up to 64 bytes, without which the tokens of a hash cannot be found.
    """
    data, step = array("i", ids).tobytes(), UNIT * 4
    state, digests = b"", []
    for start in range(0, len(data), step):
        state = blake2b(state + data[start : start + step], digest_size=HASH_BYTES, key=key).digest()
        digests.append(state)
    return array("Q", b"".join(digests))
