"""POST /kv_prefetch: a gateway names sessions that return, and nothing that a peer sends ends the engine."""

from collections.abc import Iterator
from typing import Any

import pytest

from mini_infer_engine.api.kv_prefetch import AnnouncedSessions, announced_sessions
from mini_infer_web.api_errors import ApiError
from tests.engine.server.dry_server import DryServer

PEER = {"x-mini-infer-peer": "gateway"}


def test_sessions_are_read_when_a_body_names_them() -> None:
    assert announced_sessions({"request_ids": ["a", "b"]}) == AnnouncedSessions(["a", "b"], 10.0)
    assert announced_sessions({"request_ids": ["a"], "ttl_s": 3}) == AnnouncedSessions(["a"], 3.0)


BAD = [
    ({}, None),
    ({"request_ids": []}, "request_ids"),
    ({"request_ids": "a"}, "request_ids"),
    ({"request_ids": [""]}, "request_ids[0]"),
    ({"request_ids": [7]}, "request_ids[0]"),
    ({"request_ids": ["x" * 257]}, "request_ids[0]"),
    ({"request_ids": ["x"] * 65}, "request_ids"),
    ({"request_ids": ["x"], "ttl_s": 0}, "ttl_s"),
    ({"request_ids": ["x"], "ttl_s": 3601}, "ttl_s"),
    ({"request_ids": ["x"], "ttl_s": "soon"}, "ttl_s"),
    ({"request_ids": ["x"], "pages": [1]}, None),
]


@pytest.mark.parametrize(("body", "param"), BAD)
def test_a_body_is_refused_when_a_field_is_wrong(body: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError, match="request_ids") as refused:
        announced_sessions(body)
    assert refused.value.param == param
    assert refused.value.status == 400


@pytest.fixture(scope="module")
def server() -> Iterator[DryServer]:
    with DryServer("--served-model-name", "dry") as server:
        yield server


def test_the_engine_serves_on_when_it_was_told_of_sessions_that_it_does_not_know(server: DryServer) -> None:
    for body, status in (({"request_ids": ["nobody"] * 64}, 204), *((body, 400) for body, _ in BAD)):
        assert server.client.post("/kv_prefetch", json=body, headers=PEER).status_code == status
    as_json = PEER | {"content-type": "application/json"}
    assert server.client.post("/kv_prefetch", content=b"[", headers=as_json).status_code == 400
    assert server.client.get("/kv_prefetch", headers=PEER).status_code == 405
    answer = server.client.post("/v1/completions", json={"prompt": "Some text", "max_tokens": 2})
    assert answer.status_code == 200
