"""The plan of one step: everything the layers need, built once, passed down."""

from dataclasses import dataclass

from torch import Tensor

from hybrid.kernels.batch_invariant import RowBlocks


@dataclass(frozen=True, slots=True)
class Group:
    """The R requests of a batch that are of one kind: those that bring prompt parts, or those that decode.

    Attributes:
        rows: their tokens within the batch.
        cu_seqlens: `[R + 1]` where each request's new tokens begin, from 0 on.
        seq_lens: `[R]` tokens of each sequence, new ones included; 0: padding, which writes nothing.
        block_table: `[R, max_pages]` page ids.
        state_read, state_write: `[R]` state slots. Equal only for the request's own slot; -1 is written by nobody.
        num_splits: into how many pieces the keys of a request may be cut; None: as many as keep the device busy.
    """

    rows: slice
    cu_seqlens: Tensor
    seq_lens: Tensor
    block_table: Tensor
    state_read: Tensor
    state_write: Tensor
    num_splits: int | None


@dataclass(frozen=True, slots=True)
class Embedded:
    """Rows of a batch that are no tokens: positions of images.

    Attributes:
        rows: `[N]`.
        values: `[N, hidden_size]`, what stands in them.
    """

    rows: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """A packed batch of T new tokens: prompt parts first, then requests that decode, one token each.

    Attributes:
        token_ids: `[T]`.
        positions: `[T]` place of each token in its sequence.
        slot_mapping: `[T]` where each token's K and V go; -1: the page has them already.
        checkpoints: `[C, 3]` (request, new tokens, slot): the state after so many of a prompt part's tokens goes to the
            slot too.
        sample_rows: `[S]` rows whose logits are wanted.
        prefills, decodes: the requests; None: there are none of this kind.
        blocks: how the rows of matrix products are cut; None: not at all, and results may depend on the batch.
        rotary_positions: `[3, T]` rotary positions (time, height, width), where there are images; None: `positions`.
        embedded: the rows of images; None: there are none.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    checkpoints: Tensor
    sample_rows: Tensor
    prefills: Group | None
    decodes: Group | None
    blocks: RowBlocks | None
    rotary_positions: Tensor | None = None
    embedded: Embedded | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that there are, in the order of their rows."""
        return tuple(group for group in (self.prefills, self.decodes) if group is not None)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether what a request gets must not depend on the rest of the batch."""
        return self.blocks is not None
