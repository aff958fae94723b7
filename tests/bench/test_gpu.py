"""The script for a GPU, rehearsed on a CPU: every section that can run here does, and what only a GPU can do is run on
a stand-in."""

import importlib
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid.kernels import reference

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> Iterator[Path]:
    """The folder of the script, importable."""
    folder = ROOT / "bench"
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def without_fla(folder: Path, **more: str) -> dict[str, str]:
    """An environment in which flash-linear-attention is not found: it takes ten seconds to import, and what is asked of
    it is tested below."""
    hiding = folder / "hiding"
    hiding.mkdir()
    (hiding / "fla.py").write_text("raise ModuleNotFoundError('hidden')\n", encoding="utf-8")
    found = os.pathsep.join([str(hiding), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": found, "CUDA_VISIBLE_DEVICES": "", **more}


def rehearse(path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run the script on toy sizes with our kernels interpreted: its exit status, its figures, what it printed."""
    environment = without_fla(path.parent, TRITON_INTERPRET="1", HYBRID_KERNELS="triton")
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "run.py"), "--rehearse", "--budget", "inf"]
    command += ["--json", str(path), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert path.exists(), ended.stderr
    return ended.returncode, json.loads(path.read_text(encoding="utf-8")), ended.stdout + ended.stderr


IN_ONE_PROCESS = f"""
import sys
sys.path[0] = {str(ROOT)!r}
import hybrid
sys.path[0] = {str(ROOT / "bench")!r}
import json
from functools import partial
from importlib import import_module
from pathlib import Path
from gpu.report import Report
from gpu.run import SECTIONS
from gpu.section import run

report = Report(Path(sys.argv[1]))
for name, (module, function, _) in SECTIONS.items():
    entry, section = report.begin(name), getattr(import_module(module), function)
    take = lambda message: report.take(name, json.loads(json.dumps(message, default=str)))
    run(section, (float("inf"), report.head.get("roofline")), True, take)
    entry["status"] = "done"
report.write()
"""
"""A rehearsal of all sections without a process for each, which would import everything again."""


def test_a_rehearsal_runs_every_section(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    ended = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS, str(path)],
        env=without_fla(tmp_path, HYBRID_KERNELS="auto", TRITON_INTERPRET="0"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert figures["status"] == 0, [section["failed"] for section in figures["sections"].values()]
    assert {section["status"] for section in figures["sections"].values()} == {"done"}
    assert all(line["right"] is not False for line in figures["lines"])
    assert all(line["target"] is None for line in figures["lines"])
    assert {entry["part"] for entry in figures["lines"]} == set(figures["sections"]) - {"roofline"}
    assert [*figures["sections"]][:5] == ["smoke", "steps", "roofline", "decode", "hit"]
    assert len(figures["sections"]) == 17
    assert figures["roofline"]["bandwidth"] > 0
    checked = {entry["name"].split(" of ")[0] for entry in figures["lines"] if entry["part"] == "smoke"}
    assert {"delta rule step", "convolution", "rms_norm", "norm_rotate_store", "expert layer"} <= checked
    profiles = [profile for name in ("decode", "hit") for profile in figures["sections"][name]["profile"]]
    assert all(0 < profile["busy share"] <= 1 for one in profiles for profile in one.values())
    assert any(line["name"].startswith("cold prefill") for line in figures["lines"])


def test_smoke_runs_our_kernels_interpreted(tmp_path: Path) -> None:
    status, figures, printed = rehearse(tmp_path / "gpu.json", "--only", "smoke")
    assert status == 0, printed[-3000:]
    assert figures["machine"]["kernels"] == "triton"
    assert sum(line["right"] is not None for line in figures["lines"]) > 40


# What may happen in a section


BROKEN = """
import os, sys, time
import torch
from common import Line
from gpu.harness import Planned, Case, compare

def hangs(bench):
    yield Line("before a hang", 1.0)
    while True:
        time.sleep(600)

def dies(bench):
    yield Line("before an illegal access", 1.0)
    import ctypes
    ctypes.string_at(0)

def raises(bench):
    yield Line("before an error", 1.0)
    raise RuntimeError("no such kernel")

def fails_in_one_case(bench):
    def broken():
        raise RuntimeError("out of shared memory")
    yield Planned("a broken case", 1, broken)
    yield Planned("a case after it", 1, lambda: Case(calls=[lambda: None], num_bytes=8))

def writes_nan(bench):
    yield compare("a kernel", torch.full((4,), float("nan")), torch.ones(4))

def exits(bench):
    yield Line("before the end", 1.0)
    os._exit(7)

def fine(bench):
    assert bench.roofline.bandwidth == 5.0
    yield Line("a figure", 1.0)

def measures(bench):
    yield {"head": {"roofline": {"bandwidth": 5.0, "matmul": None}}}
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str]:
    """A run of sections that fail in all ways, each followed by one that does not."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "planted.py").write_text(BROKEN, encoding="utf-8")
    names = ("hangs", "dies", "raises", "fails_in_one_case", "writes_nan", "exits", "fine")
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "bench")!r})
from pathlib import Path
from gpu import run
sections = {{name: run.Section("planted", name, 1e6) for name in {names!r}}}
sections = {{"roofline": run.Section("planted", "measures", 1e6), **sections}}
sections["hangs"] = run.Section("planted", "hangs", 5)
sys.exit(run.main(["--rehearse", "--budget", "1e6", "--json", {str(folder / "gpu.json")!r}], sections))
"""
    environment = {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    return ended.returncode, json.loads((folder / "gpu.json").read_text(encoding="utf-8")), ended.stdout


@pytest.mark.parametrize(
    ("section", "status", "error"),
    [
        ("hangs", "still running after 5 s", "in hangs"),  # where it was, by faulthandler
        ("dies", "died by SIGSEGV", "in dies"),
        ("raises", "failed", "RuntimeError: no such kernel"),
        ("exits", "failed", ""),
    ],
)
def test_a_section_that_ends_badly_ends_alone(
    broken: tuple[int, dict[str, Any], str], section: str, status: str, error: str
) -> None:
    _, figures, _ = broken
    entry = figures["sections"][section]
    assert entry["status"] == status
    assert error in entry["error"]
    assert [line["name"] for line in figures["lines"] if line["part"] == section] != []  # what it had is kept
    assert figures["sections"]["fine"]["status"] == "done"
    assert [line["name"] for line in figures["lines"] if line["part"] == "fine"] == ["a figure"]


def test_a_case_that_fails_does_not_end_its_section(broken: tuple[int, dict[str, Any], str]) -> None:
    _, figures, printed = broken
    entry = figures["sections"]["fails_in_one_case"]
    assert entry["status"] == "done"
    assert entry["failed"] == ["a broken case: RuntimeError: out of shared memory"]
    assert any(line["name"].startswith("a case after it") for line in figures["lines"])
    assert "FAILED  fails_in_one_case: a broken case" in printed


def test_nan_is_wrong_and_the_worst_is_the_status(broken: tuple[int, dict[str, Any], str]) -> None:
    status, figures, printed = broken
    (line,) = (line for line in figures["lines"] if line["part"] == "writes_nan")
    assert line["right"] is False
    assert status == figures["status"] == 2
    assert "WRONG   writes_nan: a kernel" in printed


def test_a_run_that_is_killed_leaves_what_it_had(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(BROKEN, encoding="utf-8")
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "bench")!r})
from gpu import run
sections = {{"hangs": run.Section("planted", "hangs", 1)}}
run.main(["--rehearse", "--budget", "inf", "--json", {str(tmp_path / "gpu.json")!r}], sections)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, start_new_session=True)
    path, lines = tmp_path / "gpu.json", list[Any]()
    while not lines and process.poll() is None:
        time.sleep(0.2)
        lines = json.loads(path.read_text(encoding="utf-8"))["lines"] if path.exists() else []
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert [line["name"] for line in lines] == ["before a hang"]
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert figures["sections"]["hangs"]["status"] == "begun"


