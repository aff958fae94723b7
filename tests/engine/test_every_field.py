"""Every field of every configuration does what it says: for each a function that sets it to another value than its
default. It passes, and fails where the field is ignored. A field without a function fails."""

import asyncio
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hybrid import (
    AsyncEngine,
    CacheConfig,
    CacheMemory,
    Drafter,
    EncodingLimitError,
    Engine,
    EngineConfig,
    Hints,
    HybridCache,
    HybridError,
    Key,
    MemoryBudgetError,
    PromptError,
    QueueFullError,
    RequestOutput,
    SamplingParams,
    SpeculationConfig,
    TenantConfig,
)
from hybrid.engine.build import is_captured
from hybrid.models.loading import TINY
from hybrid.tree.policy import Facts, Policy
from support.engines import GRID, answer, engine_on, greedy, ids, no_even_tokens, run_to_end
from support.scheduling import Counting, engine_without_model

Row = Callable[[Engine, Path], None]
ROWS: dict[tuple[type, str], Row] = {}
PROMPT = ids(2 * GRID + 5)
TEXT = "The with statement is used to wrap the execution of a block"


def of(kind: type, *names: str) -> Callable[[Row], Row]:
    """A function that is the row of fields of a class."""

    def add(row: Row) -> Row:
        ROWS.update({(kind, name): row for name in names})
        return row

    return add


KINDS = SamplingParams, CacheConfig, EngineConfig, TenantConfig, SpeculationConfig
FIELDS = [(kind, field.name) for kind in KINDS for field in fields(kind)]
NAMES = [f"{kind.__name__}-{name}" for kind, name in FIELDS]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=NAMES)
def test_a_field_does_what_it_says_and_is_not_ignored(
    kind: type, name: str, tiny: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, check = ROWS[kind, name], kind.__post_init__  # type: ignore[attr-defined]
    (tmp_path / "with").mkdir()
    row(tiny, tmp_path / "with")
    default = getattr(kind(), name)

    def ignore(config: Any) -> None:
        object.__setattr__(config, name, default)
        check(config)

    monkeypatch.setattr(kind, "__post_init__", ignore)
    (tmp_path / "without").mkdir()
    with pytest.raises((Exception, pytest.fail.Exception)):
        row(tiny, tmp_path / "without")


# SamplingParams


def asked(tiny: Engine, prompt: Any = PROMPT, **params: Any) -> RequestOutput:
    """The answer of 12 tokens of an engine that keeps nothing, unless other parameters are given."""
    params = {"max_new_tokens": 12, "ignore_eos": True} | params
    return answer(engine_on(tiny, enabled=False, pages=256), prompt, SamplingParams(**params))


@of(SamplingParams, "max_new_tokens")
def _(tiny: Engine, path: Path) -> None:
    assert len(asked(tiny, max_new_tokens=3).token_ids) == 3


@of(SamplingParams, "temperature", "seed")
def _(tiny: Engine, path: Path) -> None:
    found = [asked(tiny, temperature=2.0, seed=seed).token_ids for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@of(SamplingParams, "top_k", "top_p", "min_p")
def _(tiny: Engine, path: Path) -> None:
    best, hot = asked(tiny).token_ids, {"temperature": 3.0, "seed": 3}
    assert asked(tiny, **hot).token_ids != best
    for only in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert asked(tiny, **hot, **only).token_ids == best


@of(SamplingParams, "stop")
def _(tiny: Engine, path: Path) -> None:
    text = asked(tiny, TEXT).text
    found = asked(tiny, TEXT, stop=text[5:8])
    assert found.text == text[: text.index(text[5:8])] and found.stop_reason == text[5:8]


@of(SamplingParams, "stop_token_ids")
def _(tiny: Engine, path: Path) -> None:
    token = asked(tiny).token_ids[2]
    assert asked(tiny, stop_token_ids=[token]).finish_reason == "stop"


@of(SamplingParams, "ignore_eos", "logit_bias")
def _(tiny: Engine, path: Path) -> None:
    (end,) = tiny.tokenizer("<|im_end|>").input_ids
    found = [asked(tiny, logit_bias={end: 100}, ignore_eos=ignores) for ignores in (True, False)]
    assert [one.finish_reason for one in found] == ["length", "stop"]


@of(SamplingParams, "logprobs")
def _(tiny: Engine, path: Path) -> None:
    assert [len(known) for known in asked(tiny, logprobs=3).logprobs or ()] == [3] * 12


@of(SamplingParams, "checkpoint_at")
def _(tiny: Engine, path: Path) -> None:
    engine = engine_on(tiny, placement=())
    answer(engine, ids(8 * GRID), greedy(1, checkpoint_at=[3 * GRID]))
    assert answer(engine, ids(8 * GRID)[: 4 * GRID], greedy(1)).usage.cached_tokens == 3 * GRID


@of(SamplingParams, "pin_for")
def _(tiny: Engine, path: Path) -> None:
    engine = engine_on(tiny)
    answer(engine, PROMPT, greedy(1, pin_for=60.0))
    assert engine.cache.stats().pins == 1


@of(SamplingParams, "session", "hints")
def _(tiny: Engine, path: Path) -> None:
    engine = engine_on(tiny)
    answer(engine, PROMPT, greedy(1, session="s", hints=Hints(retain=60.0)))
    assert engine.cache.stats().pins == 1
    assert engine.hint("s", Hints(end_session=True))
    assert engine.cache.stats().pins == 0


class LeastPriority(Policy):
    """Evicts what has the lowest priority."""

    def rank(self, facts: Facts) -> float:
        return facts.priority


@of(SamplingParams, "priority")
def _(tiny: Engine, path: Path) -> None:
    engine = engine_on(tiny, pages=16, eviction=LeastPriority())
    for seed, priority in ((0, 5), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0)):
        answer(engine, ids(4 * GRID, seed), greedy(1, priority=priority))
    assert answer(engine, ids(4 * GRID), greedy(1)).usage.cached_tokens == 3 * GRID


@of(SamplingParams, "tenant")
@of(EngineConfig, "tenants")
@of(TenantConfig, "max_running")
def _(tiny: Engine, path: Path) -> None:
    engine = without_model(tenants={"ann": TenantConfig(max_running=1)})
    for seed in range(3):
        engine.add_request(ids(20, seed), greedy(4, tenant="ann"))
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 2)


