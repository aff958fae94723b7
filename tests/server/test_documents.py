"""The programs in the documents that need a server, as they stand there."""

import re
from pathlib import Path

import pytest

from support.served import Poster

ROOT = Path(__file__).parents[2]
BLOCKS = [
    pytest.param(block, id=f"{name}-{at}")
    for name in ("README.md", "docs/server.md")
    for at, block in enumerate(re.findall(r"```py\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_programs_in_the_documents_run(post_tiny: Poster, block: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    assert "http://127.0.0.1:8000" in block
    exec(compile(block.replace("http://127.0.0.1:8000", post_tiny.address), "document", "exec"), {})
    assert capsys.readouterr().out.strip()
