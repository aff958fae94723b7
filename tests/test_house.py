"""Rules of the code as a whole: the rule of imports, public names."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import hybrid
from hybrid import errors

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("hybrid/**/*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("models/**/*.py")])

ORDER = (
    "kernels < words < tree, memory, prompts, models, observe, tiers, events < mirror < cache, sglang, vllm "
    "< speculation, doctor < engine, hf < serve, lm_eval < server < fleet < commands"
)
"""The rule of imports: a file imports from its own room and from rooms to the left of it, never from another room in
the same place of the line. Words are the files of `hybrid/` itself."""

LEVEL = {room: level for level, place in enumerate(ORDER.split(" < ")) for room in place.split(", ")}

MAX_PRIVATE_NAMES_IN_TESTS = 10

NO_TORCH = {"tree"}
"""Rooms that import no torch."""


def name_of(path: Path) -> str:
    """The dotted name of a file's module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "hybrid" else ("hybrid", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def room_of(module: str) -> str:
    """The room of a module: its folder, or "words"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else "words"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, dotted; those that only the type checker reads count too."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def arrows() -> dict[str, set[str]]:
    """For every module those of the project that it imports. The public face, `hybrid` itself, is in no room."""
    found = {}
    for module, path in MODULES.items():
        if module in ("hybrid", "hybrid.__main__"):
            continue
        found[module] = {name for name in imports_of(path) if name in MODULES and name not in (module, "hybrid")}
    return found


def test_rooms_are_those_of_the_rule() -> None:
    folders = {path.parent.relative_to(ROOT).parts[-1] for path in ROOT.glob("hybrid/*/__init__.py")}
    assert folders | {"kernels", "models", "words"} == set(LEVEL)


def test_imports_go_to_the_left() -> None:
    for module, others in arrows().items():
        for other in others:
            mine, theirs = room_of(module), room_of(other)
            assert mine == theirs or LEVEL[theirs] < LEVEL[mine], f"{module} imports {other}: {ORDER}"


def test_no_circle_of_imports() -> None:
    graph = arrows()
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_the_rule_in_the_docs_is_the_one_that_is_tested() -> None:
    assert ORDER in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_tree_knows_no_torch() -> None:
    for module, path in MODULES.items():
        if room_of(module) in NO_TORCH:
            assert not {name for name in imports_of(path) if name.split(".")[0] in ("torch", "transformers", "triton")}


def test_every_room_is_installed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    assert {module.rpartition(".")[0] for module in MODULES if module != "hybrid"} <= listed | {""}


def test_kernels_know_no_request_and_no_tree() -> None:
    for path in ROOT.glob("kernels/**/*.py"):
        ours = {module for module in imports_of(path) if module.startswith("hybrid")}
        assert all(module.startswith("hybrid.kernels") for module in ours), path


def test_no_memory_has_the_type_that_torch_takes_by_default() -> None:
    """It is another one while transformers loads a model in some thread, and compiled operations would write beyond its
    end. Weights are made without memory, and get their type when they are read."""
    found = []
    for path in (path for path in FILES if path.parent.name != "models"):
        for node in (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)):
            is_made = re.fullmatch(r"torch\.(empty|zeros|ones|rand|randn)", ast.unparse(node.func))
            is_empty = [*map(ast.unparse, node.args)] == ["0"]
            if is_made and not is_empty and not {keyword.arg for keyword in node.keywords} & {"dtype", "out"}:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, found


def test_kernels_and_models_hold_no_init_file() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "models" / "__init__.py").exists()


# Private names

BY_NAME = ("setattr", "getattr", "hasattr", "delattr", "patch", "attrgetter")
"""Functions that take the name of an attribute as a text."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def our_private_names() -> frozenset[str]:
    """The private names that the package defines or sets on its own objects."""
    found = set()
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                found.add(node.attr)
    return frozenset(name for name in found if is_private(name))


def private_touches(path: Path) -> Iterator[str]:
    """Places of a test file that name something private of another object: read, written, imported or patched."""
    where = path.relative_to(ROOT)
    for node in ast.walk(parsed(path)):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            texts = [value.value for value in node.args if isinstance(value, ast.Constant)]
            names = [part for text in texts if isinstance(text, str) for part in text.split(".")]
        for name in names:
            if name in our_private_names():
                yield f"{where}:{getattr(node, 'lineno', 0)} {name}"


def test_tests_watch_public_names() -> None:
    touches = [touch for path in sorted(ROOT.glob("tests/**/*.py")) for touch in private_touches(path)]
    assert len(touches) <= MAX_PRIVATE_NAMES_IN_TESTS, "\n".join(touches)


