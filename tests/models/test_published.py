"""Published checkpoints by the names and shapes of their tensors: each is built without memory, and every tensor of its
index is read into a parameter. `published/` has them, folded by layers, with what their `config.json` says; no weights
are there. Where a public page says how many numbers the weights are (`parameters`), the index has as many, which a size
written wrong would not. What no page confirmed is named (`unconfirmed`).
"""

import json
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid.models.loading import ARCHITECTURES, HEAD
from hybrid.models.transformers_types import is_new_enough

FOLDER = Path(__file__).parent / "published"

Shapes = dict[str, tuple[int, ...]]


def numbers(text: str) -> list[int]:
    """The numbers of "0-2 5": 0, 1, 2 and 5."""
    ends = [part.split("-") for part in text.split()]
    return [number for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1)]


def unfolded(facts: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of an index; `{name}` in a name stands for each number of a set."""
    sets = {name: numbers(text) for name, text in facts["sets"].items()}
    for pattern, shape in facts["tensors"].items():
        used = [name for name in sets if f"{{{name}}}" in pattern]
        for found in product(*(sets[name] for name in used)):
            yield pattern.format(**dict(zip(used, found, strict=True))), tuple(shape)


def num_parameters(index: Shapes) -> int:
    """The numbers of all tensors. 4-bit floats are two in a byte, and have exponents, which are none."""
    own = {name: shape for name, shape in index.items() if not name.endswith("_scales")}
    return sum((2 if name.endswith("_blocks") else 1) * prod(shape) for name, shape in own.items())


def config_of(facts: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    config = dict(facts["config"])
    if "layer_types" in config:  # "3 a, 1 b", again and again
        runs = [part.split() for part in config["layer_types"].split(", ")]
        once = [kind for count, kind in runs for _ in range(int(count))]
        config["layer_types"] = (once * config["num_hidden_layers"])[: config["num_hidden_layers"]]
    return AutoConfig.for_model(facts["model_type"], **config)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_every_tensor_of_a_published_index_is_read(file: Path) -> None:
    facts = json.loads(file.read_text())
    if not is_new_enough(facts["model_type"]):
        pytest.skip("the installed transformers lacks the type")
    on_disk: Shapes = dict(unfolded(facts))
    assert len(on_disk) == facts.get("count", len(on_disk))
    assert num_parameters(on_disk) == facts.get("parameters", num_parameters(on_disk))
    index = {  # 4-bit floats are two in a byte, and have exponents
        name: (*shape[:-2], 32 * shape[-2]) if name.endswith("_blocks") else shape
        for name, shape in on_disk.items()
        if not name.endswith("_scales")
    }
    config, family = config_of(facts), ARCHITECTURES[facts["model_type"]]
    assert family.unsupported(config) is None
    with torch.device("meta"):
        model = family(config, 64)
    assert len(model.inverse_frequencies) == facts.get("rotated", len(model.inverse_frequencies))
    rows: dict[str, int] = {}
    for parameter, tensor in model.named_parameters():
        if parameter == HEAD and config.tie_word_embeddings:
            continue
        layout = max(family.layouts(parameter, config), key=lambda each: sum(source.name in index for source in each))
        for source in layout:
            assert source.name in index, parameter
            if source.rows is None:
                assert tensor[source.at].shape == index[source.name], source.name
                rows[source.name] = index[source.name][0]
            else:
                assert tensor.shape[1:] == index[source.name][1:], source.name
                rows[source.name] = rows.get(source.name, 0) + len(source.rows)
    assert rows == {name: shape[0] for name, shape in index.items() if not family.ignores(name, config)}
    assert model.own_spec().page_bytes(64) > 0