@of(SamplingParams, "scheduling_priority")
def _(tiny: Engine, path: Path) -> None:
    engine = without_model(max_num_seqs=1)
    names = [engine.add_request(ids(20, seed), greedy(1, scheduling_priority=-seed)) for seed in range(3)]
    assert [*run_to_end(engine)] == names[::-1]


@of(SamplingParams, "presence_penalty", "frequency_penalty", "repetition_penalty")
def _(tiny: Engine, path: Path) -> None:
    plain = asked(tiny, TEXT, max_new_tokens=24).token_ids
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 3.0}):
        found = asked(tiny, TEXT, max_new_tokens=24, **penalty).token_ids
        assert len(set(found)) > len(set(plain))


@of(SamplingParams, "bad_words")
def _(tiny: Engine, path: Path) -> None:
    word = asked(tiny, TEXT).text.split()[0]
    assert word not in asked(tiny, TEXT, bad_words=[word]).text.split()


@of(SamplingParams, "min_tokens")
def _(tiny: Engine, path: Path) -> None:
    token = asked(tiny).token_ids[0]
    assert len(asked(tiny, min_tokens=6, stop_token_ids=[token]).token_ids) >= 6


@of(SamplingParams, "logits_processors")
def _(tiny: Engine, path: Path) -> None:
    assert all(token % 2 for token in asked(tiny, logits_processors=[no_even_tokens]).token_ids)


@of(SamplingParams, "truncate_prompt_tokens")
def _(tiny: Engine, path: Path) -> None:
    assert asked(tiny, truncate_prompt_tokens=7).usage.prompt_tokens == 7


@of(SamplingParams, "detokenize")
def _(tiny: Engine, path: Path) -> None:
    assert asked(tiny, detokenize=False).text == ""


@of(SamplingParams, "skip_special_tokens")
def _(tiny: Engine, path: Path) -> None:
    (end,) = tiny.tokenizer("<|im_end|>").input_ids
    assert "<|im_end|>" in asked(tiny, logit_bias={end: 100}, skip_special_tokens=False).text


