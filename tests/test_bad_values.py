"""Bad input: every value gets an error of ours that names it and says what was expected, and nothing is changed."""

import math
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from hybrid import (
    ArgumentError,
    AsyncEngine,
    CacheConfig,
    CacheMemory,
    Engine,
    EngineConfig,
    HybridCache,
    HybridError,
    ImagePrompt,
    Key,
    SamplingParams,
    SpeculationConfig,
)
from hybrid.commands.main import main
from support.bad_input import assert_clear, label
from support.engines import answer, assert_nothing_held, engine_on, greedy, ids

NAN, INF = math.nan, math.inf
MISPLACED: dict[str, Any] = {"max_model_len": 9}
INDICES = CacheMemory.of_indices(num_pages=9, num_states=4)


# Settings: (class, arguments, words that the error holds)

SETTINGS: list[tuple[type, dict[str, Any], tuple[str, ...]]] = [
    (CacheConfig, {"enabled": "no"}, ("enabled", "'no'", "True or False")),
    (CacheConfig, {"enabled": 1}, ("enabled", "True or False")),
    (CacheConfig, {"deterministic": "yes"}, ("deterministic", "'yes'")),
    (CacheConfig, {"verify_contents": "off"}, ("verify_contents", "'off'")),
    (CacheConfig, {"page_size": 0}, ("page_size", "power of two", "0")),
    (CacheConfig, {"page_size": 48}, ("page_size", "48")),
    (CacheConfig, {"page_size": True}, ("page_size", "True")),
    (CacheConfig, {"page_size": 64.0}, ("page_size", "64.0")),
    (CacheConfig, {"chunk_size": "64"}, ("chunk_size", "'64'")),
    (CacheConfig, {"memory": 0}, ("memory", "0", "512MiB")),
    (CacheConfig, {"memory": -5}, ("memory", "-5")),
    (CacheConfig, {"memory": NAN}, ("memory", "nan")),
    (CacheConfig, {"memory": INF}, ("memory", "inf")),
    (CacheConfig, {"memory": True}, ("memory", "True")),
    (CacheConfig, {"memory": 1.5}, ("memory", "1.5")),
    (CacheConfig, {"memory": "²"}, ("memory", "²", "512MiB")),
    (CacheConfig, {"memory": "lots"}, ("memory", "'lots'")),
    (CacheConfig, {"memory": "0%"}, ("memory", "0%")),
    (CacheConfig, {"memory": "150%"}, ("memory", "150%")),
    (CacheConfig, {"memory": "-1GiB"}, ("memory", "-1GiB")),
    (CacheConfig, {"memory": "1" * 400}, ("memory", "512MiB")),
    (CacheConfig, {"memory": "1e9"}, ("memory", "1e9")),
    (CacheConfig, {"memory": b"1GiB"}, ("memory", "b'1GiB'")),
    (CacheConfig, {"memory": [1]}, ("memory", "[1]")),
    (CacheConfig, {"state_share": 0.0}, ("state_share", "0.0")),
    (CacheConfig, {"state_share": NAN}, ("state_share", "nan")),
    (CacheConfig, {"state_share": "half"}, ("state_share", "'half'")),
    (CacheConfig, {"eviction": "best"}, ("'best'", "lru")),
    (CacheConfig, {"eviction": None}, ("eviction", "None")),
    (CacheConfig, {"eviction": 7}, ("eviction", "7")),
    (CacheConfig, {"placement": "everywhere"}, ("'everywhere'", "turn_end")),
    (CacheConfig, {"placement": 3}, ("placement", "3")),
    (CacheConfig, {"placement": [3]}, ("placement", "3")),
    (CacheConfig, {"state_dtype": "fp4"}, ("state_dtype", "'fp4'", "int8")),
    (CacheConfig, {"state_dtype": ["int8"]}, ("state_dtype",)),
    (CacheConfig, {"state_dtype": "int8", "deterministic": True}, ("state_dtype", "deterministic")),
    (CacheConfig, {"state_dtype": "int8", "state_share": 0.5}, ("state_dtype", "state_share")),
    (CacheConfig, {"seed": "a"}, ("seed", "'a'")),
    (CacheConfig, {"seed": 1.5}, ("seed", "1.5")),
    (CacheConfig, {"priority_cap": -1}, ("priority_cap", "-1")),
    (EngineConfig, {"max_num_seqs": 1.5}, ("max_num_seqs", "1.5")),
    (EngineConfig, {"max_num_seqs": 0}, ("max_num_seqs", "0")),
    (EngineConfig, {"max_num_seqs": "8"}, ("max_num_seqs", "'8'")),
    (EngineConfig, {"max_num_seqs": True}, ("max_num_seqs", "True")),
    (EngineConfig, {"max_num_seqs": NAN}, ("max_num_seqs", "nan")),
    (EngineConfig, {"max_num_batched_tokens": -1}, ("max_num_batched_tokens", "-1")),
    (EngineConfig, {"max_num_batched_tokens": None}, ("max_num_batched_tokens", "None")),
    (EngineConfig, {"max_waiting": 0}, ("max_waiting", "0")),
    (EngineConfig, {"encoding_threads": 0}, ("encoding_threads", "0")),
    (EngineConfig, {"encoding_seconds": 0}, ("encoding_seconds", "0")),
    (EngineConfig, {"encoding_memory": "much"}, ("encoding_memory", "much")),
    (EngineConfig, {"max_waiting": 2.5}, ("max_waiting", "2.5")),
    (EngineConfig, {"max_model_len": "long"}, ("max_model_len", "'long'")),
    (EngineConfig, {"enforce_eager": "no"}, ("enforce_eager", "'no'")),
    (EngineConfig, {"overlap": "auto"}, ("overlap", "'auto'")),
    (EngineConfig, {"audit": "no"}, ("audit", "'no'")),
    (EngineConfig, {"adapter_memory": 10**400}, ("adapter_memory", "bits")),
    (CacheConfig, {"host": 10**400}, ("host", "bits", "16GiB")),
    (CacheConfig, {"disk": 10**400, "directory": "x"}, ("disk", "bits", "16GiB")),
    (SpeculationConfig, {"drafters": None}, ("drafters", "None", "'cache'")),
    (SpeculationConfig, {"drafters": 3}, ("drafters", "3", "'cache'")),
    (SpeculationConfig, {"drafters": "cache"}, ("drafters", "'cache'", "tuple")),
    (SpeculationConfig, {"drafters": ()}, ("drafters", "empty")),
    (SpeculationConfig, {"max_drafts": 2.5}, ("max_drafts", "2.5")),
    (SpeculationConfig, {"max_drafts": 64}, ("max_drafts", "63", "64")),
    (SpeculationConfig, {"adaptive": "no"}, ("adaptive", "'no'", "True or False")),
    (SamplingParams, {"ignore_eos": "no"}, ("ignore_eos", "'no'", "True or False")),
    (SamplingParams, {"max_new_tokens": 1.5}, ("max_new_tokens", "1.5")),
    (SamplingParams, {"max_new_tokens": "8"}, ("max_new_tokens", "'8'")),
    (SamplingParams, {"temperature": 10**400}, ("temperature", "bits")),
    (SamplingParams, {"temperature": NAN}, ("temperature", "nan")),
    (SamplingParams, {"temperature": -1}, ("temperature", "-1")),
    (SamplingParams, {"temperature": "hot"}, ("temperature", "'hot'")),
    (SamplingParams, {"top_p": 0, "temperature": 1}, ("top_p", "0")),
    (SamplingParams, {"tenant": "x" * 1025}, ("tenant", "1024")),
    (SamplingParams, {"tenant": "a\ud800"}, ("tenant", "surrogate")),
    (SamplingParams, {"top_p": 2, "temperature": 1}, ("top_p", "2")),
    (SamplingParams, {"top_k": -7, "temperature": 1}, ("top_k", "-7")),
    (SamplingParams, {"min_p": NAN, "temperature": 1}, ("min_p", "nan")),
    (SamplingParams, {"seed": -1, "temperature": 1}, ("seed", "-1")),
    (SamplingParams, {"stop": 7}, ("stop", "7")),
    (SamplingParams, {"stop": ["a", ""]}, ("stop", "''")),
    (SamplingParams, {"stop": [b"a"]}, ("stop", "b'a'")),
    (SamplingParams, {"stop_token_ids": [1.5]}, ("stop_token_ids", "1.5")),
    (SamplingParams, {"stop_token_ids": {1}}, ("stop_token_ids", "{1}")),
    (SamplingParams, {"logprobs": 10**6}, ("logprobs", "1000000")),
    (SamplingParams, {"checkpoint_at": ["end"]}, ("checkpoint_at", "'end'")),
    (SamplingParams, {"pin_for": 0}, ("pin_for", "0")),
    (SamplingParams, {"pin_for": "1"}, ("pin_for", "'1'")),
    (SamplingParams, {"priority": 10**30}, ("priority", "bits")),
]


