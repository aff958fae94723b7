"""The parts of `hybrid.sglang` that need no SGLang: keys, options, refusals, requests and their order, prices, imports.

SGLang's own objects are stood in for by plain attributes where a function only reads them; what SGLang does with its
objects is tested with SGLang itself, in the other files here.
"""

import json
import subprocess
import sys
import threading
import tomllib
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from hybrid.errors import ArgumentError, LockError, UnsupportedModelError, VersionError
from hybrid.key import Key
from hybrid.mirror.page_parts import PageParts
from hybrid.mirror.visits import MAX_KEYS, MAX_VISITS, PLAIN, Expected, StateOrigin, Visits, dfs_weight_order
from hybrid.sglang import installed, plugin
from hybrid.sglang.handles import Handles
from hybrid.sglang.options import CLASSIC, DEFAULT, NAMES, Options, policy_named, refuse_unsupported
from hybrid.sglang.values import WORDS, FreedIndices, IndexPages, between, joined, key_of_ids, namespace_of, prices_of
from hybrid.tree.lhd import LearnedHitDensity
from hybrid.tree.node import Checkpoint, Kind, Node, NodeUsage, Released
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.tree import Tree
from hybrid.units import Prices

ROOT = Path(__file__).parent.parent.parent

HEAVY = ("transformers", "tokenizers", "triton", "fla", "hybrid.engine", "hybrid.models", "hybrid.cache", "sglang.srt")


def printed(code: str) -> str:
    """Return what a program prints, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout


def test_the_plugin_is_imported_without_the_engine_transformers_or_sglang() -> None:
    code = f"import sys, hybrid.sglang.plugin; print([name for name in {HEAVY} if name in sys.modules])"
    shown = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert shown.stdout == "[]\n"


def test_importing_hybrid_loads_nothing_of_the_plugin() -> None:
    code = "import sys, hybrid; hybrid.Engine; print([name for name in sys.modules if 'sglang' in name])"
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert shown.stdout == "[]\n"


def test_the_room_runs_without_packages_that_only_the_engine_needs() -> None:
    """SGLang's pins of transformers and others do not matter: they are never imported."""
    code = """
import sys
for name in ("transformers", "tokenizers", "safetensors", "huggingface_hub", "jinja2", "rich", "triton", "fla"):
    sys.modules[name] = None
from hybrid.mirror import visits
from hybrid.sglang import installed, options, plugin, values
"""
    printed(code)


def test_the_entry_point_names_the_function_that_registers() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert points["sglang.srt.plugins"] == {"hybrid": "hybrid.sglang.plugin:register"}
    assert callable(plugin.register)


# Keys


def test_ids_of_64_bits_stay_apart() -> None:
    """SGLang's stand-ins for images use all 64 bits; ids of the tree have 32."""
    first, second = (key_of_ids([5, high, 7], 3, 1, None, None) for high in (1 << 40, 1 << 41))
    assert first.ids[:8] == second.ids[:8]
    assert first.ids[8:16] != second.ids[8:16]
    assert len(first) == 3 * WORDS


def test_a_key_ends_at_the_last_whole_page_of_its_limit() -> None:
    ids = array("q", range(100))
    assert key_of_ids(ids, 70, 16, None, None) == Key(ids[:64].tobytes())
    assert len(key_of_ids(ids, 15, 16, None, None)) == 0


def test_no_two_pairs_of_extra_key_and_salt_share_a_namespace() -> None:
    texts = [None, "", "a", "b", "ab", "1:a", "+a", ":", "a:b", "0:", "+"]
    pairs = [(extra, salt) for extra in texts for salt in texts if salt != ""]  # an empty salt is none
    assert len({namespace_of(*pair) for pair in pairs}) == len(pairs)
    assert namespace_of(None, None) == namespace_of(None, "") == ""


# Indices


def test_a_small_part_of_indices_does_not_keep_the_memory_of_all() -> None:
    pages = IndexPages(torch.arange(320), 4)
    large = pages[5:15]
    assert (len(pages), len(large)) == (80, 10)
    assert large.view(0, 10).tolist() == [*range(20, 60)]
    assert large.view(0, 10).untyped_storage().nbytes() == 320 * 8
    small = large[7:]  # three of ten pages, and of eighty that are in memory
    assert small.view(0, 3).tolist() == [*range(48, 60)]
    assert small.view(0, 3).untyped_storage().nbytes() == 12 * 8


