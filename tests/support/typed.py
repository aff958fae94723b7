"""The share of the public interface whose type is known to pyright: `python typed.py FOLDER --at-least PERCENT`.

FOLDER holds the package `hybrid`. Exit status 1, with a list of symbols, if less is known.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def symbols(folder: Path) -> list[dict[str, Any]]:
    """The symbols that the package exports, as pyright describes them."""
    places = os.pathsep.join([str(folder), *(path for path in sys.path if path.endswith("site-packages"))])
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pyright", "--pythonpath", sys.executable),
            *("--verifytypes", "hybrid", "--ignoreexternal", "--outputjson"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": places},
        cwd=folder,
    )
    report = json.loads(result.stdout)["typeCompleteness"]
    return [symbol for symbol in report["symbols"] if symbol["isExported"]]


def main() -> int:
    """Print the share of known types; below the bound, every symbol that lacks one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at-least", type=float, default=0.0, metavar="PERCENT")
    args = parser.parse_args()
    exported = symbols(args.folder.resolve())
    unknown = [symbol for symbol in exported if not symbol["isTypeKnown"]]
    percent = 100 * (1 - len(unknown) / len(exported))
    if percent < args.at_least:
        for symbol in unknown:
            reasons = {diagnostic["message"].splitlines()[0] for diagnostic in symbol["diagnostics"]}
            print(symbol["name"], *sorted(reasons), sep="\n    ")
        print(*Counter(".".join(symbol["name"].split(".")[:2]) for symbol in unknown).items())
    print(f"types are known of {percent:.1f} % of {len(exported)} exported symbols, required: {args.at_least:g} %")
    return int(percent < args.at_least)


if __name__ == "__main__":
    sys.exit(main())