# What is judged, and how a run ends


def report(bench: Path, tmp_path: Path, *results: Any, **section: Any) -> Any:
    made = load("gpu.report").Report(tmp_path / "report.json")
    made.begin("one").update({"status": "done", **section})
    for result in results:
        made.take("one", {"line": {key: value for key, value in result.to_json().items() if key != "reached"}})
    return made


def test_the_status_says_what_was_missed_and_what_was_wrong(bench: Path, tmp_path: Path) -> None:
    gpu = load("gpu.harness")
    fast, slow = gpu.Line("a", 0.9, 0.85), gpu.Line("b", 1.1, 1.05, True)
    right, wrong = gpu.check("c", True, ""), gpu.check("d", False, "")
    assert report(bench, tmp_path, fast, right).status == 0
    assert report(bench, tmp_path, gpu.Line("no target", 7.0), right).status == 0
    assert report(bench, tmp_path, fast, slow).status == 1
    assert report(bench, tmp_path, gpu.Line("nothing ran", None, 1.0)).status == 1
    assert report(bench, tmp_path, fast, slow, wrong).status == 2
    assert report(bench, tmp_path, fast, status="failed", error="lost").status == 1
    assert report(bench, tmp_path, fast, skipped=["a size"]).status == 1
    assert json.loads((tmp_path / "report.json").read_text())["lines"][0]["reached"]


