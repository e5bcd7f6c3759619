"""Computes a token's own bytes from its piece of the vocabulary: decoding one token alone loses spaces and broken
bytes.
"""

import json
import re
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from mini_infer_engine.text.detokenizer import Decoder

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = {"Metaspace", "ByteFallback", "Fuse", "Replace", "Strip"}


class TokenBytes:
    """The bytes of single tokens: joined, those of an output are the UTF-8 of its text."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._kinds = _decoder_kinds(decoder.decoder) if isinstance(decoder, Tokenizer) else set[str]()

    def of(self, token_id: int) -> bytes:
        """Returns the bytes of one token, which may be part of a character; empty for an id that is no token."""
        piece = self.piece(token_id)
        if piece is not None and self._kinds == {"ByteLevel"}:
            alphabet = byte_level_alphabet()
            if all(character in alphabet for character in piece):
                return bytes(alphabet[character] for character in piece)
            return piece.encode()
        if piece is not None and self._kinds and self._kinds <= _SENTENCEPIECE:
            if "ByteFallback" in self._kinds and (byte := _BYTE.fullmatch(piece)):
                return bytes.fromhex(byte[1])
            return piece.replace(_SPACE, " ").encode()
        return self._decoder.decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")

    def piece(self, token_id: int) -> str | None:
        """Returns the token as the vocabulary writes it, or None if that is not known."""
        return self._decoder.id_to_token(token_id) if isinstance(self._decoder, Tokenizer) else None

    def text(self, token_id: int) -> str:
        """Returns the token's text, in which parts of characters become U+FFFD."""
        return self.of(token_id).decode("utf-8", "replace")


def _decoder_kinds(decoder: Any) -> set[str]:
    """Returns the types of a decoder's parts; empty if a part changes text in a manner that is not supported here."""
    parts = [] if decoder is None else _leaves(json.loads(decoder.__getstate__()))
    spaces = {"pattern": {"String": _SPACE}, "content": " "}
    if any(part["type"] == "Replace" and not spaces.items() <= part.items() for part in parts):
        return set()
    return {part["type"] for part in parts}


def _leaves(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [leaf for child in part["decoders"] for leaf in _leaves(child)]


@cache
def byte_level_alphabet() -> dict[str, int]:
    """Returns GPT-2's letters for bytes: printable bytes stand for themselves, others are letters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