def test_the_indices_on_a_path_are_those_that_were_inserted() -> None:
    """Over several nodes, from any node above, with edges that were split."""
    tree = Tree(2, 2, LeastRecentlyUsed(), page_values=PageParts.of)
    for ids in ("abcdef", "abcdefghij", "abcdxy"):
        key, first = Key.of([*map(ord, ids)]), 100 * len(ids)
        pages = IndexPages(torch.arange(first, first + len(ids)), 2)
        deepest = tree.insert(key, len(ids), pages, Checkpoint(ids, len(ids))).node
        path = [node for _, node in tree.nodes() if ids.startswith("abcdefghij"[: node.end]) or node is deepest]
        kept = torch.cat([part.view(0, len(part)) for part in tree.pages(deepest, len(ids)).parts]).tolist()
        for start in {0, *(node.end for node in path if node.end <= len(ids))}:
            assert between(start, deepest, torch.device("cpu")).tolist() == kept[start:]
    assert kept[:4] == [600, 601, 602, 603]
    assert between(0, None, torch.device("cpu")).shape == (0,)


def test_indices_are_joined_in_order() -> None:
    assert joined([torch.tensor([3, 1]), torch.tensor([2])], torch.device("cpu")).tolist() == [3, 1, 2]
    assert joined([], torch.device("cpu")).shape == (0,)


def test_indices_that_a_tree_lets_go_of_are_not_copied() -> None:
    tree, indices = Tree(2, 2, LeastRecentlyUsed(), page_values=PageParts.of), torch.arange(100, 110)
    tree.insert(Key.of(range(6)), 6, IndexPages(indices[:6], 2))
    tree.insert(Key.of(range(10)), 10, IndexPages(indices, 2), Checkpoint("state", 10))
    freed = FreedIndices()
    tree.evict_pages(1, Released(freed))
    assert (len(freed), [one.tolist() for one in freed.tensors]) == (1, [[108, 109]])
    assert freed.tensors[0].untyped_storage().data_ptr() == indices.untyped_storage().data_ptr()
    tree.evict_pages(3, Released(freed))
    assert (len(freed), torch.cat(freed.tensors).tolist()) == (4, [108, 109, *range(102, 108)])


# Policies and options


def test_policies_have_the_names_of_the_flag() -> None:
    assert {"lru", "lfu", "priority"} <= set(NAMES)
    assert DEFAULT in NAMES
    assert set(NAMES) >= CLASSIC
    assert type(policy_named("LRU")) is LeastRecentlyUsed


@pytest.mark.parametrize("name", ["slru", "tlru", "", "best"])
def test_a_policy_that_there_is_not_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"it has: lru, .*lhd"):
        policy_named(name)


def test_options_are_read_and_mistakes_named() -> None:
    assert Options.of(None) == Options(admission=True, ghost_branches=False, seed=0)
    assert Options.of({"seed": 7, "admission": False}) == Options(admission=False, seed=7)
    with pytest.raises(ArgumentError, match=r"'sead'.*admission, ghost_branches, anchors, seed"):
        Options.of({"sead": 7})
    with pytest.raises(ArgumentError, match="seed must be of type int, got True"):
        Options.of({"seed": True})


# Refusals


def context(**changed: Any) -> Any:
    fields = {"enable_hierarchical_cache": False, "is_hybrid_swa": False, "is_hybrid_ssm": True}
    return SimpleNamespace(**{**fields, **changed})


def params(**changed: Any) -> Any:
    return SimpleNamespace(**{"enable_session_radix_cache": False, "enable_kv_cache_events": False, **changed})


def test_what_is_supported_is_not_refused() -> None:
    refuse_unsupported(context(), params(), -1)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ((context(enable_hierarchical_cache=True), params(), -1), "HiCache"),
        ((context(is_hybrid_swa=True), params(), -1), "sliding windows"),
        ((context(is_hybrid_ssm=False), params(), -1), "without linear-attention states"),
        ((None, params(enable_session_radix_cache=True), -1), "--enable-session-radix-cache"),
        ((None, params(enable_kv_cache_events=True), -1), "KV cache events"),
        ((None, params(), 3), "--mamba-max-states-per-path"),
        (
            (context(enable_hierarchical_cache=True, is_hybrid_swa=True), params(enable_kv_cache_events=True), -1),
            r"HiCache.*; nor .*sliding windows.*; nor KV cache events",
        ),
    ],
)
def test_all_that_is_not_supported_is_refused_at_once_each_with_its_reason(asked: Any, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"does not support .*{named}.*: "):
        refuse_unsupported(*asked)


