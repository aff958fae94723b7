"""Trees of drafts: several paths in one pass, of which one is kept."""

import random
from pathlib import Path
from typing import Any

import pytest

from hybrid import ArgumentError, CacheConfig, Engine, EngineConfig, SamplingParams
from hybrid.commands.parity import ANSWER, Judge, KnownAnswers
from hybrid.commands.random_checkpoints import write_random_checkpoint
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.drafter import Drafter, History
from hybrid.speculation.drafts import Drafts, DraftTree
from support.drafters import VOCAB, Scripted
from support.engines import GRID, answer, assert_nothing_held, cold, greedy, ids, run_to_end

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

SAMPLED = SamplingParams(max_new_tokens=60, ignore_eos=True, logprobs=3, temperature=1.2, top_p=0.9, seed=5)
GREEDY = SamplingParams(max_new_tokens=60, ignore_eos=True, logprobs=3)


def made(tokens: list[int], parents: list[int], name: str = "a") -> Drafts:
    return Drafts((*tokens,), (*parents,), ((name,),) * len(tokens))


def engine_with(tiny: Engine, drafter: Drafter, *, pages: int = 128, max_drafts: int = 7, **cache: Any) -> Engine:
    """An engine that computes all that a drafter proposes, audited after every step."""
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, **cache)
    own = SpeculationConfig(drafters=(drafter,), adaptive=False, max_drafts=max_drafts)
    return tiny.with_cache(settings, size=(pages, 32), config=EngineConfig(audit=True), speculation=own)


def grown(answers: dict[tuple[int, ...], list[int]], seed: int, right: float = 1.0) -> Scripted:
    """Random trees that have the next tokens of known answers somewhere, each with a probability."""
    rng = random.Random(seed)

    def script(history: History, limit: int) -> tuple[list[int], list[int]]:
        done = len(history) - history.prompt_len
        known = answers[tuple(history[: history.prompt_len])][done:]
        tokens: list[int] = []
        parents: list[int] = []
        last = -1
        while len(tokens) < limit:
            if known and rng.random() < 0.5:
                parents.append(last)
                last = len(tokens)
                token = known.pop(0)
                tokens.append(token if rng.random() < right else rng.randrange(VOCAB))
            else:
                parents.append(rng.randrange(-1, len(tokens)))
                tokens.append(rng.randrange(VOCAB))
        return tokens, parents

    return Scripted(script)


@pytest.mark.parametrize(
    ("params", "right", "max_drafts"),
    [(GREEDY, 1.0, GRID + 3), (GREEDY, 0.7, 7), (SAMPLED, 1.0, 7), (SAMPLED, 0.7, GRID + 3)],
)
def test_trees_change_neither_tokens_nor_bits(
    tiny: Engine, params: SamplingParams, right: float, max_drafts: int
) -> None:
    prompts = [ids(50, seed=1), ids(GRID - 1, seed=2), ids(3 * GRID, seed=3)]
    expected = [cold(tiny, prompt, params) for prompt in prompts]
    answers = {tuple(prompt): output.token_ids for prompt, output in zip(prompts, expected, strict=True)}
    engine = engine_with(tiny, grown(answers, 1, right), max_drafts=max_drafts, deterministic=True)
    for _ in range(2):  # cold, and as hits
        found = engine.generate(prompts, params, progress=False)
        assert [output.token_ids for output in found] == [output.token_ids for output in expected]
        assert [output.logprobs for output in found] == [output.logprobs for output in expected]
        assert_nothing_held(engine)
    stats = engine.stats().speculation["Scripted"]
    assert stats.accepted_tokens > 150  # of 360 tokens


@pytest.mark.parametrize("start", [0, 1, 7, GRID - 2, GRID - 1])
def test_the_kept_path_may_begin_and_end_anywhere_in_a_page(tiny: Engine, start: int) -> None:
    """The right path is the last of three: its pages take the place of those of the first one."""
    prompt = ids(GRID + start, seed=start)
    right = cold(tiny, prompt, greedy(20)).token_ids

    def script(history: History, limit: int) -> tuple[list[int], list[int]]:
        known = right[len(history) - history.prompt_len :][: limit - 3]
        return [0, 1, 2, *known], [-1, 0, -1, *([-1, *range(3, 2 + len(known))] if known else [])]

    for deterministic in (True, False):
        engine = engine_with(tiny, Scripted(script), max_drafts=GRID, deterministic=deterministic)
        output = answer(engine, prompt, greedy(20))
        assert output.token_ids == right
        assert output.usage.accepted_tokens >= 13
        assert_nothing_held(engine)
        turn = [*prompt, *right, *ids(5, seed=9)]  # reads the pages and the state that were kept
        assert answer(engine, turn, greedy(5)).token_ids == cold(tiny, turn, greedy(5)).token_ids


