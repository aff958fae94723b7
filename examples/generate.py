#!/usr/bin/env python
"""transformers' `generate` with the cache: one document, a batch of questions, beams, and a session for one's own call.

python examples/generate.py [--model FOLDER_OR_HUB_ID]
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybrid

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "models" / "tiny")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY, help="folder or hub id (default: the model inside the package)")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    cache = hybrid.hf.PrefixCache(model, memory="64MiB", chunk_size=64)

    document = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")[:1500]
    prompt = tokenizer(f"{document}\n\nIn short:", return_tensors="pt")
    for _ in range(2):
        output = cache.generate(**prompt, max_new_tokens=16, do_sample=False)
        print("one:", cache.explanations[0])
    print(repr(tokenizer.decode(output[0, prompt.input_ids.shape[1] :])))

    # Prompts of different lengths, padded on the left: each finds its own prefix.
    questions = [f"{document}\n\nWhat is {what}?" for what in ("a page", "a checkpoint of the state")]
    batch = tokenizer(questions, return_tensors="pt", padding=True)
    cache.generate(**batch, max_new_tokens=16, do_sample=False)
    for explanation in cache.explanations:
        print("batch:", explanation)

    cache.generate(**prompt, max_new_tokens=16, num_beams=3)
    print("beams:", cache.explanations[0])

    # For those who call generate themselves.
    with cache.session(prompt.input_ids) as past:
        own = model.generate(**prompt, **past.as_argument, max_new_tokens=16, do_sample=False)
    print("session:", past.explanations[0])
    assert torch.equal(own, output)
    cache.audit()


if __name__ == "__main__":
    main()
