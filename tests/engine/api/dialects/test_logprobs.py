from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mini_infer_engine.api.dialects.openai.logprobs import CompletionLogprobs, TokenNames, chat_logprobs
from mini_infer_engine.core.request import TokenLogprobs
from mini_infer_engine.text.detokenizer import Detokenizer
from tests.engine.text.test_token_bytes import FORMS, LLAMA_LIKE
from tests.prompts import conversations


def position(token_id: int, top: Sequence[int] = ()) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=token_id,
        logprob=-1.0,
        rank=1,
        top_token_ids=list(top),
        top_logprobs=[-float(number) for number in range(len(top))],
    )


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    return [tokenizer.token_to_id(piece) for piece in pieces]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30)
@given(text=conversations.texts, cut=st.floats(0, 1))
def test_text_offsets_are_where_tokens_begin_in_the_text_when_tokens_are_parts_of_characters(
    form: str, text: str, cut: float
) -> None:
    tokenizer = FORMS[form]
    ids = tokenizer.encode(text.replace("\N{REPLACEMENT CHARACTER}", "")).ids
    prompt, output = ids[: int(cut * len(ids))], ids[int(cut * len(ids)) :]
    detokenizer = Detokenizer(tokenizer, True, prompt)
    before = [0]
    for token_id in output:
        before.append(before[-1] + len(detokenizer.push(token_id)))
    answered = CompletionLogprobs(TokenNames(tokenizer, as_ids=False), prompt)
    half = len(output) // 2
    parts = [answered.of_output([position(token_id) for token_id in part]) for part in (output[:half], output[half:])]
    assert parts[0]["text_offset"] + parts[1]["text_offset"] == before[:-1]


def test_parts_of_a_character_have_bytes_and_keys_of_their_own_when_they_are_ranked() -> None:
    tokenizer = FORMS["byte_level"]
    parts = ids_of(tokenizer, "æ", "Ĺ", "¥")
    names = TokenNames(tokenizer, as_ids=False)
    content = chat_logprobs([position(token_id, parts) for token_id in parts], names)["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "日"
    assert [entry["token"] for entry in content] == ["\\xe6", "\\x97", "\\xa5"]
    answered = CompletionLogprobs(names, []).of_output([position(parts[0], parts)])
    assert answered["top_logprobs"] == [{"bytes:\\xe6": -1.0, "bytes:\\x97": -1.0, "bytes:\\xa5": -2.0}]
    assert answered["tokens"] == ["bytes:\\xe6"]


def test_words_with_and_without_a_space_have_keys_of_their_own_when_pieces_are_sentencepieces() -> None:
    top = ids_of(LLAMA_LIKE, "▁a", "a", "<0x61>")
    answered = CompletionLogprobs(TokenNames(LLAMA_LIKE, as_ids=False), ids_of(LLAMA_LIKE, "▁b")).of_output(
        [position(top[0], top), position(top[1])]
    )
    assert answered["top_logprobs"][0] == {" a": -1.0, "a": -1.0, "<0x61>": -2.0}
    assert answered["tokens"] == [" a", "a"]
    assert answered["text_offset"] == [0, 2]


@pytest.mark.parametrize(
    "form", [name for name in FORMS if name not in ("unigram", "normalized_tokens", "prepend_normalizer")]
)
@pytest.mark.parametrize("text", ["hello fox", "a日本 b", "  x\n y", "hello<|im_end|> a"])
def test_offsets_of_an_echoed_prompt_fit_its_text_when_the_tokenizer_adds_to_it(form: str, text: str) -> None:
    tokenizer = FORMS[form]
    ids = tokenizer.encode(text).ids
    answered = CompletionLogprobs(TokenNames(tokenizer, as_ids=False), ids)
    echoed: dict[str, Any] = answered.of_prompt([position(token_id) for token_id in ids[1:]], text)
    visible = tokenizer.encode(text, add_special_tokens=False).ids
    begun = echoed["text_offset"][len(ids) - len(visible) :]
    for begin, end, token in zip(begun, [*begun[1:], len(text)], echoed["tokens"][-len(visible) :], strict=True):
        shown = text[begin:end]
        assert shown in (token, token.removeprefix(" ")) or token.startswith("bytes:"), (shown, token)
    after = answered.of_output([position(visible[0])])
    assert after["text_offset"] == [len(text)]


def test_tokens_are_ids_without_a_tokenizer_when_log_probabilities_are_requested() -> None:
    answered = CompletionLogprobs(TokenNames(None, as_ids=False), [1]).of_output([position(5, [5, 6])])
    assert answered["tokens"] == ["token_id:5"]
    assert answered["top_logprobs"] == [{"token_id:5": -1.0, "token_id:6": -1.0}]
