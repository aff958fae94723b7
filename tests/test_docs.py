"""The examples in the documents are run here, as they stand there."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}-{at}")
    for path in DOCUMENTS
    for at, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.filterwarnings("error::FutureWarning")
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


def headings(path: Path) -> list[str]:
    """The anchors of a page, as GitHub derives them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [re.sub(r"[^\w\- ]", "", found.lower()).replace(" ", "-") for found in re.findall(r"^#+ (.*)$", text, re.M)]


def test_links_to_a_heading_find_one() -> None:
    for path in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", path.read_text(encoding="utf-8")):
            page = path.parent / target if target else path
            assert headings(page).count(anchor) == 1, f"{path.name} points at {target}#{anchor}"


def commands_of(path: Path) -> list[str]:
    """Return what a page shows to be typed: spans and lines of code that begin with a program of ours or `make`."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:sh)?\n(.*?)```", text, re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines()]
    return [
        " ".join(each.split()) for each in (*lines, *spans) if re.match(r"(hybrid|make) |(python )?bench/\S+\.py", each)
    ]


def test_commands_that_the_documents_show_have_these_options() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    of_hybrid = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("hybrid/commands/*.py"))
    for path in DOCUMENTS:
        for command in commands_of(path):
            program, *rest = command.removeprefix("python ").split()
            if program == "make":
                assert rest[0] in targets, f"{path.name}: {command}"
            else:
                source = of_hybrid if program == "hybrid" else (ROOT / program).read_text(encoding="utf-8")
                source += (ROOT / "bench" / "common.py").read_text(encoding="utf-8")
                for option in re.findall(r"--[a-z][a-z-]*", command):
                    assert f'"{option}"' in source or option == "--help", f"{path.name}: {command}"


def test_the_page_on_errors_has_every_public_one() -> None:
    import hybrid

    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    things = {name: getattr(hybrid, name) for name in hybrid.__all__}
    errors = [name for name, thing in things.items() if isinstance(thing, type) and issubclass(thing, Exception)]
    assert [name for name in errors if not re.search(rf"`(hybrid\.)?{name}\b", page)] == []


def test_the_map_names_modules_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = "|".join(path.parent.name for path in ROOT.glob("hybrid/*/__init__.py"))
    for room, name in re.findall(rf"\b({rooms})/(\w+)", text):
        assert (ROOT / "hybrid" / room / f"{name}.py").exists(), f"{room}/{name}"


def test_every_command_in_the_readme_is_one() -> None:
    from hybrid.commands.main import COMMANDS

    named = set(re.findall(r"`hybrid (\w+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named == {command.name for command in COMMANDS}


def test_the_page_of_the_public_names_is_what_their_docstrings_say() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_api.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run python docs/make_api.py"


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
