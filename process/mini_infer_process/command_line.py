"""Helpers that all commands' flags share: ranges of numbers, and a suggestion for a misspelt flag."""

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """Returns a parser for argparse's `type=` that takes an integer in this range."""

    def read(text: str) -> int:
        number = int(text) if re.fullmatch(r"\s*[+-]?\d{1,30}\s*", text) else None
        if number is None or number < low or (high is not None and number > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer{_range(low, high)}")
        return number

    return read


def number_within(text: str, low: float, high: float) -> float | None:
    """Returns the number that a text is; None if it is none in this range."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if low <= number <= high else None


def seconds(text: str) -> float:
    """Parses a time that is not negative, for argparse's `type=`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return number


def duration(text: str) -> float:
    """Parses a time for argparse's `type=`: seconds, or hours, minutes and seconds as kubectl writes them (1h30m, 90s).
    Returns seconds.
    """
    if parts := re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?", text, re.ASCII):
        hours, minutes, rest = (float(part or 0) for part in parts.groups())
        if text:
            return hours * 3600 + minutes * 60 + rest
    try:
        return seconds(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor a duration such as 90s or 10m") from None


port_number = whole_number(0, 65_535)
"""Parses a port number, for argparse's `type=`; 0 means a free port."""


def parse_flags(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses flags as `parse_args` does, and suggests a known flag for an unknown one."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{guess(unknown[0], parser)}")
    return options


def guess(flag: str, parser: argparse.ArgumentParser) -> str:
    """Returns the end of a sentence about an unknown flag: the known flag that was probably meant."""
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    return did_you_mean(flag.partition("=")[0], known, "--help lists all flags")


def did_you_mean(name: str, candidates: Iterable[str], otherwise: str) -> str:
    """Returns the end of a sentence about an unknown name; `otherwise` if no known name resembles it."""
    near = difflib.get_close_matches(name, list(candidates), 1)
    return f": did you mean {near[0]}?" if near else f": {otherwise}"


def _range(low: int, high: int | None) -> str:
    return f" from {low}{'' if high is None else f' up to {high}'}"
