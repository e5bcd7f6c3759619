import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mini_infer_engine.dry.vocabulary import TURN_END_ID, TURN_START_ID, VOCAB_SIZE, dry_assets
from mini_infer_engine.text.detokenizer import Detokenizer, decoder_showing
from tests.prompts import conversations
from tests.prompts.folders import TOKENIZERS

BYTE_LEVEL = Tokenizer.from_str(dry_assets().files["tokenizer.json"])
texts = st.text(st.sampled_from("ab é€😀\N{REPLACEMENT CHARACTER}中文"), max_size=40)


def llama_like() -> Tokenizer:
    """Metaspace with byte fallback, as Llama 2 and the first Mistral have it."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "ab", "é", "中"]
    return Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [
                        {"type": "Prepend", "prepend": "▁"},
                        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                    ],
                },
                "decoder": {
                    "type": "Sequence",
                    "decoders": [
                        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                        {"type": "ByteFallback"},
                        {"type": "Fuse"},
                        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                    ],
                },
                "model": {
                    "type": "BPE",
                    "vocab": {piece: index for index, piece in enumerate(pieces)},
                    "merges": [["▁", "a"], ["▁", "b"], ["a", "b"]],
                    "byte_fallback": True,
                    "unk_token": "<unk>",
                },
            }
        )
    )


LLAMA_LIKE = llama_like()


def stream(
    tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True, prompt: Sequence[int] = ()
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40), st.booleans())
def test_streamed_bytes_equal_the_whole_text(ids: list[int], skip: bool) -> None:
    assert "".join(stream(BYTE_LEVEL, ids, skip)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA_LIKE], ids=["byte-level", "metaspace with byte fallback"])
@given(text=texts)
def test_streamed_text_equals_the_whole_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    shown = ""
    for piece in pieces:
        shown += piece
        assert text.startswith(shown) or not text, "an unfinished character was shown"


FORMS = {
    "byte-level": BYTE_LEVEL,
    "byte fallback": LLAMA_LIKE,
    **{name: make() for name, make in TOKENIZERS.items()},
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30)
@given(text=texts | conversations.texts, cut=st.floats(0, 1), skip=st.booleans())
def test_a_continuation_is_the_whole_text_less_the_prompt_when_tokens_are_cut_anywhere(
    form: str, text: str, cut: float, skip: bool
) -> None:
    tokenizer = FORMS[form]
    ids = tokenizer.encode(text.replace("\N{REPLACEMENT CHARACTER}", "")).ids
    prompt, output = ids[: int(cut * len(ids))], ids[int(cut * len(ids)) :]
    whole, before = (tokenizer.decode(part, skip_special_tokens=skip) for part in (ids, prompt))
    pieces = stream(tokenizer, output, skip, prompt)
    assert all(whole.endswith("".join(pieces[number:])) for number in range(len(pieces)))
    if not before.endswith("\N{REPLACEMENT CHARACTER}"):
        assert before + "".join(pieces) == whole


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (["▁a"], ["▁b"], " b"),
        (["▁a", "<0x0A>", "▁"], ["▁b"], " b"),
        (["▁a"], ["▁", "▁b"], "  b"),
        ([], ["▁b"], "b"),
        (["<0xF0>", "<0x9F>"], ["<0x99>", "<0x82>", "▁a"], "🙂 a"),
        (["▁a", "<0xE4>", "<0xB8>", "<0xAD>", "<0xE4>"], ["<0xB8>", "<0xAD>"], "中"),
        (["▁a", *["<0xE4>", "<0xB8>", "<0xAD>"] * 40], ["<0xE4>", "<0xB8>", "<0xAD>"], "中"),
        (["<0xFF>"], ["▁a"], " a"),
        (["<0xE4>"], ["▁a"], " a"),
        (["<0xE4>"], ["<0xB8>"], "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_a_continuation_keeps_its_space_and_completes_the_prompts_character_when_it_begins_there(
    prompt: list[str], output: list[str], expected: str
) -> None:
    before, after = ([LLAMA_LIKE.token_to_id(token) for token in tokens] for tokens in (prompt, output))
    assert "".join(stream(LLAMA_LIKE, after, prompt=before)) == expected


def test_the_leading_space_is_kept_when_a_prompt_ends_with_many_special_tokens() -> None:
    tokenizer = FORMS["metaspace_always"]
    ids = tokenizer.encode("a hello", add_special_tokens=False).ids
    end = [tokenizer.token_to_id("<|im_end|>")] * 300
    assert "".join(stream(tokenizer, ids[1:], prompt=[ids[0], *end])) == tokenizer.decode(ids)[1:]


@given(st.lists(st.sampled_from([*range(1, 257), *range(257, 265)]), max_size=60))
def test_text_after_invalid_byte_fallback_tokens_is_kept(ids: list[int]) -> None:
    marker = LLAMA_LIKE.encode("abab", add_special_tokens=False).ids
    assert "".join(stream(LLAMA_LIKE, [*ids, *marker])).endswith("abab")


def test_the_detokenizers_window_stays_short_for_long_runs_of_special_tokens() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    for token_id in [0x61, *[256] * 500, *[0xFF] * 500]:
        detokenizer.push(token_id)
        assert len(detokenizer._window) < 50


def test_only_special_tokens_that_are_markers_are_shown() -> None:
    ids = [TURN_START_ID, *b"call", TURN_END_ID, *b" f"]
    assert decoder_showing(BYTE_LEVEL, ["<|im_start|>", "no token"]).decode(ids) == "<|im_start|>call f"
    assert decoder_showing(BYTE_LEVEL, ["no token"]) is BYTE_LEVEL
    shown = decoder_showing(BYTE_LEVEL, ["<|im_start|>"])
    assert shown.decode(ids, skip_special_tokens=False) == "<|im_start|>call<|im_end|> f"
    pieces = Detokenizer(shown)
    assert "".join(map(pieces.push, ids)) + pieces.flush() == "<|im_start|>call f"
