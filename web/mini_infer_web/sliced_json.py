"""Decodes a large JSON body in slices, so that other tasks of the event loop never wait for all of it.

A body is large because of few long strings or lists of token ids. They are taken out, decoded in parts of a fraction of
a millisecond, and put back where they were. Bodies that are large for another reason, or no JSON, are decoded in one go
as small ones are.
"""

import asyncio
import re
import secrets
from collections.abc import Callable, Generator, Mapping
from itertools import pairwise
from typing import Any

import msgspec

from mini_infer_web.api_errors import read_json_object

LARGE_BYTES = 1 << 20
"""Smaller bodies are decoded in a millisecond or two."""
CROWDED_BYTES = 1 << 16
"""Size from which on a body's structure alone may take milliseconds, so that other tasks run before it is looked at."""
SLICE_BYTES = 1 << 17
"""Bytes of a string that are decoded in one go; shorter strings stay where they are."""
NUMBERS_BYTES = 1 << 17
"""Size of a list of whole numbers above which it is decoded in slices: some 20,000 token ids."""
_MAX_STRINGS = 5_000
"""Most short strings: more would be slower to skip than to decode."""
AtOnce = Callable[[bytes], dict[str, Any]]
"""Returns the JSON object in a body, or raises an error."""
_HEX = rb"[0-9a-fA-F]"
_SURROGATES = rb"\\u[dD][89abAB]%b{2}\\u%b{4}" % (_HEX, _HEX)
# Whole characters and escapes of a string; a pair of surrogates is one. Possessive: nothing is ever tried twice.
_INSIDE = re.compile(
    rb'(?:[^"\\]++|\\[^u]|%b|\\u(?![dD][89abAB])%b{4})*+' % (_SURROGATES, _HEX),
    re.DOTALL,
)


_NUMBERS = re.compile(rb"\[[0-9,\s]{%d,}+\]" % NUMBERS_BYTES)


async def read_large_json_object(body: bytes, at_once: AtOnce = read_json_object) -> dict[str, Any]:
    """Returns what `at_once` returns for a body, or raises its error; other tasks run between the slices of a large
    one.

    A body that `check_structure` allows is decoded in 50 ms, whatever it is.
    """
    if len(body) < LARGE_BYTES or (body.isascii() and b"\\" not in body):
        if len(body) <= NUMBERS_BYTES or not _NUMBERS.search(body):
            small = at_once(body)  # fifteen megabytes without an escape take 4 ms
            if len(body) > CROWDED_BYTES:
                await asyncio.sleep(0)
            return small
        job = decode_numbers_in_slices(body, at_once)
    else:
        job = decode_in_slices(body, at_once)
    while True:
        try:
            next(job)
        except StopIteration as stop:
            decoded: dict[str, Any] = stop.value
            await asyncio.sleep(0)
            return decoded
        await asyncio.sleep(0)


def decode_in_slices(body: bytes, at_once: AtOnce = read_json_object) -> Generator[None, None, dict[str, Any]]:
    """Returns what `at_once` returns for a body, or raises its errors; yields between slices."""
    mark = f"\0{secrets.token_hex(8)}:"
    parts: list[bytes] = []
    long_strings: dict[str, str] = {}
    position = structure_bytes = 0
    for _ in range(_MAX_STRINGS):
        quote = body.find(b'"', position)
        ends = None if quote < 0 else (yield from _slice_ends(body, quote + 1))
        if quote < 0 or ends is None:
            parts.append(body[position:])
            break
        stop = ends[-1]
        parts.append(body[position:quote])
        if len(ends) == 1:
            parts.append(body[quote : stop + 1])
        else:
            name = f"{mark}{len(long_strings)}"
            text = yield from _decoded(body, [quote + 1, *ends])
            if text is None:
                return at_once(body)
            long_strings[name] = text
            parts.append(msgspec.json.encode(name))
        structure_bytes += len(parts[-2]) + len(parts[-1])
        position = stop + 1
    else:
        return at_once(body)
    if not long_strings or structure_bytes + len(parts[-1]) > LARGE_BYTES:
        return at_once(body)
    try:
        decoded = msgspec.json.decode(b"".join(parts))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        return at_once(body)  # whose error has the place in the body
    restored: dict[str, Any] = _restored(decoded, long_strings)
    return restored


def decode_numbers_in_slices(body: bytes, at_once: AtOnce = read_json_object) -> Generator[None, None, dict[str, Any]]:
    """Returns what `at_once` returns for a body with long lists of whole numbers, or raises its errors; yields between
    slices.
    """
    mark = f"\0{secrets.token_hex(8)}:"
    parts: list[bytes] = []
    lists: dict[str, Any] = {}
    position = 0
    for found in _NUMBERS.finditer(body):
        yield
        numbers = yield from _decoded_numbers(body, found.start() + 1, found.end() - 1)
        if numbers is None:
            return at_once(body)
        name = f"{mark}{len(lists)}"
        lists[name] = numbers
        parts += (body[position : found.start()], msgspec.json.encode(name))
        position = found.end()
    parts.append(body[position:])
    try:
        # What looked like a list within a string breaks the string here.
        decoded = msgspec.json.decode(b"".join(parts))
        restored: Any = _restored(decoded, lists)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
        return at_once(body)
    return restored if isinstance(restored, dict) else at_once(body)


def _decoded_numbers(body: bytes, start: int, stop: int) -> Generator[None, None, list[int] | None]:
    """Returns the numbers between two commas or brackets; None if they are no list."""
    numbers: list[int] = []
    while True:
        end = stop if stop - start <= SLICE_BYTES else body.rfind(b",", start, start + SLICE_BYTES)
        piece = body[start : max(start, end)]
        if not piece.strip():
            return None
        try:
            numbers += msgspec.json.decode(b"[%b]" % piece, type=list[int])
        except msgspec.DecodeError:
            return None
        if end == stop:
            return numbers
        start = end + 1
        yield


def _slice_ends(body: bytes, start: int) -> Generator[None, None, list[int] | None]:
    """Returns the ends of the slices of the string that begins at `start`, the last at its closing quote; None if it
    has none.
    """
    ends: list[int] = []
    while True:
        match = _INSIDE.match(body, start, start + SLICE_BYTES)
        stop = start if match is None else match.end()
        if stop < len(body) and body[stop] == 0x22:
            return [*ends, stop]
        while stop > start and stop < len(body) and body[stop] & 0xC0 == 0x80:
            stop -= 1  # not within a character
        if stop == start or stop >= len(body):
            return None
        ends.append(stop)
        start = stop
        yield


def _decoded(body: bytes, bounds: list[int]) -> Generator[None, None, str | None]:
    """Returns the string whose slices lie between these bounds; None if some slice is not valid."""
    texts: list[str] = []
    for start, stop in pairwise(bounds):
        try:
            texts.append(msgspec.json.decode(b'"%b"' % body[start:stop], type=str))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        yield
    return "".join(texts)


def _restored(value: Any, long_strings: Mapping[str, Any]) -> Any:
    """Returns `value` with the long strings, which may be keys too, in place of their marks."""
    if isinstance(value, str):
        return long_strings.get(value, value)
    if isinstance(value, list):
        return [_restored(item, long_strings) for item in value]
    if isinstance(value, dict):
        return {long_strings.get(key, key): _restored(item, long_strings) for key, item in value.items()}
    return value
