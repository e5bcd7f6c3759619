import re
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from mini_infer_prompts import segments, text_slices
from mini_infer_prompts.segments import SegmentEncoder, _any_of
from mini_infer_web.api_errors import ApiError
from tests.prompts import conversations
from tests.prompts.conversations import quick
from tests.prompts.folders import TOKENIZERS, byte_level
from tests.prompts.test_text_slices import NASTY
from tests.prompts.test_text_slices import tokenizer as words_tokenizer


def chat(turns: int) -> str:
    return "".join(f"<|im_start|>user\nquestion {turn}, quite long {'x' * 200}<|im_end|>\n" for turn in range(turns))


def test_segments_encode_only_new_text_of_a_growing_chat() -> None:
    encoder = SegmentEncoder(TOKENIZERS["byte_level"]())
    encoder.encode(chat(20))
    before = encoder.encoded_characters
    assert before == len(chat(20)) - 20 * len("<|im_start|><|im_end|>") - 19  # each "\n" between turns but one is old
    encoder.encode(chat(21))
    assert encoder.encoded_characters - before == len("user\nquestion 20, quite long ") + 200
    encoder.encode(chat(21))
    assert encoder.encoded_characters - before == len("user\nquestion 20, quite long ") + 200


def test_the_segment_cache_is_bounded_and_evicts_least_recently_used() -> None:
    encoder = SegmentEncoder(TOKENIZERS["byte_level"](), max_cached_bytes=1050)
    for text in ("a" * 10, "b" * 10, "c" * 10, "a" * 10, "d" * 10, "a" * 10):
        encoder.encode(text)
    assert encoder.encoded_characters == 40  # the second and third a are old
    encoder.encode("b" * 10)
    assert encoder.encoded_characters == 50  # b went for d
    encoder.encode("e" * 2000)
    encoder.encode("e" * 2000)
    assert encoder.encoded_characters == 50 + 4000, "a piece larger than the cache is not kept"
    encoder.encode("b" * 10)
    assert encoder.encoded_characters == 50 + 4000, "and drives nothing out"


@quick
@given(st.lists(conversations.texts, min_size=1, max_size=4), st.integers(0, 1500), st.sampled_from(sorted(TOKENIZERS)))
def test_segmented_encoding_equals_the_whole(texts: list[str], cached_bytes: int, name: str) -> None:
    tokenizer = _tokenizers[name]
    encoder = SegmentEncoder(tokenizer, cached_bytes)
    for end in range(1, len(texts) + 1):
        text = "".join(texts[:end])
        assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


@settings(max_examples=100, deadline=None)
@given(st.lists(NASTY | st.sampled_from(["<s>", "</s>", "<s", "<s>x"]), max_size=6).map("".join), st.integers(1, 8))
def test_sliced_and_windowed_encoding_equals_the_whole(text: str, size: int) -> None:
    tokenizer = Tokenizer.from_str(words_tokenizer("qwen2").to_str())
    tokenizer.add_special_tokens(["<s>", "</s>", "<s>x"])
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    with (
        patch.object(text_slices, "SLICE_CHARACTERS", size),
        patch.object(segments, "_SEARCH_CHARACTERS", size),
    ):
        encoder = SegmentEncoder(tokenizer)
        pieces = list(encoder.pieces(text))
        assert [token for piece in pieces for token in piece.ids] == expected
        assert [piece.end for piece in pieces] == sorted({piece.end for piece in pieces})
        for number, piece in enumerate(pieces):
            if piece.closed:  # whatever follows a closed piece: from there on the same ids
                before = [token for earlier in pieces[: number + 1] for token in earlier.ids]
                for more in (text[: piece.end] + "x", text + " more"):
                    rest = [token for later in encoder.pieces(more, piece.end) for token in later.ids]
                    assert before + rest == tokenizer.encode(more, add_special_tokens=False).ids


def test_a_long_text_is_encoded_in_short_pieces() -> None:
    text = "some words in a line, and another 1234.\n" * 5_000
    pieces = list(SegmentEncoder(words_tokenizer("llama3")).pieces(text))
    starts = [0, *(piece.end for piece in pieces)]
    assert max(end - start for start, end in pairwise(starts)) < text_slices.SLICE_CHARACTERS + 100


def refused(encoder: SegmentEncoder, text: str, words: str) -> bool:
    with pytest.raises(ApiError, match=words) as raised:
        encoder.encode(text)
    return raised.value.status == 400


def test_a_request_gets_400_when_the_tokenizer_cannot_encode_its_text() -> None:
    whole = Tokenizer(models.BPE(vocab={"a": 0, " ": 1}, merges=[]))
    assert refused(SegmentEncoder(whole), "a" * (segments.MAX_WHOLE_CHARACTERS + 1), "as one piece")
    whole.pre_tokenizer = pre_tokenizers.Split(Regex("(?:a|a)*b"), "isolated")  # the library panics after 10M tries
    assert refused(SegmentEncoder(whole), "a" * 50 + " b", "gives up")
    assert refused(SegmentEncoder(words_tokenizer("qwen2")), "a" * 1_000_000, "put spaces")


_tokenizers = {name: make() for name, make in TOKENIZERS.items()}


def plain() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def test_text_is_encoded_whole_when_segments_could_differ() -> None:
    assert SegmentEncoder(plain()).splits
    assert not SegmentEncoder(byte_level()).splits, "no added token to split at"
    for change in (
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="first")),
        lambda t: setattr(
            t,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Metaspace(prepend_scheme="first")]),
        ),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.FixedLength(3)),  # a part that is not known here
        lambda t: setattr(t, "encode_special_tokens", True),
        lambda t: setattr(t, "model", models.BPE(dropout=0.1)),
        lambda t: t.add_special_tokens(["x" * 500]),
        lambda t: t.add_tokens([AddedToken("<x>", lstrip=True, normalized=False)]),
        lambda t: t.add_tokens([AddedToken("<x>", rstrip=True, normalized=False)]),
        lambda t: t.add_tokens([AddedToken("<x>", single_word=True, normalized=False)]),
    ):
        tokenizer = plain()
        change(tokenizer)
        assert not SegmentEncoder(tokenizer).splits
    harmless = plain()
    harmless.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex("a+"), "a")])
    harmless.add_tokens([AddedToken("<x>", lstrip=True, normalized=True)])
    assert SegmentEncoder(harmless).splits


@quick
@given(st.lists(st.text("ab<|.", min_size=1, max_size=4), min_size=1), st.text("ab<|.", max_size=30))
def test_the_segment_pattern_matches_the_leftmost_longest_token(words: list[str], text: str) -> None:
    found = [match.span() for match in re.finditer(_any_of(words), text)]
    expected, at = [], 0
    while at < len(text):
        longest = max((len(word) for word in words if text.startswith(word, at)), default=0)
        if longest:
            expected.append((at, at + longest))
        at += longest or 1
    assert found == expected


@pytest.mark.parametrize("text", ["", "<s>", "<s><s>", " <s> "])
def test_edge_cases_are_encoded_as_by_the_tokenizer(text: str) -> None:
    tokenizer = plain()
    assert SegmentEncoder(tokenizer).encode(text) == tokenizer.encode(text).ids
