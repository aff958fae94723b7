#!/usr/bin/env python
"""A pipeline of transformers with the cache installed: nothing else of the program changes.

    python examples/pipeline.py [--model FOLDER_OR_HUB_ID] [--tokens 24]

Without `--model` the small model inside the package answers; it knows nothing.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import hybrid

TINY = str(Path(__file__).parent.parent / "models" / "tiny")
DOCUMENT = "The json module encodes and decodes the JSON format. The re module has regular expressions. " * 4
QUESTIONS = ["Which module decodes JSON?", "Which module has regular expressions?", "Which module decodes JSON?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TINY, help="folder or hub id (default: the model inside the package)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer (default: 24)")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)

    # Without determinism the cache may draft tokens: the third question is the first one again.
    cache = hybrid.hf.PrefixCache(model, memory="64MiB", deterministic=False)
    cache.install(speculation="cache")
    for question in QUESTIONS:
        messages = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": question}]
        found = generator(messages, max_new_tokens=args.tokens, do_sample=False)
        print(f"> {question}\n{found[0]['generated_text'][-1]['content'].strip()}")
        print(f"[{cache.explanations[0]}]\n")
    cache.uninstall()

    drafts = cache.speculation_stats()["continuation"]
    print(f"{cache.stats().hit_rate:.0%} of the prompt tokens were not computed")
    print(f"{drafts.accepted_tokens} of {drafts.drafted_tokens} drafts were accepted")
    cache.audit()


if __name__ == "__main__":
    main()
