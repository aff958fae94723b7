"""Count what a reader meets: lines, files and floors of each room, names that stand for two classes, and the files that
three ways pass through: a prompt's first step, a decode step, an eviction to disk.

    python tools/house.py [--json]

A file counts as passed when one of its functions runs. Floors are the longest chain of imports within a room.
"""

import argparse
import ast
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("hybrid", "kernels", "models", "tests", "bench")


def python_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def room(path: Path) -> str:
    """`hybrid/<folder>`, `hybrid` for the words, or the folder at the top."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "hybrid" and len(parts) > 2 else parts[0]


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "hybrid" else ("hybrid", *parts))


def floors(paths: list[Path]) -> int:
    """The longest chain of files of one room that import each other."""
    names = {module(path): path for path in paths}
    imports = {
        name: {
            node.module
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.module in names and node.module != name
        }
        for name, path in names.items()
    }
    height: dict[str, int] = {}

    def climb(name: str, above: frozenset[str]) -> int:
        if name not in height:
            below = imports[name] - above
            height[name] = 1 + max((climb(other, above | {name}) for other in below), default=0)
        return height[name]

    return max((climb(name, frozenset()) for name in names), default=0)


def names_of_two_classes() -> dict[str, list[str]]:
    """Public names of classes that are defined in more than one file of hybrid, kernels and models."""
    found = defaultdict(list)
    for path in (path for folder in ROOMS[:3] for path in python_files(folder)):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def passed_files(call: Callable[[], object]) -> set[str]:
    """Files of `hybrid/` in which a function runs during `call`, in any thread that it starts or wakes."""
    seen: set[str] = set()
    prefix = str(ROOT / "hybrid") + "/"

    def watch(frame: object, event: str, _: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)  # type: ignore[attr-defined]

    threading.setprofile_all_threads(watch) if sys.version_info >= (3, 12) else threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {name.removeprefix(prefix) for name in seen if name.startswith(prefix)}


def ways() -> dict[str, set[str]]:
    """The files of the three ways, on the model in the package."""
    import hybrid

    greedy = hybrid.SamplingParams(max_new_tokens=8, ignore_eos=True)
    found = {}
    with hybrid.Engine.from_pretrained("tiny", cache=hybrid.CacheConfig(memory="32MiB")) as engine:
        list(engine.generate(["warm up"], greedy))
        engine.add_request(list(range(40, 140)), greedy)
        found["first step of a prompt"] = passed_files(engine.step)
        engine.step()
        found["decode step"] = passed_files(engine.step)
    with tempfile.TemporaryDirectory() as folder:
        config = hybrid.CacheConfig(memory="3MiB", disk="64MiB", directory=folder)
        with hybrid.Engine.from_pretrained("tiny", cache=config) as engine:
            prompts = [[40 + (i * 37 + j * j) % 400 for j in range(300)] for i in range(16)]
            for prompt in prompts:
                list(engine.generate([prompt], greedy))
            key = hybrid.Key.of(prompts[0][:200] + [7] * 100)

            def evict() -> None:
                lease = engine.cache.open(key, limit=len(key) - 1, num_tokens=len(key))
                assert lease is not None
                engine.cache.close(lease)
                time.sleep(0.2)  # what the tier's thread writes

            before = engine.cache.stats().evicted_pages
            found["opening a request that evicts to disk"] = passed_files(evict)
            assert engine.cache.stats().evicted_pages > before, "nothing was evicted"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    rooms = defaultdict(list)
    for path in (path for folder in ROOMS for path in python_files(folder)):
        rooms[room(path)].append(path)
    figures = {
        name: {
            "files": len(paths),
            "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths),
            "floors": floors(paths),
        }
        for name, paths in rooms.items()
    }
    twice = names_of_two_classes()
    passed = {name: sorted(files) for name, files in ways().items()}
    if asked.json:
        print(json.dumps({"rooms": figures, "names of two classes": twice, "ways": passed}, indent=1))
        return
    for name, row in figures.items():
        print(f"{name:20} {row['files']:4} files {row['lines']:6} lines {row['floors']:3} floors")
    print(f"names of two classes: {len(twice)} ({', '.join(twice)})")
    for name, files in passed.items():
        print(f"{name}: {len(files)} files of hybrid/")


if __name__ == "__main__":
    main()
