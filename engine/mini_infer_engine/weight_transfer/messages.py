"""Messages of the control socket: msgpack over ZMQ, from a DEALER (an engine that starts) to a ROUTER (one that is up).

Decoding checks each value by itself; the receiver compares the manifest with its own model. No torch here.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

VERSION = 1
"""Version of these messages and of the layout of pieces: both engines must use the same one."""
TICKET_BYTES = 32
DIGEST_BYTES = 32
MAX_TENSORS = 1 << 18
MAX_PIECES = 1 << 18
"""Most pieces of one rank's weights, which are 2 TiB."""

_Identity = Annotated[str, Meta(min_length=64, max_length=64)]
_Ticket = Annotated[bytes, Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]
_Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
_Size = Annotated[int, Meta(ge=0, lt=1 << 44)]
RefusalCode = Literal["busy", "other_weights", "other_version"]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, dtype and shape of one tensor."""

    name: Annotated[str, Meta(max_length=1024)]
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[_Size, ...], Meta(max_length=8)]
    num_bytes: _Size


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Requests the weights with this identity."""

    version: int
    identity: _Identity


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Offers the weights: the ticket opens connections to the port above the control port."""

    name: Annotated[str, Meta(max_length=512)]
    """Name of the engine, for people."""
    ticket: _Ticket
    tensors: Annotated[list[TensorSpec], Meta(max_length=MAX_TENSORS)]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Refuses the weights."""

    code: RefusalCode


class DigestsRequested(msgspec.Struct, frozen=True, tag=True):
    """Requests the SHA-256 of each piece that was sent under this ticket."""

    ticket: _Ticket


class Digests(msgspec.Struct, frozen=True, tag=True):
    """The SHA-256 of each piece, in order; empty for a piece that was not sent."""

    digests: Annotated[list[_Digest], Meta(max_length=MAX_PIECES)]


class Done(msgspec.Struct, frozen=True, tag=True):
    """Ends the use of a ticket: another engine may get one."""

    ticket: _Ticket


Request = Hello | DigestsRequested | Done
Reply = Offer | Refused | Digests

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
