"""What the documents show is run here, as it stands there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}-{at}")
    for path in sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
    for at, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_programs_in_the_documents_run(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block, "document", "exec"), {"__name__": "document"})


def test_the_documents_point_at_files_that_exist() -> None:
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} points at {target}"


def test_every_command_in_the_readme_is_one() -> None:
    from hybrid.commands.main import COMMANDS

    named = set(re.findall(r"`hybrid (\w+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named == {command.name for command in COMMANDS}
