"""`hybrid models`: every family is listed, and sizes are those of the models' own specs."""

import argparse
import io

from rich.console import Console

from hybrid.commands import models
from hybrid.models.loading import ARCHITECTURES


def run(model: str | None) -> tuple[str, dict[str, object]]:
    out = io.StringIO()
    outcome = models.run(argparse.Namespace(model=model), Console(file=out, width=200))
    assert outcome.passed
    return out.getvalue(), outcome.result


def test_every_family_is_listed_and_sizes_are_those_of_published_models() -> None:
    text, result = run(None)
    assert set(models.STATES) == set(ARCHITECTURES)
    assert all(name in text for name in ARCHITECTURES)
    rows = {row["model"]: row for row in result["models"]}  # type: ignore[attr-defined]
    assert {model.name for model in models.PUBLISHED} == set(rows)
    # computed by hand: 36 layers of 32 states of 128 x 128 in float32 and windows of 3 x 8192 numbers in bfloat16; and
    # 12 layers of 2 heads of 256 for 64 tokens
    assert rows["Qwen3-Next-80B-A3B"]["state_bytes"] == 36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    assert rows["Qwen3-Next-80B-A3B"]["page_bytes"] == 64 * 12 * 2 * 2 * 256 * 2
    assert rows["Qwen3-Next-80B-A3B"]["state_tokens"] == 3144
    # 10 windows of two tokens, and 6 layers of 8 heads of 64
    assert rows["LFM2-1.2B"]["state_bytes"] == 10 * 2 * 2048 * 2
    assert rows["LFM2-1.2B"]["page_bytes"] == 64 * 6 * 2 * 8 * 64 * 2
    assert rows["Llama-3.1-8B"]["state_bytes"] == 0


def test_a_model_is_described_by_its_configuration() -> None:
    text, result = run("tiny")
    (row,) = result["models"]  # type: ignore[misc]
    assert row["model"] == "tiny" and row["state_bytes"] > row["page_bytes"] > 0
    assert "model families" not in text
