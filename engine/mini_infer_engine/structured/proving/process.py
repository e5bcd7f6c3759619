"""The process that workers are forked from: it has the vocabulary's prefix tree, no torch, no sockets but its parent's.

It reads the tokenizer once, and then a file descriptor for each grammar: a socket whose other end waits for the proof.
It keeps that socket open until the worker has ended, and says how it ended. It ends when its parent closes the control
socket, that is, also when the parent dies.
"""

import contextlib
import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass

import msgspec
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from mini_infer_contract.logs import show_crashes
from mini_infer_engine.structured.limits import MAX_WALL_S
from mini_infer_engine.structured.proving.messages import WorkerEnd, receive_document, send_document
from mini_infer_engine.structured.proving.worker import run_job

READY = b"r"
_PR_SET_PDEATHSIG = 1
"""<sys/prctl.h>: the signal that the kernel sends when the parent dies."""


@dataclass(slots=True)
class _Worker:
    pid: int
    channel: socket.socket
    deadline_s: float
    has_timed_out: bool = False


def vocabulary(tokenizer_json: str) -> LLTokenizer:
    """Returns the prefix tree of a tokenizer.json. Which token ends a sequence does not matter to a proof."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    last = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    return LLTokenizer(tokenizer_json, n_vocab=last + 1, eos_token=special[-1] if special else last)


class _Workers:
    """All workers that run now."""

    def __init__(self, control: socket.socket, tokenizer: LLTokenizer) -> None:
        self._control, self._tokenizer = control, tokenizer
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        self._workers: dict[int, _Worker] = {}
        """By the reading end of a pipe whose writing end is the worker's alone: it is readable once that has ended."""

    def serve(self) -> None:
        """Forks a worker for each job, until the control socket is closed."""
        while True:
            for key, _ in self._selector.select(self._patience_s()):
                if key.fileobj is not self._control:
                    self._reap(key.fd)
                elif not self._accept():
                    return
            self._end_overdue()

    def _accept(self) -> bool:
        """Returns False if there will be no more jobs."""
        data, (fd, *_) = _receive_fd(self._control)
        if not data:
            return False
        with socket.socket(fileno=fd) as received:
            channel = received.dup()
        ended, kept_open = os.pipe()
        if not (pid := os.fork()):
            self._work(channel)
        os.close(kept_open)
        self._workers[ended] = _Worker(pid, channel, time.monotonic() + MAX_WALL_S)
        self._selector.register(ended, selectors.EVENT_READ)
        return True

    def _work(self, channel: socket.socket) -> None:
        """The forked process: it never returns."""
        try:
            _die_with_parent()
            text = receive_document(channel).decode()
            try:
                proof = run_job(self._tokenizer, text)
            except MemoryError:
                os.kill(os.getpid(), signal.SIGABRT)  # as where the library meets the limit
            send_document(channel, msgspec.json.encode(proof))
        finally:
            os._exit(0)

    def _reap(self, ended: int) -> None:
        worker = self._workers.pop(ended)
        self._selector.unregister(ended)
        os.close(ended)
        _, status = os.waitpid(worker.pid, 0)
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        with contextlib.suppress(OSError):  # nobody waits for it any more
            send_document(worker.channel, msgspec.json.encode(WorkerEnd(number, worker.has_timed_out)))
        worker.channel.close()

    def _end_overdue(self) -> None:
        now_s = time.monotonic()
        for worker in self._workers.values():
            if worker.deadline_s <= now_s and not worker.has_timed_out:
                worker.has_timed_out = True
                os.kill(worker.pid, signal.SIGKILL)

    def _patience_s(self) -> float | None:
        if not self._workers:
            return None
        return max(0.01, min(worker.deadline_s for worker in self._workers.values()) - time.monotonic())


def _receive_fd(control: socket.socket) -> tuple[bytes, list[int]]:
    data, fds, _, _ = socket.recv_fds(control, 1, 1)
    return data, fds or [-1]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Run as `python -m mini_infer_engine.structured.proving.process FD`; started by prover.py alone."""
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
    control.sendall(READY)
    _Workers(control, tokenizer).serve()


if __name__ == "__main__":
    main()
