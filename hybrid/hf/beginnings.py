"""The pasts with which sessions and calls of `generate` begin."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.cache import placement
from hybrid.cache.config import CacheConfig
from hybrid.errors import ArgumentError
from hybrid.hf.installed import cache_name
from hybrid.hf.keys import KeySpace, last_image_end
from hybrid.hf.options import Prompts
from hybrid.hf.pass_model import PassModel
from hybrid.hf.past import Boundary, Origin, Past
from hybrid.hf.prefill import Prefill, Prefiller

SHORT_TURN = 128
"""Without determinism, up to this many tokens after a hit are computed by `generate`, in one pass: another one up to
their last boundary would cost as much again. They are committed with the answer."""

MIN_PREFILL = 16
"""Without determinism, fewer tokens are not computed in a pass of their own before `generate` computes the rest: that
would cost more than it saves. They are committed with the answer."""


class Beginnings:
    """Makes the pasts of a `PrefixCache`.

    Args:
        model: computes the passes.
        prefiller: computes prompts from the cache.
        config: of the cache.
    """

    def __init__(self, model: PassModel, prefiller: Prefiller, config: CacheConfig) -> None:
        self._model = model
        self._prefiller = prefiller
        self._config = config

    def past(self, prompts: Prompts, keys: KeySpace, max_new_tokens: int | None = None) -> Past:
        """A past after the prompts: of a single one up to its last boundary or the hit, of several up to their last
        tokens.

        Args:
            max_new_tokens: tokens of the answer, at most; None: not known.
        """
        is_alone = len(prompts.rows) == 1 and not prompts.is_padded
        works = [self._alone(prompts.rows[0], keys, max_new_tokens)] if is_alone else self._batch(prompts, keys)
        done = [self._prefiller.prefill(work) for work in works]
        layers = done[0].layers if is_alone else self._prefiller.stack([one.layers for one in done], prompts.width - 1)
        rows = [row[: one.num_tokens] for row, one in zip(prompts.rows, done, strict=True)]
        origins = [
            Origin(one.explanation, min(one.num_tokens, work.limit)) for work, one in zip(works, done, strict=True)
        ]
        on_grid = is_alone and works[0].key.whole(done[0].num_tokens, self._prefiller.grid) == done[0].num_tokens
        boundaries = [Boundary(done[0].num_tokens)] if on_grid else [None] * len(rows)
        self._model.rope_deltas.set(keys.shifts, self._model.device)
        return Past(self._prefiller, layers, rows, prompts.pads, keys, origins, boundaries)

    def _batch(self, prompts: Prompts, keys: KeySpace) -> list[Prefill]:
        """The prompts of a batch, each computed up to its last token."""
        works = []
        for at, row in enumerate(prompts.rows):
            key, end = keys.key(at, row), len(row) - 1
            limit = end if keys.segments is None else keys.segments.prompt_end(row, key)
            works.append(Prefill(row, end, key, limit, keys.media[at]))
        return works

    def _alone(self, row: Sequence[int], keys: KeySpace, max_new_tokens: int | None) -> Prefill:
        """A single prompt, up to its last boundary; to the end of its last image, since `generate` knows no images."""
        key, media, limit = keys.key(0, row), keys.media[0], len(row) - 1
        if keys.segments is not None:
            limit = keys.segments.prompt_end(row, key)
            return Prefill(row, max(limit, last_image_end(media)), key, limit, media)
        max_rest = self._max_rest(max_new_tokens)
        end = placement.prompt_end(len(row), self._prefiller.grid)
        if max_rest and end < MIN_PREFILL:
            end = 0
        return Prefill(row, max(end, last_image_end(media)), key, limit, media, max_rest)

    def resume(self, past: Past, prompts: Prompts, keys: KeySpace) -> None:
        """Begin again with a past that was given back, for prompts that continue it.

        Raises:
            ArgumentError: they do not, or it is not a past of this cache.
        """
        if not past.belongs_to(self._prefiller) or past.keys.namespace != keys.namespace:
            raise ArgumentError(
                f"generate: {cache_name()}: this past is of another cache or namespace, or the model has changed since; "
                "leave it out"
            )
        past.resume(prompts.rows, prompts.pads, keys)
        self._model.rope_deltas.set(past.keys.shifts, self._model.device)

    def _max_rest(self, max_new_tokens: int | None) -> int:
        """Tokens after a hit that are left to `generate`. Where an answer is too short to reach the next boundary, or
        cannot be committed as it was computed, they would have to be computed again."""
        is_committed = "turn_end" in self._config.placement and not self._config.deterministic
        if not is_committed or self._prefiller.has_windows:
            return 0
        return SHORT_TURN if max_new_tokens is None or max_new_tokens >= self._prefiller.grid else 0
