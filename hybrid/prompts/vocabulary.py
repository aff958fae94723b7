"""The texts of single tokens, as bytes: one token may be a part of a character."""

from __future__ import annotations

import json
from typing import Any

from hybrid.prompts.detokenizer import control_tokens


def _bytes_by_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: itself where it is printable, else the next
    character from 256 on (the table of GPT-2)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


class Vocabulary:
    """The texts of the tokens of one tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        decoder = self._backend.decoder
        self._kinds = _kinds(json.loads(decoder.__getstate__())) if decoder is not None else frozenset[str]()
        self._by_character = _bytes_by_character() if "ByteLevel" in self._kinds else {}
        self._added: dict[int, str] = {
            token: entry.content for token, entry in self._backend.get_added_tokens_decoder().items()
        } | control_tokens(tokenizer)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token's text; none for an id that has no token."""
        if token in self._added:
            return self._added[token].encode()
        name: str | None = self._backend.id_to_token(token)
        if name is None:
            return b""
        if self._by_character and all(character in self._by_character for character in name):
            return bytes(map(self._by_character.__getitem__, name))
        if "ByteFallback" in self._kinds and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        if self._kinds & {"Metaspace", "Replace"}:  # of SentencePiece
            name = name.replace("▁", " ")
        return name.encode()


def _kinds(decoder: Any) -> frozenset[str]:
    """The kinds of the decoders in a description of one."""
    if not isinstance(decoder, dict):
        return frozenset()
    nested = (_kinds(each) for each in decoder.get("decoders") or ())
    return frozenset({decoder.get("type", "")}).union(*nested)
