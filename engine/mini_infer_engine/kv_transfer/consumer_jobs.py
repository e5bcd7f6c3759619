"""Defines the jobs of KV transfer on the consumer's side, the engines that it takes from, and its time limits."""

from dataclasses import dataclass, field
from typing import Literal

import zmq

from mini_infer_engine.kv_transfer.estimates import RateMeter
from mini_infer_engine.kv_transfer.protocol import events, wire
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.transport import Digest, Motion

Stage = Literal["connecting", "asked", "accepted", "reading", "given_up"]


@dataclass(slots=True)
class ReceiveSlot:
    """A slot of our staging buffer to which a producer writes."""

    area: Area
    slot: int
    placing: Motion | None = None
    """The copy from the slot into the job's pages, or None if the producer has not sent `Written` yet."""


@dataclass(slots=True, frozen=True)
class Proof:
    """The proof of what has arrived, before the job is reported as done."""

    digest: Digest
    """The digest of the tokens in the job's pages, and of the state at its slot."""
    expected: int
    """The producer's."""
    done: events.TransferDone


@dataclass(slots=True)
class ReceiveJob:
    """Keys and values that one sequence takes from another engine."""

    take: events.Take
    started_s: float
    stage: Stage
    deadline_s: float
    estimate_s: float | None = None
    motion: Motion | None = None
    """The read from pool to pool, if one is in flight."""
    awaits_written: bool = False
    """True if some of what was granted comes through staging slots, and `AllWritten` has to follow."""
    receive_slots: dict[int, ReceiveSlot] = field(default_factory=dict)
    """Slots that are lent to the producer, by its serial numbers, until their content is in the job's pages."""
    last: wire.Prefilled | wire.AllWritten | None = None
    """The producer's last message, which is handled once all that it has written is in the job's pages."""
    granted_tokens: int = 0
    granted_digest: int = 0
    proof: Proof | None = None
    lease_end_s: float = 0.0
    num_bytes: int = 0
    settles_s: float | None = None
    """The latest time at which the pages are settled, if no read into them is in flight: the peer is gone, or writes no
    more.
    """

    @property
    def is_reading(self) -> bool:
        """True if this engine itself still copies into the job's pages, or checks them."""
        if self.motion is not None or self.proof is not None:
            return True
        return any(receive_slot.placing is not None for receive_slot in self.receive_slots.values())


@dataclass(slots=True)
class Peer:
    """The connection to an engine that has keys and values, and the jobs over it."""

    address: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    party: wire.Party | None = None
    """The peer's description, or None if it has not answered `Hello` yet."""
    bytes_per_s: RateMeter = field(default_factory=RateMeter)
    jobs: dict[int, ReceiveJob] = field(default_factory=dict)
    refused_fetches: int = 0
    """Prefixes in a row that were computed here, because that was sooner by the peer's rate."""
    renewed_s: float = 0.0
    is_broken: bool = False
    """True if the transport to this peer has failed: new jobs use a new connection, and a new handshake."""


@dataclass(slots=True, frozen=True)
class KVConsumerLimits:
    """Time limits, in seconds."""

    lease_s: float
    timeout_s: float
