"""Limits of every ZMQ socket of engines and gateways, in one table. It opens no socket.

libzmq bounds neither the size of a frame nor, at a high-water mark of 0, the number of buffered messages. Code that
makes a socket applies its row before `bind` or `connect`.
"""

from dataclasses import dataclass
from typing import Any, Final

import zmq

HANDSHAKE_MS: Final = 5_000
"""A connection that has not finished its handshake by then is closed, so that half-open ones do not pile up."""
_KiB, _MiB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketLimits:
    """The limits of one socket. Queues count messages of one peer; 0 means that another limit bounds them."""

    socket: str
    """The socket's name, as tables show it."""
    max_message_bytes: int
    """Largest frame; libzmq closes the connection that announces a longer one, before it allocates it."""
    receive_queue: int
    send_queue: int
    at_limit: str
    """The fate of a message beyond `send_queue`, or the other limit that bounds the queues."""

    def apply(self, socket: "zmq.Socket[Any]") -> None:
        """Sets the options; call it before `bind` or `connect`."""
        socket.set(zmq.MAXMSGSIZE, self.max_message_bytes)
        socket.set(zmq.RCVHWM, self.receive_queue)
        socket.set(zmq.SNDHWM, self.send_queue)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


EVENTS: Final = SocketLimits(
    socket="engine, events (PUB)",
    max_message_bytes=4 * _KiB,
    receive_queue=64,
    send_queue=2_048,
    at_limit="a subscriber that does not read loses events, sees a gap and asks for a replay",
)
"""Subscriptions are all that comes in; a CurveZMQ handshake needs less than 1 KiB."""
REPLAY: Final = SocketLimits(
    socket="engine, replay (ROUTER)",
    max_message_bytes=4 * _KiB,
    receive_queue=16,
    send_queue=64,
    at_limit="the replay waits until its peer reads, and ends after 10 s without progress",
)
TRANSFER: Final = SocketLimits(
    socket="engine, KV transfer control (ROUTER)",
    max_message_bytes=32 * _MiB,
    receive_queue=64,
    send_queue=10_000,
    at_limit="the message is dropped, and its transfer ends by its own time-out",
)
"""A request for a prompt carries its token ids, up to five bytes each."""
TRANSFER_CLIENT: Final = SocketLimits(
    socket="engine, KV transfer control towards another engine (DEALER)",
    max_message_bytes=32 * _MiB,
    receive_queue=1_000,
    send_queue=10_000,
    at_limit="the message is dropped, and its transfer ends by its own time-out",
)
WEIGHTS: Final = SocketLimits(
    socket="engine, weights (ROUTER)",
    max_message_bytes=4 * _KiB,
    receive_queue=16,
    send_queue=64,
    at_limit="the message is dropped, and the engine that starts reads files",
)
"""Requests carry an identity or a ticket; a manifest goes the other way."""
WEIGHTS_CLIENT: Final = SocketLimits(
    socket="engine, weights of another engine (DEALER)",
    max_message_bytes=64 * _MiB,
    receive_queue=4,
    send_queue=16,
    at_limit="the message is dropped, and the engine that starts reads files",
)
"""A manifest has a hundred bytes for each tensor, and digests 34 for each piece."""
SUBSCRIBER: Final = SocketLimits(
    socket="gateway, events of one engine (SUB)",
    max_message_bytes=4 * _MiB,
    receive_queue=128,
    send_queue=64,
    at_limit="the engine buffers, then drops; the gateway sees the gap and reads a replay or the snapshot",
)
"""An engine's largest batch is that of one step: 4 MiB are some 700,000 tokens."""
REPLAY_CLIENT: Final = SocketLimits(
    socket="gateway, replay of one engine (DEALER)",
    max_message_bytes=4 * _MiB,
    receive_queue=128,
    send_queue=16,
    at_limit="the engine waits",
)
LOCAL: Final = SocketLimits(
    socket="between processes of one engine (ipc, or tcp between its nodes)",
    max_message_bytes=1 << 30,
    receive_queue=0,
    send_queue=0,
    at_limit="queues are bounded by admission (--max-waiting, --max-num-seqs); a snapshot is the largest message",
)

TABLE: Final = (EVENTS, REPLAY, TRANSFER, TRANSFER_CLIENT, WEIGHTS, WEIGHTS_CLIENT, SUBSCRIBER, REPLAY_CLIENT, LOCAL)
