"""Every option of every command, and every value of its choices, is given once on the model inside the package: it does
what it says, or is refused with the message that is named here. Options are read off the parsers: one without a run
fails."""

import argparse
import json
import os
import shlex
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("uvicorn", reason="the extra 'server' is not installed")

from hybrid import CacheConfig, Engine
from hybrid.commands import demo, parity
from hybrid.commands.main import main, make_parser
from hybrid.commands.random_checkpoints import FAMILIES
from hybrid.models.loading import TINY
from hybrid.server.tenants import Caller
from support.engines import answer, greedy
from support.peft_adapters import make_adapter
from support.served import served
from support.small_parity import only_repeated_prompts

Shown = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A command line that succeeds, and what must hold then.

    Attributes:
        command: `{}` names of folders and files are those of the fixture `places`.
        holds: by the JSON that it prints and by the engine that it has made last.
    """

    command: str
    holds: Callable[[Shown, Any], object] = lambda shown, engine: True


@dataclass(frozen=True)
class Refusal:
    """A command line that is refused, and what it is told."""

    command: str
    message: str


def config(**expected: Any) -> Callable[[Shown, Any], bool]:
    """What settings of the cache of an engine must be."""
    return lambda shown, engine: {name: getattr(engine.cache.config, name) for name in expected} == expected


def all_of(*conditions: Callable[[Shown, Any], object]) -> Callable[[Shown, Any], bool]:
    return lambda shown, engine: all(condition(shown, engine) for condition in conditions)


def dtype(name: str) -> Callable[[Shown, Any], bool]:
    """The type that a model runs in."""
    return lambda shown, engine: str(engine.model.dtype) == f"torch.{name}"


def drafts(*names: str) -> Callable[[Shown, Any], bool]:
    return lambda shown, engine: tuple(engine.speculation.drafters) == names


def quantized(shown: Shown, engine: Any) -> bool:
    """Weights are quantized."""
    return any(getattr(module, "scales", None) for module in engine.model.modules())


ENGINES = {
    "--memory 48MiB --host-memory 16MiB --disk 16MiB --directory {disk} --eviction flop_aware:alpha=0.5 "
    "--kv-dtype auto --state-dtype float32 --device cpu --dtype float32 --speculation cache": all_of(
        config(memory="48MiB", host=2**24, disk=2**24, eviction="flop_aware:alpha=0.5", kv_dtype="auto"),
        lambda shown, engine: engine.deterministic and str(engine.device) == "cpu",
        dtype("float32"),
        drafts("cache"),
    ),
    "--memory 48MiB --kv-dtype fp8 --state-dtype bfloat16 --no-deterministic --dtype bfloat16 --load-dtype int8 "
    "--speculation mtp": all_of(
        config(kv_dtype="fp8", state_dtype="bfloat16", deterministic=False), dtype("bfloat16"), quantized, drafts("mtp")
    ),
    "--memory 48MiB --kv-dtype int8 --state-dtype int8 --no-deterministic --dtype float16 --load-dtype int4:32 "
    "--speculation cache+mtp": all_of(
        config(kv_dtype="int8", state_dtype="int8"), dtype("float32"), quantized, drafts("cache", "mtp")
    ),
    "--memory 48MiB --adapter law={adapter}": lambda shown, engine: list(engine.adapters) == ["law"],
}
"""Options of an engine, in three commands, and what they make of it. float16 is widened on a CPU."""

PROMPT = "generate tiny 'The with statement' --max-new-tokens 4"


def sampled(shown: Shown, engine: Any) -> bool:
    """Five tokens at most, and the answer ends before the stop text."""
    [output] = shown["outputs"]
    return len(output["token_ids"]) <= 5 and "e" not in output["text"]


GENERATE = (
    *(Run(f"{PROMPT} {options}", holds) for options, holds in ENGINES.items()),
    Run(
        "generate tiny 'The with statement' --chat --max-new-tokens 5 --temperature 0.8 --top-k 40 --top-p 0.9 "
        "--seed 7 --stop e --no-cache --memory 48MiB",
        all_of(sampled, config(enabled=False)),
    ),
    Refusal(f"{PROMPT} --state-dtype int8", "--no-deterministic"),
    Refusal(f"{PROMPT} --adapter a={{adapter}} --adapter b={{adapter}}", "give --adapter once"),
    Refusal(f"{PROMPT} --adapter {{adapter}}", "NAME=FOLDER"),
    Refusal(f"{PROMPT} --load-dtype int2", "load_dtype must be one of"),
    Refusal(f"{PROMPT} --eviction best", "eviction"),
    Refusal(f"{PROMPT} --disk 1GiB", "disk and directory belong together"),
)

Ask = Callable[[httpx.Client, dict[str, str]], None]


def limited(client: httpx.Client, places: dict[str, str]) -> None:
    """What a server with limits says."""
    assert client.get("/v1/models").status_code == 401
    client.headers["x-api-key"] = "key"
    [entry] = client.get("/v1/models").json()["data"]
    assert (entry["id"], entry["max_model_len"]) == ("mine", 512)
    body = {"model": "mine", "messages": [{"role": "user", "content": "import"}], "ignore_eos": True}
    assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 3
    assert client.post("/v1/chat/completions", json=body | {"user": "x" * 2**20}).status_code == 413
    assert client.get("/health", headers={f"x-{number}": "a" for number in range(60)}).status_code == 431
    assert client.get("/health", headers={"x": "a" * 2**15}).status_code == 431
    loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "law", "lora_path": "law"})
    assert loaded.status_code == 200


def keyed(client: httpx.Client, places: dict[str, str]) -> None:
    """What a server with a file of keys says."""
    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models", headers={"x-api-key": "key"}).status_code == 200


SERVE: dict[str, Ask] = {
    "serve tiny --port {port} --host 127.0.0.1 --name mine --api-key key --memory 48MiB --adapter-dir {adapters} "
    "--max-num-seqs 2 --max-requests 4 --max-model-len 512 --max-tokens 3 --max-body 1MiB --timeout 50 --drain 5 "
    "--max-connections-per-address 40 --max-connections 50 --max-head 16KiB --max-headers 50 --head-timeout 20 "
    "--body-timeout 20 --idle-timeout 20 --send-timeout 20": limited,
    "serve tiny --port {port} --keys {keys} --memory 48MiB": keyed,
}

FLEET = (
    "fleet serve tiny --replicas 3 --address auto --cpus 0.5 --threads 1 --name mine --host 127.0.0.1 --port {port} "
    "--api-key key --shared-memory 16MiB --store {store} --memory 48MiB --max-num-seqs 2 --max-requests 4 "
    "--max-model-len 512 --max-tokens 3 --max-body 1MiB --body-timeout 20 --timeout 50 --drain 5",
    "fleet serve tiny --keys {keys} --memory 48MiB",
)

OTHERS = (
    *(Run(f"demo --model tiny --no-cache --verbose --dtype {name}") for name in ("bfloat16", "float16")),
    Run("demo --dtype float32 --no-cache", lambda shown, engine: str(engine.model.dtype) == "torch.float32"),
    Run(
        "tree --model tiny --memory 16MiB --max-new-tokens 2 --out {page} a b",
        lambda shown, engine: Path(shown["page"]).stat().st_size > 1000,
    ),
    Run("cache show {saved}", lambda shown, engine: shown["checkpoints"] > 0),
    Run("cache check {saved} --model tiny --dtype float32", lambda shown, engine: shown["checked"] > 0),
    Refusal("cache check {saved} --dtype bfloat16", "float32"),
    Run("cache check {saved} --dtype float16"),  # float32 on a CPU
    Run("cache check {folder} --fix", lambda shown, engine: shown["wrong"] == []),
    Refusal("cache check {saved} --fix", "--fix drops wrong copies of a disk tier"),
    Refusal("cache show {folder} --fix", "--fix drops wrong copies of a disk tier"),
    Refusal("cache show {saved} --dtype float32", "--dtype is the type that a file is computed again in"),
    Refusal("cache check {folder} --dtype float32", "--dtype is the type that a file is computed again in"),
    Refusal("cache show {saved} --model {folder}", "--model does nothing here"),
    Refusal("stress --no-model --dtype bfloat16", "--dtype does nothing here"),
    Run("models", lambda shown, engine: len(shown["models"]) > 10),
    Run("models tiny", lambda shown, engine: len(shown["models"]) == 1),
    Run("stress --no-model --no-signals --operations 30 --seed 3 --audit-every 5 --seconds 60"),
    *(
        Run(f"stress --model tiny --dtype {name} --no-signals --operations 5")
        for name in ("float32", "bfloat16", "float16")
    ),
    *(
        Run(f"parity --model tiny --seed 2 --dtype {name}", lambda shown, engine, name=name: shown["dtype"] == name)
        for name in ("float32", "bfloat16", "float16")
    ),
    Run("parity --family llama --load-dtype int8", lambda shown, engine: list(shown["families"]) == ["llama"]),
    Run("parity --all-families", lambda shown, engine: list(shown["families"]) == ["llama"]),
    Refusal("parity --model tiny --all-families", "not allowed with argument"),
    Run(
        "doctor {log} --model tiny --dtype float32 --memory 64MiB --memory 128MiB --engine vllm --engine sglang "
        "--engine hybrid --engine lru --engine marconi --engine bound --tokenizer tiny --out {page} --block-size 32 "
        "--models --no-cures --concurrency 2 --prefill-rate 1000 --decode-rate 40 --price 2",
    ),
    Run("doctor {log} --model tiny --dtype bfloat16 --engine hybrid --models --no-cures"),
    Run("doctor {log} --model tiny --dtype float16 --engine lru --models --no-cures"),
    Run("doctor {sessions} --model tiny --engine lru --models --no-cures --gap 5 --max-pause 60 --users 1"),
    Run(
        "doctor watch {server} {log} --api-key key --model tiny --engine hybrid --models --within 100",
        lambda shown, engine: shown["engine"] == "hybrid",
    ),
    Run("doctor anonymize {log} --out {page}", lambda shown, engine: shown["requests"] == 2),
    Refusal("doctor anonymize {log} --memory 1GiB", "--memory does nothing here"),
    Refusal("doctor anonymize {log} --gap 5", "--gap does nothing here"),
    Refusal("doctor watch {server} --memory 1GiB", "--memory does nothing here"),
    Refusal("doctor watch {server} {log} --price 2", "--price does nothing here"),
    Refusal("doctor {log} --api-key key", "--api-key does nothing here"),
)


@pytest.fixture(scope="module")
def places(tiny: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What command lines name in braces; folders that are written to are those of `fresh`."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("places")
    make_adapter(AutoModelForCausalLM.from_pretrained(TINY), root / "adapters" / "law", 1)
    tier = {"disk": "16MiB", "directory": root / "folder"}
    with tiny.with_cache(
        CacheConfig(page_size=16, chunk_size=16, memory="16MiB", deterministic=True, **tier)
    ) as engine:
        answer(engine, [*range(3, 80)], greedy(2))
        engine.save(root / "a.hybrid")
    (root / "keys.json").write_text(json.dumps({"ann": {"key": "key", "weight": 2, "sees_all": True}}))
    lines = [{"prompt": "import os, sys " * 20, "completion": "b", "time": at} for at in range(2)]
    (root / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = [{"t": 9.0 * at, "in": 128 + at, "out": 8, "hash_ids": [1, 2]} for at in range(3)]
    (root / "sessions").mkdir()
    (root / "sessions" / "one.json").write_text(json.dumps({"block_size": 64, "requests": requests}))
    names = {"saved": "a.hybrid", "log": "log.jsonl", "keys": "keys.json", "adapters": "adapters"}
    names |= {"adapter": "adapters/law", "folder": "folder", "sessions": "sessions"}
    engine = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))
    with served(engine, keys={"key": Caller("ops", "", sees_all=True)}) as (url, _):
        yield {name: str(root / path) for name, path in names.items()} | {"server": url}


@pytest.fixture
def fresh(places: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """`places`, with folders and files of one test, and a port that is free."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    own = {"disk": tmp_path / "disk", "page": tmp_path / "page.html", "store": tmp_path / "store", "port": port}
    return places | {name: str(value) for name, value in own.items()}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that commands make."""
    found: list[Engine] = []
    make = Engine.from_pretrained

    def making(*arguments: Any, **settings: Any) -> Engine:
        found.append(make(*arguments, **settings))
        return found[-1]

    monkeypatch.setattr(Engine, "from_pretrained", making)
    return found


def words(command: str, fresh: dict[str, str]) -> list[str]:
    return [word.format_map(fresh) for word in shlex.split(command)]


def ran(command: str, fresh: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Shown:
    """What a command prints as JSON, which succeeds."""
    status = main([*words(command, fresh), "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured
    shown: Shown = json.loads(captured.out)
    return shown


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One question in the demo, one scenario in parity, one family."""
    monkeypatch.setattr(demo, "QUESTIONS", demo.QUESTIONS[:1])
    only_repeated_prompts(monkeypatch, logits=True)
    monkeypatch.setattr(parity, "FAMILIES", {name: FAMILIES[name] for name in ("llama",)})


