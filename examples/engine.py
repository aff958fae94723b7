#!/usr/bin/env python
"""The library's own engine on the small model inside the package: prompts together, turns, streaming, figures.

python examples/engine.py [--model FOLDER_OR_HUB_ID]
"""

import argparse

import hybrid

DOCUMENT = (
    "The import statement combines two operations; it searches for the named module, then binds the results. " * 6
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder or hub id (default: the model inside the package)")
    args = parser.parse_args()

    engine = hybrid.Engine.from_pretrained(args.model, cache=hybrid.CacheConfig(memory="64MiB"))
    params = hybrid.SamplingParams(max_new_tokens=24)

    # Launched together: what they share is computed once.
    questions = [f"{DOCUMENT}\n\nThe {what} is" for what in ("module", "statement", "search")]
    outputs = engine.generate(questions, params, progress=False)
    for output in outputs:
        print(f"{output.usage.cached_tokens} of {output.usage.prompt_tokens} tokens cached: {output.text!r}")

    # A next turn, as it comes.
    for piece in engine.stream(questions[0] + outputs[0].text + " Then", params):
        print(piece, end="", flush=True)
    print()

    engine.cache.audit()
    print(f"{engine.cache.stats().hit_rate:.0%} of the prompt tokens were not computed")


if __name__ == "__main__":
    main()
