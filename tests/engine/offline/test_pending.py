"""Tests what callers get of steps' outputs: without an engine, from outputs as the core sends them."""

from typing import Any

import pytest

from mini_infer_engine import RequestOutput, RequestOutputKind
from mini_infer_engine.core.request import Output, Request, SamplingParams, TokenLogprobs
from mini_infer_engine.offline.pending import PendingGeneration, RequestsInFlight
from mini_infer_engine.offline.prompts import OfflinePrompt


def logprobs_of(token: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=token, logprob=-float(token), rank=1, top_token_ids=[token], top_logprobs=[-float(token)]
    )


def output(name: str, *tokens: int, **fields: Any) -> Output:
    return Output(request_id=name, token_ids=list(tokens), logprobs=[logprobs_of(one) for one in tokens], **fields)


def pending(kind: RequestOutputKind, copies: int = 1, name: str = "r") -> PendingGeneration:
    names = [name] if copies == 1 else [f"{copy}_{name}" for copy in range(copies)]
    sampling = SamplingParams(logprobs=0, prompt_logprobs=0)
    requests = [Request(request_id=one, prompt_token_ids=[5, 6], sampling=sampling) for one in names]
    return PendingGeneration(name, requests, OfflinePrompt(None, [5, 6]), kind)


def tokens_of(result: RequestOutput) -> dict[int, list[int]]:
    return {one.index: one.token_ids for one in result.outputs}


def test_a_delta_has_what_is_new_when_a_caller_skips_steps() -> None:
    in_flight, request = RequestsInFlight(None), pending(RequestOutputKind.DELTA, copies=2)
    in_flight.add(request)
    in_flight.take([output("0_r", 1, prompt_logprobs=[logprobs_of(6)]), output("1_r", 7)])
    in_flight.take([output("0_r", 2)])
    first = request.output()
    assert tokens_of(first) == {0: [1, 2], 1: [7]}
    assert first.prompt_logprobs is not None
    assert [one and list(one) for one in first.prompt_logprobs] == [None, [6]]
    in_flight.take([output("1_r", 8, finish_reason="length")])
    second = request.output()
    assert (tokens_of(second), second.finished, second.prompt_logprobs) == ({1: [8]}, False, [])
    assert second.outputs[0].logprobs is not None
    assert [list(one) for one in second.outputs[0].logprobs] == [[8]]
    in_flight.take([output("0_r", 3, finish_reason="stop")])
    last = request.output()
    assert (tokens_of(last), last.finished, len(in_flight)) == ({0: [3]}, True, 0)


def test_outputs_have_everything_when_they_are_cumulative() -> None:
    in_flight, request = RequestsInFlight(None), pending(RequestOutputKind.CUMULATIVE, copies=2)
    in_flight.add(request)
    assert not request.finished
    in_flight.take([output("0_r", 1)])
    first = request.output()
    in_flight.take([output("0_r", 2, finish_reason="stop"), output("1_r", 3, finish_reason="stop")])
    assert (tokens_of(first), tokens_of(request.output())) == ({0: [1], 1: []}, {0: [1, 2], 1: [3]})


def test_a_caller_that_wants_the_last_output_gets_none_before() -> None:
    in_flight, request = RequestsInFlight(None), pending(RequestOutputKind.FINAL_ONLY)
    in_flight.add(request)
    in_flight.take([output("r", 1)])
    assert not request.has_output
    changed, _ = in_flight.take([output("r", 2, finish_reason="length"), output("unknown", 3)])
    assert changed == [request]
    assert request.has_output
    assert tokens_of(request.output()) == {0: [1, 2]}


def test_an_id_is_refused_when_it_is_in_use() -> None:
    in_flight, request = RequestsInFlight(None), pending(RequestOutputKind.DELTA)
    in_flight.add(request)
    with pytest.raises(ValueError, match="'r'"):
        in_flight.add(pending(RequestOutputKind.DELTA))
    assert in_flight.remove(request) == ["r"]
    in_flight.add(pending(RequestOutputKind.DELTA))


@pytest.mark.parametrize(("is_refusal", "error"), [(True, ValueError), (False, RuntimeError)])
def test_an_error_says_whose_fault_it_is_when_a_request_fails(is_refusal: bool, error: type[Exception]) -> None:
    in_flight, request = RequestsInFlight(None), pending(RequestOutputKind.DELTA)
    in_flight.add(request)
    in_flight.take([output("r", finish_reason="error", error="too bad", is_refusal=is_refusal)])
    assert type(request.error) is error
    assert "too bad" in str(request.error)
