"""A past that knows its tokens: transformers' own cache, with `fork` and `rewind`, and the hooks on a model that tell
it what is computed with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from hybrid.cache.explain import Explanation
from hybrid.errors import ArgumentError, NonFiniteError, RequestError
from hybrid.hf.installed import as_argument, cache_in, cache_name, unexpected
from hybrid.hf.keys import KeySpace, last_image_end
from hybrid.hf.layers import fork_layer
from hybrid.hf.pass_model import PassModel


@dataclass(frozen=True)
class CommitPoint:
    """A position of a sequence up to which its pages and states can be committed as they were computed.

    Attributes:
        num_tokens: the position.
        states: copies of the states there; empty where the tree has them, or the layers of the past.
    """

    num_tokens: int
    states: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class PastOrigin:
    """The origin of the first tokens of a sequence.

    Attributes:
        explanation: why its hit was as long as it was.
        num_committed: tokens of its prompt that were committed before the model computed the rest, if there was memory.
    """

    explanation: Explanation
    num_committed: int


@dataclass(frozen=True)
class SavedPast:
    """The contents of a past before a pass.

    Attributes:
        lengths: per sequence the tokens that it held.
        layers: independent of its own; empty where they can be cut.
        boundaries: its last ones.
    """

    lengths: tuple[int, ...]
    layers: tuple[Any, ...]
    boundaries: tuple[CommitPoint | None, ...]


class PastBackend(Protocol):
    """The cache that made a `Past`, as far as it needs it (see `hybrid.hf.prefill.Prefiller`)."""

    @property
    def can_be_cut(self) -> bool:
        """Tell whether the cache of a prefix can be cut out of the cache."""
        ...

    @property
    def has_states(self) -> bool:
        """Tell whether the model has linear-attention layers."""
        ...

    def compute(self, rows: Sequence[Sequence[int]], pads: Sequence[int], keys: KeySpace) -> list[Any]:
        """The layers after these tokens, padded on the left. Each row resumes at its nearest checkpoint."""
        ...

    def next_boundary(
        self,
        before: CommitPoint | None,
        layers: Sequence[Any],
        row: int,
        ids: Sequence[int],
        num_new: int,
        keys: KeySpace,
    ) -> CommitPoint | None:
        """The last boundary of a sequence after one more pass."""
        ...


class Past(DynamicCache):
    """transformers' cache of one or several sequences, to be given to `model.generate` or to the model.

    It follows its tokens while its session is open. After `model.generate` it holds all tokens but the last one
    generated, as every cache of transformers does.

    Args:
        backend: the cache that made it.
        layers: the layers of transformers' cache.
        rows, pads, keys, origins: the attributes of the same names.
        boundaries: per sequence its last boundary, if it has one.
        family: the attribute of the same name, for a fork; None: a session begins with this past.

    Attributes:
        rows: per sequence the tokens that it holds, without padding; None after a pass with unknown tokens.
        pads: per sequence, the number of padding positions before its tokens.
        keys: how its tokens are keyed.
        origins: per sequence, where its first tokens come from.
        family: this past, and all pasts forked from it or from its forks; empty after its session.
    """

    def __init__(
        self,
        backend: PastBackend,
        layers: Sequence[Any],
        rows: Sequence[Sequence[int]] | None,
        pads: Sequence[int],
        keys: KeySpace,
        origins: Sequence[PastOrigin],
        boundaries: Sequence[CommitPoint | None],
        family: list[Past] | None = None,
    ) -> None:
        super().__init__()
        self.layers: list[Any] = list(layers)
        self.layer_class_to_replicate: type | None = None
        self.rows: list[list[int]] | None = None if rows is None else [list(row) for row in rows]
        self.pads: list[int] = list(pads)
        self.keys: KeySpace = keys
        self.origins: tuple[PastOrigin, ...] = tuple(origins)
        self.family: list[Past] = [self] if family is None else family
        self._boundaries = list(boundaries)
        self._backend = backend
        self._is_in_pass = False

    def resume(self, prompts: Sequence[Sequence[int]], pads: Sequence[int], keys: KeySpace) -> None:
        """Begin a session again, with prompts that continue its tokens.

        Raises:
            ArgumentError: the prompts do not, or have images after its tokens.
        """
        rows = self.known_rows()
        are_as_many = rows is not None and len(rows) == len(prompts) and self.pads == list(pads)
        if rows is None or not are_as_many or not all(map(self._is_continued, rows, prompts, count(), repeat(keys))):
            raise ArgumentError(
                f"generate: {cache_name()}: the prompts do not begin with the tokens and images that this past holds, "
                "or have images after them; leave it out, and what is cached of them is found"
            )
        self.family = [self]
        reason = "resumed from the past that was given"
        self.origins = tuple(
            PastOrigin(Explanation(len(prompt), len(row), len(row), reason), len(row))
            for row, prompt in zip(rows, prompts, strict=True)
        )

    def _is_continued(self, row: Sequence[int], prompt: Sequence[int], at: int, keys: KeySpace) -> bool:
        """Tell whether a prompt begins with the tokens and images of a sequence, and has no image after them."""
        is_longer = last_image_end(keys.media[at]) <= len(row) < len(prompt)
        return is_longer and self.keys.key(at, row) == keys.key(at, prompt[: len(row)])

    @property
    def as_argument(self) -> dict[str, Any]:
        """It as the argument of `model.generate` or of the model, `{"cache": past}`, by the name that this version of
        transformers has for it: `model.generate(input_ids, **past.as_argument)`."""
        return as_argument(self)

    @property
    def explanations(self) -> tuple[Explanation, ...]:
        """Per sequence, why its hit was as long as it was."""
        return tuple(origin.explanation for origin in self.origins)

    def belongs_to(self, backend: PastBackend) -> bool:
        """Tell whether it was made by this cache."""
        return self._backend is backend

    def end_session(self) -> None:
        """It is not followed any more. The pasts of its family no longer refer to each other."""
        for member in list(self.family):
            member.family = []

    def fork(self) -> Past:
        """A second past after the same tokens, independent of this one. Keys and values are shared until then."""
        other = Past(
            self._backend,
            [fork_layer(layer) for layer in self.layers],
            self.rows,
            self.pads,
            self.keys,
            self.origins,
            self._boundaries,
            self.family,
        )
        if self.family:
            self.family.append(other)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Past:
        return self.fork()

    def rewind(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` tokens of every sequence.

        With full attention alone the layers are cut. With states or sliding windows they are restored from the nearest
        checkpoint, and the tokens after it are computed again.

        Raises:
            ArgumentError: `num_tokens` is negative, or no token of a sequence would be left.
            RequestError: this past holds tokens that it does not know.
        """
        rows = self._refuse_unknown("rewind")
        shortest = min(map(len, rows))
        if not 0 <= num_tokens < shortest:
            raise ArgumentError(f"rewind: num_tokens must be from 0 to {shortest - 1} here, got {num_tokens}")
        if num_tokens == 0:
            return
        kept = [row[:-num_tokens] for row in rows]
        if self._backend.can_be_cut:
            super().crop(-num_tokens)
        else:
            self.layers = self._backend.compute(kept, self.pads, self.keys)
        self._set_rows(kept)

    def save(self) -> SavedPast:
        """Save what `take_back` needs after the next pass. States are copied, keys and values are not.

        Raises:
            RequestError: this past holds tokens that it does not know.
        """
        rows = self._refuse_unknown("save")
        layers = () if self._backend.can_be_cut else tuple(fork_layer(layer) for layer in self.layers)
        return SavedPast(tuple(map(len, rows)), layers, tuple(self._boundaries))

    def take_back(self, saved: SavedPast, num_tokens: int) -> None:
        """Remove the last `num_tokens` tokens, all of them of the pass after `save`: with full attention alone exactly
        these. Otherwise the past is what it was before that pass, if there are any."""
        if num_tokens == 0:
            return
        rows = self._refuse_unknown("take_back")
        if self._backend.can_be_cut:
            super().crop(-num_tokens)
            kept = [row[:-num_tokens] for row in rows]
        else:
            self.layers = list(saved.layers)
            kept = [row[:length] for row, length in zip(rows, saved.lengths, strict=True)]
        self._boundaries = list(saved.boundaries)
        self._set_rows(kept)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens as transformers does, and also for models with states (see `rewind`), where it is wrong."""
        recording = any(getattr(layer, "record_past", False) for layer in self.layers)
        if self._backend.has_states or not (self._backend.can_be_cut or recording):
            self.rewind(-tokens_to_remove)
            return
        rows = self.known_rows()
        super().crop(tokens_to_remove)
        if rows is None or tokens_to_remove >= 0:
            self.rows = rows
        else:
            self._set_rows([row[:tokens_to_remove] for row in rows])

    def _set_rows(self, rows: list[list[int]]) -> None:
        """It holds these tokens from now on. Boundaries beyond them are dropped: other tokens will come there."""
        self.rows = rows
        self._boundaries = [
            boundary if boundary is None or boundary.num_tokens <= len(row) else None
            for boundary, row in zip(self._boundaries, rows, strict=True)
        ]

    def activate_past_recording(self) -> None:
        """Record as transformers does for models without states; `crop` needs no recording with states."""
        if not self._backend.has_states:
            super().activate_past_recording()

    def known_rows(self) -> list[list[int]] | None:
        """Per sequence the tokens that it holds; None when it holds tokens that it does not know."""
        length = self.get_seq_length()
        if self.rows is None or any(len(row) + pad != length for row, pad in zip(self.rows, self.pads, strict=True)):
            return None
        return self.rows

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Take the keys and values of a layer, as in transformers.

        Raises:
            VersionError: the session is open, and no hook has seen the pass begin.
        """
        if self.family and not self._is_in_pass:
            self._raise_unseen()
        return super().update(*args, **kwargs)

    def refuse_unseen(self) -> None:
        """Check that every pass since the session began was seen.

        Raises:
            VersionError: this past holds tokens of a pass that was not.
        """
        if self.rows is not None and self.known_rows() is None:
            self._raise_unseen()

    def _raise_unseen(self) -> NoReturn:
        self.forget_tokens()
        raise unexpected(
            "a pass was not seen by the hooks on the model, so that neither its tokens nor NaN in it are known; "
            "nothing of it is cached. If this program calls a part of the model instead of the model, call the model"
        )

    def _refuse_unknown(self, what: str) -> list[list[int]]:
        """Per sequence the tokens that it holds.

        Raises:
            RequestError: it does not know them.
            VersionError: its session is open, and a pass was not seen.
        """
        if self.family:
            self.refuse_unseen()
        rows = self.known_rows()
        if rows is None:
            raise RequestError(
                f"{what}: this past holds tokens that it does not know (embeddings, a pass outside of its session, or "
                "one that bypassed the model's own call); start a session from token ids instead"
            )
        return rows

    def begin_pass(self, position_ids: Any) -> None:
        """Expect keys and values, after a check of the positions of a pass of several tokens: `[batch, tokens]`, or
        `[rows, batch, tokens]` of vision models, one row of rotary positions, or first one without the shift of images.

        Raises:
            RequestError: the pass does not begin at the position where this past ends.
        """
        self._is_in_pass = True
        if not isinstance(position_ids, Tensor) or position_ids.ndim < 2 or position_ids.shape[-1] == 1:
            return
        first, expected = int(position_ids.flatten(0, -2)[0, 0]), self.num_seen(0)
        if position_ids.ndim == 3 and len(position_ids) == 1:
            expected += (self.keys.shifts or [0])[0]
        if first != expected:
            raise RequestError(
                f"this past ends at position {expected}, but the pass begins at {first}: give model.generate all "
                "tokens, including those that the past holds, and no option of assisted decoding, which computes those "
                "again"
            )

    def follow(self, input_ids: Any) -> None:
        """End a pass, and append the tokens that it has computed.

        Args:
            input_ids: `[batch, tokens]`; with anything else the tokens of this past are unknown from now on.
        """
        self._is_in_pass = False
        if self.rows is None or not isinstance(input_ids, Tensor) or len(input_ids) != len(self.rows):
            self.forget_tokens()
            return
        num_positions = self.pads[0] + len(self.rows[0])
        if self.get_seq_length() == num_positions:
            return  # a wrapper of the model and the model inside it report the same pass
        for at, ids in enumerate(input_ids.tolist()):
            row = self.rows[at]
            row.extend(ids)
            self._boundaries[at] = self._backend.next_boundary(
                self._boundaries[at], self.layers, at, row, len(ids), self.keys
            )

    def forget_tokens(self) -> None:
        """Its tokens are unknown from now on, so nothing that it holds is cached."""
        self.rows = None

    def boundary_of(self, row: int, token_ids: Sequence[int]) -> CommitPoint | None:
        """The last boundary of a sequence, if `token_ids` begin with the tokens before it; else None."""
        rows, boundary = self.known_rows(), self._boundaries[row]
        if rows is None or boundary is None or boundary.num_tokens > len(token_ids):
            return None
        is_same = rows[row][: boundary.num_tokens] == list(token_ids[: boundary.num_tokens])
        return boundary if is_same else None

    def num_seen(self, row: int) -> int:
        """Number of tokens that it holds of a sequence, without padding."""
        return int(self.get_seq_length()) - self.pads[row]

    # Operations that reorder sequences reorder their tokens as well.

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder as transformers does: sequence `i` becomes the former sequence `beam_idx[i]`."""
        super().reorder_cache(beam_idx)
        order = beam_idx.tolist()
        self.pads = [self.pads[index] for index in order]
        self.keys = self.keys.of_rows(order)
        self.origins = tuple(self.origins[index] for index in order)
        self._boundaries = [self._boundaries[index] for index in order]
        if self.rows is not None:
            self.rows = [list(self.rows[index]) for index in order]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times, as transformers does."""
        self.reorder_cache(torch.arange(len(self.pads)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences with these indices, which may be a mask, as transformers does."""
        self.reorder_cache(torch.arange(len(self.pads))[indices.cpu()])


@contextmanager
def following(model: PassModel, past: Past) -> Iterator[None]:
    """Have `past`, and its forks, learn the tokens that the model computes with them in this context.

    The hooks are on the model and on the model inside it: a wrapper's `generate` calls the latter. A pass that both see
    is followed once.

    Raises:
        NonFiniteError: by a pass with one of these pasts whose logits are not finite.
        RequestError: by a pass that does not begin where its past ends.
        VersionError: one of these pasts is extended by a pass that no hook has seen.
    """

    def member_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Past | None:
        found = cache_in(args, kwargs)
        return found if isinstance(found, Past) and any(found is member for member in past.family) else None

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        member = member_in(args, kwargs)
        if member is not None:
            member.begin_pass(kwargs.get("position_ids"))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        member = member_in(args, kwargs)
        if member is not None:
            logits = output[0] if isinstance(output, tuple) else output.logits
            if not finite_logits(logits[:, -1]):
                member.forget_tokens()
                raise NonFiniteError(
                    "a pass of the model gave logits with NaN or infinity; nothing of it is cached, and this past "
                    "cannot be used any more"
                )
            member.follow(kwargs.get("input_ids", args[0] if args else None))

    with ExitStack() as hooks:
        for module in {model.outer, model.inner}:
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after, with_kwargs=True))
        yield
        for member in past.family:
            member.refuse_unseen()


def finite_logits(logits: Tensor) -> bool:
    """Tell whether logits, `[..., vocabulary]`, have no NaN and no infinity but minus infinity, of masked tokens."""
    return bool(logits.amax(-1).isfinite().all())
