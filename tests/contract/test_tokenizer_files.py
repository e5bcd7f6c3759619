"""What transformers does to a tokenizer beyond tokenizer.json, and that it is done here too."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from transformers import AutoTokenizer

from mini_infer_contract.prompt import PromptAssets, PromptEncoder
from mini_infer_contract.tokenizer_files import load_tokenizer
from tests.contract import conversations
from tests.contract.conversations import quick
from tests.contract.folders import TOKENIZERS, write_folder

QWEN, LLAMA = "Qwen2Tokenizer", "LlamaTokenizer"
PADDING = {"__type": "AddedToken", "content": "<pad>", "lstrip": True, "rstrip": False, "normalized": False}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen": ("byte_level", "qwen2", {"tokenizer_class": QWEN, "bos_token": None}),
    "qwen with a prefix space": ("byte_level", "qwen3", {"tokenizer_class": QWEN, "add_prefix_space": True}),
    "qwen under a wrong class": ("byte_level", "qwen2", {"tokenizer_class": "LlamaTokenizerFast"}),
    "qwen without a class": ("byte_level", "qwen2", {"tokenizer_class": None}),
    "qwen by its file": ("byte_level", "qwen3", {}),
    "bos and eos asked for": ("byte_level", "llama", {"add_bos_token": True, "add_eos_token": True}),
    "bos not asked for": ("byte_level_llama3", "llama", {"add_bos_token": False}),
    "llama": ("prepend_normalizer", "llama", {"tokenizer_class": LLAMA, "legacy": False, "add_bos_token": True}),
    "llama, legacy": ("prepend_normalizer", "llama", {"tokenizer_class": LLAMA + "Fast", "legacy": True}),
    "llama, null": ("prepend_normalizer", "llama", {"tokenizer_class": LLAMA, "legacy": None}),
    "llama, no space": ("prepend_normalizer", "llama", {"tokenizer_class": LLAMA, "add_prefix_space": False}),
    "mistral": ("prepend_normalizer", "mistral", {"tokenizer_class": LLAMA}),
    "deepseek": ("prepend_normalizer", "deepseek_v2", {"tokenizer_class": LLAMA + "Fast"}),
    "tokens that the file lacks": (
        "byte_level",
        "llama",
        {"pad_token": PADDING, "extra_special_tokens": ["<|im_"], "image_token": "[IN"},
    ),
    "additional tokens": ("byte_level", "llama", {"additional_special_tokens": ["end|>", "[IN"]}),
    "named extra tokens": ("byte_level", "llama", {"extra_special_tokens": {"image_token": "[IN"}}),
    "special tokens as text": ("byte_level", "llama", {"split_special_tokens": True}),
}


def assert_equal(reference: Any, encoder: PromptEncoder, text: str) -> None:
    for add_special_tokens in (False, True):
        ids = reference(text, add_special_tokens=add_special_tokens)["input_ids"]
        assert encoder.encode(text, add_special_tokens) == ids
        assert encoder.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("case", CASES)
@quick
@given(text=conversations.texts)
def test_as_transformers_loads_it(case: str, tmp_path: Path, text: str) -> None:
    if case not in _loaded:
        name, model_type, config = CASES[case]
        folder = write_folder(tmp_path, TOKENIZERS[name](), model_type=model_type, **config)
        _loaded[case] = AutoTokenizer.from_pretrained(folder), PromptEncoder(PromptAssets.from_directory(folder))
    reference, encoder = _loaded[case]
    assert encoder.special_tokens == reference.special_tokens_map
    assert_equal(reference, encoder, text)


_loaded: dict[str, tuple[Any, PromptEncoder]] = {}


def test_added_tokens_in_the_config_override_the_files(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["byte_level"]()
    declared = {
        str(token_id): json.loads(json.dumps(token.__getstate__()))
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }
    first, second, *_ = declared.values()
    first["lstrip"], second["special"], second["normalized"] = True, False, True
    declared[str(tokenizer.get_vocab_size())] = {**first, "content": "<|im_", "rstrip": True}
    folder = write_folder(tmp_path, tokenizer, added_tokens_decoder=declared)
    reference, encoder = AutoTokenizer.from_pretrained(folder), PromptEncoder(PromptAssets.from_directory(folder))
    for text in ("a <s> </s> b", "x <|im_ y", "<|im_end|>  <s>", "</s>"):
        assert_equal(reference, encoder, text)
    assert not encoder.segments.splits


def test_special_tokens_map_counts_where_the_config_declares_no_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, TOKENIZERS["byte_level"](), eos_token=None)
    names = {"eos_token": {"content": "<|im_end|>", "lstrip": False, "normalized": False}, "pad_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    reference, encoder = AutoTokenizer.from_pretrained(folder), PromptEncoder(PromptAssets.from_directory(folder))
    assert encoder.special_tokens == reference.special_tokens_map
    assert encoder.special_tokens["eos_token"] == "<|im_end|>"
    assert encoder.special_token_id("eos_token") == reference.eos_token_id
    assert encoder.special_token_id("mask_token") is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"tokenizer\.json is missing"),
        ({"tokenizer.json": "{"}, r"tokenizer\.json: "),
        ({"tokenizer.json": "{}"}, r"tokenizer\.json: "),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{"}, r"tokenizer_config\.json: "),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, r"tokenizer_config\.json: must be a JSON object"),
        ({"tokenizer.json": "[]", "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'}, "must be a JSON"),
    ],
)
def test_a_broken_file_is_named(files: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(files)
