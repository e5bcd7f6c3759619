"""Opens the Unix socket of `--admin-socket`: whoever may open its file may administer the engine. It
knows no routes.
"""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def admin_socket(path: str | None) -> Iterator[socket.socket | None]:
    """Yields a listening socket of mode 0600, or None without a path. Its file is removed at the end of the block.

    Raises OSError if the path is taken by anything but a socket without a listener.
    """
    if path is None:
        yield None
        return
    file = Path(path)
    _remove_left_behind(file)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        before = os.umask(0o177)
        try:
            listening.bind(path)
        finally:
            os.umask(before)
        try:
            listening.listen(16)
            listening.setblocking(False)
            yield listening
        finally:
            file.unlink(missing_ok=True)


def _remove_left_behind(path: Path) -> None:
    """Removes the socket of a process that was killed."""
    try:
        is_socket = stat.S_ISSOCK(path.stat().st_mode)
    except FileNotFoundError:
        return
    if is_socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
