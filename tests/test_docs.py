"""The examples in the documents are run here, as they stand there."""

import argparse
import re
import runpy
import shlex
from dataclasses import fields
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


def text_of(name: str) -> str:
    """The text of a page, on one line."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def table_of(name: str, head: str) -> list[list[str]]:
    """The rows of the table of a page whose first line begins with a text, as cells without marks of stress."""
    text = (ROOT / name).read_text(encoding="utf-8")
    rows = text[text.index(f"\n|{head}") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in (rows[0], *rows[2:])]


def test_the_default_memory_is_said_the_same_everywhere() -> None:
    from hybrid.cache.config import CPU_MEMORY, GPU_MEMORY
    from hybrid.commands.commands import DEFAULT_MEMORY

    assert f"{GPU_MEMORY} of what the weights leave free on a GPU, {CPU_MEMORY >> 30} GiB on a CPU" == DEFAULT_MEMORY
    assert DEFAULT_MEMORY in text_of("docs/api.md")


def options_of(command: str) -> list[argparse.Action]:
    """The options of a command."""
    from hybrid.commands.main import COMMANDS

    parser = argparse.ArgumentParser()
    next(each for each in COMMANDS if each.name == command).add_arguments(parser)
    return parser._actions


@pytest.mark.parametrize(
    "command", ["demo", "doctor", "fleet", "generate", "models", "parity", "serve", "stress", "tree"]
)
def test_the_help_names_the_default_that_an_option_has(command: str) -> None:
    for action in options_of(command):
        named = re.search(r"\(default: (\d[\w.-]*)\)", action.help or "")
        if named is not None and action.default is not None:
            default = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
            assert named[1] == default, f"hybrid {command} {action.option_strings}: {action.help}"


def test_the_page_of_the_server_has_the_defaults_of_its_options() -> None:
    defaults = {action.option_strings[0]: action.default for action in options_of("serve") if action.option_strings}
    found = dict(re.findall(r"`(--[\w-]+)` \((?:[a-z ]*)(\d+)\b", text_of("docs/server.md")))
    found |= {"--max-tokens": re.findall(r"`--max-tokens` tokens \((\d+)", text_of("docs/server.md"))[0]}
    assert len(found) >= 3 and {name: str(defaults[name]) for name in found} == found


def test_what_the_documents_say_is_not_there_is_not_there() -> None:
    from hybrid import SamplingParams
    from hybrid.commands.main import COMMANDS

    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    absent = " ".join(re.findall(r"^\| (.*) \| not there \|$", page, re.MULTILINE))
    assert "beam search" in absent
    names = {field.name for field in fields(SamplingParams)}
    assert not names & set(re.findall(r"`(\w+)`", absent)) and "num_beams" not in names
    commands = {command.name for command in COMMANDS}
    assert {"serve", "fleet"} <= commands and "there is no server" not in text_of("docs/migrating.md")


def test_figures_that_are_quoted_twice_agree() -> None:
    rows = table_of("docs/performance.md", " operation | SGLang | ours")[1:]
    ratios = [float(row[3]) for row in rows if "memory" not in row[0]]
    said = f"{min(ratios):g} to {max(ratios):g} times as fast"
    assert said in text_of("README.md") and f"(#the-prefix-tree) | {said}" in text_of("docs/performance.md")

    (_, *cells), *rows = table_of("README.md", " trace, GB | lmsys 3")
    quoted = {name.replace("*", ""): figures for name, *figures in rows}
    known = {
        f"{row[1]} {row[2]}": row
        for row in table_of("docs/eviction.md", " geometry | trace | GB | LRU")
        if row[0] == "qwen35_4b"
    }
    assert quoted["LRU (SGLang-like)"] == [known[cell][3] for cell in cells]
    assert quoted["Marconi, best alpha in hindsight"] == [known[cell][4].split(", ")[1] for cell in cells]
    assert quoted["`lhd`, the default"] == [known[cell][6].strip("* ") for cell in cells]


def test_the_readme_has_every_model_type_that_is_tested() -> None:
    from hybrid.models.loading import ARCHITECTURES

    named = {name for row in table_of("README.md", " | CPU float32")[1:] for name in re.findall(r"`(\w+)`", row[0])}
    assert named == set(ARCHITECTURES)


def test_the_table_of_models_has_every_model_type_that_is_tested() -> None:
    """`tests/models/test_families.py` compares each with transformers, and its hits in three dtypes."""
    from hybrid.models.loading import ARCHITECTURES

    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?`) \| .* \| tested, fp32 \| tested, all three dtypes \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(ARCHITECTURES)


def typed(path: Path) -> list[list[str]]:
    """The words of each command of ours in the blocks of a page, whole: lines that go on behind a backslash are one."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for block in re.findall(r"```(?:sh)?\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    parts = [part.split("#")[0].strip() for line in lines for part in re.split(r"&&|\||;", line)]
    return [shlex.split(part)[1:] for part in parts if re.match(r"(\$ )?hybrid [a-z]", part)]


def test_commands_in_blocks_are_parsed_as_they_stand(capsys: pytest.CaptureFixture[str]) -> None:
    from hybrid.commands.main import make_parser

    parser, seen = make_parser(), 0
    for path in DOCUMENTS:
        for words in typed(path):
            try:
                parser.parse_args(words)
            except SystemExit:
                pytest.fail(f"{path.name}: {words}: {capsys.readouterr().err}")
            seen += 1
    assert seen >= 5
