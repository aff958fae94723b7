"""The input of a forward pass: what every layer needs, built once per step and passed down."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor, nn


class StateSteps(NamedTuple):
    """The places where the linear layers read and write the states of N decoded tokens.

    Attributes:
        starts: `[R + 1]` where the tokens of each request begin.
        read: `[N]` the slot that a token continues from; -1: from the token before it.
        write: `[N]` the slot that holds the state after it; -1: it is not kept.
    """

    starts: Tensor
    read: Tensor
    write: Tensor


class Unrolled(NamedTuple):
    """Drafts that form trees, as the linear layers compute them: each path by itself from the state after the last
    known token on, since no state is kept after a draft. What paths have in common is computed for each of them.

    Attributes:
        rows: `[N]` the decoded token that each step computes; `StateSteps` is about these steps.
        places: `[R]` for each decoded token the first step that computes it.
    """

    rows: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """The R requests of a batch that are of one kind: those that prefill, or those that decode.

    A decoded token with drafts after it is, for attention, one request for each of these tokens: each of them sees
    those up to itself, and is computed as it would be alone.

    Attributes:
        rows: their tokens within the batch.
        cu_seqlens: `[R + 1]` cumulative numbers of new tokens, starting at 0. A prompt of padding may have none.
        seq_lens: `[R]` length of each sequence including its new tokens; 0 for padding, which writes nothing.
        block_table: `[R, max_pages]` page ids.
        state_read, state_write: `[R]` state slots. They are equal only for the request's own slot; -1 in
            `state_write`: no state is written.
        num_splits: maximum number of parts the keys of a request are split into; None: as many as keep the device busy.
        run_starts: as `StateSteps.starts`, where there are drafts; None: every request has one token.
        unrolled: where drafts form trees; then `state_read` and `state_write` are about its steps. None: every token
            continues from the one before it.
    """

    rows: slice
    cu_seqlens: Tensor
    seq_lens: Tensor
    block_table: Tensor
    state_read: Tensor
    state_write: Tensor
    num_splits: int | None
    run_starts: Tensor | None = None
    unrolled: Unrolled | None = None

    @property
    def steps(self) -> StateSteps:
        """The places where the linear layers read and write the states of decoded tokens."""
        starts = self.cu_seqlens if self.run_starts is None else self.run_starts
        return StateSteps(starts, self.state_read, self.state_write)


@dataclass(frozen=True, slots=True)
class Embedded:
    """Rows of a batch whose embeddings are given: positions of images.

    Attributes:
        rows: `[N]` rows of the batch.
        values: `[N, hidden_size]` their embeddings.
    """

    rows: Tensor
    values: Tensor


class LowRank(NamedTuple):
    """The product that an adapter adds to a weight: `b @ a`.

    Attributes:
        a: `[rank, inputs]`.
        b: `[outputs, rank]`.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class Adapted:
    """The rows of a batch that are computed with an adapter.

    Attributes:
        rows: `[N]` rows of the batch.
        decode_start: as of the batch, counted among these rows.
        weights: what is added to the weights of modules.
    """

    rows: Tensor
    decode_start: int | None
    weights: Mapping[nn.Module, LowRank]


class Arriving(Protocol):
    """Pages and states of which some are on their way to the device."""

    def wait_for_layer(self, layer: int) -> None:
        """Have what the device is given from now on wait for what this layer keeps of them. The model
        calls it before each of its layers, in their order."""
        ...

    def wait_for_all(self) -> None:
        """Have it wait for all of them. The model calls it after its last layer."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """A packed batch of T new tokens: prefills first, then requests that decode, one token each and its drafts.

    All integers are int64.

    Attributes:
        token_ids: `[T]`.
        positions: `[T]` position of each token in its sequence.
        slot_mapping: `[T]` slot of each token's K and V, `page * page_size + offset`; -1: its page holds them already.
        checkpoints: `[C, 3]` (request, n, slot): the state after the first n new tokens of a prefill is also written to
            the slot. A row of the request -1 is padding.
        sample_rows: `[S]` rows whose logits are computed.
        prefills, decodes: the requests of each kind; None if there are none.
        decode_start: the number of rows of prompts, where results must not depend on the batch: rows from it on are one
            token each. None: they may depend on it.
        rotary_positions: `[3, T]` rotary positions (time, height, width) if there are images; None: `positions`.
        embedded: the rows of images; None if there are none.
        log: the linear layers append what their states of the decoded tokens are computed from, in the order of the
            layers; None: it is not needed.
        adapted: the rows of each adapter.
        copies: `[2, N]` slots from which keys and values are copied once they are written, and where to, on paths of
            drafts; None: nothing is copied.
        is_padded: its sizes are among few, so that a graph can be captured of it: nothing may depend on its numbers on
            the host.
        arriving: pages and states that the model waits for, layer by layer; None: all are there.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    checkpoints: Tensor
    sample_rows: Tensor
    prefills: Group | None
    decodes: Group | None
    decode_start: int | None
    rotary_positions: Tensor | None = None
    embedded: Embedded | None = None
    log: list[tuple[Tensor, ...]] | None = None
    adapted: tuple[Adapted, ...] = ()
    copies: Tensor | None = None
    is_padded: bool = False
    arriving: Arriving | None = None

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that are not empty, in the order of their rows."""
        return tuple(group for group in (self.prefills, self.decodes) if group is not None)

    @property
    def prompt_slots(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The places where the linear layers read and write the states of prompts: `cu_seqlens`, `state_read` and
        `state_write` of these, and `checkpoints`."""
        prompts = self.prefills
        assert prompts is not None
        return prompts.cu_seqlens, prompts.state_read, prompts.state_write, self.checkpoints

    @property
    def is_batch_invariant(self) -> bool:
        """Tell whether the result of a request must not depend on the rest of the batch."""
        return self.decode_start is not None

    @property
    def needs_own_kernels(self) -> bool:
        """Tell whether kernels of other packages must not compute it: their results depend on the batch, and
        they read its numbers on the host."""
        return self.is_batch_invariant or self.is_padded
