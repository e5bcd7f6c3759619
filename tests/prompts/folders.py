"""Small model folders in Hugging Face format: tokenizers of every kind that matters, trained here in milliseconds."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = [
    *("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|im_end|>x", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
]
PLAIN = ["<think>", "</think>", "<tool_call>", "[TOOL_CALLS]"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. What does textwrap.dedent do? It removes common whitespace.",
    "def dedent(text: str) -> str:\n    return text\n\n\n1234567890 hello world, it's the system user assistant",
    "naïve café 東京 Ünïcödé ½ \u00a0 emoji 🙂 tool_call name arguments location Zürich temperature 3.14",
] * 4


def byte_level(*, prefix_space: bool = False) -> Tokenizer:
    """As Qwen's and Llama 3's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level_llama3() -> Tokenizer:
    """Words by a regular expression, and a BOS from the post-processor."""
    tokenizer = byte_level()
    tokenizer.normalizer = None
    words = pre_tokenizers.Split(Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"), "isolated")
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte])
    tokenizer.add_special_tokens(["<s>"])
    bos = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", tokenizer.token_to_id("<s>"))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), bos])
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    """As SentencePiece's: spaces are ▁, unknown letters are bytes."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(fallback)
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator([word for text in CORPUS for word in text.split(" ")], trainer)
    # The bytes are vocabulary, not tokens to look for in a text.
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = description["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(description))


def prepend_normalizer() -> Tokenizer:
    """As Llama 2's file: the prefix space comes from the normalizer, in each piece."""
    tokenizer = metaspace("never")
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def gemma_split() -> Tokenizer:
    """As Gemma's file: no prefix space, and words end with their space."""
    tokenizer = metaspace("never")
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def byte_level_digits() -> Tokenizer:
    """As the first DeepSeek models': words by several rules, one after the other."""
    tokenizer = byte_level()
    tokenizer.normalizer = None
    rules = [
        pre_tokenizers.Split(Regex(r"[\r\n]"), "isolated"),
        pre_tokenizers.Split(Regex(r"\s?\p{L}+"), "isolated"),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rules)
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram with a normalizer that changes lengths."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, unk_token="<unk>", special_tokens=["<unk>", "<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def with_tokens(tokenizer: Tokenizer, **flags: bool) -> Tokenizer:
    """Adds special and plain tokens; `flags` go to the plain ones."""
    tokenizer.add_special_tokens([token for token in SPECIAL if token not in tokenizer.get_vocab()])
    tokenizer.add_tokens([AddedToken(token, **{"normalized": False, **flags}) for token in PLAIN])
    return tokenizer


_TRAINED: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": lambda: with_tokens(byte_level()),
    "byte_level_prefix_space": lambda: with_tokens(byte_level(prefix_space=True)),
    "byte_level_llama3": lambda: with_tokens(byte_level_llama3()),
    "byte_level_digits": lambda: with_tokens(byte_level_digits()),
    "metaspace_first": lambda: with_tokens(metaspace("first")),
    "metaspace_always": lambda: with_tokens(metaspace("always")),
    "metaspace_never": lambda: with_tokens(metaspace("never")),
    "gemma_split": lambda: with_tokens(gemma_split()),
    "prepend_normalizer": lambda: with_tokens(prepend_normalizer()),
    "unigram": lambda: with_tokens(unigram()),
    "normalized_tokens": lambda: with_tokens(unigram(), normalized=True, single_word=True, lstrip=True),
    "stripping_tokens": lambda: with_tokens(byte_level(), lstrip=True, rstrip=True),
    "single_word_tokens": lambda: with_tokens(byte_level(), single_word=True),
}


@functools.cache
def _file_of(name: str) -> str:
    return _TRAINED[name]().to_str()


def _copy_of(name: str) -> Tokenizer:
    return Tokenizer.from_str(_file_of(name))


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {name: functools.partial(_copy_of, name) for name in _TRAINED}
"""Each call returns another copy of one that is trained once."""
SPLITTING = {
    "byte_level",
    "byte_level_prefix_space",
    "byte_level_llama3",
    "byte_level_digits",
    "metaspace_always",
    "metaspace_never",
    "gemma_split",
    "prepend_normalizer",
    "unigram",
    "normalized_tokens",
}
"""Those that may be encoded piece by piece."""


FRAGMENTS = [
    *SPECIAL,
    *PLAIN,
    *(
        "hello",
        " hello",
        "it's",
        "x",
        "A",
        "1234",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "\u00a0",
        "▁",
        "<|im_",
        "end|>",
        "[IN",
    ),
    *("Ünï", "e\u0301", "東京", "🙂", "½", "ﬁ", "\u200b", "\x00", "<0x41>", "CONTINUE_FINAL_MESSAGE_TAG "),
]
"""What texts are made of where it matters how tokenizers cut."""


def write_folder(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = None,
    model_type: str = "llama",
    **config: Any,
) -> Path:
    """A model folder as `save_pretrained` would write it, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder
