"""Runs the process that forks workers: it has the vocabulary's prefix tree, no torch, no sockets but its parent's.

It reads the tokenizer once, and forks workers that wait, so that no client waits for a fork. A waiting worker reads a
file descriptor from the control socket: a socket whose other end sends a grammar and expects the proof. It passes it on
to this process, which keeps it open until the worker has ended, and reports how it ended. All processes end when the
parent closes the control socket, so also when the parent dies.
"""

import contextlib
import ctypes
import gc
import math
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import cast

import msgspec
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from mini_infer_engine.structured.limits import MAX_WALL_S
from mini_infer_engine.structured.proving.messages import WorkerEnd, receive_document, send_document
from mini_infer_engine.structured.proving.worker import limit_this_process, prove, warm_up
from mini_infer_process.heap import trim_heap
from mini_infer_process.logs import show_crashes

READY = b"r"
WAITING_WORKERS = 2
"""Workers that wait for a grammar; each shares the memory of the process that forked it."""
_PR_SET_PDEATHSIG = 1
"""Option of <sys/prctl.h> for the signal that the kernel sends when the parent dies."""
_CONTROL_CLOSED = 3
"""Exit status of a worker that waited until the parent closed the control socket."""
_LIBC = ctypes.CDLL(None)


@dataclass(slots=True)
class _Worker:
    pid: int
    job: socket.socket | None = None
    """Socket for the proof; None while the worker waits for a grammar."""
    deadline_s: float = math.inf
    has_timed_out: bool = False


def vocabulary(tokenizer_json: str) -> LLTokenizer:
    """Returns the prefix tree of a tokenizer.json. Its end-of-sequence token is arbitrary, as proofs need none."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    return LLTokenizer(tokenizer_json, n_vocab=last + 1, eos_token=special[-1] if special else last)


class _Workers:
    """All workers: those that prove a grammar, and those that wait for one."""

    def __init__(self, control: socket.socket, tokenizer: LLTokenizer) -> None:
        self._control, self._tokenizer = control, tokenizer
        self._selector = selectors.DefaultSelector()
        self._workers: dict[socket.socket, _Worker] = {}
        """Workers by our end of a socket pair whose other end is the worker's alone."""
        self._is_closed = False
        """True once the parent has closed the control socket, as a waiting worker saw."""

    def serve(self) -> None:
        """Keeps workers waiting until the control socket is closed and the last worker has ended."""
        while not self._is_closed or self._workers:
            self._fork_until(WAITING_WORKERS)
            for key, _ in self._selector.select(self._client_timeout_s()):
                self._receive(cast("socket.socket", key.fileobj))
            self._end_overdue()

    def _fork_until(self, count: int) -> None:
        """Forks up to `count` waiting workers. While proofs run it forks only if none waits: forks cost clients
        processor time.
        """
        waiting = sum(worker.job is None for worker in self._workers.values())
        desired = 0 if self._is_closed else count if waiting == len(self._workers) else 1
        for _ in range(desired - waiting):
            self._fork()

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        if not (pid := os.fork()):
            ours.close()
            self._work(theirs)
        theirs.close()
        self._workers[ours] = _Worker(pid)
        self._selector.register(ours, selectors.EVENT_READ)

    def _work(self, parent: socket.socket) -> None:
        """Runs the forked process: it never returns."""
        try:
            _die_with_parent()
            bytes_before = warm_up(self._tokenizer)
            limit_this_process()
            if (job := _receive_job(self._control)) is None:
                os._exit(_CONTROL_CLOSED)
            socket.send_fds(parent, [b"j"], [job.fileno()])
            text = receive_document(job).decode()
            try:
                proof = prove(self._tokenizer, text, bytes_before)
            except MemoryError:
                os.kill(os.getpid(), signal.SIGABRT)  # as where the library meets the limit
            send_document(job, msgspec.json.encode(proof))
        finally:
            os._exit(0)

    def _receive(self, link: socket.socket) -> None:
        """Reads a message of a worker: its job, or that it has ended."""
        worker = self._workers[link]
        try:
            job = _receive_job(link)
        except OSError:
            job = None
        if job is None:
            self._reap(link)
        else:
            worker.job, worker.deadline_s = job, time.monotonic() + MAX_WALL_S

    def _reap(self, link: socket.socket) -> None:
        worker = self._workers.pop(link)
        self._selector.unregister(link)
        link.close()
        _, status = os.waitpid(worker.pid, 0)
        if worker.job is None:
            self._is_closed |= os.WIFEXITED(status) and os.WEXITSTATUS(status) == _CONTROL_CLOSED
            return
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        with contextlib.suppress(OSError):  # nobody waits for it any more
            send_document(worker.job, msgspec.json.encode(WorkerEnd(number, worker.has_timed_out)))
        worker.job.close()

    def _end_overdue(self) -> None:
        now_s = time.monotonic()
        for worker in self._workers.values():
            if worker.deadline_s <= now_s and not worker.has_timed_out:
                worker.has_timed_out = True
                os.kill(worker.pid, signal.SIGKILL)

    def _client_timeout_s(self) -> float | None:
        earliest_s = min((worker.deadline_s for worker in self._workers.values()), default=math.inf)
        return None if earliest_s == math.inf else max(0.01, earliest_s - time.monotonic())


def _receive_job(channel: socket.socket) -> socket.socket | None:
    """Returns the socket that a message carries, or None if the other side has closed the channel."""
    data, fds, _, _ = socket.recv_fds(channel, 1, 1)
    return socket.socket(fileno=fds[0]) if data and fds else None


def _die_with_parent() -> None:
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Serves proofs, as `python -m mini_infer_engine.structured.proving.process FD`; only prover.py starts it."""
    show_crashes()  # of this process: a worker that dies says nothing, for its parent does
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a supervisor: the parent decides when this ends
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        tokenizer = vocabulary(receive_document(control).decode())
    except EOFError:
        return
    gc.collect()
    gc.freeze()  # or the first collection in a worker would copy every page of this process
    trim_heap()  # a third of it with 150,000 tokens: forks are quicker, and workers cannot allocate from what is free
    control.sendall(READY)
    _Workers(control, tokenizer).serve()


if __name__ == "__main__":
    main()
