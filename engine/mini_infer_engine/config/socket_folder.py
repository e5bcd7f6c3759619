"""Creates the folder in which processes of one engine meet: only this user can enter it. Knows no sockets."""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_LONGEST_SOCKET_PATH = 107 if sys.platform == "linux" else 103
_LONGEST_NAME = 12
"""Most bytes of a socket's name in the folder."""
_RANDOM_NAME = 8
"""Characters that mkdtemp adds to the prefix."""


def socket_folder(prefix: str, elsewhere: Sequence[str] = ("/tmp", "/dev/shm")) -> Path:
    """Creates a folder in TMPDIR, or `elsewhere` if its path is too long for sockets. Raises ValueError if none is
    possible.
    """
    longest = _LONGEST_SOCKET_PATH - len(f"/{prefix}/") - _RANDOM_NAME - _LONGEST_NAME
    for place in (tempfile.gettempdir(), *elsewhere):
        if len(os.fsencode(place)) <= longest and os.access(place, os.W_OK):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    raise ValueError(
        f"TMPDIR = {tempfile.gettempdir()!r} is too long for socket files: set it to a folder whose path has at most "
        f"{longest} bytes"
    )
