"""Converts values of Python to JSON text, for formats that show Python. Nothing is evaluated but literals."""

import ast
import json
from typing import NoReturn


def as_json(text: str) -> str:
    """Returns a JSON text as it is, a literal of Python as JSON, anything else as a string."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _literal_as_json(text)
    return text


def _literal_as_json(text: str) -> str:
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> NoReturn:
    """Refuses NaN and Infinity, which Python reads in JSON though it has them not."""
    raise ValueError(name)
