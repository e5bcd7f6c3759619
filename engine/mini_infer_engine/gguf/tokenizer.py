"""Converts a GGUF file's vocabulary to the files of a tokenizer in Hugging Face format.

Two kinds are supported: byte-level BPE ("gpt2": vocabulary, merges, and the name of a rule that splits words) and
SentencePiece's BPE ("llama": pieces with scores). The result tokenises like llama.cpp with the same vocabulary, and
like transformers with the checkpoints that were converted. No torch.
"""

import logging
from typing import Any

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.header import GgufHeader
from mini_infer_engine.gguf.word_rules import NO_RULE, WORD_RULES, WordRule, byte_level

log = logging.getLogger(__name__)

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Values of `tokenizer.ggml.token_type`."""
_SPACE = "▁"
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
_NAMED_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def tokenizer_files(header: GgufHeader) -> dict[str, dict[str, Any]]:
    """Returns `tokenizer.json` and `tokenizer_config.json` as objects.

    Raises ModelError if the kind is not supported, or there are no tokens.
    """
    tokens = _field(header, "tokens", list)
    kind = _field(header, "model", str)
    if kind == "gpt2":
        rule = _word_rule(header)
        parts, adds_bos = _byte_level_bpe(header, tokens, rule), rule.adds_bos
    elif kind == "llama":
        parts, adds_bos = _sentencepiece_bpe(header, tokens), True
    else:
        raise _refuse(header, f"model = {kind!r}", "supported are gpt2 (byte-level BPE) and llama (SentencePiece)")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(header, tokens),
        "post_processor": _post_processor(header, tokens, adds_bos=adds_bos),
        **parts,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _tokenizer_config(header, tokens)}


def _word_rule(header: GgufHeader) -> WordRule:
    name = header.metadata.get("tokenizer.ggml.pre") or NO_RULE
    if not isinstance(name, str) or name not in WORD_RULES:
        raise _refuse(header, f"pre = {name!r}", f"supported are {', '.join(WORD_RULES)}")
    if name == NO_RULE:
        log.warning("%s: no rule is named that splits words (tokenizer.ggml.pre): answers may be worse", header.path)
    return WORD_RULES[name]


def _byte_level_bpe(header: GgufHeader, tokens: list[str], rule: WordRule) -> dict[str, Any]:
    types = _token_types(header, tokens)
    used = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _UNUSED  # what fills the embedding table up
    }
    return {
        "normalizer": rule.normalizer,
        "pre_tokenizer": rule.pre_tokenizer(),
        "decoder": byte_level(use_regex=True),
        "model": _bpe(used, [merge.split(" ", 1) for merge in _field(header, "merges", list)])
        | {"ignore_merges": rule.takes_whole_words},
    }


def _sentencepiece_bpe(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    scores = _field(header, "scores", list)
    if len(scores) != len(tokens):
        raise _refuse(header, f"{len(scores)} scores for {len(tokens)} tokens", "the file is broken; convert it again")
    prefixes = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefixes else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixes else []
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *strip,
    ]
    types = _token_types(header, tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    pieces = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    unknown = _token_id(header, "unknown")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges_by_score(vocab, pieces))
        | {"unk_token": _text(tokens, unknown), "fuse_unk": True, "byte_fallback": True},
    }


def merges_by_score(vocab: dict[str, int], pieces: dict[str, float]) -> list[list[str]]:
    """Returns every split of each piece into two known pieces, best pieces first: SentencePiece's rule as merges.

    SentencePiece merges the two pieces that make the best one. Ties are ordered like transformers' `generate_merges`.
    """
    merges: list[tuple[float, str, str]] = []
    for piece, score in pieces.items():
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in halves if left in pieces and right in pieces]
        known.sort(key=lambda halves: (vocab[halves[0]], vocab[halves[1]]))
        merges.extend((score, left, right) for left, right in known)
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [[left, right] for _, left, right in merges]


def _bpe(vocab: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }


def _added_tokens(header: GgufHeader, tokens: list[str]) -> list[dict[str, Any]]:
    """Returns the tokens that are found in a text before it is split; control tokens are not text."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, **flags, "special": kind == _CONTROL}
        for index, (token, kind) in enumerate(zip(tokens, _token_types(header, tokens), strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _post_processor(header: GgufHeader, tokens: list[str], *, adds_bos: bool) -> dict[str, Any] | None:
    """Returns the step that adds BOS before and EOS after a text if the file says so.

    `adds_bos` is the default for files that say nothing of BOS.
    """
    before = _edge(header, tokens, "bos", adds_bos)
    after = _edge(header, tokens, "eos", False)
    if not before and not after:
        return None
    text = {"Sequence": {"id": "A", "type_id": 0}}
    edges = [[{"SpecialToken": {"id": token, "type_id": 0}} for token in edge] for edge in (before, after)]
    return {
        "type": "TemplateProcessing",
        "single": [*edges[0], text, *edges[1]],
        "pair": [*edges[0], text, *edges[0], {"Sequence": {"id": "B", "type_id": 1}}, *edges[1]],
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in {*before, *after}
        },
    }


def _edge(header: GgufHeader, tokens: list[str], name: str, default: bool) -> list[str]:
    adds = header.metadata.get(f"tokenizer.ggml.add_{name}_token", default)
    token = _text(tokens, _token_id(header, name))
    return [token] if adds and token is not None else []


def _tokenizer_config(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    named = {name: _text(tokens, _token_id(header, key)) for key, name in _NAMED_TOKENS.items()}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: token for name, token in named.items() if token is not None}
    if isinstance(template := header.metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return config


def _token_types(header: GgufHeader, tokens: list[str]) -> list[int]:
    types = header.metadata.get("tokenizer.ggml.token_type")
    if isinstance(types, list) and len(types) == len(tokens):
        return types
    return [_NORMAL] * len(tokens)


def _token_id(header: GgufHeader, name: str) -> Any:
    """Returns a special token's id. SentencePiece's first three have defaults, as in llama.cpp."""
    default = _SENTENCEPIECE_IDS.get(name) if header.metadata.get("tokenizer.ggml.model") == "llama" else None
    return header.metadata.get(f"tokenizer.ggml.{name}_token_id", default)


def _text(tokens: list[str], index: Any) -> str | None:
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _field(header: GgufHeader, name: str, kind: type) -> Any:
    value = header.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, kind):
        raise _refuse(header, f"{name} is missing", "the file has no tokenizer that can be read; convert it again")
    return value


def _refuse(header: GgufHeader, what: str, remedy: str) -> ModelError:
    return ModelError(f"{header.path}: tokenizer.ggml.{what}: {remedy}.")
