r"""Makes valid JSON of the arguments that a model writes, as they stream. Knows no calls and no formats.

Models write line breaks and tabs into strings as they are, and escapes that JSON has not, such as \' or \d. Clients
hand a call's arguments to a JSON parser, which refuses either.
"""

import re

_ENDS_RUN = re.compile(r'["\\\x00-\x1f]')
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_ESCAPABLE = '"\\/bfnrt'
_HEX = re.compile(r"u[0-9a-fA-F]{0,4}")


class JsonText:
    """Escapes what may not stand in JSON's strings; everything else passes as it is, however the text is cut."""

    __slots__ = ("_in_string", "_pending")

    def __init__(self) -> None:
        self._in_string = False
        self._pending = ""
        """The beginning of an escape whose end has not come."""

    def push(self, text: str) -> str:
        """Returns the part of the text so far that is certain and has not been returned."""
        text, self._pending = self._pending + text, ""
        if not self._in_string and '"' not in text:
            return text
        made: list[str] = []
        at = 0
        while at < len(text):
            found = _ENDS_RUN.search(text, at) if self._in_string else None
            end = (found.start() if found else len(text)) if self._in_string else text.find('"', at)
            if end < 0:
                end = len(text)
            made.append(text[at:end])
            at = end
            if at == len(text):
                break
            at = self._special(text, at, made)
            if at < 0:
                break
        return "".join(made)

    def _special(self, text: str, at: int, made: list[str]) -> int:
        """Appends what a quote, a control character or a backslash becomes; returns where to go on, -1: wait."""
        character = text[at]
        if character == '"':
            self._in_string = not self._in_string
            made.append(character)
            return at + 1
        if character != "\\":
            made.append(_ESCAPES.get(character, f"\\u{ord(character):04x}"))
            return at + 1
        rest = text[at + 1 : at + 6]
        digits = _HEX.match(rest)
        if not rest or (digits and digits.end() == len(rest) < 5):
            self._pending = text[at:]
            return -1
        if rest[0] == "'":
            made.append("'")
            return at + 2
        size = 5 if digits and digits.end() == 5 else 1 if rest[0] in _ESCAPABLE else 0
        made.append("\\" + rest[:size] if size else "\\\\")
        return at + 1 + size

    def finish(self) -> str:
        """Returns the rest, if the text was cut within an escape."""
        left, self._pending = self._pending, ""
        return left
