"""What a response tells of its end, by the types of openai-python."""

import pytest
from openai.types.responses import Response

from mini_infer_apis.dialects.response_object import new_response, with_error


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "invalid_prompt"),
        (404, "invalid_prompt"),
        (408, "server_error"),
        (429, "rate_limit_exceeded"),
        (500, "server_error"),
        (503, "server_error"),
    ],
)
def test_a_failed_response_has_one_of_openais_codes(status: int, code: str) -> None:
    failed = with_error(new_response({}, "resp_1", "m", 5, "in_progress"), status, "odd", "why")
    assert Response.model_validate(failed).error is not None
    assert (failed["status"], failed["error"]) == ("failed", {"code": code, "message": "why"})


def test_a_failed_response_keeps_context_length_exceeded() -> None:
    failed = with_error(new_response({}, "resp_1", "m", 5, "in_progress"), 400, "context_length_exceeded", "why")
    assert failed["error"]["code"] == "context_length_exceeded"
