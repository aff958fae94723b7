"""Every command in a code block of the documents is run here, or a row says what runs it and why not here."""

import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn", reason="the extra 'server' is not installed")

from hybrid import CacheConfig, Engine
from hybrid.commands.main import main, make_parser
from hybrid.models.loading import TINY
from hybrid.server.tenants import Caller
from support.peft_adapters import make_adapter
from support.served import served

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


@dataclass(frozen=True)
class Here:
    """A command that is run here as it stands, in a folder with the files that it reads. A request is sent to a
    server."""


@dataclass(frozen=True)
class Shared:
    """A command that `tests/commands/test_options.py` runs with the same options, on a port and with values of its
    own; a fleet without Ray, as `make fleet` runs it there."""


@dataclass(frozen=True)
class Network:
    """A line that needs the network and is not run. The extras that one of pip names are held to pyproject.toml."""


@dataclass(frozen=True)
class Elsewhere:
    """A command that cannot run here.

    Attributes:
        why: what it needs.
        make: the target that runs it.
        by: the file in which it does.
        words: of the command, which that file has too.
    """

    why: str
    make: str
    by: str
    words: tuple[str, ...]


VLLM = "vllm serve Qwen/Qwen3.5-4B --enable-prefix-caching --mamba-cache-mode align"
FLAGS = ("--enable-prefix-caching", "--mamba-cache-mode", "align", "--scheduler-cls", "hybrid.vllm.Scheduler")
RAY = "tests/fleet/test_on_ray.py"

ROWS: dict[str, Here | Shared | Network | Elsewhere] = {
    "pip install .[server,structured]": Network(),
    "pip install .[ray]": Network(),
    "pip install --no-deps .": Network(),
    "make demo": Shared(),
    "make test": Elsewhere("it is what runs this", "test", "Makefile", ("test",)),
    "hybrid serve tiny": Shared(),
    "hybrid serve tiny --port 8000": Shared(),
    "hybrid fleet serve tiny --replicas 2 --port 8000": Shared(),
    "hybrid doctor log.jsonl --model 32768,51511296 --memory 24GiB --out report.html": Here(),
    "hybrid doctor kv-cache-tester/traces --model 32768,51511296,8,24,140000 --memory 16GiB --users 20 "
    "--prefill-rate 60000": Here(),
    "git clone https://github.com/callanjfox/kv-cache-tester": Network(),
    "curl http://127.0.0.1:8000/v1/completions -H content-type: application/json -d "
    '{"model": "tiny", "prompt": "The with statement", "max_tokens": 16}': Here(),
    "curl http://127.0.0.1:8000/fleet": Elsewhere("Ray", "fleet", RAY, ("/fleet",)),
    "curl localhost:8000/v1/load_lora_adapter -H content-type: application/json -d "
    '{"lora_name": "law", "lora_path": "law"}': Here(),
    'curl localhost:8000/v1/unload_lora_adapter -H content-type: application/json -d {"lora_name": "law"}': Here(),
    "curl localhost:8000/v1/completions -H Content-Type: application/json -d "
    '{"model": "Qwen/Qwen3.5-4B", "prompt": "...", "max_tokens": 1, "vllm_xargs": '
    '{"hybrid_pin": 3600, "hybrid_key": "system prompt"}}': Elsewhere(
        "vLLM", "vllm", "tests/vllm/test_without_vllm.py", ("hybrid_pin", "hybrid_key")
    ),
    f"{VLLM} --scheduler-cls hybrid.vllm.Scheduler": Elsewhere("vLLM", "served", "bench/real_vllm.py", FLAGS),
    "PROMETHEUS_MULTIPROC_DIR=$(mktemp -d) vllm serve ... --scheduler-cls hybrid.vllm.Scheduler": Elsewhere(
        "vLLM", "served", "bench/real_vllm.py", ("PROMETHEUS_MULTIPROC_DIR", *FLAGS[3:])
    ),
    f'{VLLM} --kv-transfer-config {{ "kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": { "cpu_bytes_to_use": 8000000000, "eviction_policy": "LearnedCachePolicy", '
    '"cache_policy_module_path": "hybrid.vllm.tier"}}': Elsewhere(
        "vLLM", "vllm", "tests/vllm/test_tier.py", ("LearnedCachePolicy", "hybrid.vllm.tier")
    ),
    "python -m sglang.launch_server --model-path Qwen/Qwen3.5-4B --radix-cache-backend hybrid": Elsewhere(
        "SGLang and a GPU", "sglang", "tests/sglang/test_backend.py", ("radix_cache_backend",)
    ),
    "python bench/gpu/run.py --json gpu.json": Elsewhere("a GPU", "gpu", "bench/gpu/run.py", ("--json",)),
    "python bench/gpu/run.py --rehearse": Elsewhere("minutes", "pytest", "tests/bench/test_gpu.py", ("--rehearse",)),
}
"""What the documents show to be typed, its words with a space between them."""


