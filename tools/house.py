"""Count what a reader meets: files, lines, classes, functions and floors of each room, names that stand for two
classes, and what five ways run: a request that is added, a prompt's first step, a decode step, one with overlap, an
eviction to disk.

    python tools/house.py [--json]

Floors are the longest chain of imports within a room. Of a way, `functions` are those of `hybrid/` that run, `calls`
how often they do, in every thread, and `hops` how many of these calls come from another file of `hybrid/`.
Comprehensions count with the function that they stand in.
"""

import argparse
import ast
import json
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
ROOMS = ("hybrid", "kernels", "models", "tests", "bench")
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


def python_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def room(path: Path) -> str:
    """`hybrid/<folder>`, `hybrid` for the words, or the folder at the top."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "hybrid" and len(parts) > 2 else parts[0]


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "hybrid" else ("hybrid", *parts))


def num_definitions(paths: list[Path], *kinds: type[ast.AST]) -> int:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in paths)
    return sum(isinstance(node, kinds) for tree in trees for node in ast.walk(tree))


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


@dataclass
class Way:
    """What of `hybrid/` one call runs."""

    functions: set[tuple[str, str, int]] = field(default_factory=set)
    """File, qualified name and first line of each function."""
    calls: int = 0
    hops: int = 0

    def figures(self) -> dict[str, object]:
        rooms = Counter(room(ROOT / "hybrid" / file) for file, _, _ in self.functions)
        files = sorted({file for file, _, _ in self.functions})
        counts = {"files": len(files), "functions": len(self.functions), "calls": self.calls, "hops": self.hops}
        return {**counts, "functions by room": dict(rooms.most_common()), "passed files": files}


def watched(call: Callable[[], object]) -> Way:
    """What `call` runs, in any thread that it starts or wakes."""
    way = Way()
    prefix = str(ROOT / "hybrid") + "/"

    def file_of(frame: FrameType | None) -> str | None:
        """The file of `hybrid/` that the nearest frame of it lies in."""
        while frame is not None and not frame.f_code.co_filename.startswith(prefix):
            frame = frame.f_back
        return None if frame is None else frame.f_code.co_filename

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(prefix) or code.co_name in COMPREHENSIONS:
            return
        way.functions.add((code.co_filename.removeprefix(prefix), code.co_qualname, code.co_firstlineno))
        way.calls += 1
        way.hops += file_of(frame.f_back) not in (None, code.co_filename)

    threading.setprofile_all_threads(watch) if sys.version_info >= (3, 12) else threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return way


def ways() -> dict[str, Way]:
    """The five ways, on the model in the package."""
    import hybrid

    greedy = hybrid.SamplingParams(max_new_tokens=8, ignore_eos=True)
    found = {}
    for overlap in (False, True):
        cache = hybrid.CacheConfig(memory="32MiB")
        with hybrid.Engine.from_pretrained("tiny", cache=cache, config=hybrid.EngineConfig(overlap=overlap)) as engine:
            list(engine.generate(["warm up"], greedy))
            added = watched(lambda: engine.add_request(list(range(40, 140)), greedy))
            first = watched(engine.step)
            engine.step()
            engine.step()
            decode = watched(engine.step)
        if overlap:
            found["decode step, overlapped"] = decode
        else:
            found |= {"request that is added": added, "first step of a prompt": first, "decode step": decode}
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
            found["opening a request that evicts to disk"] = watched(evict)
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
            "classes": num_definitions(paths, ast.ClassDef),
            "functions": num_definitions(paths, ast.FunctionDef, ast.AsyncFunctionDef),
            "floors": floors(paths),
        }
        for name, paths in rooms.items()
    }
    twice = names_of_two_classes()
    passed = {name: way.figures() for name, way in ways().items()}
    if asked.json:
        print(json.dumps({"rooms": figures, "names of two classes": twice, "ways": passed}, indent=1))
        return
    for name, row in figures.items():
        print(f"{name:20} " + " ".join(f"{number:6} {what}" for what, number in row.items()))
    print(f"names of two classes: {len(twice)} ({', '.join(twice)})")
    for name, way in passed.items():
        print(f"{name}: " + ", ".join(f"{way[what]} {what}" for what in ("files", "functions", "calls", "hops")))


if __name__ == "__main__":
    main()
