#!/usr/bin/env python
"""Two LoRA adapters and the model alone in one batch, each with what it cached apart; loaded and dropped at run time.

python examples/adapters.py [ADAPTER_FOLDER ...] [--model FOLDER_OR_HUB_ID]

Without folders two random adapters are written, as PEFT's save_pretrained would write them.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import hybrid

PROMPT = "The import statement combines two operations; it searches for the named module, then binds the results. " * 3


def write_random_adapter(folder: Path, engine: hybrid.Engine, seed: int) -> Path:
    """An adapter of rank 4 for the first projection of every feed-forward layer."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in engine.model.named_modules():
        if name.endswith("mlp.gate_proj"):
            outputs, inputs = module.weight.shape
            for matrix, shape in (("lora_A", (4, inputs)), ("lora_B", (outputs, 4))):
                values = torch.randn(shape, generator=generator) / 5
                tensors[f"base_model.model.{name}.{matrix}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["gate_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="folders of LoRA adapters of PEFT")
    parser.add_argument("--model", default="tiny", help="folder or hub id (default: the model inside the package)")
    args = parser.parse_args()

    engine = hybrid.Engine.from_pretrained(args.model, cache=hybrid.CacheConfig(memory="64MiB"))
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(folder) for folder in args.folders]
        folders = folders or [write_random_adapter(Path(root) / f"random-{n}", engine, n) for n in range(2)]
        for folder in folders:
            engine.adapters.load(folder.name, folder)
    print(f"{len(engine.adapters)} adapters of {engine.adapters.num_bytes} bytes")

    names = [None, *engine.adapters]
    params = [hybrid.SamplingParams(max_new_tokens=12, adapter=name) for name in names]
    for run in ("cold", "cached"):
        for name, output in zip(names, engine.generate([PROMPT] * len(params), params, progress=False), strict=True):
            print(f"{run} {name}: {output.text!r}, {output.usage.cached_tokens} tokens cached")

    for name in list(engine.adapters):
        engine.adapters.unload(name)
    print(f"{len(engine.adapters)} adapters of {engine.adapters.num_bytes} bytes")


if __name__ == "__main__":
    main()
