"""Words one by one give the ids of the whole text, whatever was seen before; no more are kept than may be."""

import sys
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mini_infer_prompts import text_slices, word_ids
from mini_infer_prompts.segments import encode_all
from mini_infer_prompts.word_ids import MAX_WORD_CHARACTERS, MAX_WORD_IDS, MAX_WORDS, WORDS_BYTES, WordIds, words_of
from tests.prompts.test_text_slices import NASTY, PATTERNS, ids, tokenizer


class Counting:
    """Gives each character's number as its id, and counts the texts that it was asked for."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        self.encoded += texts
        return [[ord(character) for character in text] for text in texts]


@pytest.mark.parametrize("normal_form", [None, "NFC", "NFD", "NFKC", "Lowercase"])
@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(NASTY, min_size=1, max_size=3))
@example(texts=["don't  stop  here", " a \n b\t c", "é a _ b \u0301 c", "a\0 b c", "the the the"])
def test_cached_word_ids_equal_those_of_the_whole(name: str, normal_form: str | None, texts: list[str]) -> None:
    made = tokenizer(name, normal_form)
    words = WordIds(lambda unknown: encode_all(made, unknown))
    for text in texts:
        assert words.encode(text) == ids(made, text), text


@given(NASTY)
def test_every_word_ends_where_a_text_may_be_cut(text: str) -> None:
    words = words_of(text)
    assert "".join(words) == text
    cuts = {found.start() for found in text_slices._CUTS.finditer(text)}
    ends = [len("".join(words[: count + 1])) for count in range(len(words) - 1)]
    assert cuts.issuperset(ends)


def test_only_what_is_new_is_tokenised() -> None:
    encode = Counting()
    words = WordIds(encode)
    words.encode("one two two")
    assert sorted(encode.encoded) == [" two", "one"]
    encode.encoded.clear()
    words.encode("one two three")
    assert encode.encoded == [" three"]


def test_no_more_words_are_kept_than_may_be() -> None:
    encode = Counting()
    words = WordIds(encode)
    with patch.object(word_ids, "MAX_WORDS", 3):
        words.encode("a b c")
        words.encode("a b c d")
        encode.encoded.clear()
        assert words.encode("a d") == [ord("a"), ord(" "), ord("d")]
        assert encode.encoded == ["a"], "with the fourth word all others were forgotten"
        words.encode("p q r s")
        encode.encoded.clear()
        words.encode("p q r s")
        assert len(encode.encoded) == 4, "more words at once than may be kept"


@pytest.mark.parametrize(("characters", "ids", "kept"), [(32, 8, True), (33, 1, False), (32, 9, False)])
def test_long_words_are_not_kept(characters: int, ids: int, kept: bool) -> None:
    requested: list[str] = []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        requested.extend(texts)
        return [[7] * ids for _ in texts]

    words = WordIds(encode)
    for _ in range(2):
        words.encode("x" * characters)
    assert len(requested) == (1 if kept else 2)


def test_words_take_no_more_memory_than_is_said() -> None:
    count = MAX_WORDS // 16
    words = WordIds(lambda texts: [[1000 * int(text) + at for at in range(MAX_WORD_IDS)] for text in texts])
    words.encode("".join(f" {number:0{MAX_WORD_CHARACTERS - 1}d}" for number in range(1, count)))
    kept = words._cache
    assert len(kept) == count - 1
    size = sys.getsizeof(kept) + sum(
        sys.getsizeof(word) + sys.getsizeof(ids) + sum(map(sys.getsizeof, ids)) for word, ids in kept.items()
    )
    assert 16 * size < WORDS_BYTES