def test_no_test_fails_because_the_machine_paused() -> None:
    """Speed is for `bench/`. In tests `support.lines` counts what something costs, and gates stand for what is slow."""
    timed = re.compile(r"assert .*\b(perf_counter|monotonic|time\.time)\(\) - ")
    lines = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted(ROOT.glob("tests/**/*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if timed.search(line)
    ]
    assert lines == []


# Public names

PATHS = (
    "hybrid.hf.PrefixCache",
    "hybrid.engine.Engine",
    "hybrid.cache.HybridCache",
    "hybrid.tree.Tree",
    "hybrid.key.Key",
    "hybrid.kernels.reference",
    "hybrid.commands.main.main",
)
"""Public paths in addition to `hybrid.__all__`: programs of users import them."""


def test_the_public_paths_are_there_and_transformers_finds_its_models_beside_a_folder_named_kernels() -> None:
    """transformers looks for the Hugging Face package of that name, and must not find ours."""
    lines = ["from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM", "import hybrid.kernels.reference"]
    lines += ["from {} import {}".format(*path.rsplit(".", 1)) for path in PATHS]
    subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(lines)], check=True, cwd=ROOT, capture_output=True)


def test_every_program_in_the_readme_is_there() -> None:
    named = set(re.findall(r"`(?:python )?(bench/[\w/]+\.py)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_the_public_names_are_these() -> None:
    assert hybrid.__all__ == sorted(hybrid.__all__)
    assert set(hybrid.__all__) == {
        "Accepted",
        "ArgumentError",
        "AsyncEngine",
        "AuditError",
        "CacheConfig",
        "CacheFileError",
        "CacheMemory",
        "CacheStats",
        "CheckpointError",
        "ClosedError",
        "Completion",
        "Conversation",
        "Drafter",
        "EncodingLimitError",
        "Engine",
        "EngineConfig",
        "EngineStats",
        "Explanation",
        "Facts",
        "Hints",
        "Histogram",
        "History",
        "HybridCache",
        "HybridError",
        "Image",
        "ImagePrompt",
        "Key",
        "KeywordError",
        "LockError",
        "MemoryBudgetError",
        "NonFiniteError",
        "Mover",
        "OutputStream",
        "OwnershipError",
        "ParsedAnswer",
        "Pin",
        "Policy",
        "PolicyWarning",
        "PromptError",
        "QueueFullError",
        "RequestError",
        "RequestOutput",
        "SamplingError",
        "SamplingParams",
        "Score",
        "SpeculationConfig",
        "TenantConfig",
        "TextStream",
        "ToolCall",
        "Transfer",
        "UnsupportedModelError",
        "Usage",
        "VersionError",
        "__version__",
    }
    assert all(hasattr(hybrid, name) for name in hybrid.__all__)


def test_completion_offers_each_public_name_once_and_nothing_else() -> None:
    assert dir(hybrid) == sorted({*hybrid.__all__, "hf"})
    assert hybrid.hf.PrefixCache.__module__ == "hybrid.hf.prefix_cache"


def test_the_tree_of_exceptions_is_the_one_that_is_drawn() -> None:
    """The drawing in hybrid/errors.py: each level of indentation is a level of inheritance."""
    drawn: dict[str, str] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([│├└─ ]*)([A-Z]\w+Error)\b", line)
        if match:
            depth = len(match[1]) // 4
            parents = [*parents[:depth], match[2]]
            drawn[match[2]] = parents[depth - 1] if depth else "Exception"
    defined = {name: thing for name, thing in vars(errors).items() if isinstance(thing, type)}
    assert set(drawn) == set(defined)
    assert {name: cls.__bases__[0].__name__ for name, cls in defined.items()} == drawn
    assert set(drawn) <= set(hybrid.__all__)


def test_importing_is_silent_and_touches_neither_transformers_nor_triton_nor_fla() -> None:
    code = "import sys, hybrid; print([m for m in ('transformers', 'triton', 'fla') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout == "[]\n"
    assert result.stderr == ""


def test_the_engine_is_imported_without_any_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def modules(lines: Iterable[str]) -> set[str]:
        return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}

    lines = (lines for extra, lines in project["optional-dependencies"].items() if extra != "dev")
    extras = modules(chain.from_iterable(lines))
    absent = sorted(extras - modules(project["dependencies"]) - {"hybrid_prefix_cache"})
    assert "orjson" in absent
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import hybrid; hybrid.Engine, hybrid.AsyncEngine"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True)


def test_the_version_is_that_of_the_package() -> None:
    assert f'version = "{hybrid.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
