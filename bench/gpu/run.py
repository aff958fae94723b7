#!/usr/bin/env python
"""Everything that needs a GPU, in one run of ten minutes: kernels and engine, first right, then fast.

    python bench/gpu/run.py [--only smoke attention delta] [--budget 540] [--json gpu.json]
    python bench/gpu/run.py --rehearse

Sizes are those of Qwen3.5-9B with random weights; no checkpoint and no network is needed. Each figure is printed with
the target that it should reach and the peers that run here: torch's SDPA, flash-linear-attention.

Each section is a process of its own with a time limit: an illegal access or a hang ends that section, and the report
says where it was. `smoke` and `steps` come first, then what the targets are about. Figures are written to a file after
every one of them. What the budget of seconds does not hold is skipped and reported. Exit status: 0; 1 when a target was
missed or something was not measured; 2 when a result was wrong. A rehearsal runs the same on a CPU with toy sizes, by
the kernels that `HYBRID_KERNELS` names; its times mean nothing.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # not this folder: what is found as `kernels` is taken for another package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common import COLUMNS, machine, print_table
from gpu.report import Report

BENCH = Path(__file__).resolve().parents[1]

START = f"""import sys
sys.path[0] = {str(BENCH.parent)!r}  # this checkout need not be installed
import hybrid
sys.path[0] = {str(BENCH)!r}  # neither the root nor this folder: their `kernels` are taken for another package
from gpu.section import main
sys.exit(main(*sys.argv[1:]))"""
"""The program of a section's process: its arguments are a module, a function, a pipe and whether to rehearse."""

NO_DEVICE = 3
"""Exit status of that process where there is no GPU."""

GRACE = 15
"""Seconds for a process to end once it has said everything, or to say where it is when it is told to stop."""


class Section(NamedTuple):
    """A generator of figures: `function` of `module`, which runs for `seconds` at most."""

    module: str
    function: str
    seconds: float


SECTIONS = {
    "smoke": Section("gpu.engine", "smoke", 60),
    "steps": Section("gpu.engine", "first_steps", 90),  # most of it compiles kernels, when engines are made
    "roofline": Section("gpu.engine", "roofline", 30),
    "decode": Section("gpu.engine", "decode", 150),
    "hit": Section("gpu.engine", "hit", 100),
    "restore": Section("gpu.engine", "restore", 60),
    "parity": Section("gpu.engine", "parity", 60),
    "delta": Section("gpu.kernels", "delta_step", 60),
    "attention": Section("gpu.attention", "decode_attention", 100),
    "extend": Section("gpu.attention", "extend_attention", 60),
    "states": Section("gpu.kernels", "state_copies", 40),
    "sharing": Section("gpu.engine", "sharing", 90),
    "store": Section("gpu.kernels", "elementwise", 60),
    "chunks": Section("gpu.kernels", "chunk_rule", 90),
    "convolution": Section("gpu.kernels", "convolution", 40),
    "linear": Section("gpu.kernels", "products", 120),
    "experts": Section("gpu.kernels", "experts", 60),
}
"""In the order in which they run."""


