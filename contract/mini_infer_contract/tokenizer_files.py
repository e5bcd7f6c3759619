"""The tokenizer of a model's files, with what transformers 5 changes about it when it loads them.

`tokenizer.json` is nearly all of it; `tokenizer_config.json` names special tokens and may add or change some, and for
two tokenizer classes transformers puts its own normalizer and pre-tokenizer in place of the file's.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer


class LoadedTokenizer(NamedTuple):
    """What the files say."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    """By name, such as "eos_token"; chat templates see these as variables."""
    chat_templates: dict[str, str]
    """By name; "default" is the one to use."""


def load_tokenizer(files: Mapping[str, str]) -> LoadedTokenizer:
    """Reads the files by name. ValueError: one of them is broken, and which."""
    try:
        return _load(files)
    except (AttributeError, KeyError, TypeError) as error:  # no field is checked one by one: there are too many forms
        raise ValueError(f"the tokenizer's files hold something of an unknown form ({error!r})") from error


def _load(files: Mapping[str, str]) -> LoadedTokenizer:
    config = _json(files, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older folders keep the special tokens in a file of their own
        config |= _json(files, "special_tokens_map.json")
    tokenizer_class = _tokenizer_class(config, _json(files, "config.json"))
    named = {name: _token(value) for name, value in _named_tokens(config, tokenizer_class).items()}
    declared = _declared_tokens(config)
    if "tokenizer.json" not in files:
        raise ValueError("tokenizer.json is missing: save_pretrained() a fast tokenizer")
    text = files["tokenizer.json"]
    if tokenizer_class in _REBUILT:
        description = _json(files, "tokenizer.json")
        if description.get("model", {}).get("type") == "BPE":
            declared = declared or {token["id"]: _token(token) for token in description.get("added_tokens", [])}
            description |= _REBUILT[tokenizer_class](config) | {"added_tokens": []}
            description["model"] |= _REBUILT_MODEL[tokenizer_class]
            text = json.dumps(description)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"tokenizer.json: {error}") from error
    _add_tokens(tokenizer, declared, list(named.values()), _extra_tokens(config))
    if tokenizer_class == "Qwen2Tokenizer":
        tokenizer.add_tokens([AddedToken(token.content, special=True) for token in named.values()])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    special_tokens = {name: token.content for name, token in named.items()}
    return LoadedTokenizer(tokenizer, special_tokens, _chat_templates(files, config))


def _json(files: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, "{}"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name}: must be a JSON object")
    return value


def _token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    flags = {name: value[name] for name in names if name in value}
    return AddedToken(value["content"], **{"special": True, **flags})


_STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_CLASS_DEFAULTS = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
}


def _named_tokens(config: dict[str, Any], tokenizer_class: str) -> dict[str, str | dict[str, Any]]:
    """Standard names first, then a model's own, which may also stand under keys of their own."""
    given = _CLASS_DEFAULTS.get(tokenizer_class, {}) | {
        name: value for name, value in config.items() if name.endswith("_token")
    }
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(key), dict):
            given |= config[key]
    names = [*_STANDARD_NAMES, *(name for name in given if name not in _STANDARD_NAMES)]
    return {
        name: given[name]
        for name in names
        if isinstance(given.get(name), str) or (isinstance(given.get(name), dict) and "content" in given[name])
    }


def _extra_tokens(config: dict[str, Any]) -> list[AddedToken]:
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens")) or []
    return [_token(token) for token in extra] if isinstance(extra, list) else []


def _declared_tokens(config: dict[str, Any]) -> dict[int, AddedToken]:
    declared = config.get("added_tokens_decoder", {})
    if not all(str(index).isdecimal() for index in declared):
        raise ValueError("tokenizer_config.json: added_tokens_decoder has a key that is no token id")
    return {int(index): _token(token) for index, token in declared.items()}


def _add_tokens(
    tokenizer: Tokenizer, declared: dict[int, AddedToken], named: list[AddedToken], extra: list[AddedToken]
) -> None:
    """Adds the declared tokens that differ from the tokenizer's own, and special tokens that it does not have."""
    present = tokenizer.get_added_tokens_decoder().values()
    flags = {repr(token) for token in present}
    new = [token for _, token in sorted(declared.items()) if repr(token) not in flags]
    contents = {token.content for token in (*present, *new)}
    for token in (*named, *extra):
        if token.content not in contents:
            contents.add(token.content)
            new.append(token)
    named_contents = {token.content for token in named}
    for token in new:
        token.special = token.special or token.content in named_contents
    tokenizer.add_tokens(new)


def _tokenizer_class(config: dict[str, Any], model_config: dict[str, Any]) -> str:
    """The class that transformers' AutoTokenizer picks, as far as it matters here; "" is: the file as it is."""
    named = config.get("tokenizer_class") or model_config.get("tokenizer_class") or ""
    named = str(named).removesuffix("Fast")
    registered = _CLASS_OF_MODEL_TYPE.get(str(model_config.get("model_type", "")))
    if registered is None or not named:
        return named or registered or ""
    if named != registered and (registered == "" or model_config["model_type"] in _TRUST_MODEL_TYPE):
        return registered
    return named


_CLASS_OF_MODEL_TYPE = {
    "deepseek_v2": "",
    "deepseek_v3": "",
    "mistral": "",
    "mixtral": "",
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
}
_TRUST_MODEL_TYPE = {"qwen2"}
"""Model types whose folders on the hub often name a wrong class."""


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    prefix = config.get("add_prefix_space") in (None, True)
    scheme = "never" if not prefix else "always" if config.get("legacy", False) else "first"
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
    }


_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _qwen2(config: dict[str, Any]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "trim_offsets": True}
    words = {"type": "Split", "pattern": {"Regex": _QWEN_WORDS}, "behavior": "Isolated", "invert": False}
    prefix = bool(config.get("add_prefix_space"))
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [words, byte_level | {"add_prefix_space": prefix, "use_regex": False}],
        },
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
    }


_REBUILT = {"LlamaTokenizer": _llama, "Qwen2Tokenizer": _qwen2}
_REBUILT_MODEL: dict[str, dict[str, Any]] = {
    "LlamaTokenizer": {"dropout": None, "unk_token": None, "fuse_unk": True, "byte_fallback": True}
    | {"continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False},
    "Qwen2Tokenizer": {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    | {"continuing_subword_prefix": "", "end_of_word_suffix": "", "ignore_merges": False},
}


def _chat_templates(files: Mapping[str, str], config: dict[str, Any]) -> dict[str, str]:
    """Templates in files come before those in tokenizer_config.json."""
    templates = {
        name.removeprefix(f"{TEMPLATE_FOLDER}/").removesuffix(".jinja"): text
        for name, text in files.items()
        if name.startswith(f"{TEMPLATE_FOLDER}/")
    }
    if "chat_template.jinja" in files:
        templates["default"] = files["chat_template.jinja"]
    given = config.get("chat_template")
    if templates or not given:
        return templates
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return given if isinstance(given, dict) else {"default": given}


TEMPLATE_FOLDER = "additional_chat_templates"
