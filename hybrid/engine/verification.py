"""Acceptance of the drafts of a pass, and the states after those that are accepted.

The pass keeps no state after a draft: the front is valid after the last known token. What the states of the accepted
drafts were computed from is in the pass's log, and they are computed from it once more, by the same operation and so
with the same bits, into the front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybrid.engine.replay import Replay
from hybrid.engine.step import Part
from hybrid.speculation.drafts import accepted


class Verification:
    """The drafts of one pass.

    Args:
        parts: of the step, prompt parts first.
        end_tokens: the model's tokens that end an answer.
        replay: computes the states of accepted drafts; None: the pass has done it.
    """

    def __init__(
        self, parts: Sequence[Part], end_tokens: frozenset[int], replay: Callable[[Replay], None] | None
    ) -> None:
        self._parts = parts
        self._end_tokens = end_tokens
        self._replay = replay

    def path(self, index: int, sampled: Sequence[int]) -> list[int]:
        """Return the drafts of a part that are accepted.

        Args:
            sampled: the token after each of its rows; -1: the row is not finite.
        """
        part = self._parts[index]
        if part.drafts is None:
            return []
        return accepted(part.drafts, sampled, lambda token: part.request.is_end(token, self._end_tokens))

    def keep(self, paths: Sequence[list[int]]) -> None:
        """Keep the states after the accepted drafts of each part. The front is after their last known token."""
        if self._replay is None:
            return
        replay, first = Replay([], [0], [], []), 0
        for part, path in zip(self._parts, paths, strict=True):
            if part.is_prefill:
                continue
            if path:
                replay.rows.extend([first + 1 + draft for draft in path])
                replay.starts.append(len(replay.rows))
                replay.read.extend([part.lease.front, *[-1] * (len(path) - 1)])
                replay.write.extend(_writes(part, len(path)))
            first += part.num_rows
        if replay.rows:
            self._replay(replay)


def _writes(part: Part, count: int) -> list[int]:
    """Return where the states after `count` accepted drafts are kept: the last one; and one at a boundary in the front,
    which the scheduler then swaps with the back."""
    writes, boundary = [-1] * count, part.boundary_before(part.end + count)
    writes[-1] = part.lease.front
    if boundary is not None:
        assert part.lease.back is not None
        writes[-1] = part.lease.back
        if boundary > part.end:
            writes[boundary - part.end - 1] = part.lease.front
    return writes
