"""Every model family against transformers' own, on random checkpoints that transformers wrote, and hits against cold
runs. `hybrid parity --all-families` runs all scenarios on them; here are those that share most among requests."""

from pathlib import Path

import pytest
import torch

from hybrid import CacheConfig, Engine
from hybrid.commands import parity
from hybrid.commands.random_checkpoints import ALL_FAMILIES, FAMILIES, is_comparable, write_random_checkpoint
from hybrid.models.loading import ARCHITECTURES

CONFIG = CacheConfig(memory="64MiB", deterministic=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints, each written once."""
    return {
        name: write_random_checkpoint(tmp_path_factory.mktemp("family") / str(at), name)
        for at, name in enumerate(FAMILIES)
    }


def judge_of(path: Path, dtype: str) -> parity.Judge:
    return parity.Judge(Engine.from_pretrained(path, device="cpu", dtype=dtype, cache=CONFIG))


def assert_all_pass(checks: list[parity.Check]) -> None:
    assert not [check for check in checks if not check.passed]


def test_there_is_a_random_checkpoint_of_every_model_type() -> None:
    written_types = {name.partition(",")[0] for name in ALL_FAMILIES}
    vision_language = {name.removesuffix("_text") for name in written_types if name.startswith("qwen3_5")}
    assert set(ARCHITECTURES) == written_types | vision_language


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, written: dict[str, Path]) -> None:
    if not is_comparable(name):
        pytest.skip("the installed transformers computes it otherwise than it was trained")
    own = judge_of(written[name], "float32")
    theirs = parity.transformers_logits(written[name], parity.compared_with_transformers(own))
    assert_all_pass(parity.against_transformers(own, torch.from_numpy(theirs)))


@pytest.mark.parametrize("name", [name for name in FAMILIES if "," not in name])
def test_hits_are_bitwise_in_a_busy_batch(name: str, written: dict[str, Path]) -> None:
    judge = judge_of(written[name], "float32")
    assert_all_pass([parity.busy_batch(judge)])
    answers = [judge.cold(prompt) for prompt in parity.sharing(judge)]  # they were computed to compare with
    assert all(len(set(answer.token_ids)) > 8 for answer in answers)


@pytest.mark.parametrize(
    ("name", "dtype"),  # float16 is widened to float32, as for all
    [("qwen3_5_text", "float16"), *((name, "bfloat16") for name in FAMILIES if "," not in name)],
)
def test_hits_are_bitwise_in_half_precision_too(name: str, dtype: str, written: dict[str, Path]) -> None:
    assert_all_pass([parity.repeated_prompt(judge_of(written[name], dtype))])
