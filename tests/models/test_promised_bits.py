"""The bits that deterministic mode promises on a CPU are computed by compiled operations: torch moves numbers, and
adds, multiplies and divides single ones, whose results depend on nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid import CacheConfig, Engine, EngineConfig, SamplingParams
from hybrid.commands.random_checkpoints import FAMILIES, write_random_checkpoint

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

EXACT = {
    "abs", "add", "add_", "arange", "argmax", "as_strided", "bitwise_and", "bitwise_not", "bitwise_or", "cat", "chunk",
    "clamp", "clamp_min", "clone", "constant_pad_nd", "contiguous", "copy", "copy_", "detach", "detach_", "div",
    "embedding", "empty", "empty_like", "pad", "unflatten",
    "empty_strided", "eq", "expand", "expand_as",
    "fill", "fill_", "flatten", "full", "full_like", "gather", "ge", "gt", "index",
    "index_put_", "index_select", "isfinite", "isinf", "isnan", "le", "lift_fresh", "lt", "masked_fill", "max",
    "maximum", "min", "minimum", "mul", "mul_", "ne", "neg", "new_empty", "new_full", "new_ones", "new_zeros",
    "ones_like", "permute", "repeat", "reshape", "roll", "scalar_tensor", "scatter", "select", "set_", "slice", "sort",
    "split", "split_with_sizes", "squeeze", "stack", "sub", "t", "to", "_to_copy", "topk", "transpose", "unbind",
    "unsqueeze", "view", "_unsafe_view", "where", "zero_", "zeros", "zeros_like", "_local_scalar_dense", "resize_",
    "_unsafe_index", "unfold", "alias", "view_as", "narrow", "index_copy_",
}  # fmt: skip
"""Operations of torch whose results are the same bits for an element wherever it stands, and whatever is beside it."""


class Others(TorchDispatchMode):
    """Collects the names of operations of torch that compute numbers, and are not among `EXACT`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        makes_numbers = any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(result))
        if makes_numbers and name not in EXACT:
            self.found.add(name)
        return result


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(name, dtype) for name in FAMILIES if "," not in name for dtype in ("float32", "bfloat16")],
)  # the others differ in sizes and in how they are stored
def test_no_operation_of_torch_that_may_depend_on_the_batch_joins(family: str, dtype: str, tmp_path: Path) -> None:
    checkpoint = write_random_checkpoint(tmp_path / "checkpoint", family)
    engine = Engine.from_pretrained(
        checkpoint,
        device="cpu",
        dtype=dtype,
        cache=CacheConfig(memory="64MiB", deterministic=True, page_size=16, chunk_size=16),
        config=EngineConfig(enforce_eager=True),
    )
    prompts = [list(range(5, 60)), [7, 8, 9]]
    greedy = SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=2)
    sampled = SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=0.8, top_p=0.9, seed=1)
    engine.generate(prompts, greedy, progress=False)  # what is computed once, from weights alone
    with Others() as others:
        engine.generate([[*prompt, 11] for prompt in prompts], greedy, progress=False)
        engine.generate(prompts, sampled, progress=False)
    assert others.found <= {"sum"}  # of a row of logits, of which the sampler asks only whether it is finite


def test_an_operation_that_joins_is_seen() -> None:
    x = torch.ones(3, 4)
    with Others() as others:
        torch.nn.functional.linear(x, x).softmax(-1).exp()
    assert others.found == {"mm", "_softmax", "exp"}