def test_without_free_memory_the_first_path_is_computed(tiny: Engine) -> None:
    prompt = ids(20)
    right = cold(tiny, prompt, greedy(40)).token_ids
    answers = {tuple(prompt): right}
    engine = engine_with(tiny, grown(answers, 3), pages=5, deterministic=True)
    engine.add_request(prompt, greedy(40))
    private = []
    outputs = {}
    while engine.has_work:
        outputs.update({output.request_id: output for output in engine.step()})
        private.append(engine.cache.stats().pages_private)
    assert [output.token_ids for output in outputs.values()] == [right]
    assert max(private) <= 4
    assert_nothing_held(engine)


def test_trees_chains_and_none_are_computed_in_one_step(tiny: Engine) -> None:
    prompts = [ids(20, seed=seed) for seed in range(6)]
    answers = {tuple(prompt): cold(tiny, prompt, greedy(30)).token_ids for prompt in prompts}
    trees = grown(answers, 4)

    def script(history: History, limit: int) -> Any:
        done, kind = len(history) - history.prompt_len, prompts.index(list(history[: history.prompt_len])) % 3
        known = answers[tuple(history[: history.prompt_len])][done : done + limit]
        return (trees.script(history, limit), (known, range(-1, len(known) - 1)), ([], []))[kind]

    engine = engine_with(tiny, Scripted(script), deterministic=True)
    outputs = {}
    for prompt in prompts:
        engine.add_request(prompt, greedy(30))
        outputs.update({output.request_id: output for output in engine.step()})
    outputs.update(run_to_end(engine))
    assert [output.token_ids for output in outputs.values()] == [*answers.values()]
    assert [output.usage.accepted_tokens > 0 for output in outputs.values()] == [True, True, False] * 2
    assert_nothing_held(engine)


def test_only_private_pages_change_places(tiny: Engine) -> None:
    engine = engine_with(tiny, grown({}, 0))
    answer(engine, ids(3 * GRID), greedy(1))
    engine.add_request([*ids(3 * GRID), 5], greedy(4))
    engine.step()
    (lease,) = engine.cache.leases
    with pytest.raises(ArgumentError, match="first 3 are shared"):
        engine.cache.swap_pages(lease, 2, 3)
    with pytest.raises(ArgumentError, match="places 3 and 4"):
        engine.cache.swap_pages(lease, 3, 4)
    run_to_end(engine)


# Several drafters


def test_drafts_of_several_drafters_are_one_tree_the_most_likely_first() -> None:
    tree = DraftTree()
    tree.add(made([5, 6, 7], [-1, 0, 1]), 0.5)
    tree.add(made([8, 9], [-1, 0], "b"), 0.8)
    # a: 0.5, 0.25, 0.125; b: 0.8 of the other half, and 0.8 of that
    assert tree.chances == pytest.approx([0.5, 0.4, 0.32, 0.25, 0.125])
    assert tree.best(4) == Drafts((5, 8, 9, 6), (-1, -1, 1, 0), (("a",), ("b",), ("b",), ("a",)))


def test_of_the_drafts_of_one_drafter_the_most_probable_are_computed() -> None:
    tree = DraftTree()
    tree.add(made([5, 6, 7], [-1, -1, 1]), 0.6)  # the second one is right where the first is wrong
    assert tree.chances == pytest.approx([0.6, 0.4 * 0.6, 0.4 * 0.6 * 0.6])
    tree = DraftTree()
    tree.add(Drafts((5, 6, 7), (-1, -1, 1), (("a",),) * 3, (0.2, 0.7, 0.9)), 0.6)
    assert tree.chances == pytest.approx([0.7, 0.7 * 0.9, 0.2])
    assert tree.best(2) == Drafts((6, 7), (-1, 0), (("a",),) * 2)
    assert tree.best(3).chances == (0.2, 0.7, 0.9)  # as they were proposed


def test_a_token_that_two_drafters_name_is_one_draft_and_likelier() -> None:
    tree = DraftTree()
    tree.add(made([5, 6], [-1, 0]), 0.5)
    tree.add(made([5, 7], [-1, 0], "b"), 0.5)
    assert tree.chances == pytest.approx([0.75, 0.375, 0.1875])
    assert tree.best(3) == Drafts((5, 6, 7), (-1, 0, 0), (("a", "b"), ("a",), ("b",)))