@of(SamplingParams, "structured")
def _(tiny: Engine, path: Path) -> None:
    assert asked(tiny, structured={"choice": ["yes", "no"]}, ignore_eos=False).text in ("yes", "no")


@of(SamplingParams, "n")
def _(tiny: Engine, path: Path) -> None:
    assert len({tuple(one.token_ids) for one in asked(tiny, n=3, temperature=2.0, seed=1).outputs}) == 3


@of(SamplingParams, "prompt_logprobs", "logprob_start_len")
def _(tiny: Engine, path: Path) -> None:
    known = asked(tiny, prompt_logprobs=2, logprob_start_len=30).prompt_logprobs or []
    assert [one is None for one in known] == [True] * 30 + [False] * (len(PROMPT) - 30)


@of(SamplingParams, "adapter")
def _(tiny: Engine, path: Path) -> None:
    engine = engine_on(tiny)
    engine.adapters.load("own", adapter_in(path))
    assert answer(engine, PROMPT, greedy(12, adapter="own")).token_ids != answer(engine, PROMPT, greedy(12)).token_ids


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>"
CHAT = "{{ messages }}{% if tools %}<tool_call><function={% endif %}<|im_start|>assistant\n{% if 1 %}{% endif %}"


def calling(tiny: Engine, says: str, **params: Any) -> RequestOutput:
    """The answer of a model whose chat template writes calls of tools, and which says a text if it may."""
    tokenizer: Any = deepcopy(tiny.tokenizer)
    tokenizer.chat_template = CHAT
    said = [*tokenizer(says).input_ids, tokenizer.eos_token_id]

    def say(answer: list[int], logits: Any) -> Any:
        logits[said[min(len(answer), len(said) - 1)]] += 100
        return logits

    engine = Engine(replace(tiny.loaded, tokenizer=tokenizer), engine_on(tiny).cache, tiny.config)
    params = {"max_new_tokens": 150, "logits_processors": [say]} | params
    return answer(engine, [{"role": "user", "content": "?"}], SamplingParams(**params))


@of(SamplingParams, "parse_response")
@of(SamplingParams, "tools")
def _(tiny: Engine, path: Path) -> None:
    found = calling(tiny, CALL, parse_response=True, tools=[TOOL])
    assert [call.arguments for call in found.tool_calls] == [{"a": 12}]  # a number by the tool's schema


@of(SamplingParams, "tool_choice")
def _(tiny: Engine, path: Path) -> None:
    found = calling(tiny, "No.", parse_response=True, tools=[TOOL], tool_choice="required")
    assert [call.name for call in found.tool_calls] == ["add"]


# CacheConfig


def bare(pages: int = 64, states: int = 16, **config: Any) -> HybridCache:
    """A cache without contents."""
    return HybridCache(CacheMemory.of_indices(pages, states), CacheConfig(**{"page_size": 4, "chunk_size": 4} | config))


