#!/usr/bin/env python
"""A chat in transformers, with turns: each turn computes only what is new in it.

    python examples/chat.py [--model FOLDER_OR_HUB_ID] [--tokens 48]

Without `--model` the small model inside the package answers; it knows nothing.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hybrid

TINY = str(Path(__file__).parent.parent / "models" / "tiny")
QUESTIONS = [
    "The with statement is used to wrap the execution of a block with methods defined by a context manager. "
    "This allows common try except finally usage patterns to be encapsulated for convenient reuse. What does it do",
    "And what is a context manager",
    "Where is it defined",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY, help="folder or hub id (default: the model inside the package)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer (default: 48)")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    cache = hybrid.hf.PrefixCache(model, memory="64MiB", chunk_size=64)

    # A chat is kept as token ids: text that is tokenized again may come out as other tokens.
    chat = torch.empty(1, 0, dtype=torch.long)
    for question in QUESTIONS:
        new = tokenizer(f"Question: {question}?\nAnswer:", return_tensors="pt").input_ids
        chat = torch.cat([chat, new], dim=1)
        start = time.perf_counter()
        output = cache.generate(chat, max_new_tokens=args.tokens, do_sample=False)
        answer = tokenizer.decode(output[0, chat.shape[1] :], skip_special_tokens=True)
        print(f"> {question}?\n{answer.strip()}")
        print(f"[{time.perf_counter() - start:.2f} s; {cache.explanations[0]}]\n")
        chat = torch.cat([output, tokenizer("\n", return_tensors="pt").input_ids], dim=1)

    cache.audit()
    print(f"{cache.stats().hit_rate:.0%} of the prompt tokens were not computed")


if __name__ == "__main__":
    main()
