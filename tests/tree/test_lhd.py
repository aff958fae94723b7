"""The policy that learns: its arithmetic, and that it finds out what a cache of random work should keep."""

import random

import pytest

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.tree import lhd as learned
from hybrid.tree.lhd import LearnedHitDensity
from hybrid.tree.node import Kind, NodeUsage
from hybrid.tree.policy import Facts
from support.caches import AuditedCache, start

PAGE = 4


def facts(usage: NodeUsage, now: int, below: bool = False) -> Facts:
    return Facts.without_node(usage, now, 64, tokens_saved=64, bytes_freed=64, has_below=below)


def live(policy: LearnedHitDensity, kind: str, now: int) -> NodeUsage:
    usage = NodeUsage(now, now, kind=kind, used_at=now)
    policy.entered(facts(usage, now))
    return usage


def use(policy: LearnedHitDensity, usage: NodeUsage, now: int, gone: bool) -> None:
    (policy.missed if gone else policy.hit)(facts(usage, now))
    usage.hits += 1
    usage.used_at = now


@pytest.mark.parametrize("what", ["descendants", "kind"])
def test_a_checkpoint_that_gets_descendants_or_another_kind_changes_its_class(what: str) -> None:
    """Turn ends without descendants are used again after 4 requests; branches, and those with descendants, never."""
    policy, turn_ends = LearnedHitDensity(), []
    for now in range(1, 300):
        live(policy, Kind.BRANCH, now)
        turn_ends.append(live(policy, Kind.TURN_END, now))
        policy.changed(facts(live(policy, Kind.TURN_END, now), now, below=True))
        if now > 4:
            use(policy, turn_ends[now - 5], now, gone=False)
    changed, same = live(policy, Kind.TURN_END, 299), live(policy, Kind.TURN_END, 299)
    if what == "kind":
        changed.kind = Kind.BRANCH
    policy.changed(facts(changed, 299, below=what == "descendants"))
    policy.changed(facts(same, 299))
    assert policy.rank(facts(same, 300)) > 5 * policy.rank(facts(changed, 300, below=what == "descendants"))


@pytest.mark.parametrize("gone", [False, True])
def test_a_kind_that_is_hit_is_worth_more_than_one_that_is_not(gone: bool) -> None:
    """Branches are used again after 8 requests, turn ends never. Also where every branch had been evicted: ghosts teach
    as well as hits do."""
    policy = LearnedHitDensity()
    branches: list[tuple[int, NodeUsage]] = []
    for now in range(1, 400):
        live(policy, Kind.TURN_END, now)
        fresh = live(policy, Kind.BRANCH, now)
        if gone:
            policy.evicted(facts(fresh, now))
        branches.append((now, fresh))
        for born, usage in branches:
            if now == born + 8:
                use(policy, usage, now, gone)
    now = 400
    wanted, unwanted = (
        NodeUsage(now, now, kind=Kind.BRANCH, used_at=now - 3),
        NodeUsage(now, now, kind=Kind.TURN_END, used_at=now - 3),
    )
    assert policy.rank(facts(wanted, now)) > 10 * policy.rank(facts(unwanted, now))


def test_a_conversation_that_nears_the_end_of_the_context_is_worth_what_such_ones_were() -> None:
    """Turns continue after 10 requests, except those of 980 to 1000 tokens, as long as the longest prompts."""
    policy = LearnedHitDensity()

    def of(usage: NodeUsage, now: int, num_tokens: int) -> Facts:
        return Facts.without_node(usage, now, num_tokens, tokens_saved=64, bytes_freed=64)

    policy.entered(of(NodeUsage(1, 1, kind=Kind.PROMPT_END, used_at=1), 1, 1000))
    turns: list[tuple[int, int, NodeUsage]] = []
    for now in range(1, 400):
        num_tokens = 980 + now % 21 if now % 4 == 0 else 100 + 17 * now % 400
        turns.append((now, num_tokens, NodeUsage(now, now, kind=Kind.TURN_END, used_at=now)))
        policy.entered(of(turns[-1][2], now, num_tokens))
        for born, length, usage in turns:
            if born + 10 == now and length < 980:
                policy.hit(of(usage, now, length))
                usage.hits += 1
                usage.used_at = now

    def rank(num_tokens: int) -> float:
        return policy.rank(of(NodeUsage(400, 400, kind=Kind.TURN_END, used_at=396), 400, num_tokens))

    assert rank(300) > 5 * rank(990)
    assert rank(700) > 3 * rank(990)  # a length that it has not seen


def test_a_kind_never_seen_is_worth_what_its_age_says() -> None:
    policy = LearnedHitDensity()
    young, old = NodeUsage(1, 1, kind=Kind.BRANCH, used_at=99), NodeUsage(1, 1, kind=Kind.BRANCH, used_at=1)
    assert policy.rank(facts(young, 100)) > policy.rank(facts(old, 100)) > 0


