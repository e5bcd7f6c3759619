"""What transformers does to a tokenizer beyond tokenizer.json, and that it is done here too."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mini_infer_prompts.prompt import PromptAssets, PromptEncoder
from mini_infer_prompts.tokenizer_files import load_tokenizer
from tests.prompts import conversations
from tests.prompts.conversations import quick
from tests.prompts.folders import TOKENIZERS, write_folder

LLAMA, CODE_LLAMA, GEMMA, QWEN = "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer"
PADDING = {"__type": "AddedToken", "content": "<pad>", "lstrip": True, "rstrip": False, "normalized": False}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
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

SENTENCEPIECE = ["prepend_normalizer", "metaspace_first", "metaspace_always", "metaspace_never", "gemma_split"]
BYTE_LEVEL = ["byte_level", "byte_level_prefix_space", "byte_level_llama3", "byte_level_digits"]
CLASSES = [LLAMA, LLAMA + "Fast", CODE_LLAMA + "Fast", GEMMA, QWEN, QWEN + "Fast", "XLMRobertaTokenizer"]
FLAGS: dict[str, dict[str, Any]] = {
    "no_flags": {},
    "legacy": {"legacy": True, "add_bos_token": True, "add_eos_token": True},
    "not_legacy": {"legacy": False, "add_bos_token": True, "add_eos_token": False},
    "null_flags": {"legacy": None, "add_prefix_space": None},
    "prefix_space": {"add_prefix_space": True, "legacy": True, "clean_up_tokenization_spaces": True},
    "no_prefix_space": {"add_prefix_space": False, "legacy": False},
}
TEXTS = [
    "The capital of France is Paris. 日本",
    "  two spaces,\n\n 1234567 and\ttabs ",
    "<s>[INST] Hello [/INST] it's<|im_end|> x <unk></s>",
    "<|im_start|>user\nÜnïcödé 🙂\u200b ▁x<|im_end|>\n<think>",
    "",
]


def assert_equal(reference: Any, encoder: PromptEncoder, text: str) -> None:
    for add_special_tokens in (False, True):
        ids = reference(text, add_special_tokens=add_special_tokens)["input_ids"]
        assert encoder.encode(text, add_special_tokens) == ids
        assert encoder.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("case", CASES)
@quick
@given(text=conversations.texts)
def test_tokenizers_equal_those_loaded_by_transformers(case: str, tmp_path: Path, text: str) -> None:
    if case not in _loaded:
        name, model_type, config = CASES[case]
        folder = write_folder(tmp_path, TOKENIZERS[name](), model_type=model_type, **config)
        _loaded[case] = AutoTokenizer.from_pretrained(folder), PromptEncoder(PromptAssets.from_directory(folder))
    reference, encoder = _loaded[case]
    assert encoder.special_tokens == reference.special_tokens_map
    assert_equal(reference, encoder, text)


def assert_equal_texts(reference: Any, encoder: PromptEncoder) -> None:
    for text in TEXTS:
        assert_equal(reference, encoder, text)


@pytest.mark.parametrize("form", SENTENCEPIECE)
@pytest.mark.parametrize("tokenizer_class", [LLAMA, LLAMA + "Fast", CODE_LLAMA, GEMMA])
@pytest.mark.parametrize("flags", FLAGS)
def test_sentencepiece_files_are_read_as_transformers_does_when_a_class_is_named(
    form: str, tokenizer_class: str, flags: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path, TOKENIZERS[form](), tokenizer_class=tokenizer_class, **FLAGS[flags])
    encoder = PromptEncoder(PromptAssets.from_directory(folder))
    assert_equal_texts(AutoTokenizer.from_pretrained(folder), encoder)


@pytest.mark.parametrize("form", [*SENTENCEPIECE, *BYTE_LEVEL])
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "granite", "mistral", "mixtral", "olmo2", "phi3"])
@pytest.mark.parametrize("tokenizer_class", [LLAMA, "GPT2TokenizerFast"])
def test_the_model_type_decides_when_it_does_not_use_the_named_class(
    form: str, model_type: str, tokenizer_class: str, tmp_path: Path
) -> None:
    folder = write_folder(
        tmp_path, TOKENIZERS[form](), model_type=model_type, tokenizer_class=tokenizer_class, legacy=False
    )
    encoder = PromptEncoder(PromptAssets.from_directory(folder))
    assert_equal_texts(AutoTokenizer.from_pretrained(folder), encoder)


@pytest.mark.parametrize("form", BYTE_LEVEL)
@pytest.mark.parametrize("tokenizer_class", CLASSES)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text"])
def test_byte_level_files_stay_as_they_are_when_the_named_class_is_of_another_kind(
    form: str, tokenizer_class: str, model_type: str, tmp_path: Path
) -> None:
    for number, flags in enumerate(FLAGS.values()):
        folder = write_folder(
            tmp_path / str(number),
            TOKENIZERS[form](),
            model_type=model_type,
            tokenizer_class=tokenizer_class,
            **flags,
        )
        reference = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        encoder = PromptEncoder(PromptAssets.from_directory(folder))
        assert encoder.tokenizer.get_vocab() == reference.get_vocab()
        assert_equal_texts(reference, encoder)


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
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, r"tokenizer_config\.json.*JSON object"),
        ({"tokenizer.json": "[]", "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'}, "must be a JSON"),
    ],
)
def test_the_error_names_a_tokenizer_file_when_it_is_broken(files: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(files)
