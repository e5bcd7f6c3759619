"""`kv_policy` and `kv_budget` in all four kinds of generation: they reach the engine, or are refused by name."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.server.dry_server import DryServer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
paths = pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Some text", "max_tokens": 2}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
    ],
)


@pytest.fixture(scope="module")
def server() -> Iterator[DryServer]:
    with DryServer("--served-model-name", "dry") as server:
        yield server


@paths
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"kv_policy": "full"}, None),
        ({"kv_policy": "snapkv", "kv_budget": 100}, "dry run"),
        ({"kv_policy": "snapkv"}, "kv_budget"),
        ({"kv_policy": "snapkv", "kv_budget": 3}, "kv_budget"),
        ({"kv_budget": 100}, "kv_budget"),
        ({"kv_budget": 0}, "kv_budget"),
        ({"kv_policy": "none"}, "kv_policy"),
    ],
)
def test_fields_of_policies_reach_the_engine(
    server: DryServer, path: str, body: dict[str, Any], fields: dict[str, Any], named: str | None
) -> None:
    answer = server.client.post(path, json={"model": "dry", **body, **fields})
    assert answer.status_code == (200 if named is None else 400), answer.text
    assert named is None or named in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields", [{"kv_policy": "snapkv"}, {"kv_budget": 100}, {"kv_policy": "snapkv", "kv_budget": 3}]
)
def test_the_budget_is_the_parameter_at_fault(server: DryServer, fields: dict[str, Any]) -> None:
    answer = server.client.post("/v1/chat/completions", json={"model": "dry", **CHAT, **fields})
    assert answer.json()["error"]["param"] == "kv_budget"
