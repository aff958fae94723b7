"""What the documents show is run here, as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}-{at}")
    for path in DOCUMENTS
    for at, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_programs_in_the_documents_run(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block, "document", "exec"), {"__name__": "document"})


def test_the_documents_point_at_files_that_exist() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (path.parent / target).exists(), f"{path.name} points at {target}"
        for target in re.findall(r"`(?:python )?((?:hybrid|kernels|models|bench|tests|examples)/[\w/]+\.py)", text):
            assert (ROOT / target).exists(), f"{path.name} names {target}"


def test_every_command_in_the_readme_is_one() -> None:
    from hybrid.commands.main import COMMANDS

    named = set(re.findall(r"`hybrid (\w+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named == {command.name for command in COMMANDS}


def test_the_page_of_the_public_names_is_what_their_docstrings_say() -> None:
    check = subprocess.run([sys.executable, "docs/make_api.py", "--check"], cwd=ROOT)
    assert check.returncode == 0, "run python docs/make_api.py"


REPLACED = (
    r"\bso many\b",
    r"\bspared\b",
    r"\bthe books\b",
    r"\b(?:no|some|every)body\b",
    r"\bwhoever\b",
    r"\blikeliest\b",
    r"\bgo(?:es)? (?:first|on)\b",
    r"\bworth its room\b",
    r"\b(?:tells|told)\b",
)
"""Phrases of which documents and code have a plainer form: n, saved, bookkeeping, no request, most likely, is evicted
first, continues, admitted, reports."""


SOURCES = [path for folder in ("hybrid", "kernels", "models") for path in sorted(ROOT.glob(f"{folder}/**/*.py"))]


def test_the_words_are_those_of_the_field() -> None:
    for path in [*DOCUMENTS, *SOURCES]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = [phrase for phrase in REPLACED if re.search(phrase, line, re.IGNORECASE)]
            assert not found, f"{path.relative_to(ROOT)}:{number}: {line}"


def test_the_table_of_models_has_every_model_type_that_is_tested() -> None:
    """`tests/models/test_families.py` compares each with transformers, and its hits in three dtypes."""
    from hybrid.models.loading import ARCHITECTURES

    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?`) \| .* \| tested, fp32 \| tested, all three dtypes \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(ARCHITECTURES)


def test_the_map_stays_short() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) < 180