def kept(cache: HybridCache, tokens: list[int], *at: int, namespace: str = "", priority: int = 0) -> int:
    """A request that leaves its prompt, with checkpoints at positions. Returns its hit."""
    key = Key.of(tokens, namespace)
    lease = cache.open(key, len(key) - 1, len(key), priority)
    assert lease is not None
    for position in at:
        if position > lease.num_hit_tokens:
            cache.capture(lease, position)
    cache.advance(lease, len(key))
    cache.commit(lease, key, len(key) // cache.config.grid * cache.config.grid)
    cache.close(lease)
    return lease.num_hit_tokens


@of(CacheConfig, "enabled")
def _(tiny: Engine, path: Path) -> None:
    engine = engine_on(tiny, enabled=False)
    assert [answer(engine, PROMPT).usage.cached_tokens for _ in range(2)] == [0, 0]


@of(CacheConfig, "page_size")
def _(tiny: Engine, path: Path) -> None:
    lease = bare(page_size=8, chunk_size=8).open(Key.of(range(40)), 39, 40)
    assert lease is not None and len(lease.block_table) == 5


@of(CacheConfig, "chunk_size")
def _(tiny: Engine, path: Path) -> None:
    cache = bare(page_size=4, chunk_size=16)
    assert cache.config.grid == 16
    with pytest.raises(HybridError, match="16"):
        kept(cache, [*range(40)], 12)


@of(CacheConfig, "memory")
def _(tiny: Engine, path: Path) -> None:
    assert CacheConfig(memory="8MiB").memory_bytes(1 << 40) == 8 << 20
    assert CacheConfig(memory=0.5).memory_bytes(1 << 30) == 1 << 29


@of(CacheConfig, "host")
def _(tiny: Engine, path: Path) -> None:
    settings = CacheConfig(page_size=16, chunk_size=16, memory=30 * sum(tiny.cache.unit_bytes), host="8MiB")
    with tiny.with_cache(settings) as engine:
        assert engine.cache.tiers is not None and engine.cache.tiers.disk is None


@of(CacheConfig, "disk", "directory")
def _(tiny: Engine, path: Path) -> None:
    for hit in (0, 2 * GRID):
        settings = CacheConfig(page_size=16, chunk_size=16, memory="16MiB", disk="64MiB", directory=path)
        with tiny.with_cache(settings) as engine:
            for _ in range(20):
                engine.cache.note_pass(1, 1.0)  # restoring is worth it
            assert answer(engine, PROMPT).usage.cached_tokens == hit


@of(CacheConfig, "directory_readable")
def _(tiny: Engine, path: Path) -> None:
    settings = {"page_size": 16, "chunk_size": 16, "memory": "16MiB", "disk": "64MiB", "directory": path}
    with tiny.with_cache(CacheConfig(**settings, directory_readable=True)) as engine:
        answer(engine, PROMPT)
    assert Key.of(PROMPT).ids[:64] in (path / "manifest.sqlite").read_bytes()


@of(CacheConfig, "state_share")
def _(tiny: Engine, path: Path) -> None:
    settings = CacheConfig(page_size=16, chunk_size=16, memory="16MiB", state_share=0.5)
    memory = tiny.with_cache(settings).cache.memory
    assert memory.arena is None
    assert memory.states.capacity == pytest.approx((8 << 20) / tiny.cache.unit_bytes[1], abs=2)


@of(CacheConfig, "placement")
def _(tiny: Engine, path: Path) -> None:
    hits = []
    for placement in (("prompt_end",), ("geometric",)):
        engine = engine_on(tiny, placement=placement)
        answer(engine, ids(8 * GRID + 1), greedy(1))
        hits.append(answer(engine, ids(8 * GRID + 1)[: 5 * GRID + 1], greedy(1)).usage.cached_tokens)
    assert hits == [0, 5 * GRID]


@of(CacheConfig, "eviction")
def _(tiny: Engine, path: Path) -> None:
    cache = bare(states=9, eviction="mru")
    for number in range(40):
        kept(cache, [number] * 8 + [0], 8)
    assert kept(cache, [0] * 8 + [1]) == 8


@of(CacheConfig, "deterministic")
def _(tiny: Engine, path: Path) -> None:
    assert engine_on(tiny).deterministic and not engine_on(tiny, deterministic=False).deterministic


@of(CacheConfig, "state_dtype")
def _(tiny: Engine, path: Path) -> None:
    settings = CacheConfig(page_size=16, chunk_size=16, memory="16MiB", state_dtype="int8", deterministic=False)
    cache = tiny.with_cache(settings).cache
    assert cache.memory.sizes is not None and cache.memory.sizes.checkpoint < 0.5 * cache.memory.sizes.state


@of(CacheConfig, "kv_dtype")
def _(tiny: Engine, path: Path) -> None:
    pages = [engine_on(tiny, kv_dtype=name).cache.unit_bytes[0] for name in ("auto", "int8")]
    assert pages[1] < 0.3 * pages[0]


@of(CacheConfig, "seed")
def _(tiny: Engine, path: Path) -> None:
    left = []
    for seed in (1, 2):
        cache = bare(pages=400, states=101, seed=seed, eviction=LeastPriority())  # of a sample: all have the same
        for number in range(150):
            kept(cache, [number] * 8 + [0], 8)
        left.append([number for number in range(150) if kept(cache, [number] * 8 + [1])])
    assert left[0] != left[1]


@of(CacheConfig, "priority_cap")
def _(tiny: Engine, path: Path) -> None:
    cache, hits = bare(pages=80, states=21, priority_cap=100), 0
    for number in range(400):
        hits += kept(cache, [number * 7 % 10] * 8 + [0], 8, namespace="regular") // 8
        for other in range(2):  # unique prompts, of which another tenant says that they matter
            kept(cache, [1000 + 2 * number + other] * 8 + [0], 8, namespace="scan", priority=100)
    assert hits < 200


@of(CacheConfig, "verify_contents")
def _(tiny: Engine, path: Path) -> None:
    engine = engine_on(tiny, verify_contents=True)
    answer(engine, PROMPT)
    engine.cache.kv.add_(1)
    with pytest.raises(Exception, match=r"changed|written"):
        engine.cache.audit(contents=True)


# EngineConfig


def without_model(**config: Any) -> Engine:
    """An engine that computes nothing."""
    return engine_without_model(200, 40, config=EngineConfig(**config), runner=Counting())


@of(EngineConfig, "max_num_seqs")
def _(tiny: Engine, path: Path) -> None:
    engine = without_model(max_num_seqs=2)
    for seed in range(4):
        engine.add_request(ids(20, seed), greedy(4))
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (2, 2)


@of(EngineConfig, "max_num_batched_tokens")
def _(tiny: Engine, path: Path) -> None:
    engine = without_model(max_num_batched_tokens=64)
    engine.add_request(ids(320), greedy(1))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert steps >= 5


@of(EngineConfig, "max_waiting")
@of(TenantConfig, "max_requests")
def _(tiny: Engine, path: Path) -> None:
    for settings in (
        {"max_num_seqs": 1, "max_waiting": 1},
        {"tenants": {"ann": TenantConfig(max_requests=2)}},
    ):
        engine = without_model(**settings)
        for seed in range(2):
            engine.add_request(ids(20, seed), greedy(4, tenant="ann"))
        with pytest.raises(QueueFullError):
            engine.add_request(ids(20, 3), greedy(4, tenant="ann"))


@of(EngineConfig, "max_model_len")
def _(tiny: Engine, path: Path) -> None:
    with pytest.raises(PromptError, match="30"):
        without_model(max_model_len=30).add_request(ids(31), greedy(4))


def adapter_in(path: Path) -> Path:
    """A random adapter of the small model."""
    from transformers import AutoModelForCausalLM

    from support.peft_adapters import make_adapter

    folder = path.parents[1] / "adapter"  # of all tests
    if folder.exists():
        return folder
    return make_adapter(AutoModelForCausalLM.from_pretrained(TINY), folder, 1, ["q_proj", "v_proj"])


@of(EngineConfig, "adapter_memory")
def _(tiny: Engine, path: Path) -> None:
    config = replace(tiny.config, adapter_memory=1000)
    engine = tiny.with_cache(tiny.cache.config, size=(20, 8), config=config)
    with pytest.raises(MemoryBudgetError, match="adapter_memory"):
        engine.adapters.load("own", adapter_in(path))


@of(EngineConfig, "prompt_templates")
def _(tiny: Engine, path: Path) -> None:
    engine = tiny.with_cache(tiny.cache.config, size=(20, 8), config=replace(tiny.config, prompt_templates=True))
    found = answer(engine, {"messages": [{"role": "user", "content": "x"}], "chat_template": "The with"}, greedy(1))
    assert found.prompt_token_ids == tiny.tokenizer("The with").input_ids


def encoded_slowly(num_prompts: int, **config: Any) -> list[Any]:
    """What becomes of prompts whose encoding takes until the first of them has ended, or two seconds."""
    engine, let_go, running, most = without_model(**config), threading.Event(), [0], [0]
    prepare = engine.prepare

    def slow(*arguments: Any) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        let_go.wait(2)
        running[0] -= 1
        return prepare(*arguments)

    engine.prepare = slow  # type: ignore[method-assign]

    async def run() -> list[Any]:
        async with AsyncEngine(engine) as own:
            tasks = [asyncio.ensure_future(own.generate([ids(40, n)], greedy(1))) for n in range(num_prompts)]
            await asyncio.wait(tasks, timeout=1, return_when=asyncio.FIRST_COMPLETED)
            let_go.set()
            return await asyncio.gather(*tasks, return_exceptions=True)

    return [*asyncio.run(run()), most[0]]


@of(EngineConfig, "encoding_threads")
def _(tiny: Engine, path: Path) -> None:
    assert encoded_slowly(12, encoding_threads=7)[-1] == 6  # of one tenant


@of(EngineConfig, "encoding_memory")
def _(tiny: Engine, path: Path) -> None:
    *found, _ = encoded_slowly(3, encoding_memory=1000)
    assert any(isinstance(one, EncodingLimitError) for one in found)


@of(EngineConfig, "encoding_seconds")
def _(tiny: Engine, path: Path) -> None:
    *found, _ = encoded_slowly(1, encoding_seconds=0.1)
    assert isinstance(found[0], EncodingLimitError)


@of(EngineConfig, "enforce_eager")
def _(tiny: Engine, path: Path) -> None:
    assert is_captured(tiny.loaded, EngineConfig())
    assert not is_captured(tiny.loaded, EngineConfig(enforce_eager=True))


@of(EngineConfig, "overlap")
def _(tiny: Engine, path: Path) -> None:
    computed = []
    for overlap in (True, False):
        runner = Counting()
        engine = engine_without_model(200, 40, config=EngineConfig(overlap=overlap), runner=runner)
        engine.add_request(ids(20), greedy(4))
        engine.step()
        computed.append(runner.computed)
    assert computed == [21, 20]  # with overlap the next step is launched before the results of this one are read


@of(EngineConfig, "audit")
def _(tiny: Engine, path: Path) -> None:
    engine = without_model(audit=True)
    audits: list[None] = []
    engine.cache.audit = lambda *_, **__: audits.append(None)  # type: ignore[method-assign]
    engine.add_request(ids(20), greedy(4))
    run_to_end(engine)
    assert len(audits) >= 4


@of(TenantConfig, "weight")
def _(tiny: Engine, path: Path) -> None:
    engine = without_model(max_num_seqs=1, tenants={"ann": TenantConfig(weight=4.0)})
    for seed in range(10):
        engine.add_request(ids(20, seed), greedy(1, tenant="ann"), request_id=f"ann {seed}")
        engine.add_request(ids(20, seed), greedy(1, tenant="bob"), request_id=f"bob {seed}")
    first = [*run_to_end(engine)][:10]
    assert sum(name.startswith("ann") for name in first) >= 7


@of(TenantConfig, "memory_share")
def _(tiny: Engine, path: Path) -> None:
    shares = []
    for share in (None, 0.2):
        engine = engine_on(tiny, pages=40, states=40)
        own = replace(engine.config, tenants={} if share is None else {"scan": TenantConfig(memory_share=share)})
        engine = Engine(engine.loaded, engine.cache, own)
        answer(engine, ids(4 * GRID, 1), greedy(1, tenant="ann"))
        for seed in range(2, 14):
            answer(engine, ids(4 * GRID, seed), greedy(1, tenant="scan"))
        shares.append(answer(engine, ids(4 * GRID, 1), greedy(1, tenant="ann")).usage.cached_tokens)
    assert shares == [0, 3 * GRID]


# SpeculationConfig


def drafted(tiny: Engine, num_tokens: int = 24, **config: Any) -> Engine:
    """An engine that has answered the same twice, with drafts."""
    own = CacheConfig(page_size=16, chunk_size=16)
    engine = tiny.with_cache(own, size=(128, 32), speculation=SpeculationConfig(**config))
    for _ in range(2):
        answer(engine, TEXT, greedy(num_tokens))
    return engine


@of(SpeculationConfig, "drafters")
def _(tiny: Engine, path: Path) -> None:
    class Always(Drafter):
        name = "always"

        def propose(self, history: Any, limit: int) -> Any:
            return [5], [-1]

    assert drafted(tiny, drafters=(Always(),), adaptive=False).stats().speculation["always"].drafted_tokens > 0


@of(SpeculationConfig, "max_drafts", "adaptive")
def _(tiny: Engine, path: Path) -> None:
    class Counted(Drafter):
        name, most = "counted", 0

        def propose(self, history: Any, limit: int) -> Any:
            self.most = max(self.most, limit)
            return [*range(3, 3 + limit)], [*range(-1, limit - 1)]  # never right: an adaptive engine stops asking

    drafter = Counted()
    stats = drafted(tiny, drafters=(drafter,), max_drafts=2, adaptive=False).stats().speculation["counted"]
    assert drafter.most == 2 and stats.drafted_tokens >= 2 * 40
