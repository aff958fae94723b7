"""The text of one answer, as its consumer iterates over it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from hybrid.engine.request import Request
from hybrid.engine.step_loop import StepLoop
from hybrid.errors import OwnershipError, RequestError


class TextStream(Iterator[str]):
    """Pieces of an answer, in order. Closing or dropping it early aborts the request, from any thread: one that does
    not own the engine has the next step do it.

    Args:
        request: not queued yet: the first piece that is asked for does that.
        steps: of the engine.
        claim: checks that the engine is open, and that the calling thread owns it or may own it.
        check_owner: raises in another thread than the owner.
    """

    def __init__(
        self, request: Request, steps: StepLoop, claim: Callable[[], None], check_owner: Callable[[], None]
    ) -> None:
        self._request = request
        self._steps = steps
        self._check_owner = check_owner
        self._pieces = _pieces(request, steps, claim)

    def __next__(self) -> str:
        """The next piece.

        Raises:
            RequestError: the request failed; raised after the text that it had.
            OwnershipError: another thread owns the engine. Nothing was changed.
        """
        self._check_owner()
        return next(self._pieces)

    def close(self) -> None:
        """Abort the request, if it has not ended."""
        try:
            self._check_owner()
        except OwnershipError:
            self._steps.abort_later(self._request)
        else:
            self._pieces.close()


def _pieces(request: Request, steps: StepLoop, claim: Callable[[], None]) -> Generator[str, None, None]:
    ended = False
    with steps.aborting([request]):
        claim()
        steps.enter([request])
        while not ended:
            if not request.outputs:
                steps.work()
            for output in request.outputs.take():
                ended = output.finish_reason is not None
                if output.delta:
                    yield output.delta
        steps.replay_while_idle()
    if request.error is not None:
        raise RequestError(f"{request.request_id} failed: {request.error}")
