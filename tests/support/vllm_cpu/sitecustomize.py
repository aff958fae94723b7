"""Lets torchvision load where it was built for GPUs and torch was not. Read by each Python of `make served`.

Its compiled part, which defines two operators, cannot be loaded there; that they are absent stops its import. vLLM
needs neither of them for text.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DefineOperators(MetaPathFinder):
    """Defines the operators when torchvision is looked for, and finds nothing."""

    library: Any = None  # torch forgets the operators with it

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(operator)


sys.meta_path.insert(0, DefineOperators())
