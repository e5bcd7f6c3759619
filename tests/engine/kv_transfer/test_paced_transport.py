"""A transport whose bytes take as long as a link of a given speed, whatever they go by."""

from dataclasses import dataclass, field
from typing import cast

from mini_infer_engine.kv_transfer.layout import KVLayout, Span
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.transport import (
    Digest,
    How,
    KnownDigest,
    Motion,
    Progress,
    Transport,
    TransportError,
)
from mini_infer_engine.kv_transfer.transports.paced_transport import PacedTransport

SPAN = Span([0], [0], 0, 128)


@dataclass
class FakeMotion:
    num_bytes: int
    state: Progress = "busy"

    def progress(self) -> Progress:
        return self.state


@dataclass
class Fake:
    """Moves what it is told to have moved."""

    name: str = "fake"
    sizes: list[int] = field(default_factory=list)
    begun: list[FakeMotion] = field(default_factory=list)

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        if engine_id == "gone":
            raise TransportError("it has gone")
        self.begun.append(FakeMotion(self.sizes.pop(0)))
        return self.begun[-1]

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        return self.start(engine_id, "write", span)

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        return self.start(engine_id, "read", span)

    def digest(self, span: Span, consumer: KVLayout | None = None) -> Digest:
        return KnownDigest(7)

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        return self.start(engine_id, "read", span)


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def paced(*sizes: int) -> tuple[PacedTransport, Fake, Clock]:
    fake, clock = Fake(sizes=list(sizes)), Clock()
    return PacedTransport(cast("Transport", fake), 1000, clock), fake, clock


def test_a_paced_transfer_takes_as_long_as_its_bandwidth_demands() -> None:
    transport, fake, clock = paced(2000)
    motion = transport.start("peer", "write", SPAN)
    fake.begun[0].state = "done"
    for now_s, found in ((100.5, "busy"), (101.9, "busy"), (102.0, "done")):
        clock.now_s = now_s
        assert motion.progress() == found
    assert motion.num_bytes == 2000


def test_a_paced_transfer_waits_when_the_link_is_slower_than_its_pace() -> None:
    transport, fake, clock = paced(2000)
    motion = transport.start("peer", "write", SPAN)
    clock.now_s = 109
    assert motion.progress() == "busy"
    fake.begun[0].state = "done"
    assert motion.progress() == "done"


def test_motions_begin_one_after_the_other_when_they_are_started_together() -> None:
    transport, fake, clock = paced(1000, 1000, 500)
    first, second = transport.start("one", "write", SPAN), transport.push("other", "device", 0, 8, SPAN)
    fake.begun[0].state = "done"
    assert (first.progress(), second.progress(), len(fake.begun)) == ("busy", "busy", 1)
    clock.now_s = 101
    assert second.progress() == "busy"  # a look at the second lets the first end
    assert (first.progress(), len(fake.begun)) == ("done", 2)
    fake.begun[1].state = "done"
    clock.now_s = 101.9
    assert second.progress() == "busy"
    clock.now_s = 110
    assert second.progress() == "done"
    third = transport.start("one", "read", SPAN)
    fake.begun[2].state = "done"
    assert third.progress() == "busy"
    clock.now_s = 110.5
    assert third.progress() == "done"


def test_only_its_own_transfer_fails_when_a_peer_disappears() -> None:
    transport, fake, clock = paced(1000, 1000)
    first, lost = transport.start("one", "write", SPAN), transport.start("gone", "write", SPAN)
    last = transport.start("one", "write", SPAN)
    fake.begun[0].state, clock.now_s = "done", 101
    assert (first.progress(), lost.progress(), last.progress()) == ("done", "failed", "busy")
    fake.begun[1].state, clock.now_s = "done", 102
    assert (last.progress(), lost.num_bytes) == ("done", 0)


def test_a_paced_transfer_fails_at_once_when_the_link_fails() -> None:
    transport, fake, _ = paced(5000)
    motion = transport.start("peer", "write", SPAN)
    fake.begun[0].state = "failed"
    assert motion.progress() == "failed"


def test_staging_copies_are_not_paced() -> None:
    transport, fake, _ = paced(1000, 1000, 1000)
    transport.push("peer", "host", 0, 8, SPAN)
    copies = [transport.stage("peer", "host", 1, SPAN), transport.place("peer", "host", 8, SPAN)]
    for begun in fake.begun:
        begun.state = "done"
    assert [copy.progress() for copy in copies] == ["done", "done"]
