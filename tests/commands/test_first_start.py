"""A first start, which compiles for a minute, says so once on stderr."""

import os
import re
import subprocess
import sys

PROGRAM = """
import logging, sys
import hybrid
from hybrid.commands.main import main
from hybrid.kernels.cpu import functions, prepare

def case(name):
    print(f"-- {name}", file=sys.stderr, flush=True)

prepare.missing = lambda wanted: wanted[:2]
prepare.compile_in_advance = iter  # what is compiled in advance, and where: tests/kernels/test_numba_cache.py
generate = ["generate", "tiny", "import", "--max-new-tokens", "1", "--memory", "32MiB"]
case("a script"); hybrid.Engine.from_pretrained("tiny", cache=hybrid.CacheConfig(memory="32MiB"))
case("a command"); main(generate)
case("json"); main([*generate, "--json"])
case("again"); main(generate)
case("a terminal"); prepare.prepare(functions.all_functions(), show=True)
logging.getLogger("hybrid").setLevel(logging.ERROR)
case("silenced on a terminal"); prepare.prepare(functions.all_functions(), show=True)
"""


def test_operations_that_are_compiled_are_announced_in_scripts_and_commands() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "HYBRID_KERNELS": "auto"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    said = {case: lines for case, *lines in (part.strip().split("\n") for part in ended.stderr.split("-- ")[1:])}
    line, counter = said["a script"], said.pop("a terminal")
    assert re.fullmatch(
        r"compiling 2 operations for this CPU, which is done once: about \d+ seconds on \d+ idle cores", *line
    )
    assert said == {"a script": line, "a command": line, "json": [], "again": line, "silenced on a terminal": []}
    assert counter[0].startswith("compiling 2 ") and counter[-1].startswith("compile: 100%") and "2/2" in counter[-1]
