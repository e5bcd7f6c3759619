"""Results of passes on their way from a pipeline's last stage, which samples, to the first rank, which has the engine.

One message for each pass, in the order of passes. It knows neither stages nor what is computed.
"""

import queue
import threading
from collections.abc import Callable

import msgspec
import zmq

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.core.result import PassResult
from mini_infer_engine.runtime.executor import PassHandle
from mini_infer_process import zmq_limits
from mini_infer_process.curve import secure_client

_LOOK_S = 0.1
"""How often who waits looks whether the group still lives."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PassResult).decode


class ResultReceiver:
    """The first rank's end."""

    def __init__(self, socket: zmq.Socket[bytes], is_lost: Callable[[], object]) -> None:
        self._socket, self._is_lost = socket, is_lost

    def connected(self) -> None:
        """Wait for the last stage. RuntimeError: the group is over."""
        self._receive()

    def next(self) -> PassResult:
        """Of the oldest pass that has not been asked for. RuntimeError: the group is over, and none will come."""
        return _decode(self._receive())

    def _receive(self) -> bytes:
        while not self._socket.poll(int(_LOOK_S * 1000)):
            if self._is_lost():
                raise RuntimeError("the group is over")
        return self._socket.recv()


class ResultSender:
    """The last stage's end: a thread that waits for passes, so that the rank's own goes on with the next ones."""

    def __init__(self, address: str, secret: PeerSecret | None = None) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        zmq_limits.LOCAL.apply(self._socket)
        secure_client(self._socket, secret)
        self._socket.set(zmq.IPV6, 1)
        self._socket.connect(address)
        self._socket.send(b"")  # see `ResultReceiver.connected`
        self._passes: queue.SimpleQueue[PassHandle] = queue.SimpleQueue()

    def start(self, prepare: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """`prepare` is called by the thread as it begins, `failed` where a pass fails: no more results come."""
        threading.Thread(target=self._run, args=(prepare, failed), name="pass-results", daemon=True).start()

    def send(self, handle: PassHandle) -> None:
        """A pass all of which has been launched."""
        self._passes.put(handle)

    def _run(self, prepare: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        try:
            prepare()
            while True:
                self._socket.send(_encode(self._passes.get().result()))
        except Exception as error:
            failed(error)
