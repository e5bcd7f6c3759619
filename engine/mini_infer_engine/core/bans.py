"""Finds the tokens that would complete one of a request's `bad_words`, after tokens that are all known."""

from collections.abc import Sequence


def completed_bans(words: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[int]:
    """Returns the last token of each word (a token sequence) whose other tokens are the last of `tokens`."""
    return [
        last
        for *before, last in words
        if len(before) <= len(tokens) and list(tokens[len(tokens) - len(before) :]) == before
    ]


def longest_before(words: Sequence[Sequence[int]]) -> int:
    """Returns how many of the last tokens decide which tokens may not follow."""
    return max((len(word) - 1 for word in words), default=0)
