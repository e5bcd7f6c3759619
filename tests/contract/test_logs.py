import json
import logging
import sys

from mini_infer_contract.logs import JsonFormatter, with_fields


def line(record: logging.LogRecord) -> dict[str, object]:
    text = JsonFormatter().format(record)
    assert "\n" not in text
    parsed: dict[str, object] = json.loads(text)
    return parsed


def test_a_line_is_one_object_with_the_fields_apart() -> None:
    record = logging.makeLogRecord(
        {"name": "a.b", "levelname": "INFO", "msg": 'said %s\n"é"', "args": ("x",), "created": 0.5, "msecs": 500.0}
        | with_fields(status=200, left_out=None, what=object)
    )
    found = line(record)
    assert found.pop("what")
    assert found == {
        "time": "1970-01-01T00:00:00.500Z",
        "level": "info",
        "logger": "a.b",
        "message": 'said x\n"é"',
        "status": 200,
    }


def test_an_exception_is_in_its_line() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    assert "ValueError: no" in str(line(record)["exception"])
