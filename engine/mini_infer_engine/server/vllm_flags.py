"""Handles vLLM's flags that the parser does not know: it accepts those that have no effect here, and refuses others
with a remedy.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from mini_infer_engine.offline.vllm_keywords import SEVERAL, SWITCHES, check_neutral, is_other_option
from mini_infer_process.command_line import guess


def split_flags(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Returns the words for `parser`, and vLLM's flags that it does not know with their values.

    argparse would take the value of such a flag for the model. As in vLLM, flags may be written with underscores, and
    `serve` may precede the model.
    """
    own: list[str] = []
    others: list[str] = []
    left = list(words[1:] if list(words[:1]) == ["serve"] and len(words) > 1 else words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*own, word, *left], others
        flag, equals, value = _OPTIMIZATION.sub(r"--optimization-level=\1", word).partition("=")
        flag = _spelt(flag)
        name = flag.removeprefix("--").replace("-", "_").partition(".")[0]
        if not flag.startswith("--") or flag in parser._option_string_actions:
            own.append(f"{flag}{equals}{value}")
        elif not is_other_option(name.removeprefix("no_")):
            own.append(word)
        else:
            others.append(f"{flag}{equals}{value}")
            others += [] if equals or name.startswith("no_") else _values_of(name, left)
    return own, others


_OPTIMIZATION = re.compile(r"\A-O(\d+)\Z")
_SHORT = {"-O": "--optimization-level", "-cc": "--compilation-config", "-asc": "--api-server-count"}


def _spelt(flag: str) -> str:
    """Returns the flag with dashes, and vLLM's short flags in their long form."""
    short, dot, rest = flag.partition(".")
    if short in _SHORT:
        return f"{_SHORT[short]}{dot}{rest}"
    if not flag.startswith("--"):
        return flag
    name, dot, rest = flag.partition(".")
    return f"--{name[2:].replace('_', '-')}{dot}{rest}"


def _values_of(name: str, left: list[str]) -> list[str]:
    """Takes the values of a flag from the words that are left."""
    most = 1
    if name in SWITCHES:
        most = int(bool(left) and left[0].lower() in ("true", "false"))
    elif name in SEVERAL:
        most = len(left)
    values: list[str] = []
    while left and len(values) < most and (not left[0].startswith("-") or _is_number(left[0])):
        values.append(left.pop(0))
    return values


def vllm_flags(words: Sequence[str], parser: argparse.ArgumentParser, model: str | None) -> list[str]:
    """Returns vLLM's flags that have no effect here. Raises ValueError if one requests an unsupported feature, or is
    unknown.
    """
    return [_checked(flag, values, parser, model) for flag, values in _flags(words)]


def _checked(flag: str, values: list[str], parser: argparse.ArgumentParser, model: str | None) -> str:
    name, dot, rest = flag.removeprefix("--").replace("-", "_").partition(".")
    is_negated = name.startswith("no_") and not values
    value = not is_negated and _value(values)
    try:
        check_neutral(name.removeprefix("no_") if is_negated else name, {rest: value} if dot else value, model, flag)
    except KeyError:
        raise ValueError(f"there is no flag {flag}{guess(flag, parser)}") from None
    return " ".join([flag, *values])


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each flag with the words behind it."""
    flag, values = "", list[str]()
    for word in words:
        if word.startswith("-") and not _is_number(word):
            if flag:
                yield flag, values
            flag, _, value = word.partition("=")
            values = [value] if value else []
        elif not flag:
            raise ValueError(f"{word!r} is one word too many: a model is named once, and flags begin with --")
        else:
            values.append(word)
    if flag:
        yield flag, values


def _value(values: list[str]) -> Any:
    """Parses words to the value that a keyword of vLLM's `LLM` would have."""
    if not values:
        return True
    text = " ".join(values)
    if text in ("True", "False"):
        return text == "True"
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None if text == "None" else text


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).isdecimal()
