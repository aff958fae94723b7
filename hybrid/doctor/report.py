"""The result of a replay: for a terminal, as JSON, as a page, in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hybrid.doctor.arrivals import Pace
from hybrid.doctor.causes import REMEDIES, Cause
from hybrid.doctor.evicted import NAMES, EvictedPart
from hybrid.doctor.past import Example, Rewrite
from hybrid.doctor.sizes import Sizes
from hybrid.doctor.traffic import Traffic
from hybrid.errors import ArgumentError
from hybrid.units import format_bytes

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:60em;padding:1em;color:#222;background:#fff}
h1{font-size:1.5em}h2{font-size:1.15em;margin:1.6em 0 .4em}table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:.35em .5em;border-bottom:1px solid #8883;vertical-align:top}
td.n{text-align:right;white-space:nowrap}
table{table-layout:fixed}td:nth-child(2){width:30%}td.n{width:6.5em}
.bar{background:#8882;height:.7em;margin-top:.45em}.bar i{display:block;height:100%;background:#4a90d9}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#8881;padding:.5em;margin:.3em 0}small{color:#666}
td{overflow-wrap:anywhere}svg{width:100%;max-width:36em;height:auto}
@media(max-width:36em){tr{display:grid;grid-template-columns:1fr 7em;border-bottom:1px solid #8883}
td:nth-child(n){width:auto;border:0}td:first-child{grid-column:1/3;padding-bottom:0}}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}small{color:#aaa}}
"""

RANKS = (
    "The order may differ from that of the causes: a token counts for the first thing that keeps it from being a hit, "
    "and a change saves what does not miss for another reason then."
)

COLOURS = ("#4a90d9", "#e07b39", "#5aa469", "#9a6fb0", "#c0504d", "#888888")


