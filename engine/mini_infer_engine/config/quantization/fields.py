"""Helpers that all readers of `quantization_config` share: lists of names, and refusals of values. No torch."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.config.json_fields import Fields


def names(fields: Fields, raw: dict[str, Any], key: str) -> tuple[str, ...]:
    """Returns the layers under a key: names or patterns; none if it is missing. Raises ModelError if it is something
    else.
    """
    found = raw.get(key) or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise refuse(fields, key, "it must be a list of names")
    for name in found:
        if name.startswith("re:"):
            check_pattern(fields, key, name.removeprefix("re:"))
    return tuple(found)


def check_pattern(fields: Fields, key: str, pattern: str) -> None:
    """Raises ModelError if the pattern is no regular expression of Python's."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise refuse(fields, f"{key}: {pattern!r}", f"it is no regular expression of Python's ({error})") from None


def refuse(fields: Fields, what: str, remedy: str) -> ModelError:
    """Returns the error for a value of quantization_config; `remedy` goes on after a colon."""
    return ModelError(f"{fields.path}: quantization_config: {what}: {remedy}; or use the original weights.")


@contextmanager
def errors_of(part: str) -> Iterator[None]:
    """Adds the part of quantization_config to the message of a ModelError within the block."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{error} (This is about {part}.)") from None
