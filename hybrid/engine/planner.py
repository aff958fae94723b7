"""From a step to its plan: the only place where the tensors of a step are created.

All numbers of a step are in one tensor, so that they reach a GPU in one copy; the plan's tensors are views of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hybrid.batch import Adapted, Batch, Embedded, Group, Unrolled
from hybrid.engine.padding import NO_PADDING, Padding, Rows, SampledRows, rows_of, run_starts, targets_of, tokens_of
from hybrid.engine.request import Request
from hybrid.engine.sampler import SampleRow, SamplingRows, sampling_numbers
from hybrid.engine.step import Part, Step
from hybrid.errors import AuditError
from hybrid.kernels.ops import fill_in_tokens
from hybrid.memory.device import on_device
from hybrid.memory.pool import EMPTY_STATE
from hybrid.models.adapters import Adapter

ALIGNMENT = 2
"""Every view starts at a multiple of this many numbers, 16 bytes: kernels are compiled for that alignment only."""

Layout = tuple[tuple[str, tuple[int, tuple[int, ...]]], ...]
"""(name, (start, shape)) of every piece."""


@dataclass
class PlanBuffer:
    """Numbers that become one tensor, and where each piece of them starts.

    Most pieces have a few numbers: they are collected in a list, of which one array is made, instead of one for each.
    """

    layout: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _arrays: list[np.ndarray] = field(default_factory=list)
    _list: list[int | None] = field(default_factory=list)  # what follows the arrays
    _end: int = 0

    def add(self, name: str, values: Sequence[int | None], expected: int | None = None) -> None:
        """A piece of few numbers, whose count is checked where it is expected."""
        count = len(values)
        if expected is not None and count != expected:
            raise AuditError(f"plan: {name} has {count} numbers, expected {expected}")
        self.add_rows(name, values, (count,))

    def add_rows(self, name: str, values: Sequence[int | None], shape: tuple[int, ...]) -> None:
        """A piece of few rows of numbers, one after another."""
        count = len(values)
        self.layout[name] = (self._end, shape)
        self._list += values
        if count % ALIGNMENT:
            self._list += [0] * (-count % ALIGNMENT)
            count += -count % ALIGNMENT
        self._end += count

    def add_array(self, name: str, values: np.ndarray) -> None:
        """A piece that is an array of int64 or float64."""
        flat = values.ravel().view(np.int64)
        count = len(flat)
        self.layout[name] = (self._end, values.shape)
        self._arrays += [np.array(self._list, np.int64), flat]
        self._list = [0] * (-count % ALIGNMENT)
        self._end += count + -count % ALIGNMENT

    def numbers(self) -> Tensor:
        """All of them."""
        return torch.from_numpy(np.concatenate((*self._arrays, np.array(self._list, np.int64))))


def unroll(parts: Sequence[Part]) -> tuple[list[int], list[int], tuple[list[int], list[int]]]:
    """The steps of the linear layers, as `hybrid.batch.Unrolled` and `Batch.copies` have them.

    Args:
        parts: all that decode.

    Returns:
        The decoded token that each step computes, for each decoded token its first step, and slots from which keys and
        values are copied with those where they go.
    """
    steps: list[int] = []
    places: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for part in parts:
        row = len(places)
        own = [row, *(row + 1 + at for path in part.paths for at in path)]
        places += [len(steps) + own.index(each) for each in range(row, row + part.num_rows)]
        steps += own
        if part.branches is not None:
            for source, target in part.branches.copies(part.lease.block_table):
                sources.append(source)
                targets.append(target)
    return steps, places, (sources, targets)


def tables_of_drafts(parts: Sequence[Part]) -> Iterator[tuple[int, Sequence[int]]]:
    """(row among the decoded tokens, page ids) of the drafts that form trees."""
    row = 0
    for part in parts:
        if part.branches is not None:
            yield from ((row + 1 + at, part.table(at)) for at in range(part.num_drafts))
        row += part.num_rows


BATCH_INVARIANT_SPLITS = 16
"""Number of pieces into which the keys of a decoded token are split when results must not depend on the batch."""

STEPS = "decodes.steps"
"""The piece of a layout with `Unrolled.rows`, where drafts form trees."""

SAMPLING = "sampling"
"""The piece of a layout, where there is one, that says how tokens are sampled."""

LINKS = "links"
"""The piece of a layout, where there is one, that says which tokens the device fills in: as `fill_in_tokens` has it."""

RUN_STARTS = "decodes.run_starts"
"""The piece of a layout, where there are drafts, with `Group.run_starts`."""

NOT_READ = (SAMPLING, LINKS)
"""The last pieces of a layout, which no captured pass reads. Nor does it read `RUN_STARTS`, which comes before them,
where that is not padded: compiled operations know by `state_read` which token continues from the one before it."""

LINK_FIELDS = 5
"""Numbers of a link."""

IDLE = {"slot_mapping": -1, "checkpoints": -1}
IDLE |= {
    f"{kind}.{name}": value
    for kind in ("prefills", "decodes")
    for name, value in (("seq_lens", 0), ("state_write", -1))
}
"""Pieces of a layout, and what they hold where nothing is written."""


@dataclass(slots=True)
class Plan:
    """A step's numbers on the host.

    Attributes:
        numbers: `[N]` int64, all of them.
        layout: for every tensor of the batch its start and shape.
        splits: `num_splits` of each group that the step has.
        num_prefill_tokens: tokens of prompt parts, and of their padding.
        blocks: as in the batch.
        embeddings: of the rows of images, in pieces.
        parts: of the step.
        sampled: the rows of logits of each part, without padding.
        checkpoint_slots: (part, state slot) of every checkpoint that the pass writes.
        is_padded: it is padded to one of few shapes.
        adapted: the adapters of the step, with `decode_start` of their rows.
        targets: tokens whose log-probabilities are requested, by row of logits; -1: those that are chosen. None: all.
        before: chooses the tokens of the pass before, from which this one continues; None: they are known, or taken.
        pads_runs: `RUN_STARTS` is padded, too.
    """

    numbers: Tensor
    layout: dict[str, tuple[int, tuple[int, ...]]]
    splits: dict[str, int | None]
    num_prefill_tokens: int
    decode_start: int | None
    embeddings: tuple[Tensor, ...]
    parts: tuple[Part, ...]
    sampled: tuple[SampledRows, ...]
    checkpoint_slots: tuple[tuple[int, int], ...]
    is_padded: bool
    adapted: tuple[tuple[Adapter, int | None], ...] = ()
    targets: tuple[int, ...] | None = None
    before: Callable[[], Tensor] | None = None
    pads_runs: bool = False

    @property
    def not_read(self) -> tuple[str, ...]:
        """The last pieces of the layout, which no captured pass reads."""
        return NOT_READ if self.pads_runs else (RUN_STARTS, *NOT_READ)

    @property
    def shape(self) -> Layout:
        """The layout without what no layer reads."""
        not_read = self.not_read
        return tuple([place for place in self.layout.items() if place[0] not in not_read])

    def on(self, device: torch.device, tokens: Tensor | None = None) -> tuple[Batch, SamplingRows | None]:
        """The plan's tensors on a device, in one copy.

        Args:
            tokens: those of the pass before, if this one continues from them.
        """
        numbers = self.numbers.to(device, non_blocking=True, copy=LINKS in self.layout)
        self.fill_in(numbers, tokens)
        return self.batch(numbers), self.sampling(numbers)

    def fill_in(self, numbers: Tensor, tokens: Tensor | None) -> None:
        """Write tokens of the pass before into numbers of this layout, where this one continues from them."""
        if LINKS in self.layout:
            assert tokens is not None
            fill_in_tokens(numbers, tokens, self._view(numbers, LINKS))

    @property
    def sizes(self) -> str:
        """The size of the layout, as text."""
        prompts = f"{self.num_prefill_tokens} tokens of prompts and " if self.num_prefill_tokens else ""
        tables = [self.layout[f"{kind}.block_table"][1] for kind in self.splits]
        return f"{prompts}{self.num_decoded} rows, block tables of {max(width for _, width in tables)} pages"

    @property
    def num_decoded(self) -> int:
        """Number of rows that decode, with drafts and padding."""
        return self.layout["token_ids"][1][0] - self.num_prefill_tokens

    @property
    def num_runs(self) -> int:
        """Requests that decode, with drafts among them, as the linear layers see them."""
        return self.layout[RUN_STARTS][1][0] - 1

    @property
    def has_drafts(self) -> bool:
        """Tell whether the pass computes drafts."""
        return RUN_STARTS in self.layout

    def batch(self, numbers: Tensor) -> Batch:
        """The batch as views of numbers of this layout."""

        is_tree = STEPS in self.layout

        def view(name: str) -> Tensor:
            return self._view(numbers, name)

        def group(kind: str, rows: slice) -> Group | None:
            if kind not in self.splits:
                return None
            return Group(
                rows,
                cu_seqlens=view(f"{kind}.cu_seqlens"),
                seq_lens=view(f"{kind}.seq_lens"),
                block_table=view(f"{kind}.block_table"),
                state_read=view(f"{kind}.state_read"),
                state_write=view(f"{kind}.state_write"),
                num_splits=self.splits[kind],
                run_starts=view(RUN_STARTS) if kind == "decodes" and self.has_drafts else None,
                unrolled=Unrolled(view(STEPS), view(f"{STEPS}.places")) if is_tree and kind == "decodes" else None,
            )

        return Batch(
            token_ids=view("token_ids"),
            positions=view("positions"),
            slot_mapping=view("slot_mapping"),
            checkpoints=view("checkpoints"),
            sample_rows=view("sample_rows"),
            prefills=group("prefills", slice(0, self.num_prefill_tokens)),
            decodes=group("decodes", slice(self.num_prefill_tokens, None)),
            decode_start=self.decode_start,
            rotary_positions=view("rotary_positions") if "rotary_positions" in self.layout else None,
            embedded=Embedded(view("embedded_rows"), self._embeddings(numbers.device)) if self.embeddings else None,
            log=[] if self.has_drafts else None,
            adapted=tuple(
                Adapted(view(f"adapted.{index}"), decode_start, adapter.weights)
                for index, (adapter, decode_start) in enumerate(self.adapted)
            ),
            copies=view("copies") if is_tree else None,
            is_padded=self.is_padded,
        )

    def _embeddings(self, device: torch.device) -> Tensor:
        return torch.cat([on_device(piece, device) for piece in self.embeddings])

    def sampling(self, numbers: Tensor) -> SamplingRows | None:
        """Return how tokens are sampled, as views of numbers of this layout; None: every row takes its most likely
        token."""
        if SAMPLING not in self.layout:
            return None
        return SamplingRows(*self._view(numbers, SAMPLING).view(torch.float64))

    def idle(self) -> Tensor:
        """Numbers of this layout with which a pass writes no page and no state."""
        numbers = self.numbers.clone()
        for name, value in IDLE.items():
            if name in self.layout:
                self._view(numbers, name).fill_(value)
        return numbers

    @property
    def max_numbers(self) -> int:
        """Numbers of a plan of this shape in which every row is a draft or another request, is sampled at random, and
        continues from the pass before."""
        rows = self.layout["token_ids"][1][0]
        last = self.not_read
        start = min((self.layout[name][0] for name in last if name in self.layout), default=self.numbers.numel())
        return start + (1 + len(SamplingRows._fields) + LINK_FIELDS) * rows + 1 + len(last) * ALIGNMENT

    def _view(self, numbers: Tensor, name: str) -> Tensor:
        start, shape = self.layout[name]
        return numbers[start : start + math.prod(shape)].view(shape)


def plan(
    step: Step,
    page_size: int,
    chunk_size: int,
    deterministic: bool,
    padding: Padding | None = None,
    pin: bool = False,
    sources: Mapping[Request, int] | None = None,
    before: Callable[[], Tensor] | None = None,
) -> Plan:
    """Build the plan of a step whose memory has been allocated.

    Args:
        step: its parts; prompt parts come first.
        page_size, chunk_size: tokens of a page, and of a chunk.
        deterministic: results must not depend on the rest of the batch.
        padding: the sizes that the plan is padded to; None: it is not.
        pin: put the numbers into pinned memory, from which a GPU copies by itself.
        sources: the row among the tokens of the pass before, if its results are not known, of each request whose token
            it chooses.
        before: chooses these tokens.

    Raises:
        AuditError: the numbers of tokens, positions, slots and rows do not agree.
    """
    parts = step.parts
    prefills, decodes = [part for part in parts if part.is_prefill], [part for part in parts if not part.is_prefill]
    num_prefills, sources = len(prefills), sources or {}
    shape, positions = padding or NO_PADDING, [part.positions for part in parts]
    rows, buffer = Rows.of(positions, num_prefills, shape), PlanBuffer()
    _add_tokens(buffer, parts, positions, rows, page_size, sources)
    checkpoints = _add_checkpoints(buffer, parts, shape.captures)
    sampled = tuple(map(SampledRows.of, parts))
    sample_rows = rows_of(sampled, [place.stop for place in rows.parts]) + [0] * rows.num_idle
    buffer.add("sample_rows", sample_rows)
    embeddings = _add_media(buffer, parts, rows.parts, positions)
    splits: dict[str, int | None] = {}
    if prefills:
        splits["prefills"] = 1 if deterministic else None
        _add_prefills(buffer, prefills, rows, shape.width)
    if decodes:
        splits["decodes"] = BATCH_INVARIANT_SPLITS if deterministic else None
        _add_decodes(buffer, decodes, positions[num_prefills:], rows.idle_decodes, shape)
    adapted = _add_adapted(buffer, parts, rows.parts, deterministic)
    _add_sampling(buffer, parts, sampled, rows.num_idle)
    _add_links(buffer, parts, rows, sources)
    return Plan(
        buffer.numbers().pin_memory() if pin else buffer.numbers(),
        buffer.layout,
        splits,
        rows.prompts,
        rows.prompts if deterministic else None,
        embeddings,
        parts=tuple(parts),
        sampled=sampled,
        checkpoint_slots=checkpoints,
        is_padded=padding is not None,
        adapted=adapted,
        targets=targets_of(sampled),
        before=before,
        pads_runs=shape.runs > 0,
    )


def _add_tokens(
    buffer: PlanBuffer,
    parts: list[Part],
    positions: list[Sequence[int]],
    rows: Rows,
    page_size: int,
    sources: Mapping[Request, int],
) -> None:
    """The numbers of the step's tokens."""
    token_ids: list[int] = []
    slots: list[int] = []
    for part, own in zip(parts, positions, strict=True):
        known = part.request.ids[part.start : part.end]
        count = part.end - part.start
        if part.num_unknown == 1 and part.request in sources:
            known.append(0)  # the device fills it in
        if not len(known) == count > 0 or (count > 1 and not part.is_prefill):
            raise AuditError(
                f"plan: {part.request.request_id} has {len(known)} tokens for positions [{part.start}, {part.end}) of "
                f"a {'prompt part' if part.is_prefill else 'decode step'}"
            )
        token_ids += known
        token_ids += part.drafts.tokens if part.drafts is not None else ()
        slots += _slots(part, own, page_size)
    first, every = rows.known, [*chain.from_iterable(positions)]
    for name, values, idle in (("token_ids", token_ids, 0), ("positions", every, 0), ("slot_mapping", slots, -1)):
        values[first:first] = [idle] * (rows.prompts - first)  # after the prompts
        buffer.add(name, values + [idle] * (rows.total - len(values)), rows.total)


