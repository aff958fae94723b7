"""What must hold of the house: layers, names, imports, sizes."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hybrid
from hybrid import errors

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("hybrid/*.py"), *ROOT.glob("kernels/*.py"), *ROOT.glob("models/*.py")])

LAYERS = [
    {
        "errors",
        "key",
        "interrupts",
        "oracle",
        "kernels.reference_elementwise",
        "kernels.reference_experts",
        "kernels.ragged",
        "kernels.stored",
    },
    {"kernels.reference_delta_rule"},
    {"kernels.reference", "kernels.state_space", "kernels.attention_tiles", "kernels.split"},
    {
        "kernels.attention",
        "kernels.convolution",
        "kernels.delta_rule",
        "kernels.delta_rule_step",
        "kernels.elementwise",
        "kernels.matmul",
        "kernels.memory",
    },
    {"kernels.external", "kernels.experts"},
    {"kernels.ops"},
    {"kernels.linear"},
    {"eviction", "spec", "pool", "arena"},
    {"node", "batch", "placement", "learned", "tensors"},
    {"policies", "ghosts"},
    {"candidates", "config"},
    {"lookup"},
    {"tree"},
    {"explain", "audit"},
    {"lease"},
    {"room"},
    {"leasing"},
    {"cache"},
    {"passthrough"},
    {"sampling", "media"},
    {"text"},
    {"looking"},
    {"request"},
    {"scheduler", "draw"},
    {"plan", "settings", "models.layers", "models.weights"},
    {"models.moe", "models.mtp"},
    {"models.causal_lm"},
    {"models.qwen3_5", "models.bamba"},
    {"models.qwen3_5_moe", "models.qwen3_next"},
    {"graphs", "models.loading", "models.train_tiny"},
    {"runner", "families", "models.vision"},
    {"hf_layers"},
    {"hf_memory", "hf_past", "hf_probe", "hf_prompt"},
    {"hf_compute"},
    {"hf"},
    {"engine"},
    {"parity", "stress", "demo"},
    {"cli"},
]
"""A module imports only from layers before its own."""

INTEGERS_ONLY = {
    "errors",
    "key",
    "config",
    "pool",
    "arena",
    "eviction",
    "learned",
    "policies",
    "candidates",
    "ghosts",
    "lookup",
    "room",
    "node",
    "tree",
    "explain",
    "audit",
    "placement",
    "interrupts",
}
"""Modules that know no torch."""


def name_of(path: Path) -> str:
    return path.stem if path.parent.name == "hybrid" else f"{path.parent.name}.{path.stem}"


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports when it is run, dotted; what only the type checker reads does not count."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_run_one_way() -> None:
    level = {name: at for at, layer in enumerate(LAYERS) for name in layer}
    lazily_upwards = {("cache", "audit"), ("cli", "__init__")}
    for path in FILES:
        if path.name == "__init__.py":
            continue
        name = name_of(path)
        assert name in level, f"{name} has no layer: add it to LAYERS and to docs/architecture.md"
        for module in imports_of(path):
            other = module.removeprefix("hybrid.") if module.startswith("hybrid.") else None
            if other in level and (name, other) not in lazily_upwards:
                assert level[other] < level[name], f"{name} imports {other}, which does not lie below it"


def test_the_books_know_no_torch() -> None:
    for path in FILES:
        if name_of(path) in INTEGERS_ONLY:
            assert not {
                module for module in imports_of(path) if module.split(".")[0] in ("torch", "transformers", "triton")
            }, path


def test_kernels_know_no_request_and_no_tree() -> None:
    for path in ROOT.glob("kernels/*.py"):
        ours = {module for module in imports_of(path) if module.startswith("hybrid")}
        assert all(module.startswith("hybrid.kernels") for module in ours), path


def test_kernels_and_models_hold_no_init_file() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "models" / "__init__.py").exists()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_the_public_names_are_these() -> None:
    assert hybrid.__all__ == sorted(hybrid.__all__)
    assert set(hybrid.__all__) == {
        "ArgumentError",
        "AuditError",
        "CacheConfig",
        "CacheStats",
        "CheckpointError",
        "Engine",
        "HybridCache",
        "HybridError",
        "Image",
        "ImagePrompt",
        "LockError",
        "MemoryBudgetError",
        "OwnershipError",
        "Pin",
        "PolicyWarning",
        "PromptError",
        "RequestError",
        "RequestOutput",
        "SamplingError",
        "SamplingParams",
        "UnsupportedModelError",
        "Usage",
        "__version__",
    }
    assert all(hasattr(hybrid, name) for name in hybrid.__all__)


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


def test_transformers_imports_its_models_beside_a_folder_named_kernels() -> None:
    """transformers looks for the Hugging Face package of that name, and must not find ours."""
    code = "from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM; import hybrid.kernels.reference"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_the_version_is_that_of_the_package() -> None:
    assert f'version = "{hybrid.__version__}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