def test_the_summary_says_in_a_line_each_what_was_asked(bench: Path, tmp_path: Path) -> None:
    gpu = load("gpu.harness")
    results = [
        gpu.Line("a", 0.9, 0.85),
        gpu.Line("b", 1.1, 1.05, True),
        gpu.Line("c", 3.0),
        gpu.check("d", False, "far"),
    ]
    told = report(bench, tmp_path, *results, skipped=["a size"]).summary()
    assert told == [
        "ok      0.9 >= 0.85  one: a",
        "MISS    1.1 <= 1.05  one: b",
        "WRONG   one: d: far",
        "SKIPPED one: a size",
        "1 checks",
    ]


def working(rehearsal: bool) -> Any:
    device = load("gpu.harness")
    deadline = time.perf_counter() + 1e6  # farther than any test runs
    skipped: list[str] = []
    roofline, sizes = device.Roofline(1.0, 1.0), load("gpu.sizes").TOY

    def skip(*, skipped_: list[str] = skipped, **message: str) -> None:
        skipped_.append(message["skipped"])

    return device.Bench(device.Cpu(), sizes, roofline, deadline, rehearsal, skip=skip), skipped


def test_peers_that_fail_or_compute_something_else_are_told_and_not_compared_with(bench: Path) -> None:
    device, (work, skipped) = load("gpu.harness"), working(rehearsal=False)
    ours = device.Timing(1.0, 1.0, 1.0, 1, "clock")

    def missing() -> Any:
        raise ModuleNotFoundError("not here")

    def quick(value: float) -> Any:
        return lambda: [lambda: torch.tensor(value)]

    line = work.against_fastest(
        "work",
        ours,
        {"missing": missing, "wrong": quick(0.5), "right": quick(0.0), "nan": quick(math.nan)},
        1.05,
        float,
    )
    assert line.name == "work, over right"
    assert line.target == 1.05
    assert "not here" in line.details["missing"]
    assert line.details["wrong"]["error"] == 0.5
    assert set(line.medians) == {"ours", "right"}
    assert not skipped
    alone = work.against_fastest("work", ours, {"missing": missing}, 1.05)
    assert alone.value is None
    assert skipped == ["work against missing"]


