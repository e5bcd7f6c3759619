import contextlib
import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_web.api_errors import ApiError, read_json_object
from tests.prompts.conversations import quick

json_objects = st.dictionaries(
    st.text(),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
)


def test_error_bodies_have_openais_shape() -> None:
    error = ApiError(404, "model m does not exist", param="model", code="model_not_found", headers={"retry-after": "1"})
    assert error.body() == {
        "error": {
            "message": "model m does not exist",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    assert (str(error), error.headers) == ("model m does not exist", {"retry-after": "1"})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "invalid_request_error"),
        (403, "permission_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_error_types_follow_the_status(status: int, kind: str) -> None:
    assert ApiError(status, "").body()["error"]["type"] == kind


def test_openai_client_reads_every_error_field() -> None:
    body = ApiError(400, "no", param="messages[0].content", code="bad").body()
    error = openai.APIError("no", request=None, body=body["error"])  # type: ignore[arg-type] # only kept
    assert (error.param, error.code, error.type) == ("messages[0].content", "bad", "invalid_request_error")


@quick
@given(json_objects)
def test_json_objects_are_read(value: dict[str, Any]) -> None:
    assert read_json_object(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"a": NaN}', b'{"a": 1} x', b"\xff", b'{"a": "\xff"}', b"[" * 100_000, b"[]", b"null", b'"text"'],
)
def test_a_body_gets_400_when_it_is_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError, match="the request body") as raised:
        read_json_object(body)
    assert (raised.value.status, raised.value.code) == (400, "invalid_json")


@quick
@given(st.binary())
def test_reading_a_body_raises_nothing_but_api_errors(body: bytes) -> None:
    with contextlib.suppress(ApiError):
        assert isinstance(read_json_object(body), dict)


@pytest.mark.parametrize(
    ("text", "half", "at"),
    [
        (rb"a\ud83d", r"\ud83d", 1),
        (rb"a\ud83db", r"\ud83d", 1),
        (rb"\uDE00", r"\uDE00", 0),
        (rb"\ud83d\ude00\ud83d", r"\ud83d", 12),
        (rb"\ud83d\u0041", r"\ud83d", 0),
        (rb"\\\ud83d", r"\ud83d", 2),
        (rb"\ud83d\ud83d\ude00", r"\ud83d", 0),
        (rb"\u00e9\n\ud83d", r"\ud83d", 8),
    ],
)
def test_half_of_a_character_is_named_when_a_text_was_cut(text: bytes, half: str, at: int) -> None:
    before = b'{"prompt": "'
    with pytest.raises(ApiError) as error:
        read_json_object(before + text + b'"}')
    assert f"half of a surrogate pair, {half} (byte {len(before) + at})" in error.value.message


@pytest.mark.parametrize("body", [rb'{"a": "\ud83d\ude00"', rb'{"a": "\\ud83d"', b'{"a": 1', b"\xff", b"[" * 100_000])
def test_a_body_is_refused_in_the_readers_words_when_its_characters_are_whole(body: bytes) -> None:
    with pytest.raises(ApiError) as error:
        read_json_object(body)
    assert "surrogate" not in error.value.message