@pytest.mark.parametrize(("kind", "arguments", "words"), SETTINGS, ids=label)
def test_a_wrong_setting_is_refused(kind: type, arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(HybridError) as caught:
        kind(**arguments)
    assert_clear(caught.value, kind.__name__, *words)


WILD: list[Any] = [
    *(None, True, -1, 0, 10**5000, -(10**5000), 1.5, NAN, INF, -INF, "", "x", "x" * 10**6, "\ud800", b"x", [], [None]),
    *([[]], [10**5000], ["x" * 10**6], (), {}, {1: NAN}, {"a": 10**5000}, set(), object(), len),
]
"""Values of every kind. Integers of more digits than Python prints."""


@pytest.mark.parametrize("kind", [CacheConfig, EngineConfig, SamplingParams, SpeculationConfig])
def test_every_setting_takes_a_value_or_refuses_it_clearly(kind: type) -> None:
    for setting in fields(kind):
        for value in WILD:
            try:
                kind(**{setting.name: value})
            except HybridError as error:
                assert_clear(error, setting.name if setting.name != "eviction" else "")


# Prompts: (prompt, words)


def numbers() -> Iterator[int]:
    yield from range(5)


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ROLE = {"role": "user"}
PROMPTS: list[tuple[Any, tuple[str, ...]]] = [
    (None, ("prompt", "NoneType")),
    (7, ("prompt", "int")),
    (3.5, ("prompt", "float")),
    (b"bytes", ("prompt", "bytes", "decode")),
    (bytearray(b"bytes"), ("prompt", "bytearray")),
    ([b"bytes"], ("prompt", "bytes", "decode")),
    (numbers(), ("prompt", "generator", "list")),
    ({1, 2}, ("prompt", "set")),
    ({}, ("keys",)),
    ({"text": "a"}, ("'text'", "prompt_token_ids")),
    ({"prompt": "a", "prompt_token_ids": [1]}, ("'prompt'", "one of")),
    ({"prompt": "a", "split_special_tokens": [True]}, ("split_special_tokens", "[True]")),
    ({"prompt": [1], "split_special_tokens": True}, ("split_special_tokens", "list")),
    ({"prompt_token_ids": [1], "split_special_tokens": True}, ("split_special_tokens", "with prompt or messages")),
    ({"messages": [{**ROLE, "content": "a"}], "split_special_tokens": "yes"}, ("split_special_tokens", "'yes'")),
    ({"messages": [{**ROLE, "content": "a"}], "chat_template_kwargs": [1]}, ("chat_template_kwargs", "[1]")),
    ({"messages": [{**ROLE, "content": "a"}], "chat_template_kwargs": {"tokenize": 1}}, ("'tokenize'",)),
    (
        {
            "messages": [{**ROLE, "content": "a"}],
            "chat_template_kwargs": {"deep": nested(3000)},
            "split_special_tokens": True,
        },
        ("chat template", "recursion"),
    ),
    ({"messages": "hello"}, ("messages", "'hello'")),
    ({"messages": []}, ("messages", "empty")),
    ([[1.5]], ("token ids",)),
    ([["a", 3]], ("token ids",)),
    ([[1, None]], ("token ids",)),
    ([[True, False]], ("token ids",)),
    ([[-1]], ("-1", "vocabulary")),
    ([[10**40]], ("bits", "vocabulary")),
    ([[]], ("empty",)),
    ("", ("empty",)),
    ("\ud800 lone", ("surrogate", "character 0")),
    ("x" * 10**7, ("bytes", "shorten")),
    ([{"content": "no role"}], ("role", "message 0")),
    ([{"role": 7, "content": "a"}], ("role", "7")),
    ([{"role": "", "content": "a"}], ("role", "''")),
    ([{**ROLE, "content": 7}], ("content", "7")),
    ([{**ROLE, "content": b"a"}], ("content", "b'a'")),
    ([{**ROLE}], ("content", "message 0")),
    ([{**ROLE, "content": "\ud800"}], ("surrogate",)),
    ([{**ROLE, "content": "a"}, "then"], ("message 1", "'then'")),
    ([{**ROLE, "content": [7]}], ("part 0", "7")),
    ([{**ROLE, "content": [{"type": "text"}]}], ("part 0", "text")),
    ([{**ROLE, "content": [{"type": "text", "text": 7}]}], ("part 0", "7")),
    ([{**ROLE, "content": [{"text": "a"}]}], ("part 0", "type")),
    ([{**ROLE, "content": [{"type": "video", "video": "a"}]}], ("part 0", "'video'")),
    ([{**ROLE, "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}], ("image_url", "load_image")),
    ([{**ROLE, "content": [{"type": "image", "image": "http://a"}]}], ("address", "load_image")),
    ([{**ROLE, "content": [{"type": "image"}]}], ("image", "load_image")),
    ([{**ROLE, "content": [{"type": "image", "image": 7}]}], ("vision tower",)),
    (ImagePrompt([1.5], [], None), ("token_ids", "integers")),  # type: ignore[list-item]
    (np.zeros((2, 2, 2), dtype=np.int64), ("prompt", "ndarray")),
    (np.array([1.5, 2.5]), ("prompt",)),
    (torch.tensor([[NAN]]), ("prompt",)),
]


@pytest.fixture(scope="module")
def engine(tiny: Engine) -> Engine:
    return engine_on(tiny, pages=24)


@pytest.mark.parametrize(("prompt", "words"), PROMPTS, ids=label)
def test_a_wrong_prompt_is_refused(engine: Engine, prompt: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        engine.generate(prompt, greedy(2), progress=False)
    assert_clear(caught.value, *words)
    assert_nothing_held(engine)


def calls(engine: Engine) -> list[tuple[Callable[[], Any], tuple[str, ...]]]:
    """Calls with a wrong argument."""
    return [
        (lambda: engine.pin(ids(20), ttl="1"), ("ttl", "'1'", "seconds")),  # type: ignore[arg-type]
        (lambda: engine.pin(ids(20), ttl=NAN), ("ttl", "nan")),
        (lambda: engine.pin(ids(20), ttl=True), ("ttl", "True")),
        (lambda: engine.pin(ids(20), adapter="none"), ("'none'", "adapters.load")),
        (lambda: engine.pin(ids(20), adapter=7), ("adapter", "7")),  # type: ignore[arg-type]
        (lambda: engine.generate(ids(9), {"max_new_tokens": 3}), ("SamplingParams", "dict")),  # type: ignore[arg-type]
        (lambda: engine.generate(ids(9), "greedy"), ("SamplingParams", "str")),  # type: ignore[arg-type]
        (lambda: engine.add_request(ids(9), 7), ("SamplingParams", "int")),  # type: ignore[arg-type]
        (lambda: engine.add_request(ids(9), namespace=b"a"), ("namespace", "b'a'")),  # type: ignore[arg-type]
        (lambda: engine.add_request(ids(9), namespace="\ud800"), ("namespace", "surrogate")),
        (lambda: engine.add_request(ids(9), namespace="x" * 1025), ("namespace", "1024", "1025", "hash")),
        (lambda: engine.add_request(ids(9), request_id=7), ("request_id", "7")),  # type: ignore[arg-type]
        (lambda: engine.add_request(ids(9), SamplingParams(checkpoint_at=[99])), ("checkpoint_at", "99")),
        (lambda: engine.explain(ids(9), namespace=7), ("namespace", "7")),  # type: ignore[arg-type]
        (lambda: engine.dump(namespace=b"a"), ("namespace", "b'a'")),  # type: ignore[arg-type]
        (lambda: engine.dump(after="x"), ("after", "'x'")),  # type: ignore[arg-type]
        (lambda: engine.save(None), ("path", "None")),  # type: ignore[arg-type]
        (lambda: engine.save("a\0b"), ("cannot be written", "null byte")),
        (lambda: engine.with_cache(engine.cache.config, size=(0, 0)), ("size", "pages", "0")),
        (lambda: engine.with_cache(engine.cache.config, size=(9, 2)), ("size", "state slots", "2")),
        (lambda: engine.with_cache(engine.cache.config, size=9), ("size", "(128, 32)", "9")),  # type: ignore[arg-type]
        (lambda: engine.with_cache("64MiB"), ("CacheConfig", "'64MiB'")),  # type: ignore[arg-type]
        (lambda: Engine.from_pretrained("tiny", device="gpu"), ("device", "'gpu'", "cuda")),
        (lambda: Engine.from_pretrained("tiny", device=7), ("device", "7")),  # type: ignore[arg-type]
        (lambda: Engine.from_pretrained("tiny", device="meta"), ("device", "meta")),
        (lambda: Engine.from_pretrained("tiny", device="cuda:99"), ("device", "cuda:99")),
        (lambda: Engine.from_pretrained("tiny", dtype="int3"), ("dtype", "'int3'")),
        (lambda: Engine.from_pretrained("tiny", dtype=torch.int8), ("dtype", "torch.int8")),
        (lambda: Engine.from_pretrained("tiny", dtype=16), ("dtype", "16")),  # type: ignore[arg-type]
        (lambda: Engine.from_pretrained("tiny", cache={"memory": 1}), ("cache", "CacheConfig")),  # type: ignore[arg-type]
        (lambda: Engine.from_pretrained("tiny", config={}), ("config", "EngineConfig")),  # type: ignore[arg-type]
        (lambda: Engine.from_pretrained(None), ("None", "folder")),  # type: ignore[arg-type]
        (lambda: Engine.from_pretrained(""), ("folder",)),
        (lambda: Engine.from_pretrained("a\0b"), ("folder",)),
        (lambda: Engine.from_pretrained("tiny", cache=CacheConfig(memory=1)), ("1 B", "CacheConfig(memory=")),
        (lambda: Engine.from_pretrained("tiny", cache=CacheConfig(memory=2**62)), ("free", "memory=")),
        (lambda: Engine.from_pretrained("tiny", dtype="auto"), ("dtype", "'auto'", "None (the checkpoint's on a GPU")),
        (lambda: Engine.from_pretrained("tiny", **MISPLACED), ("config=EngineConfig(max_model_len=...)",)),
        (lambda: Engine.from_pretrained("tiny", **{"gpu_memory_utilization": 0.9}), ("cache=CacheConfig(memory=...)",)),
        (lambda: Engine.from_pretrained("tiny", **{"torch_dtype": "auto"}), ("did you mean dtype?",)),
        (lambda: Engine.from_pretrained("tiny", **{"tensor_parallel_size": 2}), ("there are: model, device",)),
        (lambda: engine.generate(ids(9), **{"max_tokens": 3}), ("params=SamplingParams(max_new_tokens=...)",)),
        (lambda: engine.generate(ids(9), **{"sampling_params": 3}), ("did you mean params?",)),
        (lambda: engine.stream("a", **{"temperature": 1}), ("params=SamplingParams(temperature=...)",)),
        (lambda: engine.add_request(ids(9), **{"rid": "a"}), ("did you mean request_id?",)),
        (lambda: AsyncEngine.from_pretrained("tiny", **MISPLACED), ("config=EngineConfig(max_model_len=...)",)),
        (lambda: engine.unpin(None), ("hybrid.Pin", "None")),  # type: ignore[arg-type]
        (lambda: engine.cache.draw("tree.png"), ("'tree.png'", "tree.html")),
        (lambda: engine.load("name", store="redis://host"), ("get_into", "'redis://host'")),  # type: ignore[arg-type]
        (lambda: engine.generate(UserDict(input_ids=[ids(9)])), ("give its input_ids",)),  # type: ignore[arg-type]
        (lambda: HybridCache(100), ("CacheMemory.of_bytes", "100")),  # type: ignore[arg-type]
        (lambda: HybridCache(INDICES, {"page_size": 16}), ("CacheConfig", "page_size")),  # type: ignore[arg-type]
        (lambda: HybridCache(INDICES).open([1, 2], 1, 2), ("Key.of", "[1, 2]")),  # type: ignore[arg-type]
        (lambda: CacheMemory.of_bytes("1GiB", 4096, 100), ("of_bytes", "'1GiB'")),  # type: ignore[arg-type]
        (lambda: CacheMemory.of_bytes(10**6, 0, 100), ("page_bytes", "0")),
        (lambda: CacheMemory.of_indices(5.0, 5), ("num_pages", "5.0")),  # type: ignore[arg-type]
        (lambda: Key.of("text"), ("32 bits", "'text'")),  # type: ignore[arg-type]
        (lambda: Key.of([2**40]), ("32 bits", "1099511627776")),
    ]


@pytest.mark.parametrize("number", range(57))
def test_a_wrong_argument_of_a_call_is_refused(engine: Engine, number: int) -> None:
    call, words = calls(engine)[number]
    with pytest.raises(HybridError) as caught:
        call()
    assert_clear(caught.value, *words)
    assert_nothing_held(engine)


def test_the_engine_still_works_after_all_of_it(engine: Engine) -> None:
    assert len(answer(engine, ids(20), greedy(3)).token_ids) == 3
    assert len(calls(engine)) + len(SETTINGS) + len(PROMPTS) + len(COMMANDS) >= 120


def test_memory_that_the_system_refuses_is_an_error_of_ours(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*shape: Any, **more: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")

    monkeypatch.setattr(torch, "empty", refused)
    with pytest.raises(HybridError) as caught:
        tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="8MB"))
    assert_clear(caught.value, "the system refuses 7.6 MiB", "memory=...")


# Commands: arguments and words on stderr

COMMANDS: list[tuple[list[str], tuple[str, ...]]] = [
    (["fly"], ("'fly'",)),
    (["generate"], ("MODEL",)),
    (["generate", "tiny"], ("PROMPT",)),
    (["generate", "tiny", ""], ("empty",)),
    (["generate", "tiny", "\udcff"], ("UTF-8", "argument 3")),
    (["generate", "/no/such", "a"], ("/no/such", "not a checkpoint")),
    (["generate", "tiny", "a", "--max-new-tokens", "0"], ("--max-new-tokens", "'0'")),
    (["generate", "tiny", "a", "--max-new-tokens", "1.5"], ("--max-new-tokens", "'1.5'")),
    (["generate", "tiny", "a", "--max-new-tokens", "²"], ("--max-new-tokens", "²")),
    (["generate", "tiny", "a", "--temperature", "nan"], ("temperature", "nan")),
    (["generate", "tiny", "a", "--temperature", "warm"], ("--temperature", "'warm'")),
    (["generate", "tiny", "a", "--temperature", "-1"], ("temperature", "-1")),
    (["generate", "tiny", "a", "--top-k", "-1"], ("--top-k", "'-1'")),
    (["generate", "tiny", "a", "--top-p", "2", "--temperature", "1"], ("top_p", "2")),
    (["generate", "tiny", "a", "--seed", "-1"], ("--seed", "'-1'")),
    (["generate", "tiny", "a", "--stop", ""], ("stop", "''")),
    (["generate", "tiny", "a", "--memory", "²"], ("²", "512MiB")),
    (["generate", "tiny", "a", "--memory", "0"], ("'0'", "512MiB")),
    (["generate", "tiny", "a", "--memory", "1"], ("1 B", "at least")),
    (["generate", "tiny", "a", "--memory", "101%"], ("101%",)),
    (["generate", "tiny", "a", "--memory", "9999TiB"], ("9999TiB", "free")),
    (["generate", "tiny", "a", "--device", "gpu"], ("device", "'gpu'")),
    (["generate", "tiny", "a", "--dtype", "int8"], ("--dtype", "'int8'")),
    (["stress", "--seconds", "nan"], ("--seconds", "'nan'")),
    (["stress", "--seconds", "-1"], ("--seconds", "'-1'")),
    (["stress", "--operations", "0"], ("--operations", "'0'")),
    (["stress", "--audit-every", "0"], ("--audit-every", "'0'")),
    (["stress", "--seed", "x"], ("--seed", "'x'")),
    (["stress", "--model", "/no/such"], ("/no/such",)),
    (["parity", "--model", "/no/such"], ("/no/such",)),
    (["parity", "--seed", "1e3"], ("--seed", "'1e3'")),
    (["demo", "--model", "/no/such"], ("/no/such",)),
    (["tree", "a", "--max-new-tokens", "0"], ("--max-new-tokens", "'0'")),
    (["tree", "a", "--memory", "none"], ("'none'",)),
    (["tree", "a", "--max-new-tokens", "1", "--out", "/no/such/tree.html"], ("/no/such/tree.html",)),
    (["demo", "--fast"], ("--fast",)),
    (["demo", "--verbose=2"], ("--verbose", "'2'")),
    (["generate", "tiny", "a", "--no-cache=no"], ("--no-cache", "'no'")),
    (["parity", "--all-families=bamba"], ("--all-families", "'bamba'")),
    (["stress", "--no-model=1"], ("--no-model", "'1'")),
    (["stress", "--no-signals=x"], ("--no-signals", "'x'")),
    (["tree", "a", "--model", "/no/such"], ("/no/such", "not a checkpoint")),
    (["tree", "a", "--model", ""], ("''", "folder")),
    (["cache"], ("FILE",)),
    (["cache", "fly", "x"], ("'fly'", "'show'")),
    (["cache", "show", "/no/such"], ("/no/such", "no such file")),
    (["cache", "show", __file__], (__file__, "not a usable file")),
    (["cache", "check", "/no/such", "--dtype", "int8"], ("--dtype", "'int8'")),
]


@pytest.mark.parametrize(("arguments", "words"), COMMANDS, ids=lambda value: " ".join(map(str, value))[:60])
def test_a_wrong_command_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: tuple[str, ...]
) -> None:
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
    shown = capsys.readouterr()
    assert status == 2, shown
    for word in words:
        assert word in shown.err
    assert "Traceback" not in shown.err
