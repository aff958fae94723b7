#!/usr/bin/env python
"""An agent with a tool: the model calls it, its result comes back, and the model answers.

    python examples/tools.py [--model FOLDER_OR_HUB_ID] [--choice auto]

The small model inside the package was not trained to call tools: `tool_choice="required"` has a grammar make its first
answer a call. A model that was may choose by itself: `--choice auto`. Each turn hits the one before.
"""

import argparse
from pydoc_data.topics import topics

import hybrid

NAMES = ["with", "for", "while", "try"]
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The page of the language reference on a statement.",
        "parameters": {
            "type": "object",
            "properties": {"statement": {"type": "string", "enum": NAMES}},
            "required": ["statement"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder or hub id (default: the model inside the package)")
    parser.add_argument("--choice", default="required", choices=("required", "auto"), help="of the first answer")
    args = parser.parse_args()

    engine = hybrid.Engine.from_pretrained(args.model, cache=hybrid.CacheConfig(memory="64MiB"))
    messages = [{"role": "user", "content": "What does the with statement do?"}]
    choice = args.choice
    for _ in range(4):
        params = hybrid.SamplingParams(max_new_tokens=64, parse_response=True, tool_choice=choice)
        output = engine.generate({"messages": messages, "tools": [LOOK_UP]}, params, progress=False)[0]
        print(output.usage.cached_tokens, "of", output.usage.prompt_tokens, "tokens cached")
        messages.append(output.message())
        if not output.tool_calls:
            break
        for call in output.tool_calls:
            print("calls", call.name, call.arguments)
            result = topics[call.arguments["statement"]][:1000]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        choice = "auto"
    print("answers", repr(output.content))


if __name__ == "__main__":
    main()
