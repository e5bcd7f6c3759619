"""What moves bytes between the page pools of two engines: the interface."""

from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import msgspec

from mini_infer_engine.kv_transfer.layout import KVLayout, Span
from mini_infer_engine.kv_transfer.protocol.wire import TransportAddress
from mini_infer_engine.kv_transfer.staging_slots import Area

How = Literal["write", "read"]
Progress = Literal["busy", "done", "failed"]
BUSY_S = 0.0001
"""Between two looks at bytes on their way."""
TEND_S = 0.2
"""Between two looks at peers that may be gone: whoever takes a peer's place wants its GPU's memory within seconds."""


class TransportError(RuntimeError):
    """A peer is gone, or never was: whoever moves something from or to it does it another way."""


class Motion(Protocol):
    """Bytes on their way."""

    @property
    def num_bytes(self) -> int:
        """Of all ranks, once it is `done`."""

    def progress(self) -> Progress:
        """How far they are, without waiting; `failed`: some may have arrived, and none will any more.

        There is no way to stop them: what has begun to move may arrive until it is `done` or `failed`, and whoever owns
        the pages keeps them until then.
        """


class Motions:
    """Several that belong together: done when all are, failed when none moves any more and one has failed."""

    def __init__(self, motions: Iterable[Motion], *, has_failed: bool = False) -> None:
        """`has_failed`: another one could not begin."""
        self._motions, self._has_failed = list(motions), has_failed

    @property
    def num_bytes(self) -> int:
        """See `Motion.num_bytes`."""
        return sum(motion.num_bytes for motion in self._motions)

    def progress(self) -> Progress:
        """See `Motion.progress`."""
        found = {motion.progress() for motion in self._motions}
        if "busy" in found:
            return "busy"
        return "failed" if self._has_failed or "failed" in found else "done"


class Transport(Protocol):
    """Of one pool, or of a group's, which it registers when it is made. Used by one thread."""

    name: str
    """Of several that it chooses from, all names, joined by +."""

    def enter_thread(self) -> None:
        """Called once, by the thread that uses it from then on."""

    def describe(self) -> TransportAddress:
        """What another engine needs to reach what is here."""

    def add_peer(self, engine_id: str, layout: KVLayout, where: TransportAddress) -> None:
        """Get to know another engine's pools; one that is known already is replaced. TransportError."""

    def remove_peer(self, engine_id: str) -> None:
        """Forget it, and free what is kept for it."""

    def tend(self) -> None:
        """Called from time to time: free what is kept for peers whose processes have ended."""

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        """Write tokens to a peer's pools, or read them from there. TransportError."""

    def way(self, engine_id: str, span: Span) -> Area | None:
        """The staging buffer that tokens given to a peer go through; None: they are written to its pools. Of these only
        layers and numbers of tokens count. TransportError.
        """

    def slot_bytes(self, engine_id: str, area: Area) -> int:
        """Of staging slots, the smaller of both sides'. TransportError."""

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Gather what a peer is given into a slot of the staging buffer. TransportError."""

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        """Write what was gathered in a slot to one that the peer has lent. TransportError."""

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        """Put what a peer has written to a slot of ours into `span.our_pages`. TransportError."""

    def close(self) -> None:
        """Unregister the pool."""


class TransportChoice(msgspec.Struct, frozen=True):
    """What was asked for."""

    kind: str = "auto"
    """--kv-transport."""
    staging_bytes: int = 128 << 20
    """--kv-staging-memory: of each staging buffer of a rank."""
    bytes_per_s: int | None = None
    """--kv-transfer-bandwidth: of a rank, at most."""


OpenTransport = Callable[[TransportChoice, str], Transport]
"""What an engine exchanges its pages by, for what was asked for and its id. ModelError: it cannot work here."""
