"""The tokens of a request, as clients are told."""

from mini_infer_engine.api.dialects.openai.shapes import usage
from mini_infer_engine.core.request import CachedTokens, Output, Request, SamplingParams
from mini_infer_engine.text.output_text import OutputText


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
