"""Defines the interface by which bytes move between the page pools of two engines."""

from collections.abc import Callable, Collection, Iterable
from typing import Literal, Protocol

import msgspec

from mini_infer_engine.kv_transfer.layout import KVLayout, Pool, Span
from mini_infer_engine.kv_transfer.protocol.wire import TransportAddress
from mini_infer_engine.kv_transfer.staging_slots import Area

How = Literal["write", "read"]
Progress = Literal["busy", "done", "failed"]
BUSY_S = 0.0001
"""Seconds between two polls of bytes in flight."""
TEND_S = 0.2
"""Seconds between two checks for peers that have ended: a peer's successor needs its GPU memory within seconds."""


class TransportError(RuntimeError):
    """The peer is gone or was never connected. The caller has to move or compute the data in another way."""


class Motion(Protocol):
    """An asynchronous copy between two pools."""

    @property
    def num_bytes(self) -> int:
        """Bytes that all ranks have moved. It is valid once the motion is `done`."""

    def progress(self) -> Progress:
        """Returns the state without waiting. After `failed` some bytes may have arrived, and no more will.

        A motion cannot be cancelled: bytes may arrive until it is `done` or `failed`, and the owner of the pages keeps
        them until then.
        """


class Digest(Protocol):
    """The digest of some tokens, which is being computed."""

    @property
    def value(self) -> int:
        """The digest, 0 <= value < 2**64. It is valid once `progress` is `done`."""

    def progress(self) -> Progress:
        """Returns the state without waiting. `failed` means that it cannot be computed."""


class KnownDigest(msgspec.Struct, frozen=True):
    """Implements `Digest` where nothing is to be waited for."""

    value: int

    def progress(self) -> Progress:
        """Returns `done`."""
        return "done"


class DigestSum:
    """The sum of several digests: `done` when all are, and `failed` when all have ended and one has failed."""

    def __init__(self, digests: Iterable[Digest]) -> None:
        self._digests = list(digests)

    @property
    def value(self) -> int:
        """The sum modulo 2**64."""
        return sum(digest.value for digest in self._digests) % (1 << 64)

    def progress(self) -> Progress:
        """Returns the combined state."""
        return combined({digest.progress() for digest in self._digests})


def combined(found: Collection[Progress]) -> Progress:
    """Returns the state of all parts together: they have ended when the last one has."""
    if "busy" in found:
        return "busy"
    return "failed" if "failed" in found else "done"


class Motions:
    """Several motions as one: `done` when all are, and `failed` when all have ended and one has failed."""

    def __init__(self, motions: Iterable[Motion], *, has_failed: bool = False) -> None:
        """Groups the motions. `has_failed` is True if another one could not begin."""
        self._motions, self._has_failed = list(motions), has_failed

    @property
    def num_bytes(self) -> int:
        """Sum over all motions."""
        return sum(motion.num_bytes for motion in self._motions)

    def progress(self) -> Progress:
        """Returns the combined state."""
        found = combined({motion.progress() for motion in self._motions})
        return "failed" if self._has_failed and found == "done" else found


class Transport(Protocol):
    """Moves bytes of an engine's pools, or of those of each rank of a tensor-parallel group, which are registered at
    construction. Only one thread uses it.
    """

    name: str
    """Name of the transport; one that chooses between several joins their names by "+"."""

    def enter_thread(self) -> None:
        """Prepares the calling thread, which alone uses the transport from then on. Called once."""

    def describe(self) -> TransportAddress:
        """Returns the addresses that another engine needs to reach our pools."""

    def add_peer(self, engine_id: str, layout: KVLayout, where: TransportAddress) -> None:
        """Connects to another engine's pools, and replaces an earlier connection. Raises TransportError if they cannot
        be reached.
        """

    def remove_peer(self, engine_id: str) -> None:
        """Disconnects from a peer, and frees its resources."""

    def tend(self) -> None:
        """Frees the resources of peers whose processes have ended. Called periodically."""

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        """Begins to write tokens to a peer's pools, or to read them from there. Raises TransportError if it cannot
        begin.
        """

    def staging_area(self, engine_id: str, span: Span) -> Area | None:
        """Returns the staging buffer through which tokens go to a peer, or None if they are written to its pools
        directly.

        Only the pool, the layers and the number of tokens of `span` count. Raises TransportError if the peer is not
        connected.
        """

    def slot_bytes(self, engine_id: str, area: Area, pool: Pool = "pages") -> int:
        """Returns the bytes of a staging slot of one pool, the smaller of both sides' slots. Raises TransportError if a
        side has none.
        """

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Begins to gather tokens for a peer into a slot of our staging buffer. Raises TransportError if it cannot
        begin.
        """

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        """Begins to write a filled slot to a slot that the peer has lent. Raises TransportError if it cannot begin."""

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Begins to copy a slot that a peer has filled to `span.our_pages`. Raises TransportError if that fails."""

    def digest(self, span: Span, consumer: KVLayout | None = None) -> Digest:
        """Begins to compute the digest of `span.our_pages`, for a consumer with pools of this layout. None means that
        this engine is the consumer, where the digest of what has arrived whole is the producer's.
        """

    def close(self) -> None:
        """Unregisters the pool."""


class TransportChoice(msgspec.Struct, frozen=True):
    """The operator's choice of transport."""

    kind: str = "auto"
    """Kind of transport (--kv-transport)."""
    staging_bytes: int = 128 << 20
    """Bytes of each staging buffer of a rank (--kv-staging-memory)."""
    bytes_per_s: int | None = None
    """The most bytes per second that a rank sends (--kv-transfer-bandwidth). None if there is no limit."""


OpenTransport = Callable[[TransportChoice, str], Transport]
"""Opens the transport of an engine, from the operator's choice and the engine's id. Raises ModelError if it cannot work
here.
"""