RUNS = [run for run in (*GENERATE, *OTHERS) if isinstance(run, Run)]
REFUSALS = [run for run in (*GENERATE, *OTHERS) if isinstance(run, Refusal)]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.command)
@pytest.mark.usefixtures("small", "untraced")
def test_what_is_given_is_done(
    run: Run, fresh: dict[str, str], made: list[Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ran(run.command, fresh, capsys)
    assert run.holds(shown, made[-1] if made else None), shown


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda run: run.command)
def test_what_cannot_be_done_is_refused_with_the_reason(
    refusal: Refusal, fresh: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(words(refusal.command, fresh))
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and refusal.message in capsys.readouterr().err


WHERE = {"generate": f"{PROMPT} ", "serve": "serve tiny --port {port} ", "fleet": "fleet serve tiny "}
"""The commands that run an engine with options."""


def serve_and_ask(command: str, ask: Ask, fresh: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Shown:
    """Serve in this thread, ask in another one, and end by SIGTERM."""
    failed: list[BaseException] = []

    def client() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{fresh['port']}", timeout=60) as own:
            try:
                while True:
                    with suppress(httpx.ConnectError):
                        own.get("/health")
                        break
                    if ended.wait(0.02):
                        return
                ask(own, fresh)
            except BaseException as error:
                failed.append(error)
        os.kill(os.getpid(), signal.SIGTERM)

    ended = threading.Event()
    thread = threading.Thread(target=client)
    thread.start()
    try:
        shown = ran(command, fresh, capsys)
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]
    return shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which bench/gpu/run.py uses")
def test_a_gpu_is_refused_where_there_is_none(fresh: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(f"{PROMPT} --device cuda", fresh)) == 2
    assert "PyTorch finds 0 GPUs here" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "ask"), SERVE.items(), ids=["limits", "keys"])
