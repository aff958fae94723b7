"""LoRA adapters over HTTP: listed, loaded and unloaded at run time, by who may."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid import CacheConfig, Engine, SamplingParams
from hybrid.models.loading import TINY
from hybrid.server.tenants import Caller
from support.peft_adapters import make_adapter
from support.served import Poster, served

KEYS = {"op": Caller("ops", "ops", sees_all=True), "ann": Caller("ann", "ann")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with adapters `law` and `torn`, one beside it, and a link to that one."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("adapters")
    inside = root / "inside"
    make_adapter(AutoModelForCausalLM.from_pretrained(TINY), inside / "law", 1)
    shutil.copytree(inside / "law", root / "outside")
    (inside / "link").symlink_to(root / "outside")
    shutil.copytree(inside / "law", inside / "linked_file")
    (inside / "linked_file" / "adapter_model.safetensors").unlink()
    (inside / "linked_file" / "adapter_model.safetensors").symlink_to(root / "outside" / "adapter_model.safetensors")
    shutil.copytree(inside / "law", inside / "torn")
    (inside / "torn" / "adapter_model.safetensors").write_bytes(b"torn")
    shutil.copytree(inside / "law", inside / "huge")
    with (inside / "huge" / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(2**43)  # it takes no room
    return inside


@pytest.fixture(scope="module")
def server(tiny: Engine, folder: Path) -> Iterator[dict[str, Poster]]:
    """Posters by key."""
    engine = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))
    with served(engine, keys=KEYS, adapter_folder=folder) as (url, _):
        yield {key: Poster(url, key) for key in KEYS}


def models(poster: Poster) -> dict[str, dict[str, Any]]:
    return {entry["id"]: entry for entry in poster.get("/v1/models").json()["data"]}


def test_an_adapter_is_loaded_answers_and_is_unloaded_while_the_server_runs(
    server: dict[str, Poster], folder: Path, tiny: Engine
) -> None:
    op, ann = server["op"], server["ann"]
    body = {"prompt": "import os, sys", "max_tokens": 8, "temperature": 0}
    plain = ann("/v1/completions", **body).json()["choices"][0]["text"]
    assert ann("/v1/completions", **body | {"model": "law"}).status_code == 404
    for path in ("law", str(folder / "law")):
        assert op("/v1/load_lora_adapter", lora_name="law", lora_path=path).status_code == 200
        assert models(op)["law"] | {"root": str(folder / "law"), "parent": "tiny"} == models(op)["law"]
        assert models(ann)["law"] | {"root": "law", "parent": "tiny"} == models(ann)["law"]
        assert models(op)["tiny"] | {"root": "tiny", "parent": None} == models(op)["tiny"]
        adapted = ann("/v1/completions", **body | {"model": "law"}).json()["choices"][0]["text"]
        assert ann("/v1/completions", **body).json()["choices"][0]["text"] == plain
        again = op("/v1/load_lora_adapter", lora_name="law", lora_path="law")
        assert again.status_code == 400 and "is loaded" in again.json()["error"]["message"]
        assert op("/v1/unload_lora_adapter", lora_name="law").status_code == 200
        assert op("/v1/unload_lora_adapter", lora_name="law").status_code == 404
        assert ann("/v1/completions", **body | {"model": "law"}).status_code == 404
    own = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))
    own.adapters.load("law", folder / "law")
    params = SamplingParams(max_new_tokens=8, adapter="law")
    assert adapted == own.generate(body["prompt"], params, progress=False)[0].text != plain


@pytest.mark.parametrize(
    "path", ["../outside", "{root}/outside", "link", "linked_file", ".", "{root}/inside", "no", "a\0b", "x" * 5000]
)
def test_what_is_not_below_the_folder_is_not_loaded(path: str, server: dict[str, Poster], folder: Path) -> None:
    given = path.format(root=folder.parent)
    answer = server["op"]("/v1/load_lora_adapter", lora_name="law", lora_path=given)
    assert answer.status_code == 404 and "--adapter-dir" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"lora_path": "law"}, "lora_name must be a text"),
        ({"lora_name": "law"}, "lora_path must be a text"),
        ({"lora_name": "law", "lora_path": "law", "load_inplace": True}, "load_inplace is not supported"),
        ({"lora_name": "tiny", "lora_path": "law"}, "is the model itself"),
        ({"lora_name": "x" * 300, "lora_path": "law"}, "1 to 256 characters"),
        ({"lora_name": "law", "lora_path": "torn"}, "adapter_model.safetensors"),
        ({"lora_name": "law", "lora_path": "huge"}, "has 8.0 TiB; adapters of this model have"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(
    body: dict[str, Any], said: str, server: dict[str, Poster]
) -> None:
    answer = server["op"]("/v1/load_lora_adapter", **body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert set(models(server["op"])) == {"tiny"}


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_only_tenants_that_see_all_change_adapters_and_nobody_without_a_folder(
    path: str, server: dict[str, Poster], post: Poster
) -> None:
    assert server["ann"](path, lora_name="law", lora_path="law").status_code == 403
    assert post(path, lora_name="law", lora_path="law").status_code == 404
