"""Serves the weights of a rank that is up: answers requests on the control port, and issues tickets for its pieces.

Nothing that a peer sends ends the thread: a message that cannot be decoded or answered is counted and dropped.
"""

import logging
import socket
import threading

import zmq

from mini_infer_engine.weight_transfer import messages
from mini_infer_engine.weight_transfer.addresses import zmq_address
from mini_infer_engine.weight_transfer.exchange import WeightExchange
from mini_infer_engine.weight_transfer.messages import Digests, DigestsRequested, Done, Hello, Offer, Refused
from mini_infer_engine.weight_transfer.model_tensors import ModelTensors
from mini_infer_engine.weight_transfer.pieces import pieces_of
from mini_infer_engine.weight_transfer.sender import PieceSender
from mini_infer_process import zmq_limits
from mini_infer_process.curve import PeerAuthenticator, secure_server
from mini_infer_process.listening import bound_socket

log = logging.getLogger(__name__)

_POLL_MS = 200
"""Milliseconds between two checks whether the server is to end."""


class WeightServer:
    """Owns the control thread of one rank."""

    def __init__(self, tensors: ModelTensors, identity: str, exchange: WeightExchange, rank: int) -> None:
        """Binds both ports of the rank. Raises ValueError if one of them is taken."""
        self.identity = identity
        """Identity of the tensors that are served."""
        port = exchange.port_of(rank)
        self._name = f"{socket.gethostname()}:{port}"
        self._tensors = tensors
        listening = _bound(exchange.host, port + 1)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        secret = exchange.secret
        self._authenticator = PeerAuthenticator(self._context, secret) if secret is not None else None
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        zmq_limits.WEIGHTS.apply(self._router)
        secure_server(self._router, secret)
        self._router.set(zmq.IPV6, ":" in exchange.host)
        self.sender = PieceSender(listening, tensors, pieces_of(tensors.specs))
        self.faults = 0
        """Messages that could not be decoded or answered."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        try:
            self._router.bind(zmq_address(exchange.host, port))
        except zmq.ZMQError as error:
            self.close()
            raise _taken(exchange.host, port, error) from None

    @property
    def sent_bytes(self) -> int:
        """Bytes of weights sent since the start."""
        return self.sender.sent_bytes

    def start(self) -> None:
        """Begins to answer."""
        self.sender.start()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and all connections."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(2.0)
        self.sender.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._router.poll(_POLL_MS):
                    self._answer(*self._router.recv_multipart())
            except zmq.ContextTerminated:
                return
            except Exception as error:  # whatever a peer has sent, it costs its message alone
                self.faults += 1
                log.warning("a message on the weights port is dropped: %s", error)

    def _answer(self, peer: bytes, *frames: bytes) -> None:
        (payload,) = frames
        match messages.decode_request(payload):
            case Hello(version, identity):
                self._send(peer, self._greeted(version, identity))
            case DigestsRequested(ticket):
                digests = self.sender.digests(ticket)
                if digests is not None:
                    self._send(peer, Digests(digests))
            case Done(ticket):
                self.sender.end(ticket)

    def _greeted(self, version: int, identity: str) -> messages.Reply:
        if version != messages.VERSION:
            return Refused("other_version")
        if identity != self.identity:
            return Refused("other_weights")
        ticket = self.sender.open_session()
        return Refused("busy") if ticket is None else Offer(self._name, ticket, self._tensors.specs)

    def _send(self, peer: bytes, reply: messages.Reply) -> None:
        self._router.send_multipart([peer, messages.encode(reply)], zmq.NOBLOCK)


def serve_weights(tensors: ModelTensors, identity: str, exchange: WeightExchange, rank: int) -> WeightServer:
    """Serves the weights from now on. Raises ValueError if a port is taken."""
    server = WeightServer(tensors, identity, exchange, rank)
    server.start()
    log.info("weights are served to engines of this service at port %d", exchange.port_of(rank))
    return server


def _bound(host: str, port: int) -> socket.socket:
    try:
        return bound_socket(host, port)
    except OSError as error:
        raise _taken(host, port, error) from None


def _taken(host: str, port: int, error: Exception) -> ValueError:
    return ValueError(f"cannot listen on {host}:{port} ({error}): choose another --weights-port")
