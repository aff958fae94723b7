#!/usr/bin/env python
"""An agent in transformers that tries several ways from one point, and takes the worse ones back.

    python examples/agent.py [--model FOLDER_OR_HUB_ID]

`fork` gives a second past after the same tokens; `rewind` takes tokens back. On a model with linear attention neither
can be had from transformers' own cache: its `crop` leaves the states as they are.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybrid

TINY = str(Path(__file__).parent.parent / "models" / "tiny")
TASK = "A list is a mutable sequence. A tuple is an immutable sequence. A dictionary maps keys to values. " * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY, help="folder or hub id (default: the model inside the package)")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    cache = hybrid.hf.PrefixCache(model, memory="64MiB", chunk_size=64)

    def tokens(text: str) -> Tensor:
        return tokenizer(text, return_tensors="pt").input_ids

    task = tokens(TASK)
    options = {"max_new_tokens": 24, "do_sample": False}
    with cache.session(task) as trunk:
        # Two branches from one point. Keys and values are shared, states are copied.
        for step in (" Use a list when", " Use a tuple when"):
            way = torch.cat([task, tokens(step)], dim=1)
            branch = trunk.fork()
            output = model.generate(way, **branch.as_argument, **options)
            print(f"branch {step!r}: {tokenizer.decode(output[0, way.shape[1] :])!r}")

        # The trunk goes one way, and takes it back to the task.
        way = torch.cat([task, tokens(" This is wrong:")], dim=1)
        model.generate(way, **trunk.as_argument, **options)
        before = trunk.get_seq_length()
        trunk.rewind(before - task.shape[1] + 1)
        print(f"rewound from {before} to {trunk.get_seq_length()} tokens")
        way = torch.cat([task, tokens(" A dictionary")], dim=1)
        output = model.generate(way, **trunk.as_argument, **options)
        print(f"after it: {tokenizer.decode(output[0, way.shape[1] :])!r}")

    # What the branches computed is known to everybody.
    print(cache.explain(torch.cat([task, tokens(" Use a list when it is long")], dim=1)))
    cache.audit()


if __name__ == "__main__":
    main()
