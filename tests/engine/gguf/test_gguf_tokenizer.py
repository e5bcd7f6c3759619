"""Tokenizers from GGUF files: the ids of the tokenizer that was converted, or of llama.cpp's algorithm."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.gguf.architectures import eos_token_ids
from mini_infer_engine.gguf.header import GgufHeader
from mini_infer_engine.gguf.tokenizer import tokenizer_files
from mini_infer_engine.gguf.word_rules import WORD_RULES
from mini_infer_engine.model_path import DEMO_DIRECTORY
from mini_infer_engine.text.token_bytes import byte_level_alphabet
from mini_infer_prompts.prompt import PromptAssets, PromptEncoder
from tests.support.prompt_ids import encode_chat

TEXTS = [
    "def f(x):\r\n\treturn x  # 12345\n\n\n  ",
    "<|im_start|>user\nHello, world's 3rd café: 東京 🙂<|im_end|>\n<think>no</think>",
    "",
    " ",
    "I'LL don't  'em \u200b ½ ²\x00\x7f",
]
CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 + 30?"}]


def header_of(**fields: Any) -> GgufHeader:
    template = {"tokenizer.chat_template": fields.pop("chat_template")} if "chat_template" in fields else {}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    return GgufHeader(Path("m.gguf"), metadata | template, {})


def encoder_of(header: GgufHeader) -> PromptEncoder:
    files = tokenizer_files(header)
    return PromptEncoder(PromptAssets.from_files({name: json.dumps(content) for name, content in files.items()}))


def demo_header() -> GgufHeader:
    """The demo model's tokenizer as convert_hf_to_gguf.py writes it."""
    description = json.loads((DEMO_DIRECTORY / "tokenizer.json").read_text())
    vocab = description["model"]["vocab"] | {token["content"]: token["id"] for token in description["added_tokens"]}
    tokens = [token for token, _ in sorted(vocab.items(), key=lambda entry: entry[1])]
    special = {token["content"]: 3 if token["special"] else 4 for token in description["added_tokens"]}
    return header_of(
        model="gpt2",
        pre="qwen2",
        tokens=[*tokens, "[PAD4096]"],
        token_type=[*(special.get(token, 1) for token in tokens), 5],
        merges=[" ".join(merge) for merge in description["model"]["merges"]],
        eos_token_id=vocab["<|im_end|>"],
        padding_token_id=vocab["<|endoftext|>"],
        chat_template=(DEMO_DIRECTORY / "chat_template.jinja").read_text(),
    )


def test_gguf_bpe_tokenizer_and_template_equal_the_converted_ones() -> None:
    made, expected = encoder_of(demo_header()), PromptEncoder(PromptAssets.from_directory(DEMO_DIRECTORY))
    for text in TEXTS:
        ids = expected.encode(text, True)
        assert made.encode(text, True) == ids
        assert made.decode(ids) == expected.decode(ids)
    assert encode_chat(made, CONVERSATION) == encode_chat(expected, CONVERSATION)
    assert made.special_token_id("eos_token") == expected.special_token_id("eos_token")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("gpt-2", ["It", "'s", "Ġ1234", "Ġdays", ",", "ĠDON", "'", "T", "ĊĊ"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġdays", ",", "ĠDON", "'", "T", "ĊĊ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġdays", ",", "ĠDON", "'T", "ĊĊ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "Ġdays", ",", "ĠDON", "'T", "ĊĊ"]),
        *(
            (alias, ["It", "'s", "Ġ", "123", "4", "Ġdays", ",", "ĠDON", "'T", "ĊĊ"])
            for alias in ("llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3", "pixtral", "chatglm-bpe")
        ),
        ("megrez", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġdays", ",", "ĠDON", "'T", "ĊĊ"]),
        ("tekken", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġdays", ",", "ĠDON", "'T", "ĊĊ"]),
        ("gpt-4o", ["It's", "Ġ", "123", "4", "Ġdays", ",", "ĠDON'T", "ĊĊ"]),
        ("deepseek-v3", ["It", "'s", "Ġ", "123", "4", "Ġdays", ",", "ĠDON", "'T", "ĊĊ"]),
        ("deepseek-llm", ["It", "'", "s", "Ġ", "1234", "Ġdays", ",", "ĠDON", "'", "T", "Ċ", "Ċ"]),
        ("deepseek-coder", ["It", "'", "s", "Ġ", "1", "2", "3", "4", "Ġdays", ",", "ĠDON", "'", "T", "Ċ", "Ċ"]),
        ("default", ["It", "'", "s", "Ġ", "123", "4", "Ġdays", ",", "ĠDON", "'", "T", "ĊĊ"]),
        ("superbpe", ["It'sĠ", "1", "234", "Ġdays,ĠDON'TĊĊ"]),
    ],
)
def test_gguf_pre_tokenizers_split_like_the_published_ones(rule: str, words: list[str]) -> None:
    splitter: Any = encoder_of(header_of(model="gpt2", pre=rule, tokens=["a"], merges=[])).tokenizer.pre_tokenizer
    assert [word for word, _ in splitter.pre_tokenize_str("It's 1234 days, DON'T\n\n")] == words


