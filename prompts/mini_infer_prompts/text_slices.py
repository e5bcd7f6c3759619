"""Finds places where a text may be cut so that its two parts, tokenised one after the other, give the ids of the whole.

A long text is then tokenised in slices of a few milliseconds: other work runs in between, memory stays small, and a
client that left or a limit that is reached ends it early. The rules hold for pre-tokenizers made of known regular
expressions (GPT-2's, Llama 3's, Qwen's and o200k's families); for any other a text is one slice. Knows no cache.
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer

SLICE_CHARACTERS = 16 << 10
"""Least characters of a slice, about 5 ms of tokenising."""
MAX_RUN_CHARACTERS = 128 << 10
"""Most characters without a place to cut: a longer run is no text, but letters, digits or blanks only. It would occupy
a core for seconds.
"""

_CUTS = re.compile(
    r"(?<=[^\W_])(?= )"  # a letter or digit of any script, before a space
    r"|(?<=[!-~])(?= )"
    r"|(?<=[A-Za-z0-9])(?=[\t\n\r!-&(-/:-@\[-`{-~])"  # not before ', which may begin an English contraction
    r"|(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])"
    r"|(?<=[\u3040-\u30ff\u4e00-\u9fff])(?=[，。、；：？！])"
)
"""No match of a regular expression in `_STANDARD` spans such a place, none looks back, and the only one that looks
ahead (`\\s+(?!\\S)`) does so from white space, which never stands before it. No normal form joins the characters there.
word_ids cuts at the first two kinds."""

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LETTERS = {
    *(r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"),
    *(f"[^\\r\\n\\p{{L}}\\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{end}" for end in ("", _CONTRACTION + "?")),
}
_NUMBERS = {r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}"}
_PUNCTUATION = {
    *(
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    ),
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
}
_BLANKS = {r"\s+"}
_FURTHER = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTION, "(?i:[sdmt]|ll|ve|re)", "'(?i:[sdmt]|ll|ve|re)"),
    *(f"[^\\r\\n\\p{{L}}\\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{end}" for end in ("", _CONTRACTION + "?")),
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)"),
}
_STANDARD = _LETTERS | _NUMBERS | _PUNCTUATION | _BLANKS | _FURTHER
"""Alternatives of pre-tokenizers' regular expressions; one of each of the first four matches every character."""

_OTHERS = {
    # DeepSeek V2 and V3, Falcon
    *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"\s+$", r"[一-龥ࠀ-一가-퟿]+", r"[一-龥぀-ゟ゠-ヿ]+"),
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
    *(r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", r"[0-9][0-9][0-9]", r"[0-9]"),
}
"""Further alternatives of public models, of which only that they take time in proportion to a text is known."""

_LITERALS = re.compile(r"(?:\(\?i:)?['A-Za-z|]{1,64}\)?")
"""Alternatives that are some words, such as a family's contractions."""

_NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}


def can_be_cut(tokenizer: Tokenizer) -> bool:
    """True if `next_cut` holds for this tokenizer."""
    added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.normalized]
    return (
        all(part["type"] in _NORMAL_FORMS for part in parts_of(tokenizer.normalizer))
        and _pre_tokenizer_is_linear(parts_of(tokenizer.pre_tokenizer))
        and not getattr(tokenizer.model, "dropout", None)
        and not any(t.lstrip or t.rstrip or t.single_word or _CUTS.search(t.content) for t in added)
    )


def alternatives_are_linear(pattern: str) -> bool:
    """True if a regular expression is made of alternatives that take time in proportion to a text."""
    return all(one in _STANDARD or one in _OTHERS or _LITERALS.fullmatch(one) for one in _alternatives(pattern))


def next_cut(text: str, start: int, end: int) -> int:
    """Returns the end of the slice of `text` that begins at `start`; the text ends at `end`.

    The slice has at least SLICE_CHARACTERS if the text has them. Raises ValueError if there is no place to cut within
    MAX_RUN_CHARACTERS.
    """
    earliest = start + SLICE_CHARACTERS
    if earliest >= end:
        return end
    latest = start + MAX_RUN_CHARACTERS
    if found := _CUTS.search(text, earliest, min(end, latest)):
        return found.start()
    if end <= latest:
        return end
    raise ValueError(
        f"the text holds more than {MAX_RUN_CHARACTERS - SLICE_CHARACTERS} characters after character {earliest} "
        "that are all letters, all digits, all signs or all blanks: put spaces or line breaks between words"
    )


def parts_of(component: Any) -> list[dict[str, Any]]:
    """Returns the descriptions of the parts of a normalizer, pre-tokenizer or post-processor: what the
    library pickles.
    """
    return [] if component is None else _leaves(json.loads(component.__getstate__()))


def _leaves(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] != "Sequence":
        return [part]
    return [
        leaf
        for child in part.get("normalizers") or part.get("pretokenizers") or part.get("processors") or []
        for leaf in _leaves(child)
    ]


def _pre_tokenizer_is_linear(parts: list[dict[str, Any]]) -> bool:
    """True if the parts cut a text at words first, and then treat each by itself: without a first cut at words nothing
    may be cut.
    """
    if not parts or not all(_part_is_linear(part) for part in parts):
        return False
    return any(part["type"] == "Split" or part.get("use_regex") for part in parts)


def _part_is_linear(part: dict[str, Any]) -> bool:
    match part:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return True
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            alternatives = set(_alternatives(pattern))
            return alternatives <= _STANDARD and all(
                alternatives & kind for kind in (_LETTERS, _NUMBERS, _PUNCTUATION, _BLANKS)
            )
        case _:
            return False


def _alternatives(pattern: str) -> list[str]:
    """Splits a regular expression at its outermost bars."""
    found, depth, begun, at = [], 0, 0, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "|" and depth == 0:
            found.append(pattern[begun:at])
            begun = at + 1
        at += 1
    return [*found, pattern[begun:]]
