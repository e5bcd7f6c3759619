"""Parses JSON as it comes: values are emitted character by character. Knows no markers, and no calls.

A model may write invalid JSON, so a value ends where it cannot go on; the result says if it was whole.
"""

import json
import re

from mini_infer_engine.parsing.text_source import TextSink, TextSource, Waiting

_OUTSIDE_STRINGS = re.compile(r"[\s,:0-9eE+\-.truefalsnNIity]+")
"""Characters that may stand between brackets and strings; letters are those of true, false, null, NaN, Infinity."""
_INSIDE_STRINGS = re.compile(r'[^"\\]+')
_CLOSING = {"{": "}", "[": "]"}


def read_value(source: TextSource, emit: TextSink) -> Waiting[bool]:
    """Emits the text of the next value as it is. Returns False if it breaks off, or is no JSON."""
    first = yield from source.peek()
    if first == '"':
        return (yield from _read_string(source, emit))
    if first in _CLOSING:
        return (yield from _read_container(source, emit))
    return (yield from _read_scalar(source, emit))


def _read_scalar(source: TextSource, emit: TextSink) -> Waiting[bool]:
    has_some = False
    while True:
        character = yield from source.peek()
        if character in ("", ",", "}", "]") or character.isspace() or not _OUTSIDE_STRINGS.fullmatch(character):
            return has_some
        emit(source.take(1))
        has_some = True


def _read_container(source: TextSource, emit: TextSink) -> Waiting[bool]:
    expected = [_CLOSING[source.take(1)]]
    emit({"}": "{", "]": "["}[expected[0]])
    while expected:
        if not (yield from source.peek()):
            return False
        if run := _OUTSIDE_STRINGS.match(source.available):
            emit(source.take(run.end()))
            continue
        character = yield from source.peek()
        if character == '"':
            if not (yield from _read_string(source, emit)):
                return False
            continue
        if character in _CLOSING:
            expected.append(_CLOSING[character])
        elif character == expected[-1]:
            expected.pop()
        else:
            return False
        emit(source.take(1))
    return True


def _read_string(source: TextSource, emit: TextSink) -> Waiting[bool]:
    emit(source.take(1))
    while True:
        character = yield from source.peek()
        if not character:
            return False
        if run := _INSIDE_STRINGS.match(source.available):
            emit(source.take(run.end()))
            continue
        emit(source.take(1))
        if character == '"':
            return True
        emit(source.take(len((yield from source.peek()))))  # escaped, whatever it is


def read_decoded_string(source: TextSource, emit: TextSink) -> Waiting[bool]:
    """Emits the decoded text of the next string. Returns False if it breaks off, or has an escape that JSON has not."""
    source.take(1)
    while True:
        character = yield from source.peek()
        if run := _INSIDE_STRINGS.match(source.available):
            emit(source.take(run.end()))
        elif character == '"':
            source.take(1)
            return True
        elif not character or not (yield from _read_escape(source, emit)):
            return False


def _read_escape(source: TextSource, emit: TextSink) -> Waiting[bool]:
    escape = yield from source.peek(2)
    if escape == "\\u":
        escape = yield from source.peek(6)
        if escape[2:4].lower() in ("d8", "d9", "da", "db"):  # half of a character: the other half follows
            escape = yield from source.peek(12)
    try:
        decoded = json.loads(f'"{escape}"')
        decoded.encode()
    except ValueError:
        return False
    source.take(len(escape))
    emit(decoded)
    return True


class Recorder:
    """Records emitted text for later."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def __call__(self, text: str) -> None:
        """Takes a piece."""
        self._pieces.append(text)

    @property
    def text(self) -> str:
        """All of the recorded text."""
        return "".join(self._pieces)