@pytest.mark.parametrize(
    ("rule", "fields", "expected"),
    [
        ("llama-bpe", {}, [1, 0]),
        ("llama3", {}, [1, 0]),
        ("tekken", {}, [1, 0]),
        ("llama-bpe", {"add_bos_token": False}, [0]),
        ("smaug-bpe", {}, [0]),
        ("dbrx", {}, [0]),
        ("gpt-2", {}, [0]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [1, 0, 1]),
        ("", {}, [0]),
        (None, {}, [0]),
    ],
)
def test_a_text_begins_with_bos_as_in_llama_cpp_when_the_file_does_not_say(
    rule: str | None, fields: dict[str, Any], expected: list[int]
) -> None:
    named = {} if rule is None else {"pre": rule}
    tokens = {"tokens": ["a", "<s>"], "token_type": [1, 3], "bos_token_id": 1, "eos_token_id": 1}
    encoder = encoder_of(header_of(model="gpt2", merges=[], **tokens, **named, **fields))
    assert encoder.encode("a", True) == expected


@pytest.mark.parametrize("rule", ["no-such-rule", 5, ["qwen2"]])
def test_an_unknown_rule_is_refused_with_those_that_are_known_when_a_file_names_it(rule: Any) -> None:
    with pytest.raises(ModelError, match=r"ggml\.pre"):
        tokenizer_files(header_of(model="gpt2", pre=rule, tokens=["a"], merges=[]))


def test_real_words_are_split_as_tokenizer_json_does_when_every_rule_is_loaded() -> None:
    for name, rule in WORD_RULES.items():
        made = encoder_of(header_of(model="gpt2", pre=name, tokens=["a"], merges=[]))
        splitter: Any = made.tokenizer.pre_tokenizer
        for text in TEXTS:
            joined = "".join(word for word, _ in splitter.pre_tokenize_str(text))
            assert bytes_of(joined) == text.encode(), (name, rule)


def bytes_of(word: str) -> bytes:
    alphabet = byte_level_alphabet()
    return bytes(alphabet[character] for character in word)


PIECES = ["▁", "a", "b", "n", "d", "an", "▁a", "and", "▁an", "▁and", "ab", "ba", "band", "nd", "aa", "▁▁", "dd", "na"]
SCORES = [-5.0, -6.0, -6.1, -6.2, -6.3, -1.0, -1.5, -0.5, -2.0, -0.1, -3.0, -3.1, -4.0, -2.5, -3.5, -1.2, -3.6, -2.2]


def sentencepiece_header(**fields: Any) -> GgufHeader:
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return header_of(
        model="llama",
        tokens=[*special, *PIECES, "<turn>", "\n\n"],
        scores=[*[0.0] * len(special), *SCORES, 0.0, 0.0],
        token_type=[2, 3, 3, *[6] * 256, *[1] * len(PIECES), 3, 4],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        **fields,
    )


def llama_cpp_ids(header: GgufHeader, text: str) -> list[int]:
    """llama.cpp's SPM tokenizer: of all neighbours that make a piece, join the best, leftmost first; else bytes."""
    tokens, scores = header.metadata["tokenizer.ggml.tokens"], header.metadata["tokenizer.ggml.scores"]
    places = {token: index for index, token in enumerate(tokens)}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [
            (scores[places[pair]], -at) for at, pair in enumerate(map("".join, pairwise(symbols))) if pair in places
        ]
        if not joined:
            break
        at = -max(joined)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        ids += [places[symbol]] if symbol in places else [3 + byte for byte in symbol.encode()]
    return ids


def test_sentencepiece_merges_as_llama_cpp_does() -> None:
    header = sentencepiece_header()
    encoder, dice = encoder_of(header), random.Random(5)
    for length in range(1, 200):
        text = "".join(dice.choices("abnd é", weights=[5, 3, 4, 4, 2, 0.3], k=length % 24 + 1))
        ids = llama_cpp_ids(header, text)
        assert encoder.encode(text, False) == ids, text
        assert encoder.decode(ids) == text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1, "▁and"]),
        ({"add_eos_token": True}, [1, "▁and", 2]),
        ({"add_bos_token": False}, ["▁and"]),
        ({"add_space_prefix": False}, [1, "and"]),
    ],
)
def test_gguf_tokenizer_adds_bos_eos_and_space_by_its_fields(fields: dict[str, Any], expected: list[int | str]) -> None:
    header = sentencepiece_header(**fields)
    tokens = header.metadata["tokenizer.ggml.tokens"]
    ids = [tokens.index(token) if isinstance(token, str) else token for token in expected]
    assert encoder_of(header).encode("and", True) == ids


def test_gguf_control_tokens_are_recognised_in_a_text() -> None:
    encoder = encoder_of(sentencepiece_header(add_space_prefix=False))
    turn, newlines = (encoder.tokenizer.token_to_id(token) for token in ("<turn>", "\n\n"))
    ids = encoder.encode("and<turn>an\n\n", False)
    assert ids == [encoder.tokenizer.token_to_id("and"), turn, encoder.tokenizer.token_to_id("an"), newlines]
    assert encoder.decode(ids) == "andan\n\n"


def test_gguf_eos_ids_include_every_end_of_turn_token() -> None:
    tokens = ["a", "</s>", "<|eot_id|>", "<end_of_turn>", "b"]
    assert eos_token_ids(header_of(tokens=tokens, eos_token_id=1, eom_token_id=4)) == [1, 2, 3, 4]
