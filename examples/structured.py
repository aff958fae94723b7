#!/usr/bin/env python
"""Answers of a given form: a JSON schema, a regular expression and a choice, together in one batch.

python examples/structured.py [--model FOLDER_OR_HUB_ID]
"""

import argparse
import json

import hybrid

SCHEMA = {
    "type": "object",
    "properties": {"module": {"enum": ["json", "re", "os"]}, "functions": {"type": "integer", "maximum": 20}},
    "required": ["module", "functions"],
    "additionalProperties": False,
}
FORMS = {
    "schema": {"json_schema": SCHEMA},
    "date": {"regex": r"20[0-9]{2}-(0[1-9]|1[0-2])"},
    "choice": {"choice": ["a module", "a statement"]},
}
QUESTION = (
    "The import statement combines two operations; it searches for the named module, then binds the results. " * 4
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder or hub id (default: the model inside the package)")
    args = parser.parse_args()

    engine = hybrid.Engine.from_pretrained(args.model, cache=hybrid.CacheConfig(memory="64MiB"))
    params = [hybrid.SamplingParams(structured=form, max_new_tokens=120) for form in FORMS.values()]
    for run in ("cold", "cached"):
        outputs = engine.generate([QUESTION] * len(params), params, progress=False)
        for name, output in zip(FORMS, outputs, strict=True):
            print(f"{run} {name}: {output.text!r}, {output.usage.cached_tokens} tokens cached")
        print("parsed:", json.loads(outputs[0].text))


if __name__ == "__main__":
    main()
