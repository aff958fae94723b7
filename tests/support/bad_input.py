"""The shared parts of tests of bad input: what a clear error is, and names of the cases."""

import re
import reprlib

from hybrid import HybridError


def assert_clear(error: HybridError, *words: str) -> None:
    """An error for people: one of ours, with the words, of a length that can be read."""
    assert isinstance(error, ValueError)
    text = str(error)
    for word in words:
        assert word in text, text
    assert 15 < len(text) < 1500, text
    assert "Traceback" not in text


class _WithoutAddresses(reprlib.Repr):
    def repr_instance(self, value: object, level: int) -> str:
        return re.sub(" at 0x[0-9a-f]+", "", repr(value))[: self.maxother]


def label(value: object) -> str:
    """A value in the name of a test: the same in every process."""
    return _WithoutAddresses().repr(value)[:60]
