"""The backend in SGLang's own hands: found by its plugins, built by its factory, refused with a reason."""

import os
import subprocess
import sys
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hybrid.errors import ArgumentError, LockError, UnsupportedModelError, VersionError
from support.sglang_absent import require_sglang

require_sglang()

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.registry import create_tree_cache  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

from hybrid.sglang.cache import HybridRadixCache  # noqa: E402
from hybrid.sglang.plugin import BACKEND, register  # noqa: E402
from hybrid.sglang.tree_core import HybridTreeCore  # noqa: E402
from hybrid.sglang.values import WORDS  # noqa: E402
from support.sglang_served import Served, Setting, context_of, torch  # noqa: E402

ROOT = Path(__file__).parent.parent.parent


def key(*ids: int, salt: str | None = None) -> RadixKey:
    return RadixKey(array("q", ids), cache_salt=salt)


@pytest.fixture
def served() -> Served:
    return Served(Setting(page_size=1, extra_buffer=False))


def put(served: Served, *ids: int, salt: str | None = None) -> Any:
    """Insert ids with KV and a state of their own."""
    value, state = served.allocator.alloc(len(ids)), served.pool.mamba_allocator.alloc(1)
    return served.cache.insert(InsertParams(key=key(*ids, salt=salt), value=value, mamba_value=state))


def match(served: Served, *ids: int, salt: str | None = None) -> Any:
    return served.cache.match_prefix(MatchPrefixParams(key=key(*ids, salt=salt)))


@pytest.mark.parametrize(("policy", "anchors"), [("lhd", True), ("lhd", False), ("lru", True)])
def test_a_long_prompt_keeps_anchors_where_parts_of_its_prefill_end(policy: str, anchors: bool) -> None:
    served, length, part = Served(Setting(policy=policy, tokens=61440, config={"anchors": anchors})), 60000, 1024
    served.serve([*range(length)], length, part)
    tree = served.cache.tree_core.tree
    spacing = tree.anchor_spacing(length * WORDS)
    ends = [node.end for _, node in tree.nodes() if kind_of(node) == "anchor"]
    if policy == "lru" or not anchors:
        assert not spacing and not ends
    else:
        assert len(ends) > 1
        assert all(not end % (part * WORDS) for end in ends)
        assert all(spacing - part * WORDS < below - above for above, below in pairwise([0, *sorted(ends)]))


def kind_of(node: Any) -> str | None:
    """Why the state of a node is there; None: there is none."""
    return str(node.usage.kind) if node.slot is not None else None


# How it is found and built

FOUND = """
from support.sglang_absent import imitate
imitate()
import sys
for name in [name for name in sys.modules if name.split(".")[0] == "hybrid"]:  # what the imitation has loaded
    del sys.modules[name]
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.mem_cache.registry import registered_radix_cache_backends
from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES
print(registered_radix_cache_backends(), "lhd" in RADIX_EVICTION_POLICY_CHOICES)
print([name for name in sys.modules if name.startswith("hybrid.") and "sglang" not in name and "tree" not in name])
"""


def test_sglangs_own_loader_finds_the_plugin_in_a_fresh_process() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "SGLANG_PLUGINS": "hybrid"}
    command = [sys.executable, "-W", "ignore", "-c", FOUND]
    shown = subprocess.run(command, capture_output=True, text=True, env=env, check=True, cwd="/").stdout.splitlines()
    assert shown[-2] == "['hybrid'] True"
    assert "hybrid.engine" not in shown[-1]
    assert "hybrid.cache" not in shown[-1]


def test_registering_twice_is_registering_once() -> None:
    register()
    register()


def test_the_factory_builds_it_from_server_arguments(served: Served) -> None:
    assert served.args.radix_cache_backend == BACKEND
    assert type(served.cache) is HybridRadixCache
    assert isinstance(served.cache, UnifiedRadixCache)
    assert type(served.cache.tree_core) is HybridTreeCore
    assert served.cache.supports_mamba()


