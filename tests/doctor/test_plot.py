"""Plots of a report, with matplotlib."""

import json
from pathlib import Path

import pytest

from hybrid.doctor import Sizes, replay

pytest.importorskip("matplotlib")


def test_a_plot_has_a_line_for_each_engine_and_a_bar_for_each_cause(tmp_path: Path) -> None:
    lines = [{"input_tokens": [*range(3000), n, *range(90)], "output_tokens": [n] * 9} for n in range(5000, 5008)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = replay(tmp_path / "log.jsonl", Sizes(32768, 51511296), ["vllm", "bound"], ["1GB", "4GB"], cures=False)
    figure = report.plot()
    rates, causes = figure.axes
    for line, name in zip(rates.lines, ("vllm", "bound"), strict=True):
        rows = [row for row in report.rows if row.engine == name]
        assert [*line.get_xdata()] == [1.0, 4.0] and [*line.get_ydata()] == [row.hit_rate for row in rows]
    assert len(causes.patches) == len(report.causes) > 1
    assert sum(bar.get_width() for bar in causes.patches) == pytest.approx(100 - report.rows[0].hit_rate)
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000
