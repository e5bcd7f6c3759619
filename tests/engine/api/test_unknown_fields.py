"""`--unknown-fields`: what becomes of fields that this server does not know, in every dialect."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from mini_infer_engine.api.ignored_fields import IgnoredFields, header_value
from tests.engine.server.dry_server import DryServer

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"model": "dry", "messages": USER, "max_tokens": 3},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/tokenize": {"prompt": "hi"},
    "/v1/messages/count_tokens": {"model": "dry", "messages": USER},
}
UNKNOWN: dict[str, Any] = {
    "foo": None,
    "guided_json": {"type": "object"},
    "enable_thinking": False,
    "provider": {"order": ["x"]},
    "n" * 5000: 1,
}
HINTS: dict[str, Any] = {
    "verbosity": "low",
    "store": True,
    "prompt_cache_retention": "24h",
    "web_search_options": {},
    "prediction": {"type": "content", "content": "x"},
}
PROMISES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"n": 1000}, "n"),
    ("/v1/chat/completions", {"tools": [{"type": "web_search"}]}, "tools[0]"),
    ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("/v1/chat/completions", {"modalities": ["audio"]}, "modalities"),
    ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions"),
    ("/v1/completions", {"suffix": "x"}, "suffix"),
    ("/v1/responses", {"prompt": {"id": "p"}}, "prompt"),
    ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("/v1/messages", {"thinking": {"type": "between_tools"}}, "thinking.type"),
]


@pytest.fixture(scope="module")
def lenient() -> Iterator[DryServer]:
    with DryServer("--unknown-fields", "warn") as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_field_is_refused_by_name_when_nothing_is_set(server: DryServer, path: str, name: str) -> None:
    answer = server.client.post(path, json=BODIES[path] | {name: UNKNOWN[name]})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert name[:100] in error["message"]
    assert len(answer.content) < 1000, "a name is quoted up to 200 characters"


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_ignored_and_named_when_the_flag_says_warn(lenient: DryServer, path: str) -> None:
    plain = lenient.client.post(path, json=BODIES[path])
    answer = lenient.client.post(path, json=BODIES[path] | UNKNOWN)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in plain.headers
    if not path.startswith(("/tokenize", "/v1/messages/count")):
        named = answer.headers["x-ignored-fields"]
        assert named.startswith("foo, guided_json, enable_thinking, provider, nnn")
        assert len(named) < 300


def test_a_stream_names_ignored_fields_in_its_head_when_the_flag_says_warn(lenient: DryServer) -> None:
    body = BODIES["/v1/chat/completions"] | {"stream": True, "foo": 1}
    assert lenient.client.post("/v1/chat/completions", json=body).headers["x-ignored-fields"] == "foo"


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_is_ignored_when_the_flag_says_warn(server: DryServer, lenient: DryServer, name: str) -> None:
    body = BODIES["/v1/chat/completions"] | {name: HINTS[name]}
    assert server.client.post("/v1/chat/completions", json=body).json()["error"]["param"] == name
    answer = lenient.client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, name)


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/chat/completions", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ("/v1/responses", {"reasoning": {"effort": "low", "x": 1}}, "reasoning.x"),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/responses", {"text": {"x": None}}, "text.x"),
        ("/v1/messages", {"metadata": {"x": 1}}, "metadata.x"),
        ("/v1/messages", {"output_config": {"effort": "low", "x": {}}}, "output_config.x"),
    ],
)
def test_a_nested_field_is_ignored_when_the_flag_says_warn(
    server: DryServer, lenient: DryServer, path: str, fields: dict[str, Any], named: str
) -> None:
    assert named in server.client.post(path, json=BODIES[path] | fields).json()["error"]["message"]
    answer = lenient.client.post(path, json=BODIES[path] | fields)
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, named)


@pytest.mark.parametrize(("path", "fields", "param"), PROMISES)
def test_what_changes_the_answer_is_refused_when_the_flag_says_warn(
    lenient: DryServer, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = lenient.client.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error.get("param", "").startswith(param) if "param" in error else param in error["message"]


def test_the_log_has_one_line_in_ten_seconds_when_fields_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    ignored = IgnoredFields(lambda: now_s)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            ignored.note(["foo"])
        now_s = 11.0
        ignored.note(["bar"])
        ignored.note([])
    assert [record.args for record in caplog.records] == [(1, "foo"), (5, "bar")]


def test_names_are_printable_when_a_client_sends_others() -> None:
    assert header_value(["a\r\nset-cookie: x", "b,c", "é"]) == "a??set-cookie: x, b?c, ?"
    assert header_value([f"f{number}" for number in range(30)]).endswith(", f19, and 10 more")
