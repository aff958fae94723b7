"""Keys of the tree for the tokens of transformers' sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.key import Key
from hybrid.prompts.images import Media


def key_of(ids: Sequence[int], namespace: str, media: Media | None) -> Key:
    """The key of tokens, with the images among them; None: there are none."""
    return Key.of(ids, namespace) if media is None else media.key(ids, namespace)


def last_image_end(media: Media | None) -> int:
    """Tokens of a prompt up to the end of its last image."""
    return 0 if media is None else media.images[-1].end


@dataclass(frozen=True)
class KeySpace:
    """How the tokens of several sequences are keyed.

    Attributes:
        namespace: of the tree.
        media: per sequence its images; None: it has none.
    """

    namespace: str
    media: tuple[Media | None, ...]

    def key(self, row: int, ids: Sequence[int]) -> Key:
        """The key of the first tokens of a sequence."""
        return key_of(ids, self.namespace, self.media[row])

    def of_rows(self, order: Sequence[int]) -> KeySpace:
        """That of these sequences."""
        return KeySpace(self.namespace, tuple(self.media[index] for index in order))

    @property
    def shifts(self) -> list[int] | None:
        """Per sequence the rotary position minus the position, after its prompt; None: no sequence has images."""
        if not any(self.media):
            return None
        return [0 if own is None else own.shift for own in self.media]
