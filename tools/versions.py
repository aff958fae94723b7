"""Try the versions of other packages that nobody pinned.

    python tools/versions.py newest [--part]
    python tools/versions.py lowest

makes an environment in this checkout (`.venv-newest`, `.venv-lowest`) with the newest versions that exist, whatever
pyproject.toml says, or with the lowest that it allows, and runs in it the tests that depend on other packages, and
`hybrid parity`. Neither environment has the packages for GPUs: no flash-linear-attention, no Triton, no causal-conv1d.
Both have the torch that `make setup` takes where there is no GPU, as other versions have no build for CPUs on the
package index. The newest are looked up each time. `--part` runs a part of the tests, without
parity, and gives up where a command that makes the environment takes two minutes.

Exit status: 0, 1 where something fails, 2 where the environment could not be made: the package index cannot be reached,
say.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent

TORCH = "torch==2.13.0+cpu"

EXTRAS = ("images", "structured")
"""What the tests need beside the dependencies."""

FOR_TESTS = ("hypothesis", "peft", "pytest", "pytest-xdist")

TESTS = ("tests/hf", "tests/models", "tests/engine", "tests/prompts")

PART = (
    *("tests/hf/test_answers.py", "tests/hf/test_install.py", "tests/engine/test_structured.py"),
    *("tests/models/test_qwen3_5.py", "tests/prompts/test_encode.py"),
)

SHOWN = ("torch", "transformers", "numba", "llvmlite", "numpy", "tokenizers", "huggingface_hub", "llguidance", "pillow")


class NotMadeError(Exception):
    """An environment could not be made."""


def requirements(extras: tuple[str, ...] = EXTRAS) -> Iterator[Requirement]:
    """What pyproject.toml asks for, torch left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    for line in (line for lines in named for line in lines):
        found = Requirement(line)
        if found.name != "torch" and (found.marker is None or found.marker.evaluate()):
            yield found


def lowest(requirement: Requirement) -> str:
    """A requirement of the lowest version that is allowed.

    Raises:
        ValueError: there is no lower bound.
    """
    bounds = [Version(each.version) for each in requirement.specifier if each.operator in (">=", "==", "~=")]
    if not bounds:
        raise ValueError(f"{requirement} has no lower bound")
    return f"{requirement.name}=={max(bounds)}"


def make(folder: Path, wanted: list[str], seconds: float | None) -> None:
    """Make an environment, or bring it up to date.

    Raises:
        NotMadeError: a command failed, or took longer than the given time.
    """
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--retries", "1", "--timeout", "30"]
    here = [*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [*pip, TORCH, "setuptools>=77"],
        [*pip, "--upgrade", "--upgrade-strategy", "eager", TORCH, *FOR_TESTS, *wanted],
        here,
    ):
        try:
            subprocess.run(command, cwd=ROOT, check=True, timeout=seconds)
        except (OSError, subprocess.SubprocessError) as error:
            raise NotMadeError(str(error)) from error


def run(folder: Path, is_part: bool) -> list[str]:
    """Run tests, and parity unless it is a part, in an environment; returns which of them failed."""
    python = str(folder / "bin" / "python")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    workers = str(min(4, os.cpu_count() or 1))
    tests = PART if is_part else TESTS
    commands = {"tests": [python, "-m", "pytest", "-q", "--tb", "short", "-n", workers, "--dist", "loadfile", *tests]}
    if not is_part:
        commands["parity"] = [str(folder / "bin" / "hybrid"), "parity"]
    return [
        name
        for name, command in commands.items()
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    ]


def banner(*lines: str) -> None:
    """Print what must not be missed."""
    print("\n".join(("", "!" * 100, *(f"!!  {line}" for line in lines), "!" * 100)), flush=True)


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("versions", choices=("newest", "lowest"))
    parser.add_argument("--part", action="store_true", help="a part of the tests")
    args = parser.parse_args()
    folder = ROOT / f".venv-{args.versions}"
    if args.versions == "newest":
        wanted = [each.name for each in requirements()]
    else:
        wanted = [lowest(each) for each in requirements()]
    try:
        make(folder, wanted, 120 if args.part else None)
    except NotMadeError as error:
        banner(f"the {args.versions} versions were NOT tried: their environment could not be made", f"{error!s:.300}")
        return 2
    listed = subprocess.run(
        [str(folder / "bin" / "python"), "-m", "pip", "list", "--format", "freeze"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {name.lower() for name in SHOWN}
    versions = [line for line in listed.stdout.splitlines() if line.partition("==")[0].lower() in names]
    print(f"{args.versions}: {' '.join(versions)}", flush=True)
    failed = run(folder, args.part)
    if failed:
        banner(
            f"{' and '.join(failed)} FAILED with the {args.versions} versions:",
            *versions,
            "until that is mended the range in pyproject.toml must leave them out",
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
