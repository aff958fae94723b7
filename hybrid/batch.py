"""The plan of one step: everything the layers need, built once, passed down."""

from dataclasses import dataclass

from torch import Tensor

from hybrid.kernels.linear import RowBlocks


@dataclass(frozen=True, slots=True)
class Batch:
    """A packed batch of R requests and T new tokens: prompt parts first, then requests that decode, one token each.

    Attributes:
        token_ids: `[T]`.
        positions: `[T]` place of each token in its sequence.
        cu_seqlens: `[R + 1]` where each request's new tokens begin.
        seq_lens: `[R]` tokens of each sequence, new ones included.
        block_table: `[R, max_pages]` page ids.
        slot_mapping: `[T]` where each token's K and V go; -1: the page has them already.
        state_read, state_write: `[R]` state slots. Equal only for the request's own slot.
        checkpoints: `[C, 3]` (request, new tokens, slot): the state after so many of its new tokens goes to the slot
            too.
        sample_rows: `[S]` rows whose logits are wanted.
        num_prefills: requests `[0, num_prefills)` bring prompt parts.
        num_prefill_tokens: their tokens.
        blocks: how the rows of matrix products are cut; None: not at all.
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    state_read: Tensor
    state_write: Tensor
    checkpoints: Tensor
    sample_rows: Tensor
    num_prefills: int
    num_prefill_tokens: int
    blocks: RowBlocks | None
