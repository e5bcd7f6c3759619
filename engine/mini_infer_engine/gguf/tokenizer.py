"""From a GGUF file's vocabulary to the files of a tokenizer in Hugging Face format.

Two kinds are read: byte-level BPE ("gpt2": vocabulary, merges, and the name of a rule that splits words) and
SentencePiece's BPE ("llama": pieces with scores). What the files say is what llama.cpp computes with the same
vocabulary, and what transformers does for the checkpoints that were converted. No torch.
"""

from typing import Any

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.header import GgufHeader

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Of `tokenizer.ggml.token_type`."""
_SPACE = "▁"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_DIGITS = {"type": "Digits", "individual_digits": True}
_GPT2 = [_byte_level(use_regex=True)]
_SINGLE_DIGITS = [_DIGITS, _byte_level(use_regex=True)]
_QWEN2 = [_split(_QWEN2_WORDS), _byte_level(use_regex=False)]
_LLAMA3 = [_split(_LLAMA3_WORDS), _byte_level(use_regex=False)]
WORD_RULES: dict[str, list[dict[str, Any]]] = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
}
"""llama.cpp's names of pre-tokenizers (`tokenizer.ggml.pre`), and what those do."""
_WHOLE_WORDS_FIRST = ("llama-bpe",)
"""Where a word that is in the vocabulary is not merged from its bytes (`ignore_merges`)."""


def tokenizer_files(header: GgufHeader) -> dict[str, dict[str, Any]]:
    """`tokenizer.json` and `tokenizer_config.json` as objects. ModelError: the kind is not supported, or no tokens."""
    tokens = _field(header, "tokens", list)
    kind = _field(header, "model", str)
    if kind == "gpt2":
        parts = _byte_level_bpe(header, tokens)
    elif kind == "llama":
        parts = _sentencepiece_bpe(header, tokens)
    else:
        raise _refuse(header, f"model = {kind!r}", "supported are gpt2 (byte-level BPE) and llama (SentencePiece)")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(header, tokens),
        "post_processor": _post_processor(header, tokens, adds_bos=kind == "llama"),
        **parts,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _tokenizer_config(header, tokens)}


def _byte_level_bpe(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    rule = header.metadata.get("tokenizer.ggml.pre")
    if rule not in WORD_RULES:
        raise _refuse(header, f"pre = {rule!r}", f"supported are {', '.join(WORD_RULES)}")
    types = _token_types(header, tokens)
    used = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _UNUSED  # what fills the embedding table up
    }
    return {
        "normalizer": {"type": "NFC"} if WORD_RULES[rule] is _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": WORD_RULES[rule]},
        "decoder": _byte_level(use_regex=True),
        "model": _bpe(used, [merge.split(" ", 1) for merge in _field(header, "merges", list)])
        | {"ignore_merges": rule in _WHOLE_WORDS_FIRST},
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
    unknown = header.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, merges_by_score(vocab, pieces))
        | {"unk_token": _text(tokens, unknown), "fuse_unk": True, "byte_fallback": True},
    }


def merges_by_score(vocab: dict[str, int], pieces: dict[str, float]) -> list[list[str]]:
    """SentencePiece merges whichever two pieces make the best one: every way to make each piece, best pieces first.

    The order of equals is that of transformers' `generate_merges`.
    """
    ways: list[tuple[float, str, str]] = []
    for piece, score in pieces.items():
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in halves if left in pieces and right in pieces]
        known.sort(key=lambda halves: (vocab[halves[0]], vocab[halves[1]]))
        ways.extend((score, left, right) for left, right in known)
    ways.sort(key=lambda way: (way[0], len(way[1]), len(way[2])), reverse=True)
    return [[left, right] for _, left, right in ways]


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
    """Tokens that are found in a text before it is split; control tokens are no text."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, **flags, "special": kind == _CONTROL}
        for index, (token, kind) in enumerate(zip(tokens, _token_types(header, tokens), strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _post_processor(header: GgufHeader, tokens: list[str], *, adds_bos: bool) -> dict[str, Any] | None:
    """BOS before and EOS behind a text, where the file asks for them; SentencePiece's default is BOS."""
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
    wanted = header.metadata.get(f"tokenizer.ggml.add_{name}_token", default)
    token = _text(tokens, header.metadata.get(f"tokenizer.ggml.{name}_token_id"))
    return [token] if wanted and token is not None else []


def _tokenizer_config(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    named = {
        name: _text(tokens, header.metadata.get(f"tokenizer.ggml.{key}_token_id"))
        for key, name in _NAMED_TOKENS.items()
    }
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


def _text(tokens: list[str], index: Any) -> str | None:
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _field(header: GgufHeader, name: str, kind: type) -> Any:
    value = header.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, kind):
        raise _refuse(header, f"{name} is missing", "the file has no tokenizer that can be read; convert it again")
    return value


def _refuse(header: GgufHeader, what: str, remedy: str) -> ModelError:
    return ModelError(f"{header.path}: tokenizer.ggml.{what}: {remedy}.")
