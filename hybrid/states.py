"""The pool of state slots: what linear layers keep per sequence."""

import torch

from hybrid.pool import EMPTY_STATE, IndexPool
from hybrid.spec import HybridSpec


class StatePool(IndexPool):
    """State slots. A slot is one contiguous piece of bytes that holds every tensor of one sequence's state.

    Attributes:
        tensors: per name, `[num_slots, *shape]`: a view of the slots' bytes.
    """

    def __init__(self, spec: HybridSpec, num_slots: int, device: torch.device) -> None:
        super().__init__(num_slots, 1, "state slot")
        self._bytes = torch.empty(num_slots, spec.state_bytes, dtype=torch.uint8, device=device)
        self._bytes[EMPTY_STATE].zero_()
        self.tensors: dict[str, torch.Tensor] = {}
        for tensor, start in zip(spec.state, spec.state_offsets, strict=True):
            part = self._bytes[:, start : start + tensor.num_bytes].view(tensor.dtype)
            self.tensors[tensor.name] = part.unflatten(1, tensor.shape)
