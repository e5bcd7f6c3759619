"""Transfers the reason of a process's end through a pipe, so that its parent learns it even if the main
thread hangs.
"""

import os


class ExitReason:
    """The reader's end of the pipe, created before the process is started."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        """`writer` is the child's end, which it inherits."""
        os.set_blocking(self._reader, False)

    def started(self) -> None:
        """Closes our copy of the child's end, once the child has started."""
        os.close(self.writer)

    def read(self) -> str:
        """Returns the reason that the child has written, or an empty string if there is none."""
        try:
            return os.read(self._reader, 1 << 16).decode(errors="replace").partition("\n")[0]
        except BlockingIOError:
            return ""

    def close(self) -> None:
        """Closes the reader's end."""
        os.close(self._reader)


def write_reason(descriptor: int, reason: str) -> None:
    """Writes a reason for the reader, which reads only the first one. Does nothing if the descriptor is negative."""
    if descriptor >= 0:
        os.write(descriptor, reason.replace("\n", " ").encode() + b"\n")
