"""Where processes of one engine meet: a folder that only this user can enter, for socket files. Knows no sockets."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_LONGEST_SOCKET_PATH = 107 if sys.platform == "linux" else 103
_LONGEST_NAME = 12
"""Of a socket in the folder."""
_RANDOM_NAME = 8
"""What mkdtemp adds to the prefix."""


def socket_folder(prefix: str, elsewhere: Sequence[str] = ("/tmp", "/dev/shm")) -> Path:
    """In TMPDIR, or `elsewhere` where its path is too long for sockets. ValueError: nowhere is one possible."""
    longest = _LONGEST_SOCKET_PATH - len(f"/{prefix}/") - _RANDOM_NAME - _LONGEST_NAME
    for place in (tempfile.gettempdir(), *elsewhere):
        if len(os.fsencode(place)) <= longest and os.access(place, os.W_OK):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    raise ValueError(
        f"TMPDIR = {tempfile.gettempdir()!r} is too long for socket files: set it to a folder whose path has at most "
        f"{longest} bytes"
    )
