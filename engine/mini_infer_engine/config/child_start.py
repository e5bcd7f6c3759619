"""Starts processes that die with this one, from whatever thread requests it. Knows nothing of them.

They have the kernel kill them when their parent ends, and to Linux that is the thread that started them (prctl(2),
PR_SET_PDEATHSIG): a thread that a pool or a web framework ends would take them with it.
"""

import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue

_Start = Callable[[], "subprocess.Popen[bytes]"]


def start_child(
    command: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Starts a process as `subprocess.Popen` does, from a thread that lasts as long as this process."""

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, pass_fds=pass_fds, env=env)

    if threading.current_thread() is threading.main_thread():
        return start()
    started: Future[subprocess.Popen[bytes]] = Future()
    _starts(os.getpid()).put((started, start))
    return started.result()


@cache
def _starts(pid: int) -> "SimpleQueue[tuple[Future[subprocess.Popen[bytes]], _Start]]":
    """Returns the queue of the lasting thread of this process; a fork has another pid, and gets a thread of its own."""
    requests: SimpleQueue[tuple[Future[subprocess.Popen[bytes]], _Start]] = SimpleQueue()
    threading.Thread(target=_serve, args=(requests,), name=f"child-start-{pid}", daemon=True).start()
    return requests


def _serve(requests: "SimpleQueue[tuple[Future[subprocess.Popen[bytes]], _Start]]") -> None:
    while True:
        started, start = requests.get()
        try:
            started.set_result(start())
        except OSError as error:
            started.set_exception(error)
