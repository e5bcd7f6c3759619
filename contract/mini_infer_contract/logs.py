"""How every process logs: one line an event on stderr, as text or as JSON, in one format for all of them."""

import json
import logging
import sys
import time
from typing import Any, Literal

LEVELS = ("debug", "info", "warning", "error")
LogFormat = Literal["text", "json"]
FORMATS: tuple[LogFormat, ...] = ("text", "json")


def configure_logging(level: str, form: LogFormat = "text", engine: int | None = None) -> None:
    """For this process. `engine`: its number, where a server has several."""
    handler = logging.StreamHandler(sys.stderr)
    which = "" if engine is None else f"engine {engine} "
    text = logging.Formatter(f"%(asctime)s %(levelname)s {which}%(name)s: %(message)s")
    handler.setFormatter(JsonFormatter(engine) if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def with_fields(**fields: Any) -> dict[str, Any]:
    """For `extra` of a logging call: what the message says, apart, where lines are JSON. None is left out."""
    return {"fields": {name: value for name, value in fields.items() if value is not None}}


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, `with_fields`' fields, and an exception if there is one."""

    def __init__(self, engine: int | None = None) -> None:
        """`engine`: its number, where a server has several."""
        super().__init__()
        self._engine = {} if engine is None else {"engine": engine}

    def format(self, record: logging.LogRecord) -> str:
        """See logging."""
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
