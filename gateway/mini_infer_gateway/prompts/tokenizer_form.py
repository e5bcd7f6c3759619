"""Decides whether a tokenizer from an engine's pod may run in the gateway: its cost must be bounded by the text's
length.

A tokenizer.json is a program: a regular expression may take exponential time, a replacement may make a text a million
times longer, and the library offers no limits. Therefore only forms of known cost are loaded; with any other form, the
engine tokenises itself. Pure.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from mini_infer_prompts.text_slices import alternatives_are_linear

MAX_ADDED_TOKENS = 20_000
MAX_LENGTHENING = 16
"""Largest number of characters by which a rule may replace one."""
MAX_SPECIAL_TOKENS = 16
"""Largest number of special tokens around a text."""
MAX_PARTS = 32
MAX_UNIGRAM_PIECE = 512
"""Largest number of characters in a piece of a unigram model, which tries all lengths at each position of a text."""

_PLAIN_NORMALIZERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "BertNormalizer", "Nmt", "ByteLevel")
)
_PLAIN_PRE_TOKENIZERS = frozenset(
    (
        *("ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits", "Punctuation"),
        *("CharDelimiterSplit", "UnicodeScripts"),
    )
)
_PLAIN_PROCESSORS = frozenset(("ByteLevel", "BertProcessing", "RobertaProcessing"))


class _Model(msgspec.Struct):
    type: str | None = None
    dropout: float | None = None
    max_input_chars_per_word: int = 100
    vocab: msgspec.Raw = msgspec.Raw(b"")


class _Description(msgspec.Struct):
    """A tokenizer.json, without its vocabulary."""

    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    added_tokens: list[msgspec.Raw] = []


class UnknownFormError(Exception):
    """The gateway does not load this tokenizer; the message names the part."""


def check_form(files: Mapping[str, str]) -> None:
    """Raises UnknownFormError if the cost of a part of the tokenizer is not known to be small."""
    try:
        description = msgspec.json.decode(files["tokenizer.json"], type=_Description)
        for part in _leaves(description.normalizer, "normalizers"):
            _require(_is_normalizer(part), "normalizer", part)
        for part in _leaves(description.pre_tokenizer, "pretokenizers"):
            _require(_is_pre_tokenizer(part), "pre_tokenizer", part)
        for part in _leaves(description.post_processor, "processors"):
            _require(_is_processor(part), "post_processor", part)
        _check_model(description.model)
    except (KeyError, TypeError, AttributeError, msgspec.DecodeError, RecursionError) as error:
        raise UnknownFormError(f"tokenizer.json: {error!r:.200}") from error
    if len(description.added_tokens) > MAX_ADDED_TOKENS:
        raise UnknownFormError(f"tokenizer.json: {len(description.added_tokens)} added_tokens")


def _leaves(part: dict[str, Any] | None, children: str) -> Iterator[dict[str, Any]]:
    rest, seen = [part] if part else [], 0
    while rest:
        one = rest.pop()
        seen += 1
        if seen > MAX_PARTS:
            raise UnknownFormError(f"tokenizer.json: {children} of more than {MAX_PARTS} parts")
        if one["type"] == "Sequence":
            rest += one[children]
        else:
            yield one


def _require(is_supported: bool, name: str, part: dict[str, Any]) -> None:
    if not is_supported:
        raise UnknownFormError(f"tokenizer.json: {name} {msgspec.json.encode(part).decode()[:200]}")


def _is_normalizer(part: dict[str, Any]) -> bool:
    match part:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return bool(pattern) and len(content) <= MAX_LENGTHENING
        case {"type": "Prepend", "prepend": str(content)}:
            return len(content) <= MAX_LENGTHENING
        case {"type": kind}:
            return kind in _PLAIN_NORMALIZERS
    return False


def _is_pre_tokenizer(part: dict[str, Any]) -> bool:
    match part:
        case {"type": "Split", "pattern": {"String": str(pattern)}}:
            return bool(pattern)
        case {"type": "Split", "pattern": {"Regex": str(pattern)}}:
            return alternatives_are_linear(pattern)
        case {"type": kind}:
            return kind in _PLAIN_PRE_TOKENIZERS
    return False


def _is_processor(part: dict[str, Any]) -> bool:
    match part:
        case {"type": "TemplateProcessing", "single": list(single)}:
            tokens = part.get("special_tokens") or {}
            ids = sum(len(token["ids"]) for token in tokens.values())
            return max(len(single), len(part.get("pair") or []), ids) <= MAX_SPECIAL_TOKENS
        case {"type": kind}:
            return kind in _PLAIN_PROCESSORS
    return False


def _check_model(model: _Model) -> None:
    if model.dropout:
        raise UnknownFormError("tokenizer.json: model.dropout")
    if model.type == "WordPiece" and model.max_input_chars_per_word > 1000:
        raise UnknownFormError("tokenizer.json: model.max_input_chars_per_word")
    if model.type == "Unigram":
        pieces = msgspec.json.decode(model.vocab, type=list[tuple[str, float]])
        if max((len(piece) for piece, _ in pieces), default=0) > MAX_UNIGRAM_PIECE:
            raise UnknownFormError("tokenizer.json: model.vocab has a piece that is too long")
