#!/usr/bin/env python
"""What was cached survives a restart: one process answers and saves, another one loads and continues.

    python examples/restart.py [--model FOLDER_OR_HUB_ID] [--file FILE]

The first run answers, and saves to the file; each later run finds it and loads it. Without `--file` both happen here.
"""

import argparse
import tempfile
from pathlib import Path

import hybrid

MANUAL = "The with statement is used to wrap the execution of a block with methods defined by a context manager. " * 8
PARAMS = hybrid.SamplingParams(max_new_tokens=16)


def run(model: str, file: Path) -> None:
    """One life of a server: load what an earlier one has saved, answer, save."""
    with hybrid.Engine.from_pretrained(model, cache=hybrid.CacheConfig(memory="64MiB")) as engine:
        if file.is_file():
            try:
                print(f"loaded {engine.load(file)}")
            except hybrid.CacheFileError as error:  # of another model or version: everything is computed again
                print(f"not loaded: {error}")
        output = engine.generate(MANUAL + "The with", PARAMS)[0]
        print(f"{output.text!r}: {output.usage.cached_tokens} of {output.usage.prompt_tokens} tokens cached")
        print(f"saved {engine.save(file)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder or hub id (default: the model inside the package)")
    parser.add_argument("--file", type=Path, help="where prefixes are kept (default: a temporary file, and two lives)")
    args = parser.parse_args()
    if args.file is not None:
        run(args.model, args.file)
        return
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            run(args.model, Path(folder) / "prefixes.hybrid")


if __name__ == "__main__":
    main()
