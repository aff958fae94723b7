"""The number of variants of each kernel that Triton would compile for the steps of an engine: what a kernel is compiled
for, read off its arguments where it is launched. Nothing is launched, so that no GPU is needed. Prints JSON.

Run in a process of its own: in one in which kernels are interpreted there is nothing to compile.
"""

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[2]
VARIANT = tuple[str, tuple[object, ...]]


def variant(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], every: bool) -> VARIANT:
    """Return what a launch is compiled for: constants and options; of tensors the type and whether they are aligned; of
    other integers their width and, where they are specialized (or `every` one is), whether they are 1 or a multiple of
    16."""
    parameters = {parameter.name: parameter for parameter in kernel.params}
    given = dict(zip(parameters, args, strict=False)) | kwargs
    key: list[object] = []
    for name, value in sorted(given.items()):
        parameter = parameters.get(name)
        if isinstance(value, torch.Tensor):
            key.append((name, str(value.dtype), value.data_ptr() % 16 == 0))
        elif parameter is None or parameter.is_constexpr or isinstance(value, float | bool) or value is None:
            key.append((name, None if isinstance(value, float) else value, type(value).__name__))
        else:
            wide = not -(1 << 31) <= value < 1 << 31
            is_general = parameter.do_not_specialize and not every
            key.append((name, wide) if is_general else (name, wide, value == 1, value % 16 == 0))
    return kernel.__name__, tuple(key)


def collected(run: Callable[[], object]) -> tuple[set[VARIANT], set[VARIANT]]:
    """The variants that a run launches, and those that it would if every integer were specialized."""
    from triton.runtime.jit import JITFunction

    found: tuple[set[VARIANT], set[VARIANT]] = set(), set()

    def record(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        for every in (False, True):
            found[every].add(variant(kernel, args, kwargs, every))

    with patch.object(JITFunction, "run", record), torch.inference_mode():
        run()
    return found


def tiny_model(family: str) -> Any:
    """A model of few layers, in bfloat16, whose sizes are multiples of 16, as those of all checkpoints are."""
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    from hybrid.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

    common = {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    if family != "experts":
        dense = Qwen3_5TextConfig(**common, intermediate_size=128)
        model: Any = Qwen3_5ForCausalLM(dense, 64, has_predictor=family == "predictor")
    else:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = Qwen3_5MoeTextConfig(**common, **experts, shared_expert_intermediate_size=32)
        model = Qwen3_5MoeForCausalLM(config, 64)
    model = model.to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.zero_()
    model.fuse_projections()
    return model


def random_size(rng: random.Random, max_drafts: int) -> Any:
    """The sizes of a step."""
    from hybrid.engine.warm_up import Size

    prompts = [rng.choice((1, 3, 16, 64, 65, 200, 512, 1000)) for _ in range(rng.choice((0, 1, 2, 5)))]
    decodes = rng.choice((0, 1, 2, 7, 16, 17, 31, 33, 48, 64)) if prompts else rng.randrange(1, 65)
    captures = rng.choice((0, 1, 2, 16)) if prompts and prompts[0] >= 64 else 0
    pages = max(rng.choice((1, 15, 16, 17, 100, 1024, 4096)), -(-max(prompts, default=1) // 64))
    drafts = rng.randrange(max_drafts + 1) if decodes else 0
    is_tree = drafts > 1 and rng.random() < 0.5
    return Size(tuple(prompts), decodes, pages, captures, drafts, is_tree, is_padded=rng.random() < 0.5)


class Kind(NamedTuple):
    """A kind of engine.

    Attributes:
        family: of the model.
        kv_dtype: of its pages.
        drafts: of a request, at most.
    """

    family: str
    kv_dtype: str = "auto"
    drafts: int = 0


KINDS = {
    "dense": Kind("dense"),
    "experts": Kind("experts"),
    "dense, drafts": Kind("dense", "auto", 7),
    "predictor": Kind("predictor", "auto", 3),
    "int8, drafts": Kind("dense", "int8", 7),
    "fp8": Kind("dense", "fp8"),
}


def main() -> None:
    sys.path.insert(0, str(ROOT))
    os.environ.pop("TRITON_INTERPRET", None)
    from hybrid.kernels.ops import OPS

    for op in OPS.values():
        _ = op.kernel  # imported as what is compiled, not as what is interpreted
    os.environ.update(HYBRID_KERNELS="triton", TRITON_INTERPRET="1")  # so that tensors may be on a CPU; nothing runs
    count = int(sys.argv[1])
    found = {}
    for name, kind in KINDS.items():
        for deterministic in (False, True):
            found[f"{name}, {'deterministic' if deterministic else 'fast'}"] = variants(kind, deterministic, count)
    print(json.dumps(found))


def variants(kind: Kind, deterministic: bool, count: int) -> dict[str, Any]:
    """Return what an engine compiles when it starts, and what `count` random steps need."""
    from hybrid.engine.warm_up import Limits, Size, predict, row_counts, run, sizes
    from hybrid.memory.tensors import CacheTensors

    model, rng = tiny_model(kind.family), random.Random(0)
    spec = model.own_spec().with_kv_dtype(kind.kv_dtype)
    tensors = CacheTensors.fixed(spec, 64, 8, 4, torch.device("cpu"))
    limits = Limits(64, 2048, 4096, 64, 64, kind.drafts)

    def computed(chosen: Iterable[Size], drafted: Iterable[tuple[int, int]]) -> None:
        for size in chosen:
            run(model, size, deterministic, 1, tensors.kv, tensors.state)
        for rows, pages in drafted if model.mtp is not None else ():
            predict(model, rows, pages, 1, tensors.kv)

    start = [*sizes(limits)], [(rows, 1 << power) for rows in row_counts(64) for power in range(13)]
    later = (
        [random_size(rng, kind.drafts) for _ in range(count)],
        [(rows, rng.randrange(1, 4097)) for rows in range(1, 65)],
    )
    (warm, undone), (more, more_undone) = (collected(partial(computed, *chosen)) for chosen in (start, later))
    new = sorted(more - warm, key=str)
    return {
        "warm": Counter(name for name, _ in warm),
        "more": Counter(name for name, _ in more),
        "new": [[name, [list(map(str, x)) for x in key]] for name, key in new],
        "undone": len(undone | more_undone) - len(warm),
    }


if __name__ == "__main__":
    main()