def _add_checkpoints(buffer: PlanBuffer, parts: list[Part], count: int) -> tuple[tuple[int, int], ...]:
    """The checkpoints to write, `count` with padding. Returns their parts and slots."""
    written = [
        (row, each.num_tokens - part.start, each.slot)
        for row, part in enumerate(parts)
        if part.lease.captured
        for each in part.captured
    ]
    filled = written + [(-1, -1, -1)] * (count - len(written))
    buffer.add_rows("checkpoints", [*chain.from_iterable(filled)], (len(filled), 3))
    return tuple([(row, slot) for row, _, slot in written])


def _add_media(
    buffer: PlanBuffer, parts: list[Part], places: list[range], positions: list[Sequence[int]]
) -> tuple[Tensor, ...]:
    """In a step with images, rotary positions and the rows of images. Returns their embeddings."""
    if not [part for part in parts if part.request.media is not None]:
        return ()
    rotary = np.tile(np.array([*chain.from_iterable(positions)], np.int64), (3, 1))
    rows: list[int] = []
    embeddings: list[Tensor] = []
    for part, place, own in zip(parts, places, positions, strict=True):
        if part.request.media is None:
            continue
        row = place.start
        angles = part.request.media.rotary_positions(part.start, max(own) + 1)
        rotary[:, row : row + len(own)] = angles[:, [position - part.start for position in own]]
        for first, values in part.request.media.embeddings(part.start, part.end):
            rows += range(row + first, row + first + len(values))
            embeddings.append(values)
    buffer.add_array("rotary_positions", rotary)
    buffer.add("embedded_rows", rows)
    return tuple(embeddings)


