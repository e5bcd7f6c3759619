"""Receives weights from one peer: finds one that offers them, fetches all pieces, and compares their digests.

Everything that a peer sends is checked before it is used. Any fault raises `PeerError`, and the caller reads files.
"""

import contextlib
import hashlib
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import msgspec
import torch
import zmq
from torch import Tensor

from mini_infer_contract.peer_auth import PeerSecret
from mini_infer_engine.models.weights.progress import LoadProgress
from mini_infer_engine.weight_transfer import messages
from mini_infer_engine.weight_transfer.addresses import resolved_peers, zmq_address
from mini_infer_engine.weight_transfer.decisions import transfer_fault
from mini_infer_engine.weight_transfer.exchange import PORTS_PER_RANK
from mini_infer_engine.weight_transfer.messages import Digests, DigestsRequested, Done, Hello, Offer, Refused
from mini_infer_engine.weight_transfer.model_tensors import ModelTensors
from mini_infer_engine.weight_transfer.pieces import PIECE_BYTES, Piece, pieces_of
from mini_infer_process import zmq_limits
from mini_infer_process.curve import secure_client

log = logging.getLogger(__name__)

MAX_PEERS = 8
"""Engines that are asked at once, chosen at random."""
HELLO_S = 2.0
"""Seconds for a peer to answer a greeting."""
_REPLY_S = 5.0
"""Seconds for a peer to answer with digests."""
_CONNECT_S = 2.0
_CHECK_S = 0.05
"""Seconds between two checks of a transfer's progress."""
_MOST_CONNECTIONS = 8
_INDEX = struct.Struct("!I")
_CHUNK_BYTES = 4 << 20
"""Bytes that are received and hashed in turn, while the kernel buffers those that follow."""
_AHEAD = 2
"""Pieces that a connection has requested: the peer prepares one while another is received."""


class PeerError(RuntimeError):
    """No peer delivers these weights; the message is the reason, in a few words."""


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """The offer of one peer, whose control socket stays open until the weights are there."""

    host: str
    port: int
    socket: "zmq.Socket[bytes]"
    offer: Offer

    def request_digests(self) -> list[bytes]:
        """Returns the digests of all pieces that the peer has sent."""
        self.socket.send(messages.encode(DigestsRequested(self.offer.ticket)), zmq.NOBLOCK)
        if not self.socket.poll(int(_REPLY_S * 1000)):
            raise PeerError("no digests came")
        reply = _decoded(self.socket.recv())
        if not isinstance(reply, Digests):
            raise PeerError(f"{type(reply).__name__} came in place of digests")
        return reply.digests


@contextmanager
def find_peer(addresses: Sequence[str], rank: int, identity: str, secret: PeerSecret | None) -> Iterator[PeerOffer]:
    """Greets the ranks of all peers at once, and yields the first offer. Its ticket ends with the block.

    Raises:
        PeerError: nobody offers them.
    """
    reachable = resolved_peers(addresses, MAX_PEERS)
    if not reachable:
        raise PeerError("no peer has an address")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sockets = {}
        poller = zmq.Poller()
        for host, first_port in reachable:
            port = first_port + PORTS_PER_RANK * rank
            dealer = context.socket(zmq.DEALER)
            dealer.set(zmq.LINGER, 500)  # the last message ends the ticket
            zmq_limits.WEIGHTS_CLIENT.apply(dealer)
            secure_client(dealer, secret)
            dealer.set(zmq.IPV6, ":" in host)
            dealer.connect(zmq_address(host, port))
            dealer.send(messages.encode(Hello(messages.VERSION, identity)), zmq.NOBLOCK)
            sockets[dealer] = host, port
            poller.register(dealer, zmq.POLLIN)
        found = _first_offer(poller, sockets)
        try:
            yield found
        finally:
            _end(found.socket, found.offer.ticket)
    finally:
        context.destroy(linger=500)


