"""Trains the byte-level BPE tokenizer on the snapshot and writes it to the asset folder; the result is committed.

Fixes the vocabulary, the special tokens and the tokenizer's configuration; knows nothing of the model.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.conversations import ChatMaker
from demo.entries import load_entries, load_sources

ASSETS = Path(__file__).parent.parent / "engine" / "mini_infer_engine" / "assets" / "demo"
VOCABULARY_SIZE = 4096
MAX_MODEL_LEN = 4096
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; never shown to a user
# Shown in text, because the server's parsers read them there; each is one token all the same.
VISIBLE_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def main() -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    ASSETS.mkdir(parents=True, exist_ok=True)
    (ASSETS / "tokenizer.json").write_text(tokenizer_json(corpus_text()), encoding="utf-8")
    (ASSETS / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n", encoding="utf-8")
    print(Tokenizer.from_file(str(ASSETS / "tokenizer.json")).get_vocab_size(), "tokens")


def corpus_text() -> Iterator[str]:
    """The text whose statistics decide the merges: chats twice over, docstrings, sources."""
    entries = load_entries()
    maker = ChatMaker(entries, random.Random(0))
    for _ in range(3):
        for entry in entries:
            yield from (message["content"] for message in maker.chat_about(entry).messages)
    for entry in entries:
        yield entry.docstring
    for _, text in load_sources():
        yield text[:40_000]


def tokenizer_json(texts: Iterator[str]) -> str:
    """The tokenizer as the `tokenizers` library writes it, with exactly VOCABULARY_SIZE tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in (*CONTROL_TOKENS, *VISIBLE_TOKENS)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    raw = json.loads(tokenizer.to_str())
    for token in raw["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    return json.dumps(raw, ensure_ascii=False, indent=1) + "\n"


def tokenizer_config() -> dict[str, object]:
    """What transformers reads beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_MODEL_LEN,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }


if __name__ == "__main__":
    main()