@dataclass
class Row:
    """One replay.

    Attributes:
        engine, memory: what was replayed, and its bytes.
        num_tokens, hit_tokens: tokens of prompts, and those that were not computed.
        seconds: that the engine's bookkeeping took.
        scheduler: what was replayed on: a model of the engine's scheduler, or its own.
        causes: tokens that were not a hit, by cause; empty: not asked for.
        waits: seconds to the first token of each request that had it, by the rates of the replay.
        saved_compute: percent of what computing all prompts takes, by the sizes' crossover; None: it is not known.
        evicted: what was evicted and asked for again, by kind and age; they add up to its two causes.
    """

    engine: str
    memory: int
    num_tokens: int
    hit_tokens: int = 0
    seconds: float = 0.0
    causes: dict[Cause, int] = field(default_factory=dict)
    evicted: list[EvictedPart] = field(default_factory=list)
    waits: Sequence[float] = ()
    saved_compute: float | None = None
    scheduler: str = "a model"

    @property
    def hit_rate(self) -> float:
        """Hits in percent of the tokens of prompts."""
        return 100 * self.hit_tokens / max(1, self.num_tokens)

    @property
    def computed(self) -> int:
        """Tokens of prompts that are computed."""
        return self.num_tokens - self.hit_tokens

    @property
    def first_token(self) -> dict[str, float]:
        """Seconds to the first token: mean, median and 90th percentile; empty: there are none."""
        if not self.waits:
            return {}
        ordered = sorted(self.waits)
        at = {"mean": sum(ordered) / len(ordered), "p50": ordered[len(ordered) // 2]}
        return {**at, "p90": ordered[len(ordered) * 9 // 10]}

    @property
    def shown_compute(self) -> str:
        """What it saves of computing all prompts, in words; empty: not known."""
        return "" if self.saved_compute is None else f"{self.saved_compute:.1f} %"

    @property
    def shown_waits(self) -> str:
        """Seconds to the first token in words; empty: not known."""
        found = self.first_token
        return f"{found['mean']:.2g}, {found['p50']:.2g}, {found['p90']:.2g} s" if found else ""


@dataclass
class Cure:
    """Something that was tried.

    Attributes:
        name, how: what was changed, and what to type or to do.
        num_tokens, hit_tokens: tokens of prompts, and those that were not computed.
        saved: tokens that are computed less than without it; negative: it makes things worse.
    """

    name: str
    how: str
    num_tokens: int
    hit_tokens: int
    saved: int


@dataclass
class Report:
    """What hits, what does not, why, and what would change it.

    Attributes:
        traffic, sizes: what was replayed, and of which model.
        rows: a replay for each engine and memory; the first has the causes.
        pace: how requests came.
        cures: what was tried on the first, the best first.
        prefill_rate: tokens that are computed per second; price: of a million of them.
    """

    traffic: Traffic
    sizes: Sizes
    rows: list[Row]
    pace: str = str(Pace())
    cures: list[Cure] = field(default_factory=list)
    prefill_rate: float | None = None
    price: float | None = None

    @property
    def causes(self) -> list[tuple[Cause, int]]:
        """Tokens that missed on the first engine, by cause, the most first; what no cache could have had last."""
        return sorted(self.rows[0].causes.items(), key=lambda item: (item[0] is Cause.NEW, -item[1]))

    @property
    def examples(self) -> list[Example]:
        """Two requests for each kind of rewriting, the kind with the most tokens first."""
        named = [cause.value for cause, _ in self.causes]
        found = self.traffic.examples
        return [found[Rewrite(name)] for name in named if name in Rewrite._value2member_map_ and Rewrite(name) in found]

    def cost(self, num_tokens: int) -> str:
        """What computing tokens takes: time and money, where their rates are known."""
        parts = []
        if self.prefill_rate:
            parts.append(f"{num_tokens / self.prefill_rate:,.0f} s")
        if self.price is not None:
            parts.append(f"{num_tokens / 1e6 * self.price:,.2f}")
        return ", ".join(parts)

    @property
    def unit(self) -> str:
        """The way in which tokens were counted."""
        if not self.traffic.is_text or self.traffic.tokenizer is not None:
            return "tokens"
        return "tokens estimated by words, --tokenizer MODEL counts them"

    @property
    def summary(self) -> str:
        """The traffic in a line: requests and tokens of prompts."""
        traffic = self.traffic
        how = "" if self.unit == "tokens" else f" ({self.unit})"
        return f"{traffic.num_requests:,} requests {self.pace}, {traffic.num_prompt_tokens:,} tokens of prompts{how}"

    def to_json(self) -> dict[str, Any]:
        """The report as values of JSON."""
        return {
            "requests": self.traffic.num_requests,
            "prompt_tokens": self.traffic.num_prompt_tokens,
            "unit": self.unit,
            "pace": self.pace,
            "read_seconds": round(self.traffic.seconds, 3),
            "model": asdict(self.sizes),
            "replays": [
                {
                    "engine": row.engine,
                    "scheduler": row.scheduler,
                    "memory": row.memory,
                    "hit_rate": round(row.hit_rate, 3),
                    "hit_tokens": row.hit_tokens,
                    "computed_tokens": row.computed,
                    "seconds": round(row.seconds, 3),
                    **({"cost": self.cost(row.computed)} if self.cost(row.computed) else {}),
                    **({} if row.saved_compute is None else {"saved_compute": round(row.saved_compute, 3)}),
                    **({"first_token": row.first_token} if row.first_token else {}),
                }
                for row in self.rows
            ],
            "causes": [
                {"cause": cause.value, "tokens": tokens, "remedy": REMEDIES[cause]} for cause, tokens in self.causes
            ],
            "evicted": [
                {**part._asdict(), "places": {place.value: share for place, share in part.places.items()}}
                for part in self.rows[0].evicted
            ],
            "examples": [{**asdict(example), "rewrite": example.rewrite.value} for example in self.examples],
            "cures": [asdict(cure) for cure in self.cures],
        }

    @property
    def schedulers(self) -> str:
        """What engines were replayed on, in a line; empty: on models, as always."""
        found = {row.engine: row.scheduler for row in self.rows if row.scheduler != "a model"}
        return "; ".join(f"{engine}: {scheduler}" for engine, scheduler in found.items())

    def print(self, console: Console) -> None:
        """Print it on a terminal."""
        traffic = self.traffic
        console.print(
            f"{self.summary}, read in {traffic.seconds:.1f} s; model {self.sizes.name}",
            markup=False,
            soft_wrap=True,
        )
        shown = {
            "saved compute": [row.shown_compute for row in self.rows],
            "first token: mean, half, 90 %": [row.shown_waits for row in self.rows],
        }
        more = {name: cells for name, cells in shown.items() if any(cells)}
        table = Table("engine", "memory", "hit rate", *more, "computed", "cost", "replayed in", box=None)
        for place, row in enumerate(self.rows):
            own = (column[place] for column in more.values())
            cells = (f"{row.computed:,}", self.cost(row.computed), f"{row.seconds:.1f} s")
            table.add_row(row.engine, amount(row.memory), f"{row.hit_rate:.1f} %", *own, *cells)
        console.print(table)
        if self.schedulers:
            console.print(f"replayed on {self.schedulers}", markup=False, soft_wrap=True)
        first = self.rows[0]
        if first.causes:
            console.print(
                f"\nwhere the {first.computed:,} tokens went that {first.engine} computes", markup=False, soft_wrap=True
            )
            table = Table("tokens", "%", "why", "what helps", box=None)
            for cause, count in self.causes:
                table.add_row(f"{count:,}", f"{100 * count / first.num_tokens:.1f}", cause.value, REMEDIES[cause])
            console.print(table)
        if first.evicted:
            console.print("\nwhat was evicted and asked for again, and what was computed meanwhile")
            names = [f"{name}, %" for name in NAMES.values()]
            table = Table("tokens", "what", "last used, requests ago", *names, box=None)
            for part in first.evicted:
                shares = [f"{part.places[place]:.0f}" for place in NAMES]
                table.add_row(f"{part.num_tokens:,}", part.part.value, part.age, *shares)
            console.print(table)
        for example in self.examples:
            console.print(f"\n{_place(example)}", markup=False, soft_wrap=True)
            console.print(f"  before: {example.old!r}\n  now:    {example.new!r}", markup=False, soft_wrap=True)
        if self.cures:
            console.print(f"\nwhat would change it, each row replayed by itself\n{RANKS}", soft_wrap=True)
            table = Table("saved tokens", "hit rate", "change", "how", box=None)
            for cure in self.cures:
                rate = f"{100 * cure.hit_tokens / max(1, cure.num_tokens):.1f} %"
                table.add_row(f"{cure.saved:,}", rate, cure.name, cure.how)
            console.print(table)

    def write(self, path: str | Path) -> None:
        """Write it as a page: one file, which loads nothing."""
        head = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width,initial-scale=1"><title>hybrid doctor</title><style>{STYLE}</style>'
        )
        Path(path).write_text(f"{head}<body>{self._repr_html_()}</body></html>", encoding="utf-8")

    def _repr_html_(self) -> str:
        first = self.rows[0]
        cost = self.cost(first.computed)
        parts = [
            f"<h1>{first.hit_rate:.1f} % of the prompt tokens hit</h1>",
            f"<p>{escape(first.engine)}, {amount(first.memory)}, model {escape(self.sizes.name)}: "
            f"{escape(self.summary)}; {first.computed:,} are computed{escape(f' ({cost})' if cost else '')}.</p>",
            self._engines_html(),
            *([f"<p><small>Replayed on {escape(self.schedulers)}.</small></p>"] if self.schedulers else []),
        ]
        if first.causes:
            rows = [
                f"<tr><td>{escape(cause.value)}<br><small>{escape(REMEDIES[cause])}</small></td>"
                f"<td>{_bar(count, first.computed)}</td><td class=n>{count:,}<br>"
                f"<small>{100 * count / first.num_tokens:.1f} %</small></td></tr>"
                for cause, count in self.causes
            ]
            parts.append(f"<h2>Where the computed tokens went</h2><table>{''.join(rows)}</table>")
        if first.evicted:
            rows = [
                f"<tr><td>{escape(part.part.value)}<br><small>last used {part.age} requests ago; meanwhile: "
                f"{', '.join(f'{part.places[place]:.0f} % {place.value}' for place in NAMES)}</small></td>"
                f"<td>{_bar(part.num_tokens, first.computed)}</td><td class=n>{part.num_tokens:,}<br>"
                f"<small>{100 * part.num_tokens / first.num_tokens:.1f} %</small></td></tr>"
                for part in first.evicted
            ]
            parts.append(f"<h2>What was evicted and asked for again</h2><table>{''.join(rows)}</table>")
        for example in self.examples:
            parts.append(
                f"<h2>{escape(example.rewrite.value)}</h2><p>{escape(_place(example))}</p>before<pre>"
                f"{escape(example.old)}</pre>now<pre>{escape(example.new)}</pre>"
            )
        if self.cures:
            best = max(1, *(cure.saved for cure in self.cures))
            rows = [
                f"<tr><td>{escape(cure.name)}<br><small><code>{escape(cure.how)}</code></small></td>"
                f"<td>{_bar(max(0, cure.saved), best)}</td><td class=n>{cure.saved:,}<br>"
                f"<small>{100 * cure.hit_tokens / max(1, cure.num_tokens):.1f} %</small></td></tr>"
                for cure in self.cures
            ]
            title = "What would change it, each replayed: tokens saved"
            parts.append(f"<h2>{title}</h2><p><small>{RANKS}</small></p><table>{''.join(rows)}</table>")
        return "".join(parts)

    def plot(self) -> Any:
        """Plot hit rates over memory, and where the computed tokens went. Needs matplotlib: `pip install
        hybrid-prefix-cache[doctor]`.

        Returns:
            A figure of matplotlib, which a notebook shows and `savefig` writes.

        Raises:
            ArgumentError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ArgumentError("plots need matplotlib: pip install 'hybrid-prefix-cache[doctor]'") from error
        figure = Figure(figsize=(11, 4), layout="constrained")
        rates, causes = figure.subplots(1, 2)
        for number, name in enumerate(dict.fromkeys(row.engine for row in self.rows)):
            rows = sorted((row for row in self.rows if row.engine == name), key=lambda row: row.memory)
            x, y = [row.memory / 1e9 for row in rows], [row.hit_rate for row in rows]
            rates.plot(x, y, marker="o", label=name, color=COLOURS[number % len(COLOURS)])
        rates.set(xlabel="memory in GB", ylabel="hit rate in %", ylim=(0, 100))
        rates.legend()
        names = [cause.value for cause, _ in self.causes][::-1]
        parts = [100 * count / max(1, self.rows[0].num_tokens) for _, count in self.causes][::-1]
        causes.barh(names, parts, color=COLOURS[0])
        causes.set(xlabel=f"% of the tokens of prompts, {self.rows[0].engine}")
        return figure

    def _engines_html(self) -> str:
        """A table of all replays, and their hit rates over memory where there are several sizes."""
        rows = [
            f"<tr><td>{escape(row.engine)}, {amount(row.memory)}</td>"
            f"<td>{_bar(row.hit_tokens, row.num_tokens)}</td>"
            f"<td class=n>{row.hit_rate:.1f} %{_more(row)}</td></tr>"
            for row in self.rows
        ]
        table = f"<h2>Hit rates</h2><table>{''.join(rows)}</table>"
        sizes = sorted({row.memory for row in self.rows})
        if len(sizes) < 2:
            return table
        lines = []
        for number, name in enumerate(dict.fromkeys(row.engine for row in self.rows)):
            points = [
                (44 + 290 * sizes.index(row.memory) / (len(sizes) - 1), 190 - 1.7 * row.hit_rate)
                for row in sorted(self.rows, key=lambda row: row.memory)
                if row.engine == name
            ]
            colour, text = COLOURS[number % len(COLOURS)], " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
            lines.append(f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="2"/>')
            lines.append(f'<text x="{44 + 56 * number}" y="12" fill="{colour}">{escape(name)}</text>')
        for number, size in enumerate(sizes):
            x, anchor = 44 + 290 * number / (len(sizes) - 1), "middle" if number + 1 < len(sizes) else "end"
            lines.append(f'<text x="{x:.0f}" y="206" text-anchor="{anchor}" fill="#888">{amount(size)}</text>')
        for percent in (0, 50, 100):
            lines.append(f'<text x="0" y="{194 - 1.7 * percent}" fill="#888">{percent} %</text>')
        label = 'role="img" aria-label="hit rate over memory"'
        return f'{table}<svg viewBox="0 0 360 212" font-size="12" {label}>{"".join(lines)}</svg>'


def amount(num_bytes: int) -> str:
    """A memory as it was given: in GB where it is a round number of them, else in GiB."""
    if num_bytes % 10**8 == 0:
        return f"{num_bytes / 1e9:g} GB"
    return format_bytes(num_bytes)


def _place(example: Example) -> str:
    where = f"token {example.token:,}" + (f", character {example.character:,}" if example.character else "")
    return f"{example.rewrite.value}: line {example.line} differs from line {example.before} at {where}"


def _more(row: Row) -> str:
    """What else is known of a replay, below its hit rate."""
    compute, waits = row.shown_compute, row.shown_waits
    parts = (f"compute saved {compute}" if compute else "", f"first token {waits}" if waits else "")
    return "".join(f"<br><small>{part}</small>" for part in parts if part)


def _bar(part: float, whole: float) -> str:
    return f'<div class=bar><i style="width:{100 * part / max(1, whole):.1f}%"></i></div>'