def test_sets_rotate_through_more_than_the_cache(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, _ = working(rehearsal=False)
    monkeypatch.setattr(load("gpu.harness").Cpu, "cache_bytes", 60)
    assert [work.sets(size) for size in (1, 60, 100, 1000)] == [64, 3, 2, 1]


def test_nan_passes_no_comparison(bench: Path) -> None:
    gpu = load("gpu.harness")
    x = torch.randn(8)
    assert gpu.compare("same", x, x).right
    assert not gpu.compare("not a number", torch.full((8,), float("nan")), x).right
    assert not gpu.compare("something else", -x, x).right


def test_what_the_time_does_not_hold_is_skipped_and_said(bench: Path, tmp_path: Path) -> None:
    work, skipped = working(rehearsal=True)
    shared = load("gpu.harness")
    assert not [*work.measure(shared.Planned("a long case", 1e7, shared.Case))]
    assert work.has(30, "short")
    assert not work.has(2e6, "long")
    assert skipped == ["a long case", "long"]


def test_without_a_roofline_figures_are_there_and_not_judged(bench: Path) -> None:
    work, _ = working(rehearsal=False)
    shared = load("gpu.harness")
    blind = replace(work, roofline=shared.Roofline())
    (line,) = blind.measure(shared.Planned("a case", 1, lambda: shared.Case([lambda: None], num_bytes=8, target=0.8)))
    assert line.value is None
    assert line.medians["ours"] is not None
    assert not line.reached


def test_a_check_fails_where_a_second_run_has_other_bits(bench: Path) -> None:
    work, _ = working(rehearsal=True)
    runs = iter([torch.zeros(3), torch.ones(3)])
    (line,) = work.again("a kernel", lambda: next(runs), [torch.zeros(3)], {})
    assert line.right is True
    (line,) = work.again("a kernel", lambda: next(runs), [torch.zeros(3)], {})
    assert line.right is False


# The GPU's clock, on a stand-in for a GPU


class Standin:
    """A stand-in for `torch.cuda`, counted by the host's clock."""

    def __init__(self, records: bool) -> None:
        self.records, self.runs, self.recording = records, 0, False
        self.stream_set = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        outer = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = time.perf_counter()

            def elapsed_time(self, end: Any) -> float:
                return 1000 * (end.at - self.at)

        class Graph:
            def replay(self) -> None:
                time.sleep(0.001)

        class Stream:
            def wait_stream(self, other: Any) -> None:
                assert isinstance(other, Stream)

        class Within:
            def __init__(self, _: Any) -> None:
                return

            def __enter__(self) -> None:
                return

            def __exit__(self, *_: object) -> None:
                return

        class Recording(Within):
            def __enter__(self) -> None:
                if not outer.records:
                    raise RuntimeError("operation not permitted when stream is capturing")

        current = Stream()
        properties = SimpleNamespace(
            name="a GPU", major=9, minor=0, multi_processor_count=132, L2_cache_size=1 << 20, total_memory=1 << 30
        )
        found: dict[str, Any] = {
            "Event": Event,
            "CUDAGraph": Graph,
            "Stream": Stream,
            "stream": Within,
            "graph": Recording,
            "current_stream": lambda: current,
            "set_stream": lambda stream: setattr(outer, "stream_set", stream is current),
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "set_device": lambda device: None,
            "get_device_properties": lambda device: properties,
        }
        for name, value in found.items():
            monkeypatch.setattr(torch.cuda, name, value)  # raises where torch has no such name


@pytest.mark.parametrize("records", [True, False])
def test_the_clock_of_a_gpu_times_a_call(bench: Path, monkeypatch: pytest.MonkeyPatch, records: bool) -> None:
    standin = Standin(records)
    standin.install(monkeypatch)
    gpu = load("gpu.harness").Gpu()
    calls = [lambda: time.sleep(0.0005), lambda: time.sleep(0.0005)]
    timing = gpu.time(calls, 0.02)
    assert timing.repeats >= 7
    assert 0 < timing.low <= timing.seconds <= timing.high
    if records:
        assert timing.how == "graph"
    else:
        assert timing.how.startswith("events (RuntimeError")
        assert standin.stream_set
        assert timing.seconds == pytest.approx(0.0006, rel=0.9)
    gpu.release()
    assert gpu.describe()["l2"] == 1 << 20


def test_a_gpu_has_every_name_that_the_clock_asks_for() -> None:
    parameters = inspect.signature(torch.cuda.graph.__init__).parameters
    assert [*parameters][1] == "cuda_graph"
    assert "enable_timing" in inspect.signature(torch.cuda.Event.__new__).parameters


# Peers compute what we do


def linear_inputs(requests: int, tokens: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta `[R, T, heads, ...]`: one key head, two value heads."""
    torch.manual_seed(0)
    q, k = torch.randn(requests, tokens, 1, 16), torch.randn(requests, tokens, 1, 16)
    v = torch.randn(requests, tokens, 2, 16)
    return q, k, v, -torch.rand(requests, tokens, 2), torch.rand(requests, tokens, 2)


def test_flas_step_is_our_step(bench: Path) -> None:
    pytest.importorskip("fla")
    q, k, v, g, beta = (x.squeeze(1) for x in linear_inputs(3, 1))
    pool, slots = torch.randn(5, 2, 16, 16), torch.tensor([4, 1, 3])
    expected = pool.clone()
    output = reference.recurrent_gated_delta_rule(q, k, v, g, beta, expected, slots, slots)
    found = load("gpu.kernels").fla_step(q, k, v, g, beta, pool, slots, slots)()
    torch.testing.assert_close(found, output, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pool, expected, atol=1e-5, rtol=1e-4)


def test_the_toy_and_the_real_sizes_agree_in_kind(bench: Path) -> None:
    sizes = load("gpu.sizes")
    assert sizes.FULL.config.keys() == sizes.TOY.config.keys()
    for size in (sizes.FULL, sizes.TOY):
        assert size.config["num_hidden_layers"] == len(size.config["layer_types"])
        assert size.document % size.page_size == 0
    assert sizes.FULL.kv_bytes == 4096
    assert sizes.FULL.state_bytes == 2 << 20