def lines_of(block: str) -> Iterator[list[str]]:
    """The words of each command of a block: a text in quotation marks, or a backslash, continues on the next line."""
    text = ""
    for line in block.replace("\\\n", " ").splitlines():
        text += f"{line}\n"
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # no closing quotation
            continue
        text = ""
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        if words:
            yield words
    assert not text, f"a quotation does not end: {text}"


def key(words: list[str]) -> str:
    return " ".join(" ".join(words).split())


SHOWN = {
    key(words): words
    for page in PAGES
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for words in lines_of(block)
}


def rows(kind: type) -> list[str]:
    return [command for command, row in ROWS.items() if isinstance(row, kind)]


def test_every_command_in_a_block_has_a_row() -> None:
    assert sorted(SHOWN) == sorted(ROWS)


def test_commands_are_in_blocks_for_a_shell() -> None:
    programs = "|".join({command.split()[0] for command in ROWS if "=" not in command.split()[0]})
    for page in PAGES:
        for block in re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            found = re.search(rf"^\s*(\$ )?(\w+=\S+ )*({programs}) .*$", block, re.MULTILINE)
            assert found is None, f"{page.name}: {found}"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the commands of docs/doctor.md read, in the folder in which they run."""
    monkeypatch.chdir(tmp_path)
    log = [{"prompt": "import os, sys " * 40, "completion": "b", "time": at} for at in range(2)]
    Path("log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    requests = [{"t": 9.0 * at, "in": 256 + at, "out": 8, "hash_ids": [1, 2, 3, 4]} for at in range(3)]
    Path("kv-cache-tester/traces").mkdir(parents=True)
    Path("kv-cache-tester/traces/one.json").write_text(json.dumps({"block_size": 64, "requests": requests}))


@pytest.mark.parametrize("command", [command for command in rows(Here) if command.startswith("hybrid ")])
@pytest.mark.usefixtures("files")
def test_commands_run_as_they_stand(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = SHOWN[command][1:]
    assert main(words) == 0
    assert "hit" in capsys.readouterr().out
    if "--out" in words:
        assert Path(words[words.index("--out") + 1]).stat().st_size > 1000


def test_requests_are_answered_as_they_stand(tiny: Engine, tmp_path: Path) -> None:
    """In the order of the documents: an adapter is loaded before it is unloaded."""
    from transformers import AutoModelForCausalLM

    make_adapter(AutoModelForCausalLM.from_pretrained(TINY), tmp_path / "law", 1)
    engine = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))
    keys = {"key": Caller("ops", "", sees_all=True)}
    with served(engine, adapter_folder=tmp_path, keys=keys) as (url, _), httpx.Client(timeout=60) as client:
        client.headers["x-api-key"] = "key"
        for command in rows(Here):
            if command.startswith("curl "):
                _, address, h, header, d, body = SHOWN[command]
                assert (h, d, header) == ("-H", "-d", "content-type: application/json")
                path = re.sub(r"^(http://)?(127\.0\.0\.1|localhost):8000", "", address)
                answer = client.post(f"{url}{path}", content=body, headers=dict([header.split(": ")]))
                assert answer.status_code == 200, answer.text


def options_given(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


@pytest.mark.parametrize("command", rows(Shared))
def test_commands_are_run_by_the_tests_of_options(command: str) -> None:
    words = SHOWN[command]
    if words[0] == "make":
        words = shlex.split(recipe(words[1]).replace("$(BIN)/", ""))
    assert words[0] == "hybrid"
    make_parser().parse_args(words[1:])
    options = runpy.run_path(str(ROOT / "tests" / "commands" / "test_options.py"))
    runs = [run.command for run in options["OTHERS"] if isinstance(run, options["Run"])]
    lines = [shlex.split(line) for line in (*runs, *options["SERVE"], *options["FLEET"])]
    named = [word for word in words[1:4] if not word.startswith("--")]  # the command, and the model if it has one
    assert any(line[: len(named)] == named and options_given(words) <= options_given(line) for line in lines), command


@pytest.mark.parametrize("command", [command for command in rows(Network) if command.startswith("pip ")])
def test_extras_that_are_installed_are_there(command: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    target = SHOWN[command][-1]
    named = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", target)
    assert named is not None and set(filter(None, (named[1] or "").split(","))) <= set(extras)


def recipe(target: str) -> str:
    """What `make` runs for a target, after what it depends on."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n|\n)*)", MAKEFILE, re.MULTILINE)
    assert found, f"make {target}"
    return found[1].strip()


@pytest.mark.parametrize("command", rows(Elsewhere))
def test_what_cannot_run_here_is_run_by_what_the_row_names(command: str) -> None:
    row: Any = ROWS[command]
    run, text = recipe(row.make), (ROOT / row.by).read_text(encoding="utf-8").replace("-", "_")
    assert row.make in ("test", "pytest") or any(folder in run for folder in (row.by, str(Path(row.by).parent)))
    assert all(word.replace("-", "_") in text for word in row.words), command
    assert all(word in command or word.replace("_", "-") in command for word in row.words), command