@pytest.mark.usefixtures("untraced")
def test_a_server_does_what_is_given(
    command: str, ask: Ask, fresh: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    serve_and_ask(command, ask, fresh, capsys)


def completed(client: httpx.Client, places: dict[str, str]) -> None:
    """A server answers, and with an adapter if it has one."""
    for model in [entry["id"] for entry in client.get("/v1/models").json()["data"]]:
        answer = client.post("/v1/completions", json={"model": model, "prompt": "import", "max_tokens": 4})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("options", "holds"), ENGINES.items(), ids=ENGINES)
@pytest.mark.usefixtures("untraced")
def test_a_server_makes_the_engine_that_is_asked_for(
    options: str, holds: Any, fresh: dict[str, str], made: list[Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert holds(serve_and_ask(f"{WHERE['serve']} {options}", completed, fresh, capsys), made[-1])


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a fleet is started with, in place of Ray: real ones are run by tests/fleet/test_on_ray.py."""
    pytest.importorskip("zmq", reason="the extra 'ray' is not installed")
    found: dict[str, Any] = {}

    def start(settings: Any, replicas: int, host: str, port: int, **more: Any) -> None:
        found.update(more, settings=settings, replicas=replicas, host=host, port=port)

    async def wait(on_start: Callable[[], None]) -> None:
        on_start()

    ray = types.ModuleType("hybrid.fleet.deployment")
    vars(ray).update(connect=lambda address: found.update(address=address), start=start, wait_for_signal=wait)
    vars(ray).update(stop=lambda *_: None)
    monkeypatch.setitem(sys.modules, "hybrid.fleet.deployment", ray)
    return found


@pytest.mark.parametrize(("options", "holds"), ENGINES.items(), ids=ENGINES)
@pytest.mark.usefixtures("untraced")
def test_a_replica_makes_the_engine_that_is_asked_for(
    options: str,
    holds: Any,
    fresh: dict[str, str],
    deployed: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a replica makes it, without Ray."""
    shown = ran(f"{WHERE['fleet']} {options}", fresh, capsys)
    settings = deployed["settings"]
    arguments = {"cache": settings.cache, "config": settings.engine, **settings.model_arguments}
    with Engine.from_pretrained(settings.model, **arguments) as engine:
        for name, folder in settings.adapters.items():
            engine.adapters.load(name, folder)
        assert holds(shown, engine)


def test_a_fleet_is_started_with_what_is_given(
    fresh: dict[str, str], deployed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    limited, keyed = FLEET
    ran(limited, fresh, capsys)
    settings = deployed["settings"]
    found = {name: deployed[name] for name in ("address", "replicas", "host", "num_cpus", "drain_seconds")}
    assert found == {"address": "auto", "replicas": 3, "host": "127.0.0.1", "num_cpus": 0.5, "drain_seconds": 5.0}
    assert (settings.name, settings.threads, settings.store) == ("mine", 1, fresh["store"])
    assert (settings.engine.max_num_seqs, settings.engine.max_waiting, settings.engine.max_model_len) == (2, 4, 512)
    limits = settings.limits
    assert (limits.tokens, limits.body_bytes, limits.body_seconds, limits.seconds) == (3, 2**20, 20.0, 50.0)
    assert settings.cache.disk == 2**24 and str(settings.cache.directory).startswith("/dev/shm")
    assert list(settings.keys) == ["key"] and settings.keys["key"].sees_all
    ran(keyed, fresh, capsys)
    assert deployed["settings"].keys["key"].name == "ann"


def test_every_option_and_every_value_of_its_choices_is_given_once() -> None:
    [subparsers] = [each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction)]
    needed = {place for name, parser in subparsers.choices.items() for place in places_of(name, parser)}
    lines = [run.command for run in (*GENERATE, *OTHERS)] + [*SERVE, *FLEET]
    lines += [f"{before} {options}" for before in WHERE.values() for options in ENGINES]
    given = {place for line in lines for place in given_in(*shlex.split(line))}
    assert needed <= given, f"without a run: {sorted(needed - given)}"


def places_of(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """What is to be given of a command: its options ("" for what has no name) and the values of their choices."""
    for action in parser._actions:
        if action.dest not in ("help", "json"):
            option = action.option_strings[0] if action.option_strings else ""
            values = [str(value) for value in action.choices or ([""] if option else [])]
            yield from ((name, option, value) for value in values)


def given_in(name: str, *words: str) -> Iterator[tuple[str, str, str]]:
    """What a command line may give: each word as an option, alone and with the word after it, and as a value alone."""
    for word, value in zip(words, (*words, "")[1:], strict=True):
        yield from ((name, word, ""), (name, word, value), (name, "", word))
