"""A past that knows its tokens: transformers' own cache, with `fork` and `rewind`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hybrid.cache.explain import Explanation
from hybrid.errors import ArgumentError, RequestError
from hybrid.hf.layers import copy_of


@dataclass(frozen=True)
class Mark:
    """A boundary of a sequence up to which it can be kept as it was computed.

    Attributes:
        num_tokens: where it lies.
        states: the states there, or nothing where the tree has them.
    """

    num_tokens: int
    states: tuple[Tensor, ...] = ()


class Source(Protocol):
    """What a past is computed by: `hybrid.hf_compute.Computer`."""

    @property
    def can_be_cut(self) -> bool:
        """Whether the cache of a prefix is a part of the cache."""
        ...

    @property
    def has_states(self) -> bool:
        """Whether the model has linear-attention layers."""
        ...

    def compute(self, rows: Sequence[Sequence[int]], pads: Sequence[int], namespace: str) -> list[Any]:
        """The layers after these tokens, padded on the left, each row resumed at its nearest checkpoint."""
        ...

    def mark(self, before: Mark | None, layers: Sequence[Any], row: int, num_tokens: int, num_new: int) -> Mark | None:
        """The last boundary of a sequence whose state can be kept as it was computed, after one more pass."""
        ...


class Past(DynamicCache):
    """transformers' cache of one or several sequences, to be given to `model.generate` or to the model.

    It follows its tokens while its session is open. After `model.generate` it holds every token but the last one
    generated, as any cache of transformers does.

    Attributes:
        rows: per sequence the tokens that it holds, without padding; None once it has seen what it cannot name.
        pads: per sequence, how many positions of padding lie before them.
        namespace: the key space that it was found in.
        explanations: per sequence, why the hit was what it was.
        family: itself, and every past forked from it or from those.
    """

    def __init__(
        self,
        source: Source,
        layers: Sequence[Any],
        rows: Sequence[Sequence[int]] | None,
        pads: Sequence[int],
        namespace: str,
        explanations: Sequence[Explanation],
        marks: Sequence[Mark | None],
        family: list[Past] | None = None,
    ) -> None:
        super().__init__()
        self.layers = list(layers)
        self.layer_class_to_replicate = None
        self.rows = None if rows is None else [list(row) for row in rows]
        self.pads = list(pads)
        self.namespace = namespace
        self.explanations = tuple(explanations)
        self.family = [] if family is None else family
        self.family.append(self)
        self._marks = list(marks)
        self._source = source

    def fork(self) -> Past:
        """A second past after the same tokens, which goes on by itself. Keys and values are shared until then."""
        layers = [copy_of(layer) for layer in self.layers]
        more = self.explanations, self._marks, self.family
        return Past(self._source, layers, self.rows, self.pads, self.namespace, *more)

    def __deepcopy__(self, memo: dict[int, Any]) -> Past:
        return self.fork()

    def rewind(self, num_tokens: int) -> None:
        """Take the last tokens of every sequence back.

        Where the cache of a prefix is a part of the cache (attention alone), it is cut. Where it is not (states,
        windows), it is restored from the nearest checkpoint, and the rest is computed.

        Raises:
            ArgumentError: `num_tokens` is negative, or no token of a sequence would be left.
            RequestError: it has seen tokens that it cannot name.
        """
        rows = self.known_rows()
        if rows is None:
            raise RequestError(
                "this past has seen tokens that it cannot name (embeddings, a pass outside of its session, or one "
                "around the model's own call), so it cannot be taken back; start a session from token ids instead"
            )
        shortest = min(map(len, rows))
        if not 0 <= num_tokens < shortest:
            raise ArgumentError(f"rewind: must take back from 0 to {shortest - 1} tokens here, got {num_tokens}")
        if num_tokens == 0:
            return
        kept = [row[:-num_tokens] for row in rows]
        if self._source.can_be_cut:
            super().crop(-num_tokens)
        else:
            self.layers = self._source.compute(kept, self.pads, self.namespace)
        self._take_back(kept)

    def crop(self, tokens_to_remove: int) -> None:
        """As in transformers, and right for states, where theirs is not: see `rewind`."""
        recording = any(self.is_recording_past(at) for at in range(len(self.layers)))
        if self._source.has_states or not (self._source.can_be_cut or recording):
            self.rewind(-tokens_to_remove)
            return
        rows = self.known_rows()
        super().crop(tokens_to_remove)
        if rows is None or tokens_to_remove >= 0:
            self.rows = rows
        else:
            self._take_back([row[:tokens_to_remove] for row in rows])

    def _take_back(self, rows: list[list[int]]) -> None:
        """From now on it holds these tokens. What lies at a mark beyond them is not what will be computed there."""
        self.rows = rows
        self._marks = [
            mark if mark is None or mark.num_tokens <= len(row) else None
            for mark, row in zip(self._marks, rows, strict=True)
        ]

    def activate_past_recording(self) -> None:
        """As in transformers, where a record helps; with states it does not, and `crop` does without."""
        if not self._source.has_states:
            super().activate_past_recording()

    def known_rows(self) -> list[list[int]] | None:
        """Per sequence the tokens that it holds; None when it has seen others."""
        length = self.get_seq_length()
        if self.rows is None or any(len(row) + pad != length for row, pad in zip(self.rows, self.pads, strict=True)):
            return None
        return self.rows

    def refuse_another_place(self, position_ids: Any) -> None:
        """Look at the positions of a pass of several tokens, `[..., batch, tokens]`.

        Raises:
            RequestError: they do not go on where this past ends.
        """
        if not isinstance(position_ids, Tensor) or position_ids.ndim < 2 or position_ids.shape[-1] == 1:
            return
        first, expected = int(position_ids.flatten(0, -2)[0, 0]), self.num_seen(0)
        if first != expected:
            raise RequestError(
                f"this past ends at position {expected}, but the pass begins at {first}: give model.generate all "
                "tokens, also those that the past holds, and no option of assisted decoding, which computes those again"
            )

    def note(self, input_ids: Any) -> None:
        """The model has seen these tokens, `[batch, tokens]`; anything else: tokens that it cannot name."""
        if self.rows is None or not isinstance(input_ids, Tensor) or len(input_ids) != len(self.rows):
            self.rows = None
            return
        for at, ids in enumerate(input_ids.tolist()):
            row = self.rows[at]
            row.extend(ids)
            self._marks[at] = self._source.mark(self._marks[at], self.layers, at, len(row), len(ids))

    def mark_of(self, row: int, token_ids: Sequence[int]) -> Mark | None:
        """The last boundary of a sequence up to which it can be kept as it was computed, if `token_ids` go so far and
        are the same until there."""
        rows, mark = self.known_rows(), self._marks[row]
        if rows is None or mark is None or not mark.num_tokens <= len(token_ids):
            return None
        return mark if rows[row][: mark.num_tokens] == list(token_ids[: mark.num_tokens]) else None

    def num_seen(self, row: int) -> int:
        """Tokens that it holds of a sequence, without padding."""
        return self.get_seq_length() - self.pads[row]

    # What moves sequences around moves their tokens along.

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        order = beam_idx.tolist()
        self.pads = [self.pads[index] for index in order]
        self.explanations = tuple(self.explanations[index] for index in order)
        self._marks = [self._marks[index] for index in order]
        if self.rows is not None:
            self.rows = [list(self.rows[index]) for index in order]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(len(self.pads)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(torch.arange(len(self.pads))[indices.cpu()])