def _first_offer(poller: zmq.Poller, sockets: dict["zmq.Socket[bytes]", tuple[str, int]]) -> PeerOffer:
    """Returns the first offer; tickets of peers that answer at the same time end at once."""
    reasons: list[str] = []
    found: PeerOffer | None = None
    deadline_s = time.monotonic() + HELLO_S
    waiting = len(sockets)
    while waiting and found is None and (left_s := deadline_s - time.monotonic()) > 0:
        for dealer, _ in poller.poll(max(1, int(left_s * 1000))):
            host, port = sockets[dealer]
            waiting -= 1
            poller.unregister(dealer)
            try:
                reply = _decoded(dealer.recv())
            except PeerError as error:
                reasons.append(f"{host}: {error}")
                continue
            if not isinstance(reply, Offer):
                reasons.append(f"{host}: {reply.code if isinstance(reply, Refused) else 'no offer'}")
            elif found is not None:
                _end(dealer, reply.ticket)
            else:
                found = PeerOffer(host, port, dealer, reply)
    if found is None:
        raise PeerError("; ".join(reasons) or f"none of {len(sockets)} answers within {HELLO_S:g} s")
    return found


def fetch(tensors: ModelTensors, peer: PeerOffer, file_bytes_per_s: float | None) -> None:
    """Fills all tensors with the peer's pieces. Their memory has arbitrary contents if this raises.

    `file_bytes_per_s` is the rate of the files in place of which they are fetched; None compares nothing.

    Raises:
        PeerError: the peer has gone, is slow, or sent something else than its digests say.
    """
    pieces = pieces_of(tensors.specs)
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(pieces)):
        left.put(index)
    digests = [b""] * len(pieces)
    count = min(_MOST_CONNECTIONS, max(1, (os.cpu_count() or 1) // 2), len(pieces))
    with contextlib.closing(LoadProgress(tensors.num_bytes)) as progress, ExitStack() as stack:
        counted = _Counted(progress.add)
        connections = [stack.enter_context(_connected(peer)) for _ in range(count)]
        with ThreadPoolExecutor(count, thread_name_prefix="weights-receive") as pool:
            receivers = [_Receiver(tensors, pieces, one, digests, counted.add) for one in connections]
            try:
                _watch(
                    [pool.submit(each.run, left) for each in receivers], counted, tensors.num_bytes, file_bytes_per_s
                )
            except BaseException:
                _shut(connections)  # or the pool would wait for its threads
                raise
    if tensors.device.type == "cuda":
        torch.cuda.synchronize(tensors.device)
    stated = peer.request_digests()
    if len(stated) != len(digests):
        raise PeerError(f"{len(stated)} digests came, and there are {len(digests)} pieces")
    for piece, ours, theirs in zip(pieces, digests, stated, strict=True):
        if ours != theirs:
            raise PeerError(f"tensor {tensors.specs[piece.tensor].name}: the bytes that came have another digest")


class _Counted:
    """Counts bytes that several threads receive, and remembers when the last came."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self.begin_s = self.last_s = time.monotonic()
        self.done = 0

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes
            self.last_s = time.monotonic()
        self._report(num_bytes)


def _watch(jobs: "list[Future[None]]", counted: _Counted, total: int, file_bytes_per_s: float | None) -> None:
    """Waits until all pieces are there. Raises PeerError if a connection fails or the transfer is slow."""
    waiting: set[Future[None]] = set(jobs)
    while waiting:
        ended, waiting = wait(waiting, _CHECK_S, FIRST_EXCEPTION)
        for job in ended:
            if (error := job.exception()) is not None:
                raise PeerError(f"its connection ended ({error})") from error
        now_s = time.monotonic()
        fault = transfer_fault(
            done=counted.done,
            total=total,
            elapsed_s=now_s - counted.begin_s,
            idle_s=now_s - counted.last_s,
            file_bytes_per_s=file_bytes_per_s,
        )
        if waiting and fault:
            raise PeerError(fault)


class _Receiver:
    """Receives pieces over one connection, for one thread."""

    def __init__(
        self,
        tensors: ModelTensors,
        pieces: Sequence[Piece],
        connection: socket.socket,
        digests: list[bytes],
        count: Callable[[int], None],
    ) -> None:
        self._tensors, self._pieces, self._connection = tensors, pieces, connection
        self._digests, self._count = digests, count
        self._writer = PieceWriter(tensors)

    def run(self, left: "queue.SimpleQueue[int]") -> None:
        """Takes pieces from the queue until it is empty."""
        requested: list[int] = []
        while True:
            while len(requested) < _AHEAD and (index := _next(left)) is not None:
                self._connection.sendall(_INDEX.pack(index))
                requested.append(index)
            if not requested:
                break
            index = requested.pop(0)
            self._receive(index)
        self._writer.finish()

    def _receive(self, index: int) -> None:
        piece = self._pieces[index]
        target = self._writer.begin(piece)
        view = target.numpy().data
        digest, received = hashlib.sha256(), 0
        while received < len(view):
            size = self._connection.recv_into(view[received : received + _CHUNK_BYTES], 0, socket.MSG_WAITALL)
            if not size:
                raise EOFError("it was closed")
            digest.update(view[received : received + size])
            received += size
            self._count(size)
        self._digests[index] = digest.digest()
        self._writer.end(piece, target)


class PieceWriter:
    """Writes pieces into tensors, for one thread: in place on a CPU, through two pinned buffers to a GPU."""

    def __init__(self, tensors: ModelTensors) -> None:
        self._tensors = tensors
        self._buffers: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0
        self._stream: torch.cuda.Stream | None = None

    def begin(self, piece: Piece) -> Tensor:
        """Returns main memory for the bytes of a piece."""
        if self._tensors.device.type != "cuda":
            return self._tensors.flat(piece.tensor)[piece.begin : piece.end]
        if self._stream is None:
            torch.cuda.set_device(self._tensors.device)
            self._stream = torch.cuda.Stream(self._tensors.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._copied = [_event(), _event()]
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        return self._buffers[self._turn][: piece.num_bytes]

    def end(self, piece: Piece, target: Tensor) -> None:
        """Copies a piece that is complete to its place."""
        if self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            self._tensors.flat(piece.tensor)[piece.begin : piece.end].copy_(target, non_blocking=True)
            self._copied[self._turn].record(self._stream)

    def finish(self) -> None:
        """Waits until all pieces are in place."""
        if self._stream is not None:
            self._stream.synchronize()


def _event() -> torch.cuda.Event:
    """Returns an event whose waiters sleep: they must not take a core from the threads that receive."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _next(left: "queue.SimpleQueue[int]") -> int | None:
    try:
        return left.get_nowait()
    except queue.Empty:
        return None


@contextmanager
def _connected(peer: PeerOffer) -> Iterator[socket.socket]:
    try:
        connection = socket.create_connection((peer.host, peer.port + 1), _CONNECT_S)
    except OSError as error:
        raise PeerError(f"its port {peer.port + 1} cannot be reached ({error})") from None
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)  # `_watch` ends a transfer that stalls
        try:
            connection.sendall(peer.offer.ticket)
        except OSError as error:
            raise PeerError(f"its connection ended ({error})") from None
        yield connection


def _shut(connections: Sequence[socket.socket]) -> None:
    """Wakes threads that wait for bytes; they end with their own errors."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _end(dealer: "zmq.Socket[bytes]", ticket: bytes) -> None:
    with contextlib.suppress(zmq.ZMQError):
        dealer.send(messages.encode(Done(ticket)), zmq.NOBLOCK)


def _decoded(payload: bytes) -> messages.Reply:
    try:
        reply: messages.Reply = messages.decode_reply(payload)
        return reply
    except msgspec.MsgspecError as error:
        raise PeerError(f"its answer cannot be read ({error})") from None
