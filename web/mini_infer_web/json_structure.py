"""Limits how many objects, fields and values a JSON body may hold. Texts have no limit of their own.

A server that streams to many decodes a body between two tokens of theirs, in one go: the decoder keeps the GIL, so a
thread would not help. 16 MiB of ASCII take 6 ms, and of escapes or other letters up to 65 ms; a million small objects
would take seconds.
"""

import asyncio
import re
from collections.abc import Iterator, Sequence

from mini_infer_web.api_errors import ApiError

MAX_OBJECTS = 20_000
"""Most objects and lists: some 5,000 messages with calls of tools. Decoding and checking that many takes about 20 ms.
"""
MAX_FIELDS = 100_000
"""Most fields of all objects together."""
MAX_TEXTS = 200_000
"""Most strings, names of fields among them."""
MAX_VALUES = 1_000_000
"""Most values, counted by commas: a million token ids, say."""

_COUNTED_BYTES = 1 << 20
"""Bytes that are counted in one go, in a millisecond."""
_SLICE_BYTES = 1 << 17
"""Bytes in which text and structure are separated in one go, in a millisecond."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_WHOLE_STRINGS = re.compile(rb'(?:[^"]++|"(?:[^"\\]++|\\.)*+")++', re.DOTALL)
_IN_STRING = re.compile(rb"(?:[^\"\\]++|\\.)*+", re.DOTALL)
_QUOTE = b'"'
Limit = tuple[str, bytes, int]
"""The name of the limited thing, the signs that are counted for it, and how many there may be."""
_LIMITS: Sequence[Limit] = (
    ("objects and lists", b"{[", MAX_OBJECTS),
    ("fields", b":", MAX_FIELDS),
    ("texts", _QUOTE, MAX_TEXTS),
    ("values", b",", MAX_VALUES),
)


async def check_structure(body: bytes) -> int:
    """Returns an upper bound of the commas between values. Other tasks run in between.

    Raises ApiError 400 if the body holds more than can be read while others wait.
    """
    if len(body) <= MAX_OBJECTS:
        return body.count(b",")
    whole = (body[start : start + _COUNTED_BYTES] for start in range(0, len(body), _COUNTED_BYTES))
    possible = [kind for kind in _LIMITS if kind[2] < len(body)]
    # Nearly every body is within the limits even where both quotes of a text, and what it holds, are counted.
    if await _above(whole, possible) and (kind := await _above(_outside_of_strings(body), possible)):
        what, _, limit = kind
        message = f"the JSON of the request body holds more than {limit} {what}: send less of it at once"
        raise ApiError(400, message, code="too_many_values")
    return body.count(b",")


async def _above(parts: Iterator[bytes], limits: Sequence[Limit]) -> Limit | None:
    """Returns the limit that is exceeded; None if none is."""
    counts = [0] * len(limits)
    for part in parts:
        for index, (_, characters, _) in enumerate(limits):
            counts[index] += sum(part.count(character) for character in characters)
        if above := next((kind for kind, count in zip(limits, counts, strict=True) if count > kind[2]), None):
            return above
        await asyncio.sleep(0)
    return None


def _outside_of_strings(body: bytes) -> Iterator[bytes]:
    """The body with a quote in place of each string, slice by slice; of what is no JSON, something."""
    position = 0
    while position < len(body):
        whole = _WHOLE_STRINGS.match(body, position, position + _SLICE_BYTES)
        if whole is not None:
            yield _STRING.sub(_QUOTE, whole[0])
            position = whole.end()
            continue
        yield _QUOTE
        position += 1  # behind the quote of a string that is longer than a slice, or has no end
        while position < len(body) and body[position] != _QUOTE[0]:
            found = _IN_STRING.match(body, position, position + _SLICE_BYTES)
            if found is None or found.end() == position:
                return  # a backslash at the very end
            position = found.end()
            yield b""
        position += 1
