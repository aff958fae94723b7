"""What a step has to undo when it fails, and where it may be interrupted."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hybrid.engine.request import Request
from hybrid.engine.step import Step
from hybrid.interrupts import DeferredInterrupts, is_for_the_process


class StepGuard:
    """The failures of one step.

    Args:
        interrupts: the section in which signal handlers wait.

    Attributes:
        steps: what is undone when the step fails: the step itself, and the one launched after it.
        failures: requests that failed by themselves, with the exceptions.
    """

    def __init__(self, interrupts: DeferredInterrupts) -> None:
        self.steps: list[Step] = []
        self.failures: list[tuple[Request, BaseException]] = []
        self._interrupts = interrupts

    def interruptible(self) -> AbstractContextManager[None]:
        """Let signal handlers run: what they raise undoes the step."""
        return self._interrupts.opened()

    @property
    def was_interrupted(self) -> bool:
        """Whether the step failed because a signal handler raised: no request is the reason."""
        return self._interrupts.was_interrupted

    def undo_on_failure(self, step: Step) -> Step:
        """From now on a failure undoes this step, too."""
        self.steps.append(step)
        return step

    def keep_on_failure(self, step: Step) -> None:
        """The results of this step are there: from now on it is not undone."""
        self.steps.remove(step)

    def failed(self, request: Request, error: BaseException) -> None:
        """What was raised is the failure of this request, which has not ended."""
        self.failures.append((request, error))

    def raise_pending(self) -> None:
        """Raise the first failure that is meant for the process."""
        for _, error in self.failures:
            if is_for_the_process(error):
                raise error
