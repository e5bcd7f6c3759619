"""Counts the bytes of a request's images, which say nothing about the length of its prompt. Knows no tokens."""

from collections.abc import Iterator, Mapping
from typing import Any


def image_bytes(fields: Mapping[str, Any]) -> int:
    """Returns the characters of the images that a body of any dialect contains; of what is malformed, none."""
    return sum(map(len, _texts(fields.get("messages", fields.get("input")))))


def _texts(items: object) -> Iterator[str]:
    """Yields data URLs and base64 of parts, which stand in a message, or in a tool's result within it."""
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        for name in ("content", "output"):
            parts = item.get(name)
            for part in parts if isinstance(parts, list) else ():
                yield from _of_part(part)
                if isinstance(part, dict) and isinstance(result := part.get("content"), list):
                    for one in result:
                        yield from _of_part(one)


def _of_part(part: object) -> Iterator[str]:
    if not isinstance(part, dict):
        return
    source, url = part.get("source"), part.get("image_url")
    if isinstance(source, dict):
        url = source.get("data")
    elif isinstance(url, dict):
        url = url.get("url")
    if isinstance(url, str):
        yield url
