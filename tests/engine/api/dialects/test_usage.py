"""The tokens of a request, as clients are told."""

import msgspec
import pytest

from mini_infer_engine.api.answers import MessageUsage, PromptTokensDetails
from mini_infer_engine.api.dialects.openai.shapes import usage
from mini_infer_engine.api.dialects.responses.renderer import _usage as usage_of_response
from mini_infer_engine.core.request import CachedTokens, Output, Request, SamplingParams
from mini_infer_engine.text.output_text import OutputText
from tests.engine.api.dialects.test_anthropic import renderer


def reply(cached_tokens: CachedTokens | None) -> OutputText:
    request = Request(request_id="r", prompt_token_ids=list(range(100)), sampling=SamplingParams(detokenize=False))
    text = OutputText(request, None)
    text.push(Output("r", [1], 80, cached_tokens=cached_tokens))
    text.push(Output("r", [2], 80, finish_reason="length"))
    return text


def test_cached_tokens_are_told_by_medium_when_there_are_tiers() -> None:
    found = usage([reply(CachedTokens(device=16, host=64))])
    assert found["prompt_tokens_details"] == {
        "cached_tokens": 80,
        "cached_tokens_details": {"device": 16, "host": 64, "disk": 0, "peer": 0},
    }


def test_cached_tokens_are_a_sum_alone_when_there_are_no_tiers() -> None:
    assert usage([reply(None)])["prompt_tokens_details"] == {"cached_tokens": 80}


DETAILS = {"device": 16, "host": 64, "disk": 0, "peer": 0}


def usage_of_message(reply: OutputText) -> dict[str, object]:
    return renderer()._usage(reply)


def test_responses_and_messages_have_the_media_too_when_there_are_tiers() -> None:
    one = reply(CachedTokens(device=16, host=64))
    assert usage_of_response(one)["input_tokens_details"]["cached_tokens_details"] == DETAILS
    assert usage_of_message(one)["cached_tokens_details"] == DETAILS
    assert "cached_tokens_details" not in usage_of_response(reply(None))["input_tokens_details"]
    assert "cached_tokens_details" not in usage_of_message(reply(None))


@pytest.mark.parametrize("cached", [None, CachedTokens(device=16, host=64)])
def test_usage_has_the_described_form_when_there_are_tiers_or_none(cached: CachedTokens | None) -> None:
    one = reply(cached)
    described = msgspec.convert(usage([one])["prompt_tokens_details"], PromptTokensDetails)
    assert msgspec.to_builtins(described) == usage([one])["prompt_tokens_details"]
    message = usage_of_message(one)
    described_message = msgspec.to_builtins(msgspec.convert(message, MessageUsage))
    assert {name: described_message[name] for name in message} == message
