"""Loads the tokenizer of a model's files, with the changes that transformers 5 makes when it loads them.

`tokenizer.json` is nearly all of it; `tokenizer_config.json` names special tokens and may add or change some. For three
tokenizer classes of SentencePiece's kind transformers puts its own normalizer and pre-tokenizer in place of the file's;
byte-level files are read as they are, whatever class is named.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing


class LoadedTokenizer(NamedTuple):
    """The tokenizer, special tokens and chat templates of a model's files."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    """Special tokens by name, such as "eos_token"; chat templates see these as variables."""
    chat_templates: dict[str, str]
    """Sources of templates by name; "default" is the one to use."""


def load_tokenizer(files: Mapping[str, str]) -> LoadedTokenizer:
    """Reads the files, given by name. Raises a ValueError that names the broken one."""
    try:
        return _load(files)
    except (AttributeError, KeyError, TypeError) as error:  # no field is checked one by one: there are too many forms
        raise ValueError(f"the tokenizer's files hold something of an unknown form ({error!r})") from error


def _load(files: Mapping[str, str]) -> LoadedTokenizer:
    config = _json(files, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older folders keep the special tokens in a file of their own
        config |= _json(files, "special_tokens_map.json")
    tokenizer_class = _tokenizer_class(config, _json(files, "config.json"))
    declared = _declared_tokens(config)
    if "tokenizer.json" not in files:
        raise ValueError("tokenizer.json is missing: save_pretrained() a fast tokenizer")
    text = files["tokenizer.json"]
    if tokenizer_class in _REBUILT:
        description = _json(files, "tokenizer.json")
        if _is_sentencepiece(description):
            declared = declared or {token["id"]: _token(token) for token in description.get("added_tokens", [])}
            description |= _REBUILT[tokenizer_class](config) | {"added_tokens": []}
            description["model"] |= _REBUILT_MODEL
            text = json.dumps(description)
        else:
            tokenizer_class = ""
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"tokenizer.json: {error}") from error
    existing = {token.content for token in declared.values()}
    defaults = {
        name: token
        for name, token in _CLASS_DEFAULTS.get(tokenizer_class, {}).items()
        if token in existing or tokenizer.token_to_id(token) is not None
    }
    named = {name: _token(value) for name, value in _named_tokens(config, defaults).items()}
    _add_tokens(tokenizer, declared, list(named.values()), _extra_tokens(config))
    if tokenizer_class == "Qwen2Tokenizer":
        tokenizer.add_tokens([AddedToken(token.content, special=True) for token in named.values()])
    if tokenizer_class == "CodeLlamaTokenizer" and "bos_token" in named:
        bos = named["bos_token"].content
        tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    special_tokens = {name: token.content for name, token in named.items()}
    return LoadedTokenizer(tokenizer, special_tokens, _chat_templates(files, config))


class _AddedTokenEntry(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedTokenEntry] = []


def declared_token_id(files: Mapping[str, str], name: str) -> int | None:
    """Returns the id of a special token such as "eos_token" without making the tokenizer, which takes a second.

    Returns None if the files name no such token, or have it among their ordinary ones. Raises ValueError if a file is
    broken.
    """
    config = _json(files, "special_tokens_map.json") | _json(files, "tokenizer_config.json")
    token = config.get(name)
    content = token.get("content") if isinstance(token, dict) else token
    return added_token_id(files, content) if isinstance(content, str) else None


