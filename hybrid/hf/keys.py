"""Keys of the tree for the tokens of transformers' sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.hf.segments import Segments
from hybrid.key import Key
from hybrid.prompts.images import Media


def last_image_end(media: Media | None) -> int:
    """Tokens of a prompt up to the end of its last image."""
    return 0 if media is None else media.images[-1].end


@dataclass(frozen=True)
class KeySpace:
    """How the tokens of several sequences are keyed.

    Attributes:
        namespace: of the tree.
        media: per sequence its images; None: it has none.
        segments: how sequences are cut in deterministic mode; None: otherwise.
    """

    namespace: str
    media: tuple[Media | None, ...]
    segments: Segments | None

    def key(self, row: int, ids: Sequence[int]) -> Key:
        """The key of the first tokens of a sequence."""
        media = self.media[row]
        if self.segments is not None:
            return self.segments.key(ids, self.namespace, media)
        return Key.of(ids, self.namespace) if media is None else media.key(ids, self.namespace)

    def of_rows(self, order: Sequence[int]) -> KeySpace:
        """That of these sequences."""
        return KeySpace(self.namespace, tuple(self.media[index] for index in order), self.segments)

    @property
    def shifts(self) -> list[int] | None:
        """Per sequence the rotary position minus the position, after its prompt; None: no sequence has images."""
        if not any(self.media):
            return None
        return [0 if own is None else own.shift for own in self.media]
