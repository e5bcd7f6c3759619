"""Configures the logs of every process: one line an event on stderr, as text or as JSON, in one format for all."""

import faulthandler
import json
import logging
import sys
import time
from typing import Any, Literal

LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")

_STDERR = 2
"""The file descriptor of stderr: a library may replace `sys.stderr` by something that has none."""


def show_crashes() -> None:
    """Has a signal that ends this process by its own fault (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) write the stacks
    of all its threads to stderr first. Call it where a process begins.
    """
    faulthandler.enable(_STDERR)


def configure_logging(level: str, form: LogFormat = "text", engine: int | None = None) -> None:
    """Configures logging for this process. `engine` is its number, if a server has several."""
    _drop_unused_record_fields()
    handler = logging.StreamHandler(sys.stderr)
    which = "" if engine is None else f"engine {engine} "
    text = TextFormatter(f"%(asctime)s %(levelname)s {which}%(name)s: %(message)s")
    handler.setFormatter(JsonFormatter(engine) if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _drop_unused_record_fields() -> None:
    """Stops logging from looking up line numbers, threads and processes, which takes a third of a line's cost (Python's
    logging HOWTO, "Optimization").
    """
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def with_fields(**fields: Any) -> dict[str, Any]:
    """Returns `extra` for a logging call: the facts of the message as fields of their own, for JSON lines. Leaves out
    None.
    """
    return {"fields": {name: value for name, value in fields.items() if value is not None}}


class TextFormatter(logging.Formatter):
    """The library's formatter, except that it computes date and time of day once a second."""

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self._second, self._shown = -1, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  # as the library's
        """Formats the record's time, and reuses the date and time of day within a second."""
        second = int(record.created)
        if second != self._second:
            self._second, self._shown = second, super().formatTime(record, self.default_time_format)
        return f"{self._shown},{int(record.msecs):03d}"


class JsonFormatter(logging.Formatter):
    """Formats one JSON object a line: time, level, logger, message, `with_fields`' fields, and an exception if there is
    one.
    """

    def __init__(self, engine: int | None = None) -> None:
        """`engine` is its number, if a server has several."""
        super().__init__()
        self._engine = {} if engine is None else {"engine": engine}

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record as one line of JSON."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        } | self._engine
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
