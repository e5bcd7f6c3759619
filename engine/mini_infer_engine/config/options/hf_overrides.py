"""Parses the option `hf_overrides`, vLLM's: values that replace those of config.json."""

from typing import Any

import msgspec


def parse_hf_overrides(text: str | None) -> dict[str, Any]:
    """Returns the values. Raises ValueError if the text is no JSON object."""
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(
            f"hf_overrides = {text[:200]!r}: write a JSON object with fields of config.json ({error})"
        ) from None
