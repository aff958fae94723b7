#!/usr/bin/env python
"""A chat on the engine: as texts, and as the tokens that were generated.

    python examples/conversation.py [--model FOLDER_OR_HUB_ID] [--tokens 48]

A client that sends texts has its answers tokenized again, sometimes as other tokens, and templates of models that think
leave earlier reasoning out: what was computed of those turns does not hit. A `Conversation` keeps the ids.
"""

import argparse

import hybrid

SYSTEM = {"role": "system", "content": "You explain Python in one sentence, to readers who know other languages. " * 4}
QUESTIONS = ["What does the with statement do?", "And what is a context manager?", "Where is it defined?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder or hub id (default: the model inside the package)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer (default: 48)")
    args = parser.parse_args()

    params = hybrid.SamplingParams(max_new_tokens=args.tokens)
    with hybrid.Engine.from_pretrained(args.model, cache=hybrid.CacheConfig(memory="64MiB")) as engine:
        messages = [SYSTEM]
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            output = engine.chat(messages, params)
            messages.append(output.message())
            print(f"texts: {output.usage.cached_tokens} of {output.usage.prompt_tokens} tokens cached")

        chat = hybrid.Conversation(engine, [SYSTEM], params, namespace="ids")
        for question in QUESTIONS:
            print(f"> {question}")
            print("".join(chat.stream(question)).strip())
            hit = engine.explain(chat.token_ids, namespace="ids")
            print(f"[{hit.usable_hit} of {hit.asked} tokens are cached for the next turn]")


if __name__ == "__main__":
    main()
