import json
import logging
import signal
import subprocess
import sys

import pytest

from mini_infer_process.logs import JsonFormatter, TextFormatter, with_fields


def line(record: logging.LogRecord) -> dict[str, object]:
    text = JsonFormatter().format(record)
    assert "\n" not in text
    parsed: dict[str, object] = json.loads(text)
    return parsed


def test_a_json_log_line_is_one_object_with_fields() -> None:
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


def test_a_json_log_line_contains_its_exception() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    assert "ValueError: no" in str(line(record)["exception"])


def test_text_log_times_equal_the_logging_modules() -> None:
    form = "%(asctime)s %(message)s"
    ours, theirs = TextFormatter(form), logging.Formatter(form)
    for created, msecs in ((0.5, 500.0), (0.999, 999.0), (1.0, 0.0), (1_700_000_000.25, 250.0), (2.5, 500.0)):
        record = logging.makeLogRecord({"msg": "said", "created": created, "msecs": msecs})
        assert ours.format(record) == theirs.format(record)


def test_log_lines_have_the_engines_number_when_there_are_several() -> None:
    record = logging.makeLogRecord({"name": "a.b", "levelname": "INFO", "msg": "said"})
    assert json.loads(JsonFormatter(3).format(record))["engine"] == 3
    assert "engine" not in line(record)


_CRASH = """
import os, signal
from mini_infer_process.logs import show_crashes

def gone_wrong():
    os.kill(os.getpid(), signal.{name})

show_crashes()
gone_wrong()
"""


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT"])
def test_a_process_prints_its_stack_when_a_signal_ends_it(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _CRASH.format(name=name)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.Signals[name]
    assert "Fatal Python error" in ended.stderr
    assert "gone_wrong" in ended.stderr