# The SGLang that is installed


class Imitated:
    """SGLang's modules as far as the backend is registered and checked, with a registry that works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str = "0.5.23") -> None:
        self.factories: dict[str, Any] = {}
        self.registry = self.module(monkeypatch, "sglang.srt.mem_cache.registry")
        self.registry.register_radix_cache_backend = self.factories.__setitem__
        self.registry.registered_radix_cache_backends = lambda: [*self.factories]
        self.registry.create_unified_radix_cache = None
        self.choices = self.module(monkeypatch, "sglang.srt.arg_groups.choices")
        self.choices.RADIX_EVICTION_POLICY_CHOICES = ["lru", "slru"]
        self.choices.add_radix_eviction_policy_choices = self.choices.RADIX_EVICTION_POLICY_CHOICES.extend
        monkeypatch.setattr(installed, "version", lambda name: version)

    def module(self, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
        """An empty module in the place of one of SGLang's, and in those of the packages that it is in."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        return sys.modules[name]


def test_the_backend_and_the_names_of_its_policies_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang = Imitated(monkeypatch)
    plugin.register()
    plugin.register()
    assert sglang.factories == {"hybrid": plugin.build}
    assert ["lru", "slru", *(name for name in NAMES if name != "lru")] == sglang.choices.RADIX_EVICTION_POLICY_CHOICES


