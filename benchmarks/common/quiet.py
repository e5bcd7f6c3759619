"""Background work on the same machine, such as a soak, waits while something is measured: QUIET_FILE names a file that
exists meanwhile.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SETTLE_S = 0.5
"""For the step that is under way to end."""
_POLL_S = 0.05


def _file() -> Path | None:
    name = os.environ.get("QUIET_FILE")
    return Path(name) if name else None


@contextmanager
def measuring() -> Iterator[None]:
    """Inside, who heeds the file is still."""
    file = _file()
    if file is None:
        yield
        return
    file.touch()
    time.sleep(_SETTLE_S)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def wait_while_measuring() -> None:
    """Of background work: returns when nobody measures."""
    file = _file()
    while file is not None and file.exists():
        time.sleep(_POLL_S)
