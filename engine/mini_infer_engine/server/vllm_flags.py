"""Flags that the parser does not know: vLLM's that ask for nothing here pass, others are named with a remedy."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from mini_infer_contract.command_line import guess
from mini_infer_engine.vllm_keywords import check_neutral


def vllm_flags(words: Sequence[str], parser: argparse.ArgumentParser, model: str | None) -> list[str]:
    """Flags of vLLM's that change nothing. ValueError: one asks for something that there is not, or nobody knows it."""
    return [_checked(flag, values, parser, model) for flag, values in _flags(words)]


def _checked(flag: str, values: list[str], parser: argparse.ArgumentParser, model: str | None) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    is_negated = name.startswith("no_") and not values
    try:
        check_neutral(name.removeprefix("no_") if is_negated else name, not is_negated and _value(values), model, flag)
    except KeyError:
        raise ValueError(f"there is no flag {flag}{guess(flag, parser)}") from None
    return " ".join([flag, *values])


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words behind it."""
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
    """What a keyword of `LLM` would have."""
    if not values:
        return True
    text = " ".join(values)
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None if text == "None" else text


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).isdecimal()