def test_a_priority_doubles_and_a_spare_checkpoint_goes_before_all() -> None:
    policy = LearnedHitDensity()
    plain, dear = NodeUsage(1, 1), NodeUsage(1, 1, priority=3)
    assert policy.rank(facts(dear, 5)) == pytest.approx(8 * policy.rank(facts(plain, 5)))
    assert policy.rank(facts(NodeUsage(1, 0), 5)) < 0


def test_records_of_what_has_gone_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MAX_WATCHED", 50)
    policy = LearnedHitDensity()
    for now in range(1, 300):
        usage = live(policy, Kind.TURN_END, now)
        if now % 10:
            policy.evicted(facts(usage, now))
    assert policy.num_watched <= 50 + 30


# In a cache


def small_cache(memory: int = 60_000, **config: object) -> HybridCache:
    settings = CacheConfig(page_size=PAGE, chunk_size=PAGE, **config)  # type: ignore[arg-type]
    return AuditedCache(CacheMemory.of_bytes(memory, page_bytes=1000, state_bytes=5000), settings)


def serve(cache: HybridCache, ids: list[int], answer: int = PAGE) -> int:
    """A request and its answer, as an engine would; returns the hit."""
    key = Key.of([*ids, *range(1000, 1000 + answer)])
    lease = cache.open(key, len(ids) - 1, len(ids))
    assert lease is not None
    hit = lease.num_hit_tokens
    for position, kind in sorted(
        {lease.branching_len or 0: Kind.BRANCH, (len(ids) - 1) // PAGE * PAGE: Kind.PROMPT_END}.items()
    ):
        if position > hit:
            cache.capture(lease, position, kind)
    cache.advance(lease, len(ids))
    cache.commit(lease, key, len(ids) // PAGE * PAGE)
    whole = len(key) // PAGE * PAGE
    if cache.reserve(lease, len(key)):
        if whole > len(ids):
            cache.capture(lease, whole, Kind.TURN_END)
        cache.advance(lease, len(key))
        cache.commit(lease, key, whole)
        cache.end_turn(lease, len(key))
    cache.close(lease)
    return hit


def rate(eviction: str) -> float:
    """Twelve popular prompts with a question each, among many prompts that nobody asks again."""
    cache, dice = small_cache(eviction=eviction), random.Random(5)
    popular = [[dice.randrange(900) for _ in range(24)] for _ in range(12)]
    hits = asked = 0
    for _ in range(500):
        if dice.random() < 0.4:
            prompt = dice.choice(popular) + [dice.randrange(900) for _ in range(3)]
        else:
            prompt = [dice.randrange(900) for _ in range(27)]
        hits += serve(cache, prompt)
        asked += len(prompt)
    return hits / asked


@pytest.mark.usefixtures("untraced")  # thousands of evictions over the same lines
def test_it_keeps_what_is_popular_where_recency_does_not() -> None:
    assert rate("lhd") > 1.5 * rate("lru")


@pytest.mark.usefixtures("untraced")  # thousands of evictions over the same lines
def test_the_same_seed_evicts_the_same_victims() -> None:
    assert rate("lhd") == rate("lhd")


def test_a_checkpoint_not_worth_its_room_is_not_taken_and_remembered_all_the_same() -> None:
    """Every slot holds a prompt that is asked all the time. One more that nobody has asked for takes none of them."""
    cache = small_cache(memory=26_000)
    for _ in range(60):
        for letter in (1, 2):
            serve(cache, [letter] * (2 * PAGE + 1), answer=1)
    lease = start(cache, Key.of([3] * (PAGE + 1)))
    before = cache.stats().checkpoints
    assert cache.capture(lease, PAGE, Kind.USER) is None
    assert cache.stats().checkpoints == before
    assert lease.lost[PAGE].kind == Kind.USER
    key = Key.of([3] * (PAGE + 1))
    cache.advance(lease, PAGE + 1)
    cache.commit(lease, key, PAGE)
    cache.close(lease)
    again = start(cache, key)
    assert again.explanation.reason.startswith("a checkpoint between 0 and 4 was not admitted")
    cache.close(again)


def test_the_checkpoint_of_a_prompt_at_whose_end_its_turn_ends_is_that_of_the_turn() -> None:
    cache = small_cache()
    serve(cache, [7] * (2 * PAGE + 1), answer=1)
    (checkpoint,) = [node for _, node in cache.tree.nodes() if node.slot is not None]
    assert (checkpoint.end, checkpoint.usage.kind) == (2 * PAGE, Kind.TURN_END)


def test_turns_are_counted_along_a_conversation() -> None:
    cache = small_cache(memory=200_000)
    ids: list[int] = []
    for turn in range(4):
        ids = [*ids, *[turn] * PAGE]
        serve(cache, ids)
        ids = [*ids, *range(1000, 1000 + PAGE)]
    turns = {node.end: node.usage.turn for _, node in cache.tree.nodes() if node.usage.kind == Kind.TURN_END}
    assert turns == {2 * PAGE * (turn + 1): turn for turn in range(4)}