@pytest.mark.parametrize("part", ["registry", "choices"])
def test_registering_in_a_sglang_that_lacks_a_hook_is_an_error(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in installed.REGISTRY if part == "registry" else installed.CHOICES:
        sglang = Imitated(monkeypatch)
        delattr(getattr(sglang, part), name)
        with pytest.raises(VersionError, match=rf"SGLang 0\.5\.23 is installed: .*\.{part} has no {name}, so"):
            plugin.register()
        missing = getattr(sglang, part).__name__
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(VersionError, match=f"has no module {missing}"):
            plugin.register()


def test_registering_that_has_no_effect_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Imitated(monkeypatch).registry.register_radix_cache_backend = lambda *_: None
    with pytest.raises(VersionError, match="registry has not taken the backend"):
        plugin.register()
    Imitated(monkeypatch).choices.add_radix_eviction_policy_choices = lambda _: None
    with pytest.raises(VersionError, match=r"--radix-eviction-policy has not taken lfu, .*lhd"):
        plugin.register()


@pytest.mark.parametrize("version", ["0.5.21", "0.5.24", "0.5.23.post1", "1.0"])
def test_a_version_whose_interface_is_not_known_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Imitated(monkeypatch, version)
    known = r"known to work with 0\.5\.22 and 0\.5\.23: install one of them"
    with pytest.raises(VersionError, match=rf"SGLang {version} is installed: .*{known}"):
        plugin.build(SimpleNamespace())


def test_a_module_that_is_not_there_when_a_cache_is_built_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Imitated(monkeypatch)
    for name in ("cache", "tree_core"):
        monkeypatch.delitem(sys.modules, f"hybrid.sglang.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.base_prefix_cache", None)  # also where SGLang is
    with pytest.raises(VersionError, match=r"building its cache failed with .*sglang\.srt\.mem_cache.*known to work"):
        plugin.build(SimpleNamespace())


class Theirs:
    """A class of SGLang."""

    def evict(self) -> None: ...


def test_a_method_that_sglang_would_never_call_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Imitated(monkeypatch)

    class Ours(Theirs):
        def evict(self) -> None: ...
        def evict_for_alloc(self) -> None: ...
        def admit(self) -> None: ...
        def _take(self) -> None: ...

    with pytest.raises(VersionError, match=r"Theirs has no evict_for_alloc, so those of Ours would never be called"):
        installed.refuse_uncalled(Ours, Theirs, own=("admit",))
    installed.refuse_uncalled(Ours, Theirs, own=("admit", "evict_for_alloc"))


def test_a_parameter_that_nobody_would_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Imitated(monkeypatch)
    for name in installed.PARAMETERS:
        fields = dict.fromkeys(other for other in installed.PARAMETERS if other != name)
        with pytest.raises(VersionError, match=f"SimpleNamespace has no {name}, so a cache"):
            installed.refuse_missing(SimpleNamespace(**fields), installed.PARAMETERS, "so a cache cannot be asked for")


def test_a_cache_that_sglang_has_built_of_parts_of_its_own_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Imitated(monkeypatch)
    installed.refuse_other_parts({"its tree core": (Seen(), Seen), "its cache": (Theirs(), Theirs)})
    with pytest.raises(VersionError, match="with Theirs as its tree core, and not Seen"):
        installed.refuse_other_parts({"its tree core": (Theirs(), Seen)})


# The order of requests


def test_requests_come_by_the_weight_of_what_they_share() -> None:
    """Two keys below `a`, one of which three requests are at, and one key `b` alone."""
    tree, pages = Tree(1, 1, LeastRecentlyUsed()), count(1)
    nodes: dict[str, Node | None] = {"": None}
    for text in ("a", "b", "ac", "ad"):
        ids = [*map(ord, text)]
        nodes[text] = tree.insert(
            Key.of(ids), len(ids), [next(pages) for _ in ids], None, None, tree.new_usage("branch", 0)
        ).node
    asked = ["b", "ad", "", "ac", "a", "ac", "ac"]
    ordered = [asked[place] for place in dfs_weight_order([nodes[text] for text in asked])]
    assert ordered == ["ac", "ac", "ac", "ad", "a", "b", ""]


def test_the_other_files_here_skip_themselves_without_sglang() -> None:
    files = [path for path in Path(__file__).parent.glob("test_*.py") if path.name != Path(__file__).name]
    assert [path.name for path in files if "require_sglang()" not in path.read_text(encoding="utf-8")] == []


# Requests that have come


class Seen:
    """A tree of pages of two tokens, and what is known of its requests."""

    def __init__(self, learns: bool = True) -> None:
        self.tree = Tree(2, 2, LearnedHitDensity())
        self.visits = Visits(self.tree, learns)
        self.key = Key.of([1, 1, 2, 2, 3, 3, 4, 4])

    def put(self, end: int, kind: Kind = Kind.TURN_END, turn: int = 0) -> NodeUsage:
        checkpoint = Checkpoint(end, end, kind, turn=turn)
        return self.tree.insert(self.key, end, list(range(end // 2)), checkpoint).node.usage


def test_a_request_uses_a_state_once_however_often_it_is_looked_for() -> None:
    seen = Seen()
    usage = seen.put(4)
    found = [seen.visits.match("a", seen.key, 8) for _ in range(3)]
    assert [(match.num_tokens, known) for match, known in found] == [(4, 4)] * 3
    assert (usage.hits, seen.tree.candidates.now) == (1, 1)
    seen.visits.match("b", seen.key, 8)
    assert usage.hits == 2
    seen.visits.end_request("a", 1)
    seen.visits.match("a", seen.key, 8)
    assert usage.hits == 3


def test_states_are_known_by_the_path_of_their_request_where_times_are_known() -> None:
    seen = Seen()
    seen.visits.match("timeless", seen.key, 8)
    assert seen.visits.describe("timeless", 4, Kind.TURN_END).path is None
    seen.visits.match("a", seen.key, 8, 100.0)
    origin = seen.visits.describe("a", 4, Kind.TURN_END)
    assert origin.path is not None
    assert (origin.path.seconds, origin.path.place) == (100.0, None)
    assert seen.visits.admit(seen.key, 4, origin, tails_help=True)[0].path is origin.path
    seen.visits.end_request("a", 0)
    assert origin.path.place is None  # it has no answer
    seen.visits.match("a", seen.key, 8, 101.0)
    path = seen.visits.describe("a", 4, Kind.TURN_END).path
    seen.visits.end_request("a", 7)
    assert path is not None
    assert path.place == 0


def test_of_too_many_requests_the_first_is_forgotten() -> None:
    seen = Seen()
    usage = seen.put(4)
    for number in range(MAX_VISITS + 1):
        seen.visits.match(str(number), seen.key, 8)
    seen.visits.match("1", seen.key, 8)
    assert usage.hits == MAX_VISITS + 1
    seen.visits.match("0", seen.key, 8)
    assert usage.hits == MAX_VISITS + 2


def test_a_state_that_was_evicted_is_known_again_by_the_request_that_comes_for_it() -> None:
    """Its usage goes on, and the request that finds it gone counts as one that would have used it."""
    seen = Seen()
    usage = seen.put(4, turn=3)
    seen.tree.evict_checkpoints(1)
    match, known = seen.visits.match("a", seen.key, 8)
    assert (match.num_tokens, known, usage.hits) == (0, 4, 1)
    again = seen.visits.describe("a", 4, Kind.PROMPT_END)
    assert again.past is usage
    assert again.turn == 4  # a turn ended there
    assert seen.visits.describe("a", 6, Kind.PROMPT_END).past is None
    assert seen.visits.describe("unknown", 4, Kind.PROMPT_END) == StateOrigin(Kind.PROMPT_END, 0, None)


def test_what_is_inserted_is_what_was_announced_for_these_parameters_and_else_what_the_tree_can_tell() -> None:
    seen, params = Seen(), SimpleNamespace()
    coming = Expected(params, seen.visits.describe("a", 8, Kind.INTERVAL))
    seen.visits.expect_insert(coming)
    assert seen.visits.take_expected(params) is coming
    assert seen.visits.take_expected(params) is None  # once
    seen.visits.expect_insert(coming)
    assert seen.visits.take_expected(SimpleNamespace()) is None
    assert seen.visits.arrival(seen.key).kind is Kind.TURN_END  # nothing of it is there
    seen.put(8)
    assert seen.visits.arrival(Key.of([1, 1, 2, 2])).kind is Kind.BRANCH  # all of its pages are there


def test_a_key_is_kept_for_the_ids_that_it_was_made_of_until_the_request_ends_or_others_have_come() -> None:
    visits, key = Seen().visits, Key.of([1, 2])
    ids, equal = array("q", [1]), array("q", [1])
    visits.keep_key("a", ids, key)
    ids.append(2)
    assert visits.key("a", ids) is key
    assert visits.key("a", equal) is None
    assert visits.key("b", ids) is None
    for number in range(MAX_KEYS - 1):
        visits.keep_key(str(number), ids, key)
    visits.keep_key("a", equal, key)  # the latest now
    visits.keep_key("last", ids, key)
    assert visits.key("0", ids) is None
    assert visits.key("a", equal) is key
    visits.end_request("a", 0)
    assert visits.key("a", equal) is None


def test_where_nothing_learns_all_states_are_of_one_kind() -> None:
    seen = Seen(learns=False)
    assert seen.visits.describe("a", 4, Kind.BRANCH) is PLAIN
    assert seen.visits.arrival(seen.key) is PLAIN


@pytest.mark.parametrize("kv_bytes", [6400, (3200, 3200)])
def test_a_page_and_a_state_cost_their_share_of_their_pools(kv_bytes: int | tuple[int, int]) -> None:
    kv = SimpleNamespace(get_kv_size_bytes=lambda: kv_bytes, size=100)
    states = SimpleNamespace(get_kv_size_bytes=lambda: 9000, size=9)
    given = SimpleNamespace(
        page_size=4,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kv, mamba_full_cache_donor=lambda: None),
        req_to_token_pool=SimpleNamespace(mamba_pool=states),
    )
    assert prices_of(given, anchors=False) == Prices(page=256, checkpoint=1000, are_apart=True)
    assert prices_of(given, anchors=True) == Prices(page=256, checkpoint=1000, memory=6400 + 9000, are_apart=True)
    given.token_to_kv_pool_allocator.mamba_full_cache_donor = lambda: states
    assert prices_of(given, anchors=True).memory == 6400


# The check of a server


class Answers(BaseHTTPRequestHandler):
    """Answers as a server of SGLang does; the second time a prompt is cached."""

    seen: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        cached = 8 if prompt in self.seen else 0
        self.seen.add(prompt)
        body = {"text": prompt[-5:], "meta_info": {"prompt_tokens": 10, "cached_tokens": cached}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_the_check_of_a_server_counts_what_was_cached_and_compares_answers(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = [sys.executable, ROOT / "bench/gpu/sglang_server.py", "--url", f"http://127.0.0.1:{server.server_port}"]
    saved = tmp_path / "saved.json"
    first = subprocess.run([*program, "--prompts", "4", "--save", saved], capture_output=True, text=True, check=True)
    assert "first: 0 of 40 prompt tokens cached" in first.stdout
    assert "again: 32 of 40 prompt tokens cached" in first.stdout
    saved.write_text(saved.read_text().replace("bout?", "other"))
    second = subprocess.run(
        [*program, "--prompts", "4", "--compare", saved], capture_output=True, text=True, check=False
    )
    server.shutdown()
    server.server_close()
    assert "4 of 4 first answers differ" in second.stdout
    assert second.returncode == 1


# Handles


@pytest.fixture
def tree() -> Tree:
    tree = Tree(2, 2, LeastRecentlyUsed())
    tree.insert(Key.of([1, 1, 2, 2]), 4, [1, 2], Checkpoint(7, 4))
    return tree


@pytest.fixture
def handles(tree: Tree) -> Handles:
    return Handles(tree.locks)


def leaf(tree: Tree, handles: Handles) -> int:
    return handles.of(tree.peek(Key.of([1, 1, 2, 2]), 4).deepest)


def protected(tree: Tree) -> tuple[int, int]:
    return tree.locks.num_pages, tree.locks.num_checkpoints


def test_a_handle_is_given_once_and_leads_back(tree: Tree, handles: Handles) -> None:
    handle = leaf(tree, handles)
    assert leaf(tree, handles) == handle != handles.root
    assert handles.of(None) == handles.root
    assert handles.node(handles.root) is None
    node = handles.node(handle)
    assert node is not None
    assert node.slot == 7


def test_the_handle_of_a_node_that_was_evicted_stands_for_nothing(tree: Tree, handles: Handles) -> None:
    handle = leaf(tree, handles)
    tree.evict_all()
    for call in (handles.node, handles.lock):
        with pytest.raises(LockError, match="stands for no node"):
            call(handle)
    assert handles.num_locks(handle) == (0, 0)


def test_handles_of_two_trees_from_one_counter_differ(tree: Tree) -> None:
    numbers = count(1)
    first, second = Handles(tree.locks, numbers), Handles(tree.locks, numbers)
    assert len({first.root, leaf(tree, first), second.root, leaf(tree, second)}) == 4


def test_pages_and_checkpoint_are_locked_and_released_apart(tree: Tree, handles: Handles) -> None:
    handle = leaf(tree, handles)
    handles.lock(handle)
    handles.lock(handle, state=False)
    assert handles.num_locks(handle) == (2, 1)
    assert protected(tree) == (2, 1)
    handles.unlock(handle, pages=False)
    assert protected(tree) == (2, 0)
    assert tree.evict_checkpoints(1).slots == [7]
    handles.unlock(handle, state=False)
    handles.unlock(handle, state=False)
    assert protected(tree) == (0, 0)
    assert [*tree.evict_all().pages] == [1, 2]


def test_a_lock_too_many_is_not_released_and_changes_nothing(tree: Tree, handles: Handles) -> None:
    handle = leaf(tree, handles)
    handles.lock(handle, state=False)
    with pytest.raises(LockError, match="no lock on its checkpoint"):
        handles.unlock(handle)
    assert protected(tree) == (2, 0)
    handles.unlock(handle, state=False)
    with pytest.raises(LockError, match="no lock on its pages"):
        handles.unlock(handle, state=False)


def test_a_checkpoint_that_comes_to_a_locked_tombstone_is_protected(tree: Tree, handles: Handles) -> None:
    handle = leaf(tree, handles)
    tree.evict_checkpoints(1)
    handles.lock(handle)
    assert protected(tree) == (2, 0)
    assert tree.insert(Key.of([1, 1, 2, 2]), 4, [8, 9], Checkpoint(5, 4)).adopted
    assert protected(tree) == (2, 1)
    assert tree.evict_all().slots == []
    handles.unlock(handle)
    assert protected(tree) == (0, 0)
    assert tree.evict_all().slots == [5]


def test_locks_on_the_empty_prefix_protect_nothing_and_are_counted(tree: Tree, handles: Handles) -> None:
    handles.lock(handles.root)
    assert handles.num_locks(handles.root) == (1, 1)
    assert protected(tree) == (0, 0)
    handles.unlock(handles.root)
    with pytest.raises(LockError, match="released exactly once"):
        handles.unlock(handles.root)


def test_nodes_that_were_removed_are_forgotten_in_time(tree: Tree, handles: Handles) -> None:
    kept = leaf(tree, handles)
    handles.lock(kept)
    given = set()
    for token in range(5000):
        node = tree.insert(Key.of([token, token + 1]), 2, [token], Checkpoint(token, 2)).node
        given.add(handles.of(node))
        tree.evict_all()
    assert len(given) == 5000
    assert handles.num_known < 2500
    assert handles.node(kept) is not None
