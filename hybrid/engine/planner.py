"""From a step to its plan: the only place where the tensors of a step are created.

All numbers of a step are in one tensor, so that they reach a GPU in one copy; the plan's tensors are views of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from hybrid.batch import Adapted, Batch, Embedded, Group, Unrolled
from hybrid.engine.branches import TreePart, unroll, write_tables
from hybrid.engine.padding import NO_PADDING, Padding
from hybrid.engine.request import Request
from hybrid.engine.sampler import SampleRow, SamplingRows, sampling_numbers
from hybrid.engine.step import (
    LAST_TOKEN,
    NOT_SAMPLED,
    Part,
    SampledRows,
    Step,
    most_logprobs,
    rows_of,
    targets_of,
    tokens_of,
)
from hybrid.errors import AuditError
from hybrid.kernels.ops import fill_in_tokens
from hybrid.memory.device import on_device
from hybrid.memory.pool import EMPTY_STATE
from hybrid.models.adapters import Adapter
from hybrid.speculation.drafts import Drafts

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

    def add(self, name: str, values: Sequence[int | None], shape: tuple[int, ...] | None = None) -> None:
        """Add a piece of few numbers; rows of them one after another, where it has a shape."""
        count = len(values)
        self.layout[name] = (self._end, shape if shape is not None else (count,))
        self._list += values
        if count % ALIGNMENT:
            self._list += [0] * (-count % ALIGNMENT)
            count += -count % ALIGNMENT
        self._end += count

    def add_array(self, name: str, values: np.ndarray) -> None:
        """Add a piece that is an array of int64 or float64."""
        flat = values.ravel().view(np.int64)
        count = len(flat)
        self.layout[name] = (self._end, values.shape)
        self._arrays += [np.array(self._list, np.int64), flat]
        self._list = [0] * (-count % ALIGNMENT)
        self._end += count + -count % ALIGNMENT

    def numbers(self) -> Tensor:
        """Return all of them."""
        return torch.from_numpy(np.concatenate((*self._arrays, np.array(self._list, np.int64))))


@dataclass
class Rows:
    """The rows of a step, part by part, and those of padding: after the prompts, and at the end.

    Attributes:
        token_ids, positions, slots: of each row.
        ends: where the rows of each part end.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, part: Part, page_size: int, sources: Mapping[Request, int]) -> None:
        """Add the rows of a part.

        Raises:
            AuditError: its tokens are not those that it computes, or the lease has no page for one of them.
        """
        start, end, table = part.start, part.end, part.lease.block_table
        known = part.request.ids[start:end]
        if part.num_unknown == 1 and part.request in sources:
            known.append(0)  # the device fills it in
        if not len(known) == end - start > 0 or (end - start > 1 and not part.is_prefill):
            raise AuditError(
                f"plan: {part.request.request_id} has {len(known)} tokens for positions [{start}, {end}) of "
                f"a {'prompt part' if part.is_prefill else 'decode step'}"
            )
        self.token_ids += known
        self.positions += range(start, end)
        if end > len(table) * page_size:
            raise AuditError(f"plan: {part.request.request_id} has {len(table)} pages for {end} tokens")
        first = min(max(start, part.lease.num_shared * page_size), end)
        self.slots += [-1] * (first - start)  # on pages that the tree owns, which hold them already
        self.slots += [table[at // page_size] * page_size + at % page_size for at in range(first, end)]
        if part.drafts is not None:
            self._add_drafts(part, part.drafts, page_size)
        self.ends.append(len(self.token_ids))

    def _add_drafts(self, part: Part, drafts: Drafts, page_size: int) -> None:
        positions, table = part.draft_positions, part.lease.block_table
        last = max(positions) + 1
        if last > len(table) * page_size:
            raise AuditError(f"plan: {part.request.request_id} has {len(table)} pages for {last} tokens")
        self.token_ids += drafts.tokens
        self.positions += positions
        self.slots += part.draft_slots(page_size)

    def pad(self, count: int) -> None:
        """Add rows of padding up to this number of rows."""
        missing = count - len(self.token_ids)
        if missing > 0:
            self.token_ids += [0] * missing
            self.positions += [0] * missing
            self.slots += [-1] * missing


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
        layout: for every tensor of the batch its start and shape. What no layer reads comes last.
        num_read: number of pieces that layers read.
        splits: `num_splits` of each group that the step has.
        num_prefill_tokens: tokens of prompt parts, and of their padding.
        decode_start: as in the batch.
        parts: of the step.
        sampled: the rows of logits of each part.
        num_sampled: number of rows of logits without padding.
        checkpoint_slots: (part, state slot) of every checkpoint that the pass writes.
        is_padded: it is padded to one of few shapes.
        is_plain: that of the step.
        embeddings: of the rows of images, in pieces.
        adapted: the adapters of the step, with `decode_start` of their rows.
        targets: tokens whose log-probabilities are requested, by row of logits; -1: those that are chosen. None: all.
        num_logprobs: number of log-probabilities that a row has, at most; None: none are requested.
        before: chooses the tokens of the pass before, from which this one continues; None: they are known, or taken.
    """

    numbers: Tensor
    layout: dict[str, tuple[int, tuple[int, ...]]]
    num_read: int
    splits: dict[str, int | None]
    num_prefill_tokens: int
    decode_start: int | None
    parts: tuple[Part, ...]
    sampled: tuple[SampledRows, ...]
    num_sampled: int
    checkpoint_slots: tuple[tuple[int, int], ...]
    is_padded: bool
    is_plain: bool
    embeddings: tuple[Tensor, ...] = ()
    adapted: tuple[tuple[Adapter, int | None], ...] = ()
    targets: tuple[int, ...] | None = None
    num_logprobs: int | None = None
    before: Callable[[], Tensor] | None = None

    @property
    def shape(self) -> Layout:
        """The layout of what layers read. A captured pass is one for all plans of its shape."""
        return tuple(islice(self.layout.items(), self.num_read))

    def on(self, device: torch.device, tokens: Tensor | None = None) -> tuple[Batch, SamplingRows | None]:
        """Return the plan's tensors on a device, in one copy.

        Args:
            tokens: those of the pass before, if this one continues from them.
        """
        numbers = self.numbers.to(device, non_blocking=True, copy=self.has_links)
        if self.has_links:
            self.fill_in(numbers, tokens)
        return self.batch(numbers), self.sampling(numbers)

    @property
    def has_links(self) -> bool:
        """Tell whether the pass continues from tokens of the one before."""
        return LINKS in self.layout

    def fill_in(self, numbers: Tensor, tokens: Tensor | None) -> None:
        """Write tokens of the pass before into numbers of this layout, which has links."""
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
        """Return the batch as views of numbers of this layout."""

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
        """Return numbers of this layout with which a pass writes no page and no state."""
        numbers = self.numbers.clone()
        for name, value in IDLE.items():
            if name in self.layout:
                self._view(numbers, name).fill_(value)
        return numbers

    @property
    def max_numbers(self) -> int:
        """Numbers of a plan of this shape in which every row is a draft or another request, is sampled at random, and
        continues from the pass before."""
        rows, more = self.layout["token_ids"][1][0], [*self.layout.values()][self.num_read :]
        start = more[0][0] if more else self.numbers.numel()
        return start + (1 + len(SamplingRows._fields) + LINK_FIELDS) * rows + 1 + 3 * ALIGNMENT

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
    sources: Mapping[Request, int] = MappingProxyType({}),
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
    parts, num_prompts, is_plain, shape = step.parts, step.num_prompts, step.is_plain, padding or NO_PADDING
    prompts, decodes = parts[:num_prompts], parts[num_prompts:]
    rows, buffer, splits = Rows(), PlanBuffer(), dict[str, int | None]()
    for part in prompts:
        rows.add(part, page_size, sources)
    num_known = len(rows.token_ids)
    if prompts:
        rows.pad(shape.tokens)
    num_prompt_rows = len(rows.token_ids)
    for part in decodes:
        rows.add(part, page_size, sources)
    num_rows, idle_prompts = len(rows.token_ids), max(0, shape.prompts - num_prompts)
    idle_decodes = max(0, shape.rows - len(decodes))
    if idle_decodes:
        rows.pad(num_rows + idle_decodes)
    buffer.add("token_ids", rows.token_ids)
    buffer.add("positions", rows.positions)
    buffer.add("slot_mapping", rows.slots)
    checkpoints = _checkpoints(prompts) if prompts else []
    written = [number for checkpoint in checkpoints for number in checkpoint]
    written += [-1] * (3 * shape.captures - len(written))
    buffer.add("checkpoints", written, (len(written) // 3, 3))
    if is_plain:
        sampled = tuple([LAST_TOKEN if part.samples else NOT_SAMPLED for part in parts])
        sample_rows = [end - 1 for end in rows.ends]
    else:
        sampled = tuple(map(SampledRows.of, parts))
        sample_rows = rows_of(sampled, rows.ends)
    num_sampled, num_idle = len(sample_rows), idle_prompts + idle_decodes
    buffer.add("sample_rows", sample_rows + [0] * num_idle)
    if prompts:
        splits["prefills"] = 1 if deterministic else None
        starts = [0, *rows.ends[:num_prompts]]
        if idle_prompts:  # the last one has the tokens
            starts += [num_known] * (idle_prompts - 1) + [num_prompt_rows]
        _add_prompts(buffer, prompts, starts, idle_prompts, shape.width)
    has_drafts = num_rows - num_prompt_rows > len(decodes)
    if decodes:
        splits["decodes"] = BATCH_INVARIANT_SPLITS if deterministic else None
        positions = rows.positions[num_prompt_rows:num_rows]
        if has_drafts:
            _add_drafted(buffer, decodes, positions, idle_decodes, shape.width)
        else:
            _add_decodes(buffer, decodes, idle_decodes, shape.width)
    if has_drafts and shape.runs:
        buffer.add(RUN_STARTS, run_starts(decodes, idle_decodes, shape.runs))
    embeddings: tuple[Tensor, ...] = ()
    adapted: tuple[tuple[Adapter, int | None], ...] = ()
    if not is_plain:
        embeddings = _add_media(buffer, parts, rows)
        adapted = _add_adapted(buffer, parts, rows.ends, deterministic)
    num_read = len(buffer.layout)
    if has_drafts and not shape.runs:  # where it is not padded, captured passes know it by `state_read`
        buffer.add(RUN_STARTS, run_starts(decodes, idle_decodes, 0))
    if not is_plain:
        _add_sampling(buffer, parts, sampled, num_idle)
    if sources:
        _add_links(buffer, parts, rows.ends, num_prompt_rows, sources)
    return Plan(
        numbers=buffer.numbers().pin_memory() if pin else buffer.numbers(),
        layout=buffer.layout,
        num_read=num_read,
        splits=splits,
        num_prefill_tokens=num_prompt_rows,
        decode_start=num_prompt_rows if deterministic else None,
        parts=tuple(parts),
        sampled=sampled,
        num_sampled=num_sampled,
        checkpoint_slots=tuple([(row, slot) for row, _, slot in checkpoints]),
        is_padded=padding is not None,
        is_plain=is_plain,
        embeddings=embeddings,
        adapted=adapted,
        targets=targets_of(sampled) if not is_plain else None,
        num_logprobs=most_logprobs(sampled) if not is_plain else None,
        before=before,
    )


def _checkpoints(prompts: Sequence[Part]) -> list[tuple[int, int, int]]:
    """Return the checkpoints that prompt parts write, as the batch has them."""
    return [
        (row, each.num_tokens - part.start, each.slot)
        for row, part in enumerate(prompts)
        if part.lease.captured
        for each in part.captured
    ]


def _add_media(buffer: PlanBuffer, parts: Sequence[Part], rows: Rows) -> tuple[Tensor, ...]:
    """Add, in a step with images, rotary positions and the rows of images. Returns their embeddings."""
    if not [part for part in parts if part.request.media is not None]:
        return ()
    rotary = np.tile(np.array(rows.positions, np.int64), (3, 1))
    embedded: list[int] = []
    embeddings: list[Tensor] = []
    for part, end in zip(parts, rows.ends, strict=True):
        if part.request.media is None:
            continue
        row = end - part.num_rows
        own = rows.positions[row:end]
        angles = part.request.media.rotary_positions(part.start, max(own) + 1)
        rotary[:, row:end] = angles[:, [position - part.start for position in own]]
        for first, values in part.request.media.embeddings(part.start, part.end):
            embedded += range(row + first, row + first + len(values))
            embeddings.append(values)
    buffer.add_array("rotary_positions", rotary)
    buffer.add("embedded_rows", embedded)
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


def _add_links(
    buffer: PlanBuffer, parts: Sequence[Part], ends: Sequence[int], num_prompt_rows: int, sources: Mapping[Request, int]
) -> None:
    """Add the places where the device fills in the tokens that the pass before samples."""
    unknown = [(sources[part.request], end - 1) for part, end in zip(parts, ends, strict=True) if part.num_unknown]
    if not unknown:
        return
    first = [buffer.layout[name][0] for name in ("token_ids", "slot_mapping")]
    first += [buffer.layout[name][0] - num_prompt_rows for name in ("decodes.seq_lens", "decodes.state_write")]
    links: list[int] = []
    for source, row in unknown:
        links += (source, *(start + row for start in first))
    buffer.add(LINKS, links, (len(unknown), LINK_FIELDS))


def _add_adapted(
    buffer: PlanBuffer, parts: Sequence[Part], ends: Sequence[int], deterministic: bool
) -> tuple[tuple[Adapter, int | None], ...]:
    """Add the rows of each adapter, those of prompts first."""
    by_adapter: dict[Adapter, list[tuple[Part, range]]] = {}
    for part, end in zip(parts, ends, strict=True):
        if part.request.adapter is not None:
            by_adapter.setdefault(part.request.adapter, []).append((part, range(end - part.num_rows, end)))
    adapted: list[tuple[Adapter, int | None]] = []
    for index, (adapter, own) in enumerate(by_adapter.items()):
        adapted_rows = [row for _, rows in own for row in rows]
        buffer.add(f"adapted.{index}", adapted_rows)
        num_prompt = sum(len(rows) for part, rows in own if part.is_prefill)
        adapted.append((adapter, num_prompt if deterministic else None))
    return tuple(adapted)


def _add_prompts(buffer: PlanBuffer, parts: Sequence[Part], starts: list[int], idle: int, width: int) -> None:
    """Add the numbers of prompt parts, which start at these rows, and of prompts of padding."""
    buffer.add("prefills.cu_seqlens", starts)
    buffer.add("prefills.seq_lens", [part.end for part in parts] + [0] * idle)
    buffer.add_array("prefills.block_table", _block_table(parts, idle, width))
    buffer.add("prefills.state_read", [part.lease.read_slot for part in parts] + [EMPTY_STATE] * idle)
    buffer.add("prefills.state_write", [part.write_slot for part in parts] + [-1] * idle)


def _add_decodes(buffer: PlanBuffer, parts: Sequence[Part], idle: int, width: int) -> None:
    """Add the numbers of decoded tokens, one row each, and of the padding."""
    lengths: list[int] = []
    read: list[int | None] = []
    write: list[int | None] = []
    for part in parts:
        lengths.append(part.end)
        read.append(part.lease.read_slot)
        write.append(part.write_slot)
    buffer.add("decodes.cu_seqlens", range(len(parts) + idle + 1))
    buffer.add("decodes.seq_lens", lengths + [0] * idle)
    buffer.add("decodes.state_read", read + [EMPTY_STATE] * idle)
    buffer.add("decodes.state_write", write + [-1] * idle)
    buffer.add_array("decodes.block_table", _block_table(parts, idle, width))


def _add_drafted(buffer: PlanBuffer, parts: Sequence[Part], positions: Sequence[int], idle: int, width: int) -> None:
    """Add the numbers of decoded tokens and their drafts, one row each, and of the padding.

    Args:
        positions: of each row, without padding.
    """
    read: list[int | None] = []
    write: list[int | None] = []
    for part in parts:
        known = part.write_slot
        for number, path in enumerate(part.paths):
            read += [known, *[-1] * (len(path) - 1)] if number else [part.lease.read_slot, *[-1] * len(path)]
            write += [-1] * len(path) if number else [known, *[-1] * len(path)]
    table = _block_table(parts, idle, width).repeat([*(part.num_rows for part in parts), *[1] * idle], axis=0)
    if [part for part in parts if isinstance(part, TreePart)]:
        write_tables(parts, table)
        steps = unroll(parts)
        buffer.add(STEPS, steps.rows)
        buffer.add(f"{STEPS}.places", steps.places)
        buffer.add_array("copies", steps.copies)
    buffer.add("decodes.cu_seqlens", range(len(positions) + idle + 1))
    buffer.add("decodes.seq_lens", [position + 1 for position in positions] + [0] * idle)
    buffer.add("decodes.state_read", read + [EMPTY_STATE] * idle)
    buffer.add("decodes.state_write", write + [-1] * idle)
    buffer.add_array("decodes.block_table", table)


def run_starts(decodes: Sequence[Part], idle: int, runs: int) -> list[int]:
    """Return where the steps of each request that decodes start, and the end.

    Args:
        idle: rows of padding, which are spread over the runs that are left.
        runs: as in `Padding`.
    """
    starts = [0, *accumulate([1 + sum(map(len, part.paths)) for part in decodes])]
    end, spare = starts[-1], max(0, runs + 1 - len(starts))
    return starts + [end + idle * (index + 1) // spare for index in range(spare)]


def _block_table(parts: Sequence[Part], idle: int, width: int) -> np.ndarray:
    """Return the page ids of each part, one row each, and rows of padding."""
    pages = [part.lease.block_table for part in parts]
    table = np.zeros((len(parts) + idle, max(width, 1, *map(len, pages))), np.int64)
    for row, own in zip(table, pages, strict=False):
        row[: len(own)] = own
    return table
