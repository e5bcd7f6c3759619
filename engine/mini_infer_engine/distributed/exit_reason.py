"""A process's last words: a pipe whose reader learns why the process ended, even where its main thread hangs."""

import os


class LastWords:
    """The reader's end, made before the process is started."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        """`writer` is for the child, which inherits it."""
        os.set_blocking(self._reader, False)

    def started(self) -> None:
        """The child has its end; ours is closed."""
        os.close(self.writer)

    def read(self) -> str:
        """What was said; empty: nothing."""
        try:
            return os.read(self._reader, 1 << 16).decode(errors="replace").partition("\n")[0]
        except BlockingIOError:
            return ""

    def close(self) -> None:
        """Nothing more is read."""
        os.close(self._reader)


def say(descriptor: int, reason: str) -> None:
    """Leave a reason for the reader; the first one counts."""
    if descriptor >= 0:
        os.write(descriptor, reason.replace("\n", " ").encode() + b"\n")
