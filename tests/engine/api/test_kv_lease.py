"""The body's `kv_hints`, else the gateway's header, decide how long a request's KV cache is evicted late."""

from collections.abc import Iterator
from typing import Any

import pytest

from mini_infer_apis.dialects.kv_hints import KVHints
from mini_infer_engine.api.kv_lease import DONE_S, NO_LEASE, PIN_S, KVLease, kv_lease
from mini_infer_web.api_errors import ApiError
from tests.engine.server.dry_server import DryServer

HEADER, RETURN = {"x-mini-infer-kv-lease": "12.5"}, {"x-mini-infer-kv-return": "4"}


@pytest.mark.parametrize(
    ("headers", "hints", "lease"),
    [
        ({}, None, NO_LEASE),
        (HEADER, None, KVLease(12.5)),
        (HEADER, KVHints(), KVLease(12.5)),
        (HEADER, KVHints(ttl_s=3.0), KVLease(3.0)),
        (HEADER, KVHints(pin=True), KVLease(PIN_S, is_pinned=True)),
        (HEADER, KVHints(pin=True, ttl_s=3.0), KVLease(3.0, is_pinned=True)),
        (HEADER, KVHints(pin=True, ttl_s=3.0, done=True), KVLease(DONE_S)),
        (HEADER | RETURN, None, KVLease(12.5, returns_s=4.0)),
        (HEADER | RETURN, KVHints(ttl_s=30.0), KVLease(30.0, returns_s=4.0)),
        (HEADER | RETURN, KVHints(ttl_s=3.0), KVLease(3.0)),  # it would come after the lease's end
        (RETURN, None, NO_LEASE),
    ],
)
def test_the_body_wins_when_body_and_header_state_a_lease(
    headers: dict[str, str], hints: KVHints | None, lease: KVLease
) -> None:
    assert kv_lease(headers, hints) == lease


@pytest.mark.parametrize("text", ["-1", "3601", "nan", "inf", "soon", ""])
@pytest.mark.parametrize("name", ["x-mini-infer-kv-lease", "x-mini-infer-kv-return"])
def test_a_header_is_refused_when_it_is_no_number_of_seconds(name: str, text: str) -> None:
    with pytest.raises(ApiError, match=name):
        kv_lease({name: text}, None)


@pytest.fixture(scope="module")
def server() -> Iterator[DryServer]:
    with DryServer("--served-model-name", "dry") as server:
        yield server


@pytest.mark.parametrize(
    ("hints", "status"),
    [
        ({"pin": True, "ttl_s": 30}, 200),
        ({"done": True}, 200),
        ({"ttl_s": 0}, 400),
        ({"ttl_s": 3601}, 400),
        ({"pin": "yes"}, 400),
        ({"forever": True}, 400),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Some text", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/messages", {"model": "dry", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "store": False}),
        ("/v1/kv_hints", {"prompt": "Some text"}),
        ("/v1/kv_hints", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}),
    ],
)
def test_kv_hints_are_checked_when_a_body_has_them(
    server: DryServer, path: str, body: dict[str, Any], hints: dict[str, Any], status: int
) -> None:
    answer = server.client.post(path, json={**body, "kv_hints": hints})
    assert answer.status_code == status, answer.text
    if status == 400:
        error = answer.json()["error"]
        assert "kv_hints" in (error.get("param") or error["message"])


def test_hints_are_taken_for_each_prompt_when_a_session_has_ended(server: DryServer) -> None:
    body = {"model": "dry", "prompt": ["Some text", [65, 66]], "kv_hints": {"done": True}}
    answer = server.client.post("/v1/kv_hints", json=body)
    assert answer.json() == {"object": "kv_hints", "model": "dry", "prompt_tokens": 11}
    assert server.client.post("/v1/completions", json={"prompt": "Some text", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"prompt": "Some text"}, "kv_hints", 400),
        ({"prompt": "Some text", "kv_hints": {}}, "kv_hints", 400),
        ({"prompt": "Some text", "kv_hints": {"done": False, "pin": False}}, "kv_hints", 400),
        ({"kv_hints": {"done": True}}, "messages", 400),
        ({"messages": [], "prompt": "x", "kv_hints": {"done": True}}, "messages", 400),
        ({"prompt": [[10**9]], "kv_hints": {"done": True}}, "prompt", 400),
        ({"prompt": "x" * 100_000, "kv_hints": {"done": True}}, "prompt", 400),
        ({"model": "another", "prompt": "x", "kv_hints": {"done": True}}, "model", 404),
    ],
)
def test_hints_are_refused_by_name_when_they_say_nothing_or_of_no_prompt(
    server: DryServer, body: dict[str, Any], param: str, status: int
) -> None:
    answer = server.client.post("/v1/kv_hints", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"].startswith(param)
