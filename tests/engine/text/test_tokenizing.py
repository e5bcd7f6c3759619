"""Prompts in slices: the same ids, a turn for each, and no work on what is too long."""

import asyncio
import random
import threading
from typing import Any

import pytest

from mini_infer_engine.model_path import DEMO_DIRECTORY
from mini_infer_engine.text import tokenizing
from mini_infer_engine.text.text_model import LONG_BYTES, TextModel
from mini_infer_engine.text.tokenizing import (
    Sliced,
    chat_ids,
    completion_ids,
    longest_token,
    text_ids,
    text_of_ids,
    whole,
)
from mini_infer_engine.text.validation import ParameterError
from mini_infer_prompts.prompt import PromptEncoder, PromptText, chat_prompt_ids
from mini_infer_web.api_errors import ApiError
from tests.engine.text.test_detokenizer import BYTE_LEVEL, LLAMA_LIKE
from tests.support.prompt_ids import completion_prompt_ids

LONG = "the quick brown fox jumps over the lazy dog, 12 times; " * 4_000


@pytest.fixture(scope="module")
def model() -> TextModel:
    return TextModel.load(("demo",), DEMO_DIRECTORY)


@pytest.fixture(scope="module")
def encoder(model: TextModel) -> PromptEncoder:
    assert model.encoder is not None
    return model.encoder


def count_slices(job: Sliced[Any]) -> int:
    return sum(1 for _ in job)


@pytest.mark.parametrize("text", ["", "x", "<|im_start|>user\nhé<|im_end|>", LONG])
@pytest.mark.parametrize("special", [True, False])
def test_sliced_tokenisation_equals_that_of_the_whole(encoder: PromptEncoder, text: str, special: bool) -> None:
    assert whole(text_ids(encoder, PromptText(text, special), "prompt")) == encoder.encode(text, special)


def test_engine_and_gateway_tokenise_bodies_alike(encoder: PromptEncoder) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    assert whole(chat_ids(encoder, chat)) == chat_prompt_ids(encoder, chat)
    for prompt in ("one", ["one", "two"], [5, 6], [[5], "x"], ["x"]):
        body = {"prompt": prompt}
        assert whole(completion_ids(encoder, body)) == completion_prompt_ids(encoder, body)


def test_a_long_text_is_tokenised_in_many_slices(encoder: PromptEncoder) -> None:
    assert count_slices(text_ids(encoder, PromptText(LONG, False), "prompt")) > 10


async def test_a_short_prompt_overtakes_long_ones_in_tokenisation(model: TextModel, encoder: PromptEncoder) -> None:
    texts = [f"{number} {LONG * 10}" for number in range(3)]  # none is in the encoder's cache yet
    longs = [
        asyncio.create_task(model.in_slices(text_ids(encoder, PromptText(text, False), "prompt"), len(text)))
        for text in texts
    ]
    await asyncio.sleep(0)  # they are in line
    await model.in_slices(text_ids(encoder, PromptText("short", False), "prompt"), 5)
    assert not any(job.done() for job in longs)
    ids = await asyncio.gather(*longs)
    assert ids[2] == encoder.encode(texts[2], False)


async def test_a_short_prompt_is_tokenised_when_a_long_one_cannot_be_interrupted(model: TextModel) -> None:
    may_end = threading.Event()

    def rendering() -> Sliced[None]:
        assert may_end.wait(60)
        yield

    long = asyncio.create_task(model.in_slices(rendering(), LONG_BYTES))
    assert model.encoder is not None
    assert await model.in_slices(text_ids(model.encoder, PromptText("short", False), "prompt"), 5)
    assert not long.done()
    may_end.set()
    await long


def test_a_text_is_refused_before_tokenisation_when_it_is_too_long(model: TextModel, encoder: PromptEncoder) -> None:
    limits = model.limits(100)
    assert limits.max_characters == 100 * longest_token(encoder.tokenizer)
    before = encoder.segments.encoded_characters
    too_long = "z" * (limits.max_characters + 1)
    for job in (
        completion_ids(encoder, {"prompt": too_long}, limits),
        chat_ids(encoder, {"messages": [{"role": "user", "content": too_long}]}, limits),
        chat_ids(encoder, {"messages": [{"role": "user", "content": [{"type": "text", "text": too_long}]}]}, limits),
    ):
        with pytest.raises(ParameterError, match=f"{limits.max_characters + 1} characters.*100 tokens") as caught:
            whole(job)
        assert caught.value.code == "context_length_exceeded"
    assert encoder.segments.encoded_characters == before


def test_a_prompt_is_refused_before_validation_when_it_has_too_many_token_ids(model: TextModel) -> None:
    limits = model.limits(100)
    for prompt, param in (([5] * 99 + ["no id"], "prompt"), ([[1], [5] * 99 + [None]], "prompt[1]")):
        with pytest.raises(ParameterError, match=r"has 100 tokens.*100 tokens") as caught:
            whole(completion_ids(None, {"prompt": prompt}, limits))
        assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
    assert whole(completion_ids(None, {"prompt": [5] * 99}, limits)) == [[5] * 99]
    # A list of prompts is no prompt: how many there are is another limit's.
    assert len(whole(completion_ids(None, {"prompt": [[5]] * 100}, limits))) == 100


def test_tokenisation_stops_early_when_a_text_exceeds_the_context(model: TextModel, encoder: PromptEncoder) -> None:
    limits = model.limits(10_000)
    text = PromptText("".join(f"{number} " for number in range(50_000)), False)
    assert limits.max_characters > len(text.text)
    before = encoder.segments.encoded_characters
    with pytest.raises(ParameterError, match=r"\d+ tokens.*10000 tokens"):
        whole(text_ids(encoder, text, "prompt", limits))
    assert encoder.segments.encoded_characters - before < len(text.text) / 2


@pytest.mark.parametrize("together", [1, 3, 50, 4_096])
def test_sliced_decoding_equals_that_of_the_whole(
    encoder: PromptEncoder, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "_DECODED_TOGETHER", together)
    text = "".join(random.Random(1).choices("ab é€😀\N{REPLACEMENT CHARACTER}中文", k=2_000))
    draw = random.Random(2)
    for tokenizer, token_ids in (
        (encoder.tokenizer, encoder.encode(text, False)),
        (BYTE_LEVEL, BYTE_LEVEL.encode(text).ids),
        (LLAMA_LIKE, LLAMA_LIKE.encode(text).ids),
        # Bytes that are no characters, and characters that other tokens cut.
        (encoder.tokenizer, [draw.randrange(encoder.tokenizer.get_vocab_size()) for _ in range(2_000)]),
        (BYTE_LEVEL, [draw.randrange(128, 256) for _ in range(2_000)]),
        (BYTE_LEVEL, [226] * 500),
    ):
        assert whole(text_of_ids(tokenizer, token_ids)) == tokenizer.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("place", [0, 4_999])
@pytest.mark.parametrize("wrong", [-1, 10**9])
def test_detokenize_names_an_id_when_it_does_not_exist(encoder: PromptEncoder, place: int, wrong: int) -> None:
    token_ids = [5] * 5_000
    token_ids[place] = wrong
    with pytest.raises(ApiError, match=f"tokens holds {wrong}"):
        whole(text_of_ids(encoder.tokenizer, token_ids))


def test_many_token_ids_are_decoded_in_slices(encoder: PromptEncoder) -> None:
    assert count_slices(text_of_ids(encoder.tokenizer, [5] * 100_000)) > 20
