"""Defines the rules by which byte-level tokenizers split words, under llama.cpp's names (`tokenizer.ggml.pre`).

Follows llama.cpp's src/llama-vocab.cpp. Where llama.cpp rewrites a regular expression that its engine lacks, this
module has the original tokenizer's. Knows no file. No torch.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WordRule:
    """A rule that splits a text into words, each of which is tokenised by itself."""

    patterns: tuple[str, ...]
    """Regular expressions. Each splits the pieces of those before it into its matches and the text between them."""
    normalizer: dict[str, Any] | None = None
    takes_whole_words: bool = False
    """True if a word that is in the vocabulary is not merged from its bytes (`ignore_merges`)."""
    adds_bos: bool = False
    """True if a text begins with BOS by default, when the file says nothing of it."""

    def pre_tokenizer(self) -> dict[str, Any]:
        """Returns the rule in the format of tokenizer.json."""
        splits = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        return {"type": "Sequence", "pretokenizers": [*splits, byte_level(use_regex=False)]}


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    """Returns the step that turns bytes into GPT-2's letters, and back if it is a decoder."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_BLANKS}"
_QWEN2_WORDS = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_PUNCTUATION}|{_BLANKS}"
_QWEN35_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)


def _by_case(*, contractions: str, numbers: str) -> str:
    """Returns the pattern of words whose capital letters come first, as in tekken and o200k."""
    begin, punctuation = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    words = f"{begin}{_UPPER}*{_LOWER}+{contractions}|{begin}{_UPPER}+{_LOWER}*{contractions}"
    return f"{words}|{numbers}|{punctuation}|{_BLANKS}"


_GPT2 = WordRule((_GPT2_WORDS,))
_SINGLE_DIGITS = WordRule((r"\p{N}", _GPT2_WORDS))
_QWEN2 = WordRule((_QWEN2_WORDS,), normalizer={"type": "NFC"})
_LLAMA3 = WordRule((_LLAMA3_WORDS,), takes_whole_words=True, adds_bos=True)
_LLAMA3_MERGED = WordRule((_LLAMA3_WORDS,))
_DEEPSEEK3 = WordRule((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3_WORDS))
_DEEPSEEK_LLM = WordRule(
    (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[一-龥ࠀ-一가-\ud7ff]+",
        r"\p{N}+",
    )
)
_DEEPSEEK_CODER = WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"))
_DEFAULT = WordRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"))
_FALCON = WordRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]"))
_TEKKEN = WordRule((_by_case(contractions="", numbers=r"\p{N}"),), takes_whole_words=True, adds_bos=True)
_GPT4O = WordRule((_by_case(contractions=f"{_CONTRACTIONS}?", numbers=r"\p{N}{1,3}"),))
_BAILING = WordRule(
    (rf"'(?i:[sdmt]|ll|ve|re)|{_LETTERS}|\p{{N}}|{_PUNCTUATION}|\s*[\r\n]|\s+(?!\S)|\s+",),
)
_SEED_CODER = WordRule((rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",))
_SENTENCES = " ?[^(\\s|.,!?…。，、।۔،)]+"

_NAMES: list[tuple[WordRule, str]] = [
    (_GPT2, "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 olmo mpt jais trillion granite-docling"),
    (_SINGLE_DIGITS, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (_QWEN2, "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    (WordRule((_QWEN35_WORDS,), normalizer={"type": "NFC"}), "qwen35"),
    (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"),
    (_LLAMA3_MERGED, "smaug-bpe dbrx glm4 chatglm-bpe"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (_DEEPSEEK_LLM, "deepseek-llm"),
    (_DEEPSEEK_CODER, "deepseek-coder"),
    (_DEFAULT, "default"),
    (_FALCON, "falcon"),
    (_TEKKEN, "tekken"),
    (_GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (_BAILING, "bailingmoe bailingmoe2 llada-moe"),
    (_SEED_CODER, "seed-coder"),
    (WordRule((_SENTENCES,)), "poro-chat bloom gpt3-finnish"),
    (WordRule((_SENTENCES, r"\p{N}")), "viking"),
    (WordRule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
]
WORD_RULES: dict[str, WordRule] = {name: rule for rule, names in _NAMES for name in names.split()}
"""The rules by llama.cpp's names of pre-tokenizers."""
NO_RULE = "default"
"""The name that llama.cpp assumes if a file has none."""
