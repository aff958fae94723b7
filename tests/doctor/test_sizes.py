"""Sizes of models from a configuration alone: our families, others of transformers, and what has no states."""

import json
from pathlib import Path

import pytest
from transformers import FalconH1Config, JambaConfig, LlamaConfig, PretrainedConfig

from hybrid.doctor import Sizes, Traffic, replay
from hybrid.doctor.engines import BOUND, ENGINES
from hybrid.errors import CheckpointError, UnsupportedModelError

SMALL = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "bfloat16"}
SMALL |= {"intermediate_size": 64}
TOKEN = 2 * 2 * 16 * 2  # keys and values of two heads of 16 dimensions, two bytes each; sums of states have four

OTHERS: dict[str, tuple[PretrainedConfig, tuple[int, int, int, int]]] = {
    "attention alone": (LlamaConfig(**SMALL, num_hidden_layers=3), (3 * TOKEN, 0, 3, 0)),
    "attention and Mamba": (
        JambaConfig(
            **SMALL,
            num_hidden_layers=4,
            attn_layer_period=4,
            attn_layer_offset=1,
            num_experts=1,
            mamba_d_state=8,
            mamba_d_conv=4,
        ),
        (TOKEN, 3 * 128 * (3 * 2 + 8 * 4), 1, 3),
    ),
    "both in each layer": (
        FalconH1Config(
            **SMALL,
            num_hidden_layers=2,
            mamba_d_ssm=64,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_d_state=8,
            mamba_n_groups=1,
            mamba_d_conv=4,
        ),
        (2 * TOKEN, 2 * ((64 + 2 * 8) * 3 * 2 + 4 * 16 * 8 * 4), 2, 2),
    ),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_the_sizes_of_another_model(tmp_path: Path, name: str) -> None:
    config, expected = OTHERS[name]
    config.save_pretrained(tmp_path)
    sizes = Sizes.of((tmp_path / "config.json").rename(tmp_path / "of-my-model.json"))
    assert (sizes.token_bytes, sizes.state_bytes, sizes.attention_layers, sizes.state_layers) == expected


def test_a_configuration_is_enough_and_states_are_not_needed(tmp_path: Path) -> None:
    OTHERS["attention alone"][0].save_pretrained(tmp_path)
    log = tmp_path / "log.jsonl"
    line = {"input_tokens": [*range(3000)], "output_tokens": [1] * 200}
    log.write_text((json.dumps(line) + "\n") * 4)
    rows = replay(Traffic.read(log), tmp_path, [*ENGINES, BOUND], "1GB", cures=False).rows
    for row in rows:
        assert row.hit_tokens == 3 * (2992 if row.engine in ("vllm", BOUND) else 2944)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no folder with a config.json"),
        ("not JSON", "no configuration was found"),
        ('{"model_type": "no_such_model"}', "no configuration was found"),
        ('{"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64}', "could not be found"),
    ],
)
def test_a_wrong_configuration_is_refused(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=says) as raised:
        Sizes.of(tmp_path)
    assert "32768,51511296" in str(raised.value)