def test_without_the_flag_for_a_policy_it_is_lhd_and_with_it_what_it_says() -> None:
    def params_of(policy: str | None) -> Any:
        served = Served(Setting(policy=policy))
        params = served.params()
        create_tree_cache(context_of(served.args, params))
        return params

    assert params_of(None).eviction_policy == "lhd"
    assert params_of("lru").eviction_policy == "lru"


def test_a_cache_that_is_disabled_is_sglangs_own() -> None:
    served = Served(Setting())
    params = served.params()
    params.disable = True
    cache = create_tree_cache(context_of(served.args, params, disable_radix_cache=True))
    assert type(cache) is UnifiedRadixCache


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"enable_hierarchical_cache": True}, "HiCache"),
        ({"is_hybrid_swa": True}, "sliding windows"),
        ({"is_hybrid_ssm": False}, "without linear-attention states"),
    ],
)
def test_what_is_not_supported_is_refused_before_anything_is_built(changed: dict[str, Any], named: str) -> None:
    served = Served(Setting())
    with pytest.raises(UnsupportedModelError, match=named):
        create_tree_cache(context_of(served.args, served.params(), **changed))


@pytest.mark.parametrize("policy", ["slru", "tlru"])
def test_policies_for_trees_without_states_are_refused(policy: str) -> None:
    with pytest.raises(ArgumentError, match="leave --radix-eviction-policy out"):
        Served(Setting(policy=policy))


def test_a_mistake_in_the_configuration_is_named() -> None:
    with pytest.raises(ArgumentError, match="'seeds'"):
        Served(Setting(config={"seeds": 3}))


def test_a_version_that_is_not_known_is_refused_when_a_cache_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.sglang.installed.version", lambda name: "0.6.0")
    with pytest.raises(VersionError, match=r"0\.6\.0 is installed"):
        Served(Setting())


