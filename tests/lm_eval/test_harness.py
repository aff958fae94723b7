"""The engine as a model of lm-evaluation-harness, beside the harness's own model of transformers, on tasks in its own
format. Runs where the harness is installed (`make harness`)."""

import contextlib
import importlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval.api", reason="the extra 'lm-eval' is not installed")

from hybrid import ArgumentError, Engine
from hybrid.lm_eval.model import HybridLM

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.syspath_prepend(str(ROOT / "bench"))
        arguments = ["--documents", "12", "--memory", "64MiB", "--max-length", "1023", "--json"]
        assert importlib.import_module("lm_eval_tasks").main(arguments) == 0
    found: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
    return found


def test_scores_are_those_of_transformers_and_the_examples_are_computed_once(found: dict[str, Any]) -> None:
    for name in ("next_sentence", "perplexity_of_documents"):
        one = found[name]
        assert one["largest_difference"] < 2e-5 * one["largest_value"] and one["largest_value"] > 50
        assert one["metrics"].keys() == one["metrics_of_transformers"].keys()
        for metric, value in one["metrics_of_transformers"].items():
            assert one["metrics"][metric] == pytest.approx(value, rel=1e-4)
    assert found["next_sentence"]["hit_rate"] > 0.6


def test_answers_are_those_of_transformers(found: dict[str, Any]) -> None:
    assert found["end_of_sentence"]["equal_answers"] == "12 of 12"


def test_what_a_task_asks_for_and_cannot_have_is_refused(tiny: Engine) -> None:
    class Asked:
        args = ("The with statement", {"until": ["."], "max_gen_toks": 4, "num_beams": 3})

    with pytest.raises(ArgumentError, match="num_beams"):
        HybridLM(tiny).generate_until([Asked()])
    with pytest.raises(ArgumentError, match="max_length"):
        HybridLM(tiny, max_length=10**6)
