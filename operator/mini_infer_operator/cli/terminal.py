"""Makes text from outside safe to print: names, messages and logs may hold a terminal's control sequences. Pure."""

from typing import Any

_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_SUBSTITUTES = _PICTURES | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Characters that are shown in place of control characters: their pictures in Unicode, such as U+241B for escape."""


def printable(text: str) -> str:
    """Returns the text with a picture in place of each control character but line ends and tabs."""
    return text.translate(_SUBSTITUTES)


def printable_values(value: Any) -> Any:
    """Returns a JSON value with all its texts printable, names of fields among them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [printable_values(one) for one in value]
    if isinstance(value, dict):
        return {printable(name): printable_values(one) for name, one in value.items()}
    return value
