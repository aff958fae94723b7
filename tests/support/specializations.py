"""How many variants of each kernel Triton would compile for the steps of an engine: what a kernel is compiled for, read
off its arguments where it is launched. Nothing is launched, so that no GPU is needed. Prints JSON.

Run in a process of its own: in one in which kernels are interpreted there is nothing to compile.
"""

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[2]
VARIANT = tuple[str, tuple[object, ...]]


def variant(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], every: bool) -> VARIANT:
    """What a launch is compiled for: constants and options; of tensors the type and whether they are aligned; of other
    integers their width and, where they are specialized (or `every` one is), whether they are 1 or a multiple of 16."""
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


def collected(run: Callable[[], object], every: bool = False) -> set[VARIANT]:
    """The variants that a run launches; `every`: that it would if every integer were specialized."""
    from triton.runtime.jit import JITFunction

    found: set[VARIANT] = set()

    def record(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        found.add(variant(kernel, args, kwargs, every))

    with patch.object(JITFunction, "run", record), torch.inference_mode():
        run()
    return found


def tiny_model(family: str) -> Any:
    """A model of few layers, in bfloat16, whose sizes are multiples of 16, as those of all checkpoints are."""
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    from hybrid.models.qwen3_5 import Qwen3_5ForCausalLM
    from hybrid.models.qwen3_5_moe import Qwen3_5MoeForCausalLM

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
    if family == "dense":
        model: Any = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**common, intermediate_size=128), 64)
    else:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = Qwen3_5MoeTextConfig(**common, **experts, shared_expert_intermediate_size=32)
        model = Qwen3_5MoeForCausalLM(config, 64)
    model = model.to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data.zero_()
    model.fuse_projections()
    return model


def random_size(rng: random.Random) -> Any:
    """The sizes of a step."""
    from hybrid.engine.warm_up import Size

    prompts = [rng.choice((1, 3, 16, 64, 65, 200, 512, 1000)) for _ in range(rng.choice((0, 1, 2, 5)))]
    decodes = rng.choice((0, 1, 2, 7, 16, 17, 31, 33, 48, 64)) if prompts else rng.randrange(1, 65)
    captures = rng.choice((0, 1, 2, 16)) if prompts else 0
    pages = max(rng.choice((1, 15, 16, 17, 100, 1024, 4096)), -(-max(prompts, default=1) // 64))
    return Size(tuple(prompts), decodes, pages, captures)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    os.environ.pop("TRITON_INTERPRET", None)
    from hybrid.kernels.ops import OPS

    for op in OPS.values():
        _ = op.kernel  # imported as what is compiled, not as what is interpreted
    os.environ.update(HYBRID_KERNELS="triton", TRITON_INTERPRET="1")  # so that tensors may be on a CPU; nothing runs
    from hybrid.engine.warm_up import Size, idle_batch, sizes
    from hybrid.memory.tensors import CacheTensors

    rng = random.Random(0)
    found = {}
    for family in ("dense", "experts"):
        model = tiny_model(family)
        tensors = CacheTensors.fixed(model.spec(model.config, torch.bfloat16), 64, 8, 4, torch.device("cpu"))
        for deterministic in (False, True):

            def run(size: Size, model: Any = model, tensors: Any = tensors, fixed: bool = deterministic) -> None:
                model(idle_batch(size, 64, fixed, 1, torch.device("cpu")), tensors.kv, tensors.state)

            start = [*sizes(64, 2048, 4096, 64, 64)]
            later = [random_size(rng) for _ in range(int(sys.argv[1]))]
            warm, more, undone = (
                collected(lambda run=run, chosen=chosen: [run(size) for size in chosen], every)  # type: ignore[misc]
                for chosen, every in ((start, False), (later, False), (start + later, True))
            )
            new = sorted(more - warm, key=str)
            found[f"{family}, {'deterministic' if deterministic else 'fast'}"] = {
                "warm": Counter(name for name, _ in warm),
                "more": Counter(name for name, _ in more),
                "new": [[name, [list(map(str, x)) for x in key]] for name, key in new],
                "undone": len(undone) - len(warm),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
