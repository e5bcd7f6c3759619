"""Both sides of a cut, tokenised apart, give the ids of the whole: at every place that the rules allow."""

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from mini_infer_prompts import text_slices
from mini_infer_prompts.text_slices import MAX_RUN_CHARACTERS, SLICE_CHARACTERS, can_be_cut, next_cut
from tests.prompts.folders import CORPUS

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
PATTERNS = {
    "qwen2": rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}|{PUNCTUATION}|{BLANKS}",
    "llama3": rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}|{PUNCTUATION}|{BLANKS}",
    "qwen3.5": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*{CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}",
    "gpt2": None,
}
NASTY_PIECES = [
    *(*"aZst0159", *" \n\t\r", *"'.,!/=<_-", *"é字。，かß²Ⅷ", "\u0301", "\u0338", "\u0085", "\x1c", "\u3000", "\u00a0"),
    *("'s", "'ll", "don't ", "  ", "\n\n", "a b", "東京 ", "e\u0301 ", "\U0001f642", "ﬁ", "Ⅷ ", "\u0915\u094d "),
]
NASTY = st.lists(st.sampled_from(NASTY_PIECES), max_size=25).map("".join)


def words(pattern: str | None) -> pre_tokenizers.PreTokenizer:
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


@functools.cache
def tokenizer(name: str, normal_form: str | None = "NFC") -> Tokenizer:
    made = Tokenizer(models.BPE())
    if normal_form:
        made.normalizer = getattr(normalizers, normal_form)()
    made.pre_tokenizer = words(PATTERNS[name])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def ids(made: Tokenizer, text: str) -> list[int]:
    return made.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("normal_form", [None, "NFC", "NFD", "NFKC", "Lowercase"])
@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=60, deadline=None)
@given(text=NASTY)
@example(text="don't 12ab e\u0301 =\u0338 a=\u0338 東京。x' s 1's\n\n")
def test_cutting_a_text_at_any_allowed_place_keeps_its_ids(name: str, normal_form: str | None, text: str) -> None:
    made = tokenizer(name, normal_form)
    assert can_be_cut(made)
    whole = ids(made, text)
    for cut in text_slices._CUTS.finditer(text):
        assert ids(made, text[: cut.start()]) + ids(made, text[cut.start() :]) == whole, text[: cut.start()]


def test_texts_are_not_cut_when_parts_could_differ() -> None:
    assert can_be_cut(tokenizer("qwen2"))
    for change in (
        lambda t: setattr(t, "pre_tokenizer", None),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda t: setattr(t, "pre_tokenizer", words(r"\p{L}+|\p{N}+")),  # what it does not match stays together
        lambda t: setattr(t, "pre_tokenizer", words(PATTERNS["qwen2"] + r"|\p{L}+ \p{L}+")),
        lambda t: setattr(t, "normalizer", normalizers.Replace(" ", "x")),
        lambda t: setattr(t, "normalizer", normalizers.Prepend("x")),
        lambda t: t.add_tokens([AddedToken("two words", normalized=True)]),
        lambda t: t.add_tokens([AddedToken("word", normalized=True, lstrip=True)]),
        lambda t: setattr(t, "model", models.BPE(dropout=0.5)),
    ):
        changed = Tokenizer.from_str(tokenizer("qwen2").to_str())
        change(changed)
        assert not can_be_cut(changed)


@pytest.mark.parametrize(
    "text", ["", "x", "a b " * SLICE_CHARACTERS, "word\n" * 10_000, "字字。" * 20_000, "0f" * 30_000]
)
def test_text_slices_cover_the_text_and_are_short(text: str) -> None:
    ends = [0]
    while ends[-1] < len(text):
        ends.append(next_cut(text, ends[-1], len(text)))
        assert 0 < ends[-1] - ends[-2] < SLICE_CHARACTERS + 100
    assert ends[-1] == len(text)


@pytest.mark.parametrize("run", [" ", "a", "7", "=", "\n"])
def test_a_text_is_refused_when_a_run_without_a_cut_is_too_long(run: str) -> None:
    assert next_cut(run * MAX_RUN_CHARACTERS, 0, MAX_RUN_CHARACTERS) == MAX_RUN_CHARACTERS
    with pytest.raises(ValueError, match="spaces or line breaks"):
        next_cut(run * (MAX_RUN_CHARACTERS + 1), 0, MAX_RUN_CHARACTERS + 1)
