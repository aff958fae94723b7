"""The build of this project: all that belongs into it and nothing else. Offline."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
NAME = "hybrid_prefix_cache-0.1.0"
NOT_OURS = (".*", "build", "dist", "*.egg-info", "__pycache__")


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a source distribution or a wheel with the project's backend."""
    out.mkdir()
    program = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=source, check=True, capture_output=True)
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, without what is not part of it."""
    copy = tmp_path_factory.mktemp("project") / "copy"
    return Path(shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_OURS)))


@pytest.fixture(scope="module")
def sdist(sources: Path) -> Path:
    return build("sdist", sources, sources.parent / "sdist")


@pytest.fixture(scope="module")
def unpacked(sdist: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent.parent / "unpacked", filter="data")
    return sdist.parent.parent / "unpacked" / NAME


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Path:
    """The wheel, built from the source distribution, as installers do."""
    return build("wheel", unpacked, unpacked.parent / "wheel")


def test_the_source_distribution_holds_all_that_is_in_the_project(sources: Path, unpacked: Path) -> None:
    def files(folder: Path) -> set[str]:
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {str(path) for path in found if not {"__pycache__", "build"} & set(path.parts)}

    ours = {name for name in files(sources) if ".egg-info" not in name}
    theirs = {name for name in files(unpacked) if ".egg-info" not in name}
    assert ours - theirs == set()
    assert theirs - ours == {"PKG-INFO", "setup.cfg"}
    for folder in ("tests", "docs", "examples", "bench", "kernels", "models"):
        assert any(name.startswith(f"{folder}/") for name in theirs)


def test_the_wheel_holds_the_packages_and_the_licences_of_all_that_ships(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = message_from_string(archive.read(f"{NAME}.dist-info/METADATA").decode())
        licence = archive.read(f"{NAME}.dist-info/licenses/models/tiny/LICENSE.PSF").decode()
    assert wheel.stat().st_size < 10_000_000
    assert {name.split("/")[0] for name in names} == {"hybrid", f"{NAME}.dist-info"}
    assert {"hybrid/kernels/ops.py", "hybrid/models/tiny/model.safetensors", "hybrid/observe/tree.html"} <= names
    assert {"hybrid/py.typed", "hybrid/serve/async_engine.py", "hybrid/kernels/triton/attention.py"} <= names
    assert not [name for name in names if Path(name).name.startswith(("train", "test_"))]
    assert f"{NAME}.dist-info/licenses/LICENSE" in names
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence
    assert metadata["Name"] == "hybrid-prefix-cache"
    assert metadata["License-Expression"] == "Apache-2.0 AND PSF-2.0"
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    for version in ("3.11", "3.12", "3.13"):  # those that were tried
        assert f"Programming Language :: Python :: {version}" in metadata.get_all("Classifier", [])


def test_a_wheel_is_pure(wheel: Path) -> None:
    """So that its tag is true: it holds nothing that was compiled."""
    assert wheel.name == f"{NAME}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        suffixes = {Path(name).suffix for name in archive.namelist() if ".dist-info/" not in name}
        wheel_file = archive.read(f"{NAME}.dist-info/WHEEL").decode()
    assert suffixes <= {".py", ".typed", ".html", ".json", ".jinja", ".safetensors", ".md", ".PSF"}
    assert "Root-Is-Purelib: true" in wheel_file


def test_the_wheel_can_be_imported_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = (
        "import hybrid, hybrid.serve, hybrid.kernels.ops; from hybrid.commands.main import main; print(hybrid.__file__)"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == str(tmp_path / "installed" / "hybrid" / "__init__.py")


def test_the_source_distribution_runs_its_tests(unpacked: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:cov"]
    tests = ["tests/test_key.py", "tests/tree/test_tree.py"]
    result = subprocess.run([*command, *tests], cwd=unpacked, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_ranges_end_at_what_was_tried() -> None:
    """They include what the tests run with, and what inference engines pin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name, more in extras.items() if name != "dev" for line in more)]
    ranges = {canonicalize_name(each.name): each.specifier for each in map(Requirement, lines)}
    open_above = {name for name, found in ranges.items() if not any(each.operator == "<" for each in found)}
    assert open_above - {"hybrid-prefix-cache"} == {
        "causal-conv1d"
    }  # it is built from its sources, against the torch at hand
    del ranges["hybrid-prefix-cache"]  # an extra may name others of this package
    assert all(any(each.operator == ">=" for each in found) for found in ranges.values())
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for name, version in pinned.items():
        assert canonicalize_name(name) not in ranges or version in ranges[canonicalize_name(name)], name
    for name, versions in {"numba": ("0.65.0", "0.65.1"), "llguidance": ("1.7.0",), "torch": ("2.14.1",)}.items():
        assert all(version in ranges[name] for version in versions), name
    assert not {"triton", "flash-linear-attention"} & {Requirement(line).name for line in project["dependencies"]}
