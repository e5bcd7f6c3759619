"""Latency targets over HTTP: fields, headers and defaults; what is refused, and what is counted."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mini_infer_contract.launch import SLO_UNATTAINABLE_HEADER
from mini_infer_contract.metrics import ENGINE_LATENCY_TARGETS, ENGINE_SLO_REFUSALS
from mini_infer_engine.api.latency_targets import latency_targets
from mini_infer_engine.core.request import NO_TARGETS, LatencyTargets
from mini_infer_web.api_errors import ApiError
from tests.engine.server.dry_server import DryServer

STEP_MS = 20
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Some text", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/messages": {"model": "dry", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
}


@pytest.fixture(scope="module")
def strict() -> Iterator[DryServer]:
    flags = ("--scheduling-policy", "slo", "--dry-run-step-ms", str(STEP_MS), "--slo-itl-ms", "2000")
    with DryServer("--served-model-name", "dry", *flags) as server:
        warm = {"prompt": [1] * 64, "max_tokens": 8}  # from now on it knows how long its passes take
        assert server.client.post("/v1/completions", json=warm).status_code == 200
        yield server


def post(server: DryServer, path: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return server.client.post(path, json=BODIES[path] | fields, headers=headers)


@pytest.mark.parametrize("path", BODIES)
def test_targets_are_met_and_counted_when_there_is_time(strict: DryServer, path: str) -> None:
    before = strict.metric(ENGINE_LATENCY_TARGETS)
    answer = post(strict, path, ttft_ms=60_000, itl_ms=30_000.5, deadline_ms=90_000)
    assert answer.status_code == 200, answer.text
    assert strict.metric(ENGINE_LATENCY_TARGETS) == before + 3
    lines = strict.client.get("/metrics").text
    assert f'{ENGINE_LATENCY_TARGETS}{{kind="deadline",result="met"}}' in lines


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stated", ["field", "header"])
def test_a_request_is_refused_when_its_targets_cannot_be_met(strict: DryServer, path: str, stated: str) -> None:
    before = strict.metric(ENGINE_SLO_REFUSALS)
    fields = {"ttft_ms": 0.01} if stated == "field" else {}
    headers = {"x-mini-infer-ttft-ms": "0.01"} if stated == "header" else {}
    answer = post(strict, path, headers, **fields)
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers[SLO_UNATTAINABLE_HEADER] == "true"
    assert "ttft_ms = 0.01" in answer.text
    if path != "/v1/messages":  # Anthropic's errors have no code
        assert answer.json()["error"]["code"] in ("slo_unattainable", "rate_limit_exceeded")
    assert strict.metric(ENGINE_SLO_REFUSALS) == before + 1


def test_a_stream_has_the_status_when_it_is_refused(strict: DryServer) -> None:
    assert post(strict, "/v1/completions", stream=True, deadline_ms=0.01).status_code == 429


def test_targets_are_only_counted_when_the_policy_knows_none(server: DryServer) -> None:
    assert server.client.post("/v1/completions", json={"prompt": "x", "ttft_ms": 0.0001}).status_code == 200
    assert f'{ENGINE_LATENCY_TARGETS}{{kind="ttft",result="missed"}}' in server.client.get("/metrics").text


@pytest.mark.parametrize("value", [0, -1, "10", 1e12])
def test_a_field_is_named_when_it_is_no_time(strict: DryServer, value: object) -> None:
    answer = post(strict, "/v1/completions", itl_ms=value)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "itl_ms")


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "1e12"])
def test_a_header_is_named_when_it_is_no_time(value: str) -> None:
    with pytest.raises(ApiError, match="x-mini-infer-itl-ms"):
        latency_targets({"x-mini-infer-itl-ms": value}, {}, NO_TARGETS, 1.0)


@pytest.mark.parametrize(
    ("headers", "fields", "defaults", "expected"),
    [
        ({}, {}, NO_TARGETS, NO_TARGETS),
        ({"x-mini-infer-ttft-ms": "5"}, {}, NO_TARGETS, LatencyTargets(ttft_ms=5, since_s=10)),
        ({"x-mini-infer-ttft-ms": "5"}, {"ttft_ms": 7.0}, NO_TARGETS, LatencyTargets(ttft_ms=7, since_s=10)),
        ({}, {"itl_ms": 7.0}, LatencyTargets(ttft_ms=9, itl_ms=8), LatencyTargets(ttft_ms=9, itl_ms=7, since_s=10)),
        ({"x-mini-infer-queued-ms": "2000"}, {"ttft_ms": 7.0}, NO_TARGETS, LatencyTargets(ttft_ms=7, since_s=8)),
        ({"x-mini-infer-queued-ms": "2000"}, {}, NO_TARGETS, NO_TARGETS),
    ],
)
def test_latency_targets_come_from_body_then_headers_then_defaults(
    headers: dict[str, str], fields: dict[str, float], defaults: LatencyTargets, expected: LatencyTargets
) -> None:
    assert latency_targets(headers, fields, defaults, arrived_s=10.0) == expected
