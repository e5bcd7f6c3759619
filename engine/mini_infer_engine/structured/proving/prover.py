"""Has grammars proved by workers of another process, and interprets how they end. Knows no requests."""

import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable

import msgspec

from mini_infer_engine.config.child_start import start_child
from mini_infer_engine.structured.limits import MAX_CPU_S, MAX_GRAMMAR_BYTES, MAX_WALL_S
from mini_infer_engine.structured.proving.messages import Proof, WorkerEnd, receive_document, send_document

_START_TIMEOUT_S = 60.0
"""Time-out of the start: a large vocabulary takes a second or two, a busy machine longer."""
_TIMEOUT_S = MAX_WALL_S + 2.0
"""Time-out of a proof: the process that forks workers ends them earlier."""

_COMMAND = (sys.executable, "-m", "mini_infer_engine.structured.proving.process")

_MEANINGS: dict[int, tuple[str, str]] = {
    signal.SIGPROF: ("cpu", f"it takes more than {MAX_CPU_S:g} s of CPU to compile: simplify it"),
    signal.SIGXCPU: ("cpu", f"it takes more than {MAX_CPU_S:g} s of CPU to compile: simplify it"),
    signal.SIGABRT: ("memory", f"it takes more than {MAX_GRAMMAR_BYTES >> 20} MiB of memory to compile: simplify it"),
    signal.SIGSEGV: (
        "stack",
        "it nests too deeply, perhaps by definitions or rules that refer to each other: flatten it",
    ),
    signal.SIGBUS: (
        "stack",
        "it nests too deeply, perhaps by definitions or rules that refer to each other: flatten it",
    ),
}
"""Maps the signal that ends a worker to the limit that it exceeded and the message for the client."""

ENDS = ("cpu", "memory", "stack", "time", "lost")
"""Reasons why workers are ended: a limit, or something outside."""


class ProverLostError(RuntimeError):
    """Raised if the worker, or the process that forked it, was ended from outside: nothing is known of the grammar."""


class Prover:
    """Runs the process that forks workers. Started with the first grammar or by `start`; may be shared by threads.

    If the process is gone, it is restarted for the next grammar.
    """

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        """Prepares a prover. `tokenizer_json` returns the text of tokenizer.json, and is called at each start of the
        process.
        """
        self._tokenizer_json = tokenizer_json
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.ends: Counter[str] = Counter()
        """Number of workers that gave no proof, by the reason in `ENDS`."""

    @property
    def pid(self) -> int | None:
        """Id of the process that forks workers; None if it was not started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process and waits until it is ready. Raises ProverLostError if it cannot start."""
        with self._lock:
            self._ready_control()

    def prove(self, text: str) -> Proof:
        """Returns a worker's result for a grammar's text, even if a limit ended the worker.

        Raises ProverLostError if nothing can be said about the grammar.
        """
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(_TIMEOUT_S)
            with theirs, self._lock:
                self._hand_over(theirs)
            try:
                send_document(ours, text.encode())
                return self._answer(ours)
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                self.ends["lost"] += 1
                raise ProverLostError(f"the process that checks grammars was ended ({error})") from None

    def _answer(self, ours: socket.socket) -> Proof:
        answer = msgspec.json.decode(receive_document(ours), type=Proof | WorkerEnd)
        if isinstance(answer, Proof):
            return answer
        limit, fault = _MEANINGS.get(answer.signal, ("lost", ""))
        if answer.has_timed_out:
            limit, fault = "time", f"it takes longer than {MAX_WALL_S:g} s to compile: simplify it"
        self.ends[limit] += 1
        if not fault:
            raise ProverLostError("the worker that checked the grammar was ended from outside")
        return Proof(fault=fault)

    def _hand_over(self, theirs: socket.socket) -> None:
        """Sends a job to the process, which is restarted if it is gone."""
        for _ in range(2):
            control = self._ready_control()
            try:
                socket.send_fds(control, [b"j"], [theirs.fileno()])
                return
            except OSError:
                self._control = None
                control.close()
        raise ProverLostError("the process that checks grammars ends as soon as it has started")

    def _ready_control(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        if self._control is not None:  # The process has ended, and workers that still wait are about to.
            self._control.close()
            self._control = None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                theirs.set_inheritable(True)
                command = [*_COMMAND, str(theirs.fileno())]
                self._process = start_child(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
            ours.settimeout(_START_TIMEOUT_S)
            send_document(ours, self._tokenizer_json().encode())
            if not ours.recv(1):
                raise OSError("it ended while it started")
            ours.settimeout(_TIMEOUT_S)
        except OSError as error:
            ours.close()
            raise ProverLostError(f"the process that checks grammars cannot be started: {error}") from None
        self._control = ours
        weakref.finalize(self, ours.close)
        return ours