def test_what_a_drafter_is_measured_by_are_its_own_drafts_after_what_was_accepted() -> None:
    drafts = Drafts((5, 8, 9, 6), (-1, -1, 1, 0), (("a",), ("b",), ("b",), ("a", "b")))
    assert drafts.trials("a", (0, 3)) == (2, 2)
    assert drafts.trials("a", (1, 2)) == (1, 0)
    assert drafts.trials("b", (1, 2)) == (2, 2)
    assert drafts.trials("b", (1,)) == (2, 1)
    assert drafts.trials("b", (0, 3)) == (1, 0)


def test_two_drafters_of_which_one_is_right_at_a_time_are_both_computed(tiny: Engine) -> None:
    prompt = ids(20)
    right = cold(tiny, prompt, greedy(60)).token_ids

    class Half(Drafter):
        def __init__(self, kind: int) -> None:
            self.kind = kind

        @property
        def name(self) -> str:
            return f"half {self.kind}"

        def propose(self, history: History, limit: int) -> tuple[list[int], range]:
            done = len(history) - history.prompt_len
            known = right[done : done + limit // 2]  # all of both are computed
            wrong = done // 10 % 2 == self.kind
            return ([token ^ 1 for token in known] if wrong else known), range(-1, len(known) - 1)

    own = SpeculationConfig(drafters=(Half(0), Half(1)), adaptive=False)  # whatever a loaded machine takes for a pass
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, deterministic=True)
    engine = tiny.with_cache(settings, size=(64, 16), config=EngineConfig(audit=True), speculation=own)
    output = answer(engine, prompt, greedy(60))
    assert output.token_ids == right
    stats = engine.stats().speculation
    assert all(stats[f"half {kind}"].accepted_tokens > 0 for kind in (0, 1))
    assert output.usage.accepted_tokens > 25
    assert_nothing_held(engine)


# Other states and other kernels


@pytest.mark.parametrize(
    ("name", "wrong_every"),
    [
        *(("bamba", 3), ("tiny", 0), ("tiny", 3), ("gemma3_text", 3), ("qwen3_next", 3)),
        *(("jamba", 3), ("kimi_linear", 0), ("olmo_hybrid", 3), ("recurrent_gemma", 3)),
    ],
)
def test_trees_change_no_bit_of_any_family(name: str, wrong_every: int, tmp_path: Path) -> None:
    """The states of Mamba-2 and Mamba-1, of delta rules and recurrences, windows, latent rows, and experts."""
    path = "tiny" if name == "tiny" else write_random_checkpoint(tmp_path, name, 0)
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, memory="16MiB", deterministic=True)
    judge = Judge(Engine.from_pretrained(path, dtype="float32", cache=settings))
    prompts = [judge.ids(2 * GRID + 9), judge.ids(GRID // 2)]
    answers = {tuple(prompt): judge.cold(prompt).token_ids for prompt in prompts}
    drafter = KnownAnswers(answers, wrong_every=wrong_every, as_tree=True)
    warm = judge.warm(speculation=SpeculationConfig(drafters=(drafter,), adaptive=False))
    outputs = [output for _ in range(2) for output in warm.generate(prompts, progress=False, params=ANSWER)]
    assert judge.differences(outputs) == []
    assert all(output.error is None and output.usage.accepted_tokens > 5 for output in outputs)
    assert_nothing_held(warm)


class Two(Drafter):
    """The token that comes next of a known answer, and another one."""

    def __init__(self, known: list[int]) -> None:
        self.known = known

    def propose(self, history: History, limit: int) -> tuple[list[int], list[int], list[float]]:
        token = self.known[len(history) - history.prompt_len]
        return [token, token ^ 1][:limit], [-1, -1][:limit], [0.6, 0.4][:limit]


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "launched"])
def test_where_passes_with_chains_are_captured_the_most_probable_path_is_computed(tiny: Engine, eager: bool) -> None:
    prompt = ids(50, seed=1)
    expected = cold(tiny, prompt, greedy(30)).token_ids
    settings, config = CacheConfig(page_size=GRID, chunk_size=GRID), EngineConfig(audit=True, enforce_eager=eager)
    drafts = SpeculationConfig(drafters=(Two(expected),))
    engine = tiny.with_cache(settings, size=(128, 32), config=config, speculation=drafts)
    output = answer(engine, prompt, greedy(30))
    assert output.token_ids == expected
    assert output.usage.accepted_tokens > 0
    assert (output.usage.drafted_tokens > output.usage.accepted_tokens) == eager
    assert_nothing_held(engine)
