"""A prompt that another engine requests obeys the rules of HTTP requests."""

import math
from typing import Any

import msgspec
import pytest

from mini_infer_engine.core.request import BeamSearch, ImageInput, Request, SamplingParams
from mini_infer_engine.core_process.peer_requests import check_peer_request
from mini_infer_engine.structured.grammar import Grammar

MAX_MODEL_LEN, VOCABULARY = 100, 50
RIGHT = Request(request_id="x#1", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=1))


def check(request: Request) -> None:
    check_peer_request(request, max_model_len=MAX_MODEL_LEN, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"min_tokens": 10},
        {"logprobs": 20},
        {"logprobs": -1},
        {"stop": ["a"], "stop_token_ids": [4]},
        {"temperature": 0.0, "logit_bias": {3: -100.0}},
    ],
)
def test_prompt_is_accepted_when_a_client_may_request_it(sampling: dict[str, Any]) -> None:
    check(msgspec.structs.replace(RIGHT, sampling=SamplingParams(max_tokens=1, **sampling)))


def test_resumed_prompt_is_accepted_when_the_context_has_room_for_one_more_token() -> None:
    check(msgspec.structs.replace(RIGHT, resumed_token_ids=[4] * (MAX_MODEL_LEN - 4)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_token_ids": []},
        {"prompt_token_ids": [1] * MAX_MODEL_LEN},
        {"prompt_token_ids": [VOCABULARY]},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [1 << 63]},
        {"resumed_token_ids": [VOCABULARY]},
        {"resumed_token_ids": [4] * (MAX_MODEL_LEN - 3)},
        {"noise_seed": -1},
        {"noise_seed": 1 << 63},
        {"priority": 1 << 40},
        {"request_id": "x" * 10_000},
        {"embeds": True},
        {"beam_search": BeamSearch(request_ids=["a"])},
    ],
    ids=str,
)
def test_prompt_is_refused_when_a_client_could_not_request_it(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        check(msgspec.structs.replace(RIGHT, **wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": math.nan},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"min_tokens": -1},
        {"min_tokens": 1 << 40},
        {"logprobs": 10_000},
        {"logprob_token_ids": [VOCABULARY], "logprobs": 1},
        {"stop_token_ids": [-1]},
        {"allowed_token_ids": []},
        {"logit_bias": {VOCABULARY: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"bad_words_token_ids": [[]]},
        {"prompt_logprobs": 1},
        {"repetition_penalty": math.inf},
        {"grammar": Grammar("x" * 2_000_000)},
    ],
    ids=str,
)
def test_prompt_is_refused_when_its_sampling_is_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(wrong)).removesuffix('_token_ids')}|ids|structured"):
        check(msgspec.structs.replace(RIGHT, sampling=SamplingParams(max_tokens=1, **wrong)))


def test_a_prompt_with_more_images_than_this_engine_takes_is_refused() -> None:
    image = ImageInput(offset=0, num_tokens=1, digest=bytes(32), grid=(1, 1, 1), shape=(1,), pixels=bytes(4))
    with pytest.raises(ValueError, match="images"):
        check(msgspec.structs.replace(RIGHT, images=[image]))
    check_peer_request(msgspec.structs.replace(RIGHT, images=[image]), MAX_MODEL_LEN, VOCABULARY, max_images=1)
