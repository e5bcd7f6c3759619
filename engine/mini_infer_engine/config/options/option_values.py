"""Reads and checks values of options, for command lines and keywords alike. Knows no option by name."""

import re
from math import inf
from typing import Any, Literal, get_args, get_origin

from mini_infer_contract.options import OptionRow

_UNITS = {
    "": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40
}  # fmt: skip
_LONGEST_SHOWN = 80
"""Characters of a wrong value that an error repeats."""


def bytes_of(text: str) -> int:
    """Returns the bytes of "512MiB", "2GB", "1.5g" or a plain number. Raises ValueError if it is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", text.strip().upper())
    size = 0.0 if match is None else float(match[1]) * _UNITS[match[2] or ""]
    if match is None or size == inf or 0 < size < 1:
        raise ValueError(f"{text[:_LONGEST_SHOWN]!r} is no size: write bytes, or a number with KB, MB, GB, MiB, GiB")
    return int(size)


def count_of(text: str) -> int | None:
    """Returns a number of tokens, also in vLLM's forms: 25.6k is 25,600, 8K is 8,192. Returns None if
    it is no number.
    """
    match = re.fullmatch(r"([+-]?\d+)|(\d+(?:\.\d+)?)([kmg])|(\d+)([KMG])", text.strip())
    if match is None:
        return None
    plain, decimal, decimal_unit, binary, binary_unit = match.groups()
    if plain is not None:
        return int(plain)
    if decimal is not None:
        return int(float(decimal) * _UNITS[decimal_unit.upper()])
    return int(binary) * _UNITS[f"{binary_unit}I"]


def range_fault(row: OptionRow, value: float | None) -> str | None:
    """Says which numbers an option takes if `value` is no number (None) or out of its range; None if it is valid."""
    option = row.option
    low, high = option.low, option.high
    too_low = value is not None and low is not None and (value < low if option.low_is_allowed else value <= low)
    too_high = value is not None and high is not None and not value <= high
    if value is not None and not too_low and not too_high:
        return None
    what = "a size in bytes" if option.is_size else "an integer" if row.type is int else "a number"
    begin = "" if low is None else f" from {_shown(low)}" if option.low_is_allowed else f" above {_shown(low)}"
    return f"{what}{begin}{'' if high is None else f' up to {_shown(high)}'}"


def choice_fault(row: OptionRow, value: Any) -> str | None:
    """Says what to write instead if `value` is none of an option's choices; None if it is one."""
    choices = get_args(row.type) if get_origin(row.type) is Literal else ()
    if not choices or value in choices:
        return None
    hint = dict(row.option.hints).get(value) if isinstance(value, str) else None
    return f"choose from {', '.join(map(str, choices))}{f' ({hint})' if hint else ''}"


def _shown(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"