def added_token_id(files: Mapping[str, str], content: str) -> int | None:
    """Returns the id of an added token by its text, or None if the files add none such. Raises ValueError if a file is
    broken.
    """
    declared = _json(files, "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(declared, dict):
        found = (key for key, added in declared.items() if isinstance(added, dict) and added.get("content") == content)
        if (key := next(found, "")).isdecimal():
            return int(key)
    added_tokens = msgspec.json.decode(files.get("tokenizer.json", "{}"), type=_AddedTokens).added_tokens
    return next((added.id for added in added_tokens if added.content == content), None)


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

_LLAMA_DEFAULTS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_CLASS_DEFAULTS = {
    "CodeLlamaTokenizer": _LLAMA_DEFAULTS,
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "LlamaTokenizer": _LLAMA_DEFAULTS,
    "Qwen2Tokenizer": {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
}
"""Special tokens by tokenizer class, for files that name no others. Those that the vocabulary lacks are left out: an
added token would get an id that the model does not have.
"""


def _named_tokens(config: dict[str, Any], defaults: dict[str, str]) -> dict[str, str | dict[str, Any]]:
    """Returns standard names first, then a model's own, which may also stand under keys of their own."""
    tokens = defaults | {name: value for name, value in config.items() if name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(key), dict):
            tokens |= config[key]
    names = [*_STANDARD_NAMES, *(name for name in tokens if name not in _STANDARD_NAMES)]
    return {
        name: tokens[name]
        for name in names
        if isinstance(tokens.get(name), str) or (isinstance(tokens.get(name), dict) and "content" in tokens[name])
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
    """Returns the class that transformers' AutoTokenizer picks, as far as it matters here; "" means the
    file as it is.
    """
    named = config.get("tokenizer_class") or model_config.get("tokenizer_class") or ""
    named = str(named).removesuffix("Fast")
    registered = _CLASS_OF_MODEL_TYPE.get(str(model_config.get("model_type", "")))
    if registered is None or not named:
        return named or registered or ""
    if named != registered and (registered == "" or model_config["model_type"] in _TRUST_MODEL_TYPE):
        return registered
    return named


_CLASS_OF_MODEL_TYPE = {
    "code_llama": "CodeLlamaTokenizer",
    "deepseek_v2": "",
    "deepseek_v3": "",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "granite": "",
    "mistral": "",
    "mistral3": "",
    "mixtral": "",
    "olmo2": "",
    "phi3": "",
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
}
_TRUST_MODEL_TYPE = {"qwen2"}
"""Model types whose folders on the hub often name a wrong class."""


_FALLBACK_DECODERS = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_DECODER = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _metaspace(scheme: str, *, strips: bool) -> dict[str, Any]:
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": [*_FALLBACK_DECODERS, *([_STRIP_DECODER] if strips else [])]},
    }


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    prefix = config.get("add_prefix_space") in (None, True)
    return _metaspace("never" if not prefix else "always" if config.get("legacy") else "first", strips=prefix)


def _code_llama(config: dict[str, Any]) -> dict[str, Any]:
    return _metaspace("first" if config.get("add_prefix_space") in (None, True) else "never", strips=True)


def _gemma(_config: dict[str, Any]) -> dict[str, Any]:
    space = {"String": " "}
    return {
        "normalizer": {"type": "Replace", "pattern": space, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": False},
        "decoder": {"type": "Sequence", "decoders": _FALLBACK_DECODERS},
    }


_REBUILT = {"LlamaTokenizer": _llama, "CodeLlamaTokenizer": _code_llama, "GemmaTokenizer": _gemma}
_REBUILT_MODEL: dict[str, Any] = {
    "dropout": None,
    "unk_token": None,
    "fuse_unk": True,
    "byte_fallback": True,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "ignore_merges": False,
}


def _is_sentencepiece(description: dict[str, Any]) -> bool:
    """Returns True if the file describes a BPE model of SentencePiece, whose spaces are ▁.

    Byte-level files under the same class names (DeepSeek's distills of Llama, for example) must stay as they are:
    transformers 5 destroys their text (its issue 45488).
    """
    if (description.get("model") or {}).get("type") != "BPE":
        return False
    parts = json.dumps([description.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")])
    return '"ByteLevel"' not in parts and json.dumps("▁") in parts


def _chat_templates(files: Mapping[str, str], config: dict[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name; those in files come before those in tokenizer_config.json."""
    templates = {
        name.removeprefix(f"{TEMPLATE_FOLDER}/").removesuffix(".jinja"): text
        for name, text in files.items()
        if name.startswith(f"{TEMPLATE_FOLDER}/")
    }
    if "chat_template.jinja" in files:
        templates["default"] = files["chat_template.jinja"]
    template_field = config.get("chat_template")
    if templates or not template_field:
        return templates
    if isinstance(template_field, list):
        return {entry["name"]: entry["template"] for entry in template_field}
    return template_field if isinstance(template_field, dict) else {"default": template_field}


TEMPLATE_FOLDER = "additional_chat_templates"
