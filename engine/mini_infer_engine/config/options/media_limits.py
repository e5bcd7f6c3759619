"""Parses the option `limit_mm_per_prompt`, vLLM's: how many inputs of each kind a prompt may have beside text."""

from typing import Any

import msgspec

DEFAULT_MOST_IMAGES = 999
"""vLLM's default, which no prompt reaches."""
_OTHERS = ("video", "audio")


def parse_most_images(text: str | None) -> int | None:
    """Returns the most images of a prompt, or None if the option says nothing.

    Raises ValueError if the text is no JSON object of counts, or requests a kind that is not served.
    """
    if not text:
        return None
    try:
        limits = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(
            f'limit_mm_per_prompt = {text[:200]!r}: write a JSON object such as {{"image": 4}} ({error})'
        ) from None
    for kind, limit in limits.items():
        count = limit.get("count", DEFAULT_MOST_IMAGES) if isinstance(limit, dict) else limit  # vLLM's longer form
        if type(count) is not int or count < 0:
            raise ValueError(f"limit_mm_per_prompt: {kind[:200]!r} is {str(count)[:200]}: write a count from 0 on")
        if kind in _OTHERS and count:
            raise ValueError(f"limit_mm_per_prompt: {kind} is not served: write 0, or leave it out")
        if kind not in ("image", *_OTHERS):
            raise ValueError(f"limit_mm_per_prompt: {kind[:200]!r} is no kind of input: write image")
        limits[kind] = count
    found: int | None = limits.get("image")
    return found
