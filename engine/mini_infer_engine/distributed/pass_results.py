"""Sends results of passes from a pipeline's last stage, which samples, to the first rank, which runs the engine.

There is one message for each pass, in the order of passes. This module knows neither stages nor the computation.
"""

import queue
import threading
from collections.abc import Callable

import msgspec
import zmq

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.distributed.rank_socket import report_socket
from mini_infer_engine.runtime.executor import PassHandle

_LOOK_S = 0.1
"""Seconds between two checks that the group still runs, while waiting for a result."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PassResult).decode


class ResultReceiver:
    """Receives results on the first rank."""

    def __init__(self, socket: zmq.Socket[bytes], is_lost: Callable[[], object]) -> None:
        self._socket, self._is_lost = socket, is_lost

    def connected(self) -> None:
        """Waits until the last stage has connected. Raises RuntimeError if the group has ended."""
        self._receive()

    def next(self) -> PassResult:
        """Waits for the result of the oldest pass that was not returned yet. Raises RuntimeError if the group has
        ended.
        """
        return _decode(self._receive())

    def _receive(self) -> bytes:
        while not self._socket.poll(int(_LOOK_S * 1000)):
            if self._is_lost():
                raise RuntimeError("the group is over")
        return self._socket.recv()


class ResultSender:
    """Sends results of the last stage. A thread waits for passes, so that the rank's main thread goes on with the next
    ones.
    """

    def __init__(self, address: str, secret: PeerSecret | None = None) -> None:
        self._socket = report_socket(address, secret)
        self._socket.send(b"")  # see `ResultReceiver.connected`
        self._passes: queue.SimpleQueue[PassHandle] = queue.SimpleQueue()

    def start(self, prepare: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Starts the thread. It calls `prepare` first, and `failed` if a pass raises; after that no more results are
        sent.
        """
        threading.Thread(target=self._run, args=(prepare, failed), name="pass-results", daemon=True).start()

    def send(self, handle: PassHandle) -> None:
        """Queues a pass that was launched completely."""
        self._passes.put(handle)

    def _run(self, prepare: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        try:
            prepare()
            while True:
                self._socket.send(_encode(self._passes.get().result()))
        except Exception as error:
            failed(error)
