#!/usr/bin/env python
"""Load checkpoints that the quantizers' own packages have packed.

    pip install --no-deps --target SITE compressed-tensors autoawq auto-gptq
    python bench/quantized_files.py SITE

A random Llama is packed by `compressed-tensors` (groups with and without zero points, int8 and 8-bit floats with a
scale for each row, blocks), by AutoAWQ's and by AutoGPTQ's linear layers. Logits must be those of transformers with
the numbers that the package itself unpacks, or, of AWQ and GPTQ, that it was given. The exit status is 1 where they are
not.
"""

import argparse
import importlib
import json
import logging
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid import CacheConfig, Engine
from hybrid.commands import parity
from hybrid.commands.random_checkpoints import FAMILIES, random_model
from hybrid.models.layers import Linear

GROUP = 32
PROMPT = list(range(5, 155))
SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}

Written = tuple[dict[str, Tensor], Tensor]
"""Tensors on disk by the end of their names, and what they stand for."""


def compressed(kind: str, **weights: Any) -> tuple[Callable[[Tensor], Written], dict[str, Any]]:
    """What compressed-tensors makes of a weight, and the configuration."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(kind)

    def write(weight: Tensor) -> Written:
        strategy = weights["strategy"]
        if strategy == "group":
            parts = weight.view(len(weight), -1, weights["group_size"])
            low, high = parts.amin(-1), parts.amax(-1)
        elif strategy == "block":
            height, width = weights["block_structure"]
            parts = weight.view(len(weight) // height, height, -1, width)
            low, high = parts.amin((1, 3)), parts.amax((1, 3))
        else:
            low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
        scale, zero = calculate_qparams(low, high, scheme.weights)
        state = {"weight": weight, "weight_scale": scale.float(), "weight_zero_point": zero}
        state["weight_scale"] = scale.bfloat16().float()
        packed = compressor.compress(state, scheme)
        exact = compressor.decompress(packed, scheme)["weight"]
        packed["weight_scale"] = packed["weight_scale"].bfloat16()
        return packed, exact

    settings = json.loads(scheme.model_dump_json())
    config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": settings}}
    return write, {**config, "ignore": ["lm_head"], "quantization_status": "compressed"}


def integers(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and zero points `[out, groups]`, and the numbers."""
    parts = weight.view(len(weight), -1, GROUP)
    low, high = parts.amin(-1), parts.amax(-1)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    q = (parts / scale.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, 15)
    return scale, zero, ((q - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).view(weight.shape)


def awq(weight: Tensor) -> Written:
    module = importlib.import_module("awq.modules.linear.gemm")
    scale, zero, exact = integers(weight)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = exact
    made = module.WQLinear_GEMM.from_linear(
        linear, 4, GROUP, scales=scale.t().contiguous(), zeros=zero.t().contiguous()
    )
    return {name: getattr(made, name).cpu() for name in ("qweight", "qzeros", "scales")}, exact


def gptq(weight: Tensor) -> Written:
    module = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda_old")
    scale, zero, exact = integers(weight)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = exact
    made = module.QuantLinear(4, GROUP, weight.shape[1], weight.shape[0], False)
    made.pack(linear, scale.clone(), zero.clone(), None)
    found = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}
    found["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    found["scales"] = found["scales"].half()
    return found, exact


def formats() -> dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]]:
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    settings = {"bits": 4, "group_size": GROUP}
    return {
        "pack-quantized": compressed("pack-quantized", **four, symmetric=True),
        "pack-quantized, zero points": compressed("pack-quantized", **four, symmetric=False),
        "pack-quantized, 8 bits": compressed("pack-quantized", **{**four, "num_bits": 8}, symmetric=True),
        "int-quantized": compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        "float-quantized": compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
        "float-quantized, blocks": compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 32], symmetric=True
        ),
        "awq": (awq, {"quant_method": "awq", "version": "gemm", "zero_point": True, **settings}),
        "gptq": (gptq, {"quant_method": "gptq", "desc_act": False, "sym": False, **settings}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    sys.path.append(str(parser.parse_args().site))
    for name in ("awq", "awq.modules", "awq.modules.linear", "auto_gptq", "auto_gptq.nn_modules"):
        package = types.ModuleType(name)  # whose own __init__ imports what only GPUs have
        package.__path__ = [str(Path(parser.parse_args().site, *name.split(".")))]
        sys.modules[name] = package
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    family, passed = FAMILIES["llama"], True
    for name, (write, config) in formats().items():
        with tempfile.TemporaryDirectory() as temporary:
            short, whole = Path(temporary) / "short", Path(temporary) / "whole"
            for folder in (short, whole):
                random_model(replace(family, settings={**family.settings, **SIZES})).save_pretrained(folder)
            stored = load_file(short / "model.safetensors")
            found, exact = dict(stored), dict(stored)
            for key in [key for key in stored if "_proj.weight" in key]:
                parts, exact[key] = write(found.pop(key).float())
                base = key.removesuffix("weight")
                found |= {base + end: part.contiguous() for end, part in parts.items()}
            save_file(found, short / "model.safetensors", {"format": "pt"})
            save_file({key: tensor.contiguous() for key, tensor in exact.items()}, whole / "model.safetensors")
            settings = json.loads((short / "config.json").read_text())
            (short / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
            cache = CacheConfig(memory="64MiB", deterministic=True)
            engine = Engine.from_pretrained(short, device="cpu", dtype="float32", cache=cache)
            logits = parity.prompt_logits(engine, PROMPT, len(PROMPT))
            theirs = torch.from_numpy(parity.transformers_logits(whole, PROMPT))
            check = parity.compare_logits(name, logits, theirs)
            kinds = [str(each.weight.dtype) for each in engine.loaded.model.modules() if isinstance(each, Linear)]
            counts = {kind.removeprefix("torch."): kinds.count(kind) for kind in sorted(set(kinds))}
            print(f"{name}: {'ok' if check.passed else 'MISS'}, {check.detail}; weights {counts}", flush=True)
            passed = passed and check.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