def test_methods_of_features_that_are_refused_say_so_when_they_are_called(served: Served) -> None:
    core = served.cache.tree_core
    for name in ("insert_host", "evict_device_start", "set_hicache_enabled", "attach_swa_window"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(core, name)()


# What it answers


def test_namespaces_share_nothing(served: Served) -> None:
    put(served, 1, 2, 3, salt="a")
    assert match(served, 1, 2, 3, salt="a").device_prefix_len == 3
    assert match(served, 1, 2, 3, salt="b").device_prefix_len == 0
    assert match(served, 1, 2, 3).device_prefix_len == 0


def test_duplicates_are_freed_once_and_a_second_state_stays_the_callers(served: Served) -> None:
    first = put(served, 1, 2, 3)
    free, states = served.allocator.available_size(), served.pool.mamba_allocator.available_size()
    again = put(served, 1, 2, 3, 4)
    assert (first.prefix_len, again.prefix_len, again.mamba_exist) == (0, 3, False)
    assert served.allocator.available_size() == free - 1
    third = put(served, 1, 2, 3, 4)
    assert third.mamba_exist
    assert served.pool.mamba_allocator.available_size() == states - 2  # the third is still ours to free


def test_a_branching_point_is_on_the_grid_and_past_the_state(served: Served) -> None:
    put(served, *range(200))
    found = match(served, *range(150), 7)
    assert (found.device_prefix_len, found.full_kv_hit_length, found.mamba_branching_seqlen) == (0, 150, 128)


def test_indices_come_back_as_they_were_given(served: Served) -> None:
    value, state = served.allocator.alloc(5), served.pool.mamba_allocator.alloc(1)
    node = served.cache.insert(InsertParams(key=key(*range(5)), value=value, mamba_value=state)).last_device_node
    core = served.cache.tree_core
    assert torch.equal(served.cache.path_device_indices(node), value)
    assert torch.equal(core.get_component_device_value(node, ComponentType.MAMBA), state)
    assert torch.equal(core.all_values_flatten(), value)


def test_indices_on_a_path_are_the_trees_whatever_was_offered_for_them(served: Served) -> None:
    """Other indices for what the tree has are freed; those of the beginning are the tree's own."""

    def enter(value: torch.Tensor, previous: int) -> torch.Tensor:
        state = served.pool.mamba_allocator.alloc(1)
        params = InsertParams(key=key(*range(len(value))), value=value, mamba_value=state, prev_prefix_len=previous)
        return served.cache.path_device_indices(served.cache.insert(params).last_device_node)

    first, other, more = (served.allocator.alloc(count) for count in (3, 5, 2))
    assert torch.equal(enter(first, 0), first)
    kept = torch.cat([first, other[3:]])
    assert torch.equal(enter(other, 0), kept)
    assert torch.equal(enter(torch.cat([kept, more]), 5), torch.cat([kept, more]))
    served.cache.evict(EvictParams(num_tokens=2))
    assert torch.equal(served.cache.path_device_indices(match(served, *range(5)).last_device_node), kept)


def test_locks_are_released_per_component_and_never_twice(served: Served) -> None:
    node = put(served, *range(10)).last_device_node
    cache = served.cache
    receipt = cache.inc_lock_ref(node, skip_lock_components=(ComponentType.MAMBA,))
    assert (cache.full_protected_size(), cache.mamba_protected_size()) == (10, 0)
    cache.evict(EvictParams(mamba_num=1))
    assert (cache.full_protected_size(), cache.mamba_evictable_size()) == (10, 0)
    cache.dec_lock_ref(node, receipt.to_dec_params())
    assert cache.full_protected_size() == 0
    with pytest.raises(LockError):
        cache.dec_lock_ref(node, receipt.to_dec_params())


def test_a_handle_is_never_given_out_again(served: Served) -> None:
    core = served.cache.tree_core
    given = {core.root_node_handle(), put(served, 1, 2).last_device_node}
    served.cache.reset()
    given |= {core.root_node_handle(), put(served, 1, 2).last_device_node}
    assert len(given) == 4


def test_looking_at_a_waiting_request_counts_as_no_use() -> None:
    """States are evicted least recently used first: what only waits does not become recent."""
    served = Served(Setting(policy="lru", page_size=1, extra_buffer=False))
    for ids in ((1, 1), (2, 2)):
        put(served, *ids)
    waiting = served.arrive([1, 1, 9])
    waiting.init_next_round_input(served.cache, cow_mamba=False)
    served.cache.touch_prefix(key(1, 1))
    served.cache.evict(EvictParams(mamba_num=1))
    assert match(served, 1, 1).device_prefix_len == 0
    assert match(served, 2, 2).device_prefix_len == 2


def test_a_request_counts_once_however_often_it_starts(served: Served) -> None:
    node = put(served, 1, 1).last_device_node
    waiting = served.arrive([1, 1, 9])
    for _ in range(3):
        waiting.init_next_round_input(served.cache)
    assert served.cache.tree_core.node_by_id(node).usage.hits == 1


def test_sglangs_own_envelope_of_hints_and_its_session_reach_the_tree() -> None:
    kv_hints = pytest.importorskip("sglang.srt.managers.kv_hints", reason="this SGLang has no hints")
    served = Served(Setting(tokens=4096, states=32))
    action = {"action_id": "a", "action_type": "hybrid.end_session", "action_version": "1.0"}
    envelope = kv_hints.decode_kv_hints_envelope({"protocol_version": "0.1", "message_id": "m", "actions": [action]})
    for hints, released in ((None, False), (envelope, True)):
        req = served.arrive(array("q", range(600)))
        req.session_id, req.kv_hints = "s", hints
        assert served.start(req)
        served.prefill(req, 600)
        served.decode(req, array("q", range(900, 910)))
        served.finish(req)
        core = served.cache.tree_core
        assert all((node.usage.last_used == 0) is released for _, node in core.tree.nodes())
        assert len(core.sessions) == (0 if released else 1)
    assert not served.books()
