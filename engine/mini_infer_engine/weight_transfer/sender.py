"""Sends pieces of a model's tensors over TCP connections that a ticket opens, in threads of low priority.

Each connection reads pieces into a buffer of its own: pinned memory and a side stream for a GPU, so that passes on the
device go on. It decides nothing about who gets a ticket.
"""

import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from mini_infer_engine.weight_transfer.messages import TICKET_BYTES
from mini_infer_engine.weight_transfer.model_tensors import ModelTensors
from mini_infer_engine.weight_transfer.pieces import PIECE_BYTES, Piece
from mini_infer_process.interpreter import lower_thread_priority

log = logging.getLogger(__name__)

MAX_SESSIONS = 2
"""Engines that are sent weights at once; others are refused as busy, and read files."""
MAX_CONNECTIONS = 8
"""Connections of one ticket."""
_MAX_UNKNOWN = 16
"""Connections that have not shown a ticket yet; more are closed."""
_TICKET_S = 5.0
"""Seconds for a new connection to show its ticket."""
SESSION_S = 30.0
"""Seconds after which a ticket ends that is not used: a peer allocates its model before it connects."""
_SOCKET_S = 5.0
"""Seconds for a peer to read something of a piece, or to request the next one."""
_INDEX = struct.Struct("!I")


@dataclass(slots=True)
class Session:
    """One engine that is sent weights."""

    ticket: bytes
    digests: list[bytes]
    """SHA-256 of each piece that was sent, else empty."""
    used_s: float
    connections: int = 0
    sockets: set[socket.socket] = field(default_factory=set)
    has_ended: bool = False


class PieceSender:
    """Owns the listening socket, its connections and their threads."""

    def __init__(
        self,
        listening: socket.socket,
        tensors: ModelTensors,
        pieces: Sequence[Piece],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes over `listening`, which is bound. `start` begins to accept."""
        self._listening, self._tensors, self._pieces, self._clock = listening, tensors, pieces, clock
        self._sessions: dict[bytes, Session] = {}
        self._lock = Lock()
        self._unknown = 0
        self._closing = False
        self._digests: list[bytes] = [b""] * len(pieces)
        """SHA-256 of each piece when it was first sent: weights do not change."""
        self.sent_bytes = 0
        self._thread = threading.Thread(target=self._accept, name="weights-accept", daemon=True)

    def start(self) -> None:
        """Begins to accept connections."""
        self._listening.listen(64)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for session in list(self._sessions.values()):
            self.end(session.ticket)

    # -- Sessions, which the control thread opens and ends

    def open_session(self) -> bytes | None:
        """Returns a new ticket, or None if there are as many as may be."""
        now_s = self._clock()
        with self._lock:
            expired = [s for s in self._sessions.values() if not s.connections and now_s - s.used_s > SESSION_S]
        for session in expired:
            self.end(session.ticket)
        with self._lock:
            if len(self._sessions) >= MAX_SESSIONS:
                return None
            ticket = secrets.token_bytes(TICKET_BYTES)
            self._sessions[ticket] = Session(ticket, [b""] * len(self._pieces), now_s)
        return ticket

    def digests(self, ticket: bytes) -> list[bytes] | None:
        """Returns the digests of what was sent under a ticket, or None if there is no such ticket."""
        session = self._find(ticket)
        return None if session is None else list(session.digests)

    def end(self, ticket: bytes) -> None:
        """Ends a ticket and its connections. Unknown tickets are ignored."""
        session = self._find(ticket)
        if session is None:
            return
        with self._lock:
            self._sessions.pop(session.ticket, None)
            session.has_ended = True
            sockets = list(session.sockets)
        for connection in sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _find(self, ticket: bytes) -> Session | None:
        with self._lock:
            return next((s for key, s in self._sessions.items() if hmac.compare_digest(key, ticket)), None)

    # -- Connections

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closing:
                    return
                continue
            with self._lock:
                is_refused = self._unknown >= _MAX_UNKNOWN
                self._unknown += not is_refused
            if is_refused:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="weights-send", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        session = None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_TICKET_S)
            ticket = _received(connection, TICKET_BYTES)
            session = self._admitted(connection, ticket)
        except (OSError, EOFError) as error:
            log.debug("a connection for weights has ended: %s", error)
        finally:
            with self._lock:
                self._unknown -= 1
        try:
            if session is not None:
                self._send_pieces(connection, session)
        except (OSError, EOFError) as error:
            log.debug("a connection for weights has ended: %s", error)
        except Exception:
            log.exception("a connection for weights fails")
        finally:
            with self._lock:
                if session is not None:
                    session.connections -= 1
                    session.sockets.discard(connection)
            connection.close()

    def _admitted(self, connection: socket.socket, ticket: bytes) -> Session | None:
        session = self._find(ticket)
        with self._lock:
            if session is None or session.has_ended or session.connections >= MAX_CONNECTIONS:
                return None
            session.connections += 1
            session.sockets.add(connection)
            session.used_s = self._clock()
        return session

    def _send_pieces(self, connection: socket.socket, session: Session) -> None:
        """Answers piece by piece: a request is the piece's index, the answer its bytes."""
        connection.settimeout(_SOCKET_S)
        reader = PieceReader(self._tensors)
        lower_thread_priority()
        while True:
            (index,) = _INDEX.unpack(_received(connection, _INDEX.size))
            if index >= len(self._pieces):
                log.warning("a peer requests piece %d of %d: its connection is closed", index, len(self._pieces))
                return
            content = reader.read(self._pieces[index])
            digest = self._digests[index]
            if not digest:
                digest = self._digests[index] = hashlib.sha256(content).digest()
            session.digests[index] = digest
            connection.sendall(content)
            with self._lock:
                session.used_s = self._clock()
                self.sent_bytes += len(content)


class PieceReader:
    """Reads pieces of tensors into main memory, for one thread."""

    def __init__(self, tensors: ModelTensors) -> None:
        self._tensors = tensors
        self._index, self._flat = -1, torch.empty(0, dtype=torch.uint8)
        self._buffer: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def read(self, piece: Piece) -> memoryview:
        """Returns the bytes of a piece, valid until the next call."""
        if piece.tensor != self._index:  # a blocked weight is copied once, not for each of its pieces
            self._index, self._flat = piece.tensor, self._tensors.flat(piece.tensor)
        source = self._flat[piece.begin : piece.end]
        if source.device.type != "cuda":
            return source.numpy().data
        torch.cuda.set_device(source.device)
        if self._buffer is None or self._stream is None:
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            self._stream = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        target = self._buffer[: piece.num_bytes]
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copied.record(self._stream)
        copied.synchronize()
        return target.numpy().data


def _received(connection: socket.socket, size: int) -> bytes:
    """Reads exactly `size` bytes. Raises EOFError if the connection ends before, and TimeoutError if it takes long."""
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise EOFError("the peer has closed the connection")
        content += part
    return content
