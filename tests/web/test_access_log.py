"""The line of a request: its level, its words, and its fields where lines are JSON."""

import logging
from typing import Any

import pytest

from mini_infer_web.access_log import log_request


def line(caplog: pytest.LogCaptureFixture, path: str, status: int, error: str = "", **fields: Any) -> logging.LogRecord:
    caplog.set_level(logging.DEBUG)
    log_request(logging.getLogger("x"), "GET", path, status, 0.25, "mine", fields, error)
    return caplog.records[-1]


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        ("/v1/models", 200, "INFO"),
        ("/v1/models", 404, "WARNING"),
        ("/v1/models", 503, "WARNING"),
        ("/readyz", 200, "DEBUG"),
        ("/readyz", 503, "INFO"),
    ],
)
def test_access_log_level_by_path_and_status(
    caplog: pytest.LogCaptureFixture, path: str, status: int, level: str
) -> None:
    assert line(caplog, path, status).levelname == level


@pytest.mark.parametrize(("error", "outcome"), [("it failed", "ok"), ("", "in_band_error"), ("", "broke")])
def test_access_log_warns_when_a_stream_failed(caplog: pytest.LogCaptureFixture, error: str, outcome: str) -> None:
    assert line(caplog, "/v1/x", 200, error, outcome=outcome).levelname == "WARNING"


def test_access_log_escapes_control_characters_of_clients(caplog: pytest.LogCaptureFixture) -> None:
    message = line(caplog, "/a\n2026 FAKE\x1b[31m\u2028é", 404, "no\r\nsuch path").getMessage()
    assert message == r"GET /a\n2026 FAKE\x1b[31m\u2028é 404 in 0.250 s, id mine, no\r\nsuch path"


def test_access_log_has_the_known_fields(caplog: pytest.LogCaptureFixture) -> None:
    record = line(caplog, "/v1/x", 200, model="m", prompt_tokens=5, first_token_s=0.1, endpoint="a", outcome="broke")
    assert record.getMessage() == (
        "GET /v1/x 200 in 0.250 s, model m, 5 tokens, first after 0.100 s, by a, broke, id mine"
    )
    assert {"status": 200, "endpoint": "a", "duration_s": 0.25}.items() <= record.__dict__["fields"].items()
    assert "error" not in record.__dict__["fields"]
    assert line(caplog, "/v1/x", 400, "x" * 500, outcome="client_error").getMessage().endswith(f"mine, {'x' * 197}...")
