import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mini_infer_engine.text.token_bytes import TokenBytes
from tests.engine.text.test_detokenizer import BYTE_LEVEL, LLAMA_LIKE
from tests.prompts import conversations
from tests.prompts.folders import TOKENIZERS

FORMS = {
    "dry run": BYTE_LEVEL,
    "byte fallback": LLAMA_LIKE,
    **{name: make() for name, make in TOKENIZERS.items()},
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30)
@given(text=conversations.texts | st.text(max_size=20))
def test_bytes_of_tokens_joined_are_the_text_when_any_text_is_tokenised(form: str, text: str) -> None:
    tokenizer: Tokenizer = FORMS[form]
    ids = tokenizer.encode(text).ids
    own = TokenBytes(tokenizer)
    joined = b"".join(own.of(token_id) for token_id in ids).decode()
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    assert joined in (decoded, " " + decoded)  # a Metaspace decoder drops the first space of a text


@pytest.mark.parametrize(
    ("tokenizer", "piece", "expected"),
    [
        (LLAMA_LIKE, "▁a", b" a"),
        (LLAMA_LIKE, "a", b"a"),
        (LLAMA_LIKE, "▁", b" "),
        (LLAMA_LIKE, "<0xE4>", b"\xe4"),
        (LLAMA_LIKE, "<0x0A>", b"\n"),
        (FORMS["byte_level"], "Ġ", b" "),
        (FORMS["byte_level"], "Ċ", b"\n"),
        (FORMS["byte_level"], "æ", b"\xe6"),
        (FORMS["byte_level"], "<|im_end|>", b"<|im_end|>"),
        (FORMS["gemma_split"], "<0xFF>", b"\xff"),
        (FORMS["unigram"], "▁", b" "),
    ],
)
def test_a_token_has_the_bytes_of_its_own_piece_when_it_is_part_of_a_word_or_character(
    tokenizer: Tokenizer, piece: str, expected: bytes
) -> None:
    token_id = tokenizer.token_to_id(piece)
    assert token_id is not None
    assert TokenBytes(tokenizer).of(token_id) == expected
