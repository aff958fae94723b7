"""Running a call of `generate` once more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from hybrid.errors import NonFiniteError


class ResumedStreamer(BaseStreamer):
    """Passes on what a call puts. Of a second run that begins as the first one did it passes on what comes after.

    Args:
        streamer: of the call.
    """

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer
        self._given: list[Tensor] = []
        self._num_again = 0

    def begin_again(self) -> None:
        """The second run begins."""
        self._num_again = 0

    def put(self, value: Tensor) -> None:
        """Receive the prompt, and then each token.

        Raises:
            NonFiniteError: the second run has other tokens than those that were passed on.
        """
        if self._num_again < len(self._given):
            if not torch.equal(self._given[self._num_again], value):
                raise NonFiniteError(
                    "the model computed NaN or infinity after a hit, and computed without it gives other tokens than "
                    "those that were streamed already: run the call again"
                )
        else:
            self._streamer.put(value)
            self._given.append(value)
        self._num_again += 1

    def end(self) -> None:
        """End the answer."""
        self._streamer.end()


class SecondRun:
    """The means to run a call of `generate` once more: with the random numbers of the first run, and with a streamer
    that gets nothing twice.

    Args:
        options: of the call; a streamer in them is replaced.
        device: of the model.
    """

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        self._device = device
        self._state = torch.get_rng_state()
        self._state_on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        streamer = options.get("streamer")
        self._streamer = options["streamer"] = ResumedStreamer(streamer) if streamer is not None else None

    def begin(self) -> None:
        """Have all be as it was before the first run, but for what was streamed."""
        torch.set_rng_state(self._state)
        if self._state_on_device is not None:
            torch.cuda.set_rng_state(self._state_on_device, self._device)
        if self._streamer is not None:
            self._streamer.begin_again()
