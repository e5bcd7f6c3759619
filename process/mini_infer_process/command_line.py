"""What all commands' flags have in common: ranges of numbers, and a guess at what a misspelt flag was to be."""

import argparse
import difflib
import math
from collections.abc import Callable, Iterable, Sequence


def whole_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """For `type=` of argparse: an integer in this range."""

    def read(text: str) -> int:
        number = int(text) if text.strip().lstrip("+-").isdecimal() else None
        if number is None or number < low or (high is not None and number > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer{_range(low, high)}")
        return number

    return read


def seconds(text: str) -> float:
    """For `type=` of argparse: a time that is not negative."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0")
    return number


port_number = whole_number(0, 65_535)
"""For `type=` of argparse; 0: a free one."""


def parse_flags(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """As `parse_args`, which does not say what a flag that there is not may have been meant to be."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{guess(unknown[0], parser)}")
    return options


def guess(flag: str, parser: argparse.ArgumentParser) -> str:
    """The end of a sentence about a flag that there is not."""
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    return did_you_mean(flag.partition("=")[0], known, "--help lists all flags")


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of a sentence about a name that there is not; `otherwise`: where no known one is like it."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f": did you mean {near[0]}?" if near else f": {otherwise}"


def _range(low: int, high: int | None) -> str:
    return f" from {low}{'' if high is None else f' up to {high}'}"
