"""Defines the jobs of KV transfer on the producer's side: prefills for other engines, and their reads."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mini_infer_engine.kv_transfer.layout import KVLayout, Span
from mini_infer_engine.kv_transfer.protocol import events, wire
from mini_infer_engine.kv_transfer.staging.staged_write import StagedWrite
from mini_infer_engine.kv_transfer.staging_slots import Area, chunks
from mini_infer_engine.kv_transfer.transport import Digest, Motion, Transport

Send = Callable[[bytes, wire.FromProducer], None]
"""Sends a message to a peer, which is given by its identity at the ROUTER."""


@dataclass(slots=True)
class PrefillJob:
    """A prompt that is computed here for another engine, and written into its pages."""

    peer: bytes
    job: int
    pages: list[int]
    """The consumer's pages."""
    state_slot: int | None
    """The consumer's slot for the recurrent state; None if the model has none."""
    write: "PageWrite | None" = None
    """The write in flight. There is one at a time, so that writes end in order."""
    waiting: deque[events.Send] = field(default_factory=deque)
    """Tokens of which not all layers are being written. The first may wait for layers that are still being computed."""
    next_layer: int = 0
    """The next layer to write of the first entry of `waiting`."""
    end: events.SendEnd | None = None
    is_active: bool = True
    final_message: wire.FromProducer | None = None
    """The last message to the consumer of a failed or cancelled job. It is sent once nothing is written any more."""
    num_bytes: int = 0
    digest: int = 0
    """The sum of the digests of all that was written."""


@dataclass(slots=True)
class PageWrite:
    """A write of some layers of some tokens into the consumer's pages."""

    give: events.Send
    motion: Motion
    started_s: float
    ends_give: bool
    """True if it writes the last layers of its `give`."""
    digest: Digest | None = None
    """The digest of its `give`, once all layers of that are computed."""


@dataclass(slots=True)
class ReadJob:
    """A read of cached blocks by another engine."""

    peer: bytes
    job: int
    lease_s: float
    first_token: int
    num_tokens: int
    staged: list[StagedWrite] = field(default_factory=list)
    """Staged writes to the consumer that have not ended. What else was granted the consumer reads from pool to pool."""
    digested: "tuple[events.Grant, Digest] | None" = None
    """The core's grant, while its digest is computed: the consumer is told of both."""


@dataclass(slots=True)
class EndingRead:
    """The rest of a read that has ended while staged writes of it are still in flight."""

    peer: bytes
    job: int
    staged: list[StagedWrite]
    is_released: bool = False
    """True if the consumer waits for `Released`."""


@dataclass(frozen=True, slots=True)
class ConsumerChannel:
    """Implements `staged_write.Channel` for one job of one consumer."""

    peer: bytes
    job: int
    party: wire.Party
    area: Area
    slot_bytes: int
    transport: Transport
    layout: KVLayout
    send: Send

    def divide(self, span: Span) -> list[Span]:
        """Divides a span into chunks of the size of a slot."""
        return chunks(self.layout.of(span.pool), self.party.layout.of(span.pool), span, self.slot_bytes)

    def stage(self, slot: int, part: Span) -> Motion:
        """Gathers a part into a slot of our staging buffer."""
        return self.transport.stage(self.party.engine_id, self.area, slot, part)

    def request_slot(self, serial: int) -> None:
        """Sends `SlotRequested`."""
        self.send(self.peer, wire.SlotRequested(self.job, serial, self.area))

    def write(self, slot: int, their_slot: int, part: Span) -> Motion:
        """Writes a filled slot to the consumer's slot."""
        return self.transport.push(self.party.engine_id, self.area, slot, their_slot, part)

    def report_written(self, serial: int, part: Span) -> None:
        """Sends `Written`."""
        assert part.layers is not None
        self.send(self.peer, wire.Written(self.job, serial, part.begin, part.end, part.layers, part.pool))
