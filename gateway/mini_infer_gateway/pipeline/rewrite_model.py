"""Replaces the `model` of a JSON body and leaves every other byte as the client wrote it."""

import json
from typing import Any

from mini_infer_gateway.pipeline.clients import with_fields

_decoder = json.JSONDecoder(strict=False)
_scan_string: Any = json.decoder.scanstring  # type: ignore[attr-defined]  # typeshed leaves it out
_WHITESPACE = " \t\n\r"


def with_model(body: bytes, model: str) -> bytes:
    """Returns `body`, a well-formed JSON object, with each top-level `model` set to `model`."""
    try:
        return _replaced(body.decode(), model)
    except (RecursionError, ValueError):
        # It nests deeper, or has a longer number, than Python's decoder reads: the last `model` counts.
        return with_fields(body, {"model": model})


def _replaced(text: str, model: str) -> bytes:
    pieces, copied = [], 0
    position = _skip(text, text.index("{") + 1)
    while text[position] != "}":
        key, position = _scan_string(text, position + 1, False)
        start = _skip(text, _skip(text, position) + 1)
        _, position = _decoder.raw_decode(text, start)
        if key == "model":
            pieces += [text[copied:start], json.dumps(model)]
            copied = position
        position = _skip(text, position)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return "".join([*pieces, text[copied:]]).encode()


def _skip(text: str, position: int) -> int:
    while text[position] in _WHITESPACE:
        position += 1
    return position