def _add_sampling(buffer: PlanBuffer, parts: list[Part], sampled: tuple[SampledRows, ...], num_idle: int) -> None:
    """Add how the token of every row of logits is chosen, unless all are the most likely ones."""
    if not [part for part, own in zip(parts, sampled, strict=True) if own.samples and part.request.params.temperature]:
        return
    tokens = tokens_of(parts, sampled)
    rows: list[SampleRow | None] = [
        request.sample_row(path, num_unknown) if request is not None else None for request, path, num_unknown in tokens
    ]
    buffer.add_array(SAMPLING, np.array(sampling_numbers(rows + [None] * num_idle), np.float64))


def _add_links(buffer: PlanBuffer, parts: list[Part], rows: Rows, sources: Mapping[Request, int]) -> None:
    """Add the places where the device fills in the tokens that the pass before samples."""
    unknown = [(part, place) for part, place in zip(parts, rows.parts, strict=True) if part.num_unknown]
    if not unknown:
        return
    first = [buffer.layout[name][0] for name in ("token_ids", "slot_mapping")]
    first += [buffer.layout[name][0] - rows.prompts for name in ("decodes.seq_lens", "decodes.state_write")]
    links: list[int] = []
    for part, place in unknown:
        links += (sources[part.request], *(start + place.start for start in first))
    buffer.add_rows(LINKS, links, (len(links) // LINK_FIELDS, LINK_FIELDS))


def _add_adapted(
    buffer: PlanBuffer, parts: list[Part], places: list[range], deterministic: bool
) -> tuple[tuple[Adapter, int | None], ...]:
    """The rows of each adapter, those of prompts first."""
    by_adapter: dict[Adapter, list[tuple[Part, range]]] = {}
    for part, place in zip(parts, places, strict=True):
        if part.request.adapter is not None:
            by_adapter.setdefault(part.request.adapter, []).append((part, place))
    adapted: list[tuple[Adapter, int | None]] = []
    for index, (adapter, own) in enumerate(by_adapter.items()):
        adapted_rows = [row for _, rows in own for row in rows]
        buffer.add(f"adapted.{index}", adapted_rows)
        num_prompt = sum(len(rows) for part, rows in own if part.is_prefill)
        adapted.append((adapter, num_prompt if deterministic else None))
    return tuple(adapted)


def _add_prefills(buffer: PlanBuffer, parts: list[Part], rows: Rows, width: int) -> None:
    """The numbers of the prompt parts, and of prompts of padding, of which the last has the tokens."""
    idle = rows.idle_prompts
    count, starts = len(parts) + idle, [0, *(place.stop for place in rows.parts[: len(parts)])]
    if idle:
        starts += [rows.known] * (idle - 1) + [rows.prompts]
    buffer.add("prefills.cu_seqlens", starts, count + 1)
    buffer.add("prefills.seq_lens", [part.end for part in parts] + [0] * idle, count)
    buffer.add_array("prefills.block_table", _block_table(parts, idle, width))
    buffer.add("prefills.state_read", [part.lease.read_slot for part in parts] + [EMPTY_STATE] * idle, count)
    buffer.add("prefills.state_write", [part.write_slot for part in parts] + [-1] * idle, count)


def _add_decodes(
    buffer: PlanBuffer, parts: list[Part], positions: list[Sequence[int]], idle: int, padding: Padding
) -> None:
    """The numbers of decoded tokens and their drafts, one row each, and of the padding."""
    lengths = [position + 1 for own in positions for position in own]
    table = _block_table(parts, idle, padding.width)
    if len(lengths) == len(parts):  # no drafts
        read: list[int | None] = [part.lease.read_slot for part in parts]
        write = [part.write_slot for part in parts]
    else:
        read, write = _steps_of_drafts(parts)
        table = table.repeat([*map(len, positions), *[1] * idle], axis=0)
        for row, pages in tables_of_drafts(parts):
            table[row, : len(pages)] = pages
    rows = len(lengths) + idle
    steps = len(read) + idle  # more than rows where paths have drafts in common
    buffer.add("decodes.cu_seqlens", range(rows + 1), rows + 1)
    buffer.add("decodes.seq_lens", lengths + [0] * idle, rows)
    buffer.add("decodes.state_read", read + [EMPTY_STATE] * idle, steps)
    buffer.add("decodes.state_write", write + [-1] * idle, steps)
    buffer.add_array("decodes.block_table", table)
    if [part for part in parts if part.branches is not None]:
        unrolled, places, copies = unroll(parts)
        buffer.add(STEPS, unrolled)
        buffer.add(f"{STEPS}.places", places)
        buffer.add_array("copies", np.array(copies, np.int64))
    if len(lengths) > len(parts):
        buffer.add(RUN_STARTS, run_starts(parts, idle, padding.runs))


def _steps_of_drafts(parts: list[Part]) -> tuple[list[int | None], list[int | None]]:
    """The state slots that each step of the linear layers reads and writes."""
    read: list[int | None] = []
    write: list[int | None] = []
    for part in parts:
        paths, known = part.paths, part.write_slot
        read += [part.lease.read_slot, *[-1] * len(paths[0])]
        write += [known, *[-1] * len(paths[0])]
        for path in paths[1:]:
            read += [known, *[-1] * (len(path) - 1)]
            write += [-1] * len(path)
    return read, write


def _block_table(parts: list[Part], idle: int, width: int) -> np.ndarray:
    """The page ids of each part, one row each, and rows of padding."""
    pages = [part.lease.block_table for part in parts]
    table = np.zeros((len(parts) + idle, max(width, 1, *map(len, pages))), np.int64)
    for row, own in zip(table, pages, strict=False):
        row[: len(own)] = own
    return table


def _slots(part: Part, positions: Sequence[int], page_size: int) -> list[int]:
    """The slots of the K and V at a part's positions; -1 on pages that the tree owns, which hold them already.

    Raises:
        AuditError: the lease has no page for one of them.
    """
    table, private = part.lease.block_table, part.lease.num_shared * page_size
    branches, end = part.branches, max(positions) + 1
    if end > len(table) * page_size:
        raise AuditError(f"plan: {part.request.request_id} has {len(table)} pages for {end} tokens")
    if branches is not None:
        drafts = zip(branches.home, positions[1:], strict=True)
        known = table[part.start // page_size] * page_size + part.start % page_size
        return [known if part.start >= private else -1, *(branches.slot(home, at, table) for home, at in drafts)]
    first = min(max(part.start, private), end)
    own = [table[at // page_size] * page_size + at % page_size for at in range(first, end)]
    return [-1] * (first - part.start) + own
