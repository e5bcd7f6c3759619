"""Ends a command without a traceback where its user ends it: by Ctrl-C, by SIGTERM, or by not reading its output.

The statuses are those that a shell shows for programs that a signal ended. Imports nothing heavy: an entry point calls
it before it imports the rest of the program, which takes seconds on a busy machine.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 128 + signal.SIGINT
_NOBODY_READS = 128 + signal.SIGPIPE


@contextmanager
def ends_quietly(command: str) -> Iterator[None]:
    """Exits with 130 after Ctrl-C in the body, 143 after SIGTERM, 141 if nothing reads stdout any more, and 1 with one
    sentence if stdout cannot be written to.

    The first process of a container gets SIGTERM by its own handler only. A server sets its own in the body.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _exit) if is_main else None
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None where the caller has closed it
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        sys.exit(_NOBODY_READS)
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise  # of a file: that is for the command to name
        _drop_output()
        print(f"{command}: its output cannot be written: {error.strerror}: send it elsewhere", file=sys.stderr)
        sys.exit(1)
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _drop_output() -> None:
    """Has what stdout still buffers go nowhere: the interpreter would fail on it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
