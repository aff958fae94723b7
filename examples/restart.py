#!/usr/bin/env python
"""What was cached survives a restart: what one process computed is a hit in the next one.

    python examples/restart.py [--model FOLDER_OR_HUB_ID] [--directory DIRECTORY]

The first run answers; what it has cached is in the directory when it ends, and each later run finds it there. Without
`--directory` both happen here.
"""

import argparse
import tempfile
from pathlib import Path

import hybrid

MANUAL = "The with statement is used to wrap the execution of a block with methods defined by a context manager. " * 8
PARAMS = hybrid.SamplingParams(max_new_tokens=16)


def run(model: str, directory: Path) -> None:
    """One life of a server: answer, and leave what is cached on disk."""
    cache = hybrid.CacheConfig(memory="64MiB", disk="1GiB", directory=directory)
    with hybrid.Engine.from_pretrained(model, cache=cache) as engine:
        output = engine.generate(MANUAL + "The with", PARAMS)[0]
        print(f"{output.text!r}: {output.usage.cached_tokens} of {output.usage.prompt_tokens} tokens cached")
        print(output.explain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="folder or hub id (default: the model inside the package)")
    parser.add_argument("--directory", type=Path, help="where copies are (default: a temporary one, and two lives)")
    args = parser.parse_args()
    if args.directory is not None:
        run(args.model, args.directory)
        return
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            run(args.model, Path(folder) / "cache")


if __name__ == "__main__":
    main()