class Worker:
    """The process of a section. It imports what it needs at once, and waits for `run` before it touches the device: so
    one can be started while the section before it still runs.

    Args:
        section: what it runs.
        rehearse: on a CPU, with toy sizes.
    """

    def __init__(self, section: Section, rehearse: bool) -> None:
        self._section = section
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`); a pipe would be full at some time
        messages, theirs = os.pipe()
        command = [sys.executable, "-c", START, section.module, section.function, str(theirs), str(int(rehearse))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=self._errors, pass_fds=(theirs,))
        os.close(theirs)
        self._messages = messages

    def run(self, name: str, seconds: float, report: Report) -> None:
        """Run the section to its end or its time limit; whatever ends it is recorded."""
        entry, start = report.begin(name), time.perf_counter()
        limit = seconds if seconds == float("inf") else min(self._section.seconds, seconds)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([limit, report.head.get("roofline")]).encode() + b"\n")
            self._process.stdin.close()
            in_time = self._receive(name, start + limit, report)
        except BrokenPipeError:  # it has ended already
            in_time = True
        entry["status"] = "done"
        if not in_time:
            entry["status"] = f"still running after {limit:.0f} s"
            self._process.send_signal(signal.SIGABRT)  # faulthandler prints where it is
        try:
            code = self._process.wait(None if in_time and seconds == float("inf") else GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code == NO_DEVICE:
            sys.exit("there is no GPU here; --rehearse runs the script with toy sizes on a CPU")
        if in_time and code:
            entry["status"] = f"died by {signal.Signals(-code).name}" if code < 0 else "failed"
        self._errors.seek(0)
        output = self._errors.read().decode(errors="replace")
        if entry["status"] != "done":
            entry["error"] = output[-3000:]
        if output:
            print(output[-3000:], file=sys.stderr)
        entry["seconds"] = round(time.perf_counter() - start, 1)
        report.write()

    def _receive(self, name: str, deadline: float, report: Report) -> bool:
        """Take messages until the process has ended; False: the deadline came before."""
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._messages, selectors.EVENT_READ)
            while selector.select(None if deadline == float("inf") else max(0.0, deadline - time.perf_counter())):
                data = os.read(self._messages, 1 << 16)
                if not data:
                    return True
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    report.take(name, json.loads(line))
        return False

    def close(self) -> None:
        """End the process, if it has not ended."""
        self._process.kill()
        self._process.wait()
        os.close(self._messages)
        self._errors.close()


def run_sections(sections: dict[str, Section], args: Namespace, report: Report) -> None:
    """Run sections one after the other. While one runs, the next one's process imports what it needs."""
    end, names = time.perf_counter() + args.budget, list(sections)
    started: dict[str, Worker] = {}
    try:
        for at, name in enumerate(names):
            for soon in names[at : at + 2]:
                if soon not in started:
                    started[soon] = Worker(sections[soon], args.rehearse)
            if end - time.perf_counter() < 3:
                report.begin(name)["status"] = "no time left"
            else:
                started[name].run(name, end - time.perf_counter(), report)
            started.pop(name).close()
            entry, count = report.sections[name], len(report.results)
            print(f"{name}: {entry['status']} in {entry.get('seconds', 0)} s, {count} figures", flush=True)
    finally:
        for worker in started.values():
            worker.close()


def taken_on() -> dict[str, Any]:
    """The machine, as far as it can be found out."""
    try:
        return machine(kernels=os.environ.get("HYBRID_KERNELS", "auto"))
    except Exception as error:  # figures without it are still worth having
        return {"unknown": f"{type(error).__name__}: {error}"}


def main(arguments: list[str] | None = None, sections: dict[str, Section] = SECTIONS) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sections, default=sections, help="sections (default: all)")
    parser.add_argument("--budget", type=float, default=540, help="seconds in all (default: 540; inf: no limits)")
    default = Path(os.environ.get("OUT", ".")) / "gpu.json"
    parser.add_argument(
        "--json", type=Path, default=default, metavar="FILE", help="for the figures (default: gpu.json in $OUT or here)"
    )
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on a CPU: tests the script, not the speed")
    args = parser.parse_args(arguments)
    begin = time.perf_counter()
    report = Report(args.json, {"machine": taken_on(), "rehearsal": args.rehearse})
    # figures of any section are judged by what the roofline measures
    chosen = {name: section for name, section in sections.items() if name in args.only or name == "roofline"}
    run_sections(chosen, args, report)
    report.head["seconds"] = round(time.perf_counter() - begin, 1)
    report.write()
    print(report.head)
    print_table(COLUMNS, [line.row() for line in report.results], report.summary())
    print(f"{report.head['seconds']} s; figures in {args.json}; status {report.status}")
    return report.status


if __name__ == "__main__":
    sys.exit(main())
