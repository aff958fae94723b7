"""From a step to its plan: the one place where a step's tensors are born."""

import torch

from hybrid.batch import Batch
from hybrid.kernels.linear import RowBlocks
from hybrid.scheduler import Part, Step


def plan(step: Step, page_size: int, chunk_size: int, device: torch.device, deterministic: bool) -> Batch:
    """Build the plan of a step whose memory has been taken."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    checkpoints: list[tuple[int, int, int]] = []
    sample_rows: list[int] = []
    sampled = {id(part) for part in step.sampled()}
    for row, part in enumerate(step.parts):
        token_ids += part.request.ids[part.start : part.end]
        positions += range(part.start, part.end)
        slots += _slots(part, page_size)
        starts.append(len(token_ids))
        checkpoints += [
            (row, c.num_tokens - part.start, c.slot)
            for c in part.lease.captured
            if part.start < c.num_tokens <= part.end
        ]
        if id(part) in sampled:
            sample_rows.append(len(token_ids) - 1)
    num_prefills = sum(part.is_prefill for part in step.parts)
    longest = max(len(part.lease.block_table) for part in step.parts)
    tables = [part.lease.block_table.tolist() + [0] * (longest - len(part.lease.block_table)) for part in step.parts]
    blocks = None
    if deterministic:
        segments = [(starts[row], starts[row + 1]) for row in range(num_prefills)]
        blocks = RowBlocks(segments, starts[num_prefills], starts[-1], chunk_size)

    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Batch(
        token_ids=tensor(token_ids),
        positions=tensor(positions),
        cu_seqlens=tensor(starts),
        seq_lens=tensor([part.end for part in step.parts]),
        block_table=tensor(tables),
        slot_mapping=tensor(slots),
        state_read=tensor([part.lease.read_slot for part in step.parts]),
        state_write=tensor([part.lease.back if part.swaps else part.lease.front for part in step.parts]),
        checkpoints=tensor(checkpoints).view(-1, 3),
        sample_rows=tensor(sample_rows),
        num_prefills=num_prefills,
        num_prefill_tokens=starts[num_prefills],
        blocks=blocks,
    )


def _slots(part: Part, page_size: int) -> list[int]:
    """Where the part's K and V go: nowhere on pages that the tree owns, which have them already."""
    table, private = part.lease.block_table, part.lease.num_shared * page_size
    first = min(max(part.start, private), part.end)
    return [-1] * (first - part.start) + [
        table[at // page_size] * page_size + at % page_size for at in range(first, part.end)
    ]
