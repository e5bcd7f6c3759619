"""The side that takes, with a fake transport and a socket for the side that gives: slots that it lends, and ends."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import pytest
import zmq

from mini_infer_engine.core.request import KVSource, Request, SamplingParams
from mini_infer_engine.kv_transfer.consumer import KVConsumer
from mini_infer_engine.kv_transfer.consumer_jobs import KVConsumerLimits
from mini_infer_engine.kv_transfer.estimates import Load
from mini_infer_engine.kv_transfer.layout import KVLayout, Span
from mini_infer_engine.kv_transfer.protocol import events, wire
from mini_infer_engine.kv_transfer.staging_slots import RECEIVE_SLOTS, Area
from mini_infer_engine.kv_transfer.stats import Counters
from mini_infer_engine.kv_transfer.topology.path_selection import Place
from mini_infer_engine.kv_transfer.transport import Digest, KnownDigest, Motion, Progress, Transport
from tests.support.transfer_peers import FakeDigest

LAYOUT = KVLayout(num_layers=4, halves=2, page_size=16, num_heads=1, head_bytes=4, dtype="float32")
WHERE = wire.TransportAddress(
    "fake",
    [
        wire.RankAddress(
            metadata=b"", address=0, device="cpu", device_index=0, place=Place(ipc_domain="", has_rdma=False)
        )
    ],
)


@dataclass
class FakeMotion:
    end: Progress = "busy"
    num_bytes: int = 0

    def progress(self) -> Progress:
        return self.end


@dataclass
class FakeTransport:
    placed: list[tuple[int, Span]] = field(default_factory=list)
    """Slots, and what was put in place from them."""
    motions: list[FakeMotion] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    """The digests of what has arrived; of others 0."""

    def digest(self, span: Span, consumer: KVLayout | None = None) -> Digest:
        assert consumer is None, "this side takes"
        return self.digests.pop(0) if self.digests else KnownDigest(0)

    def add_peer(self, engine_id: str, layout: KVLayout, where: wire.TransportAddress) -> None: ...

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        assert (engine_id, area) == ("producer", "host")
        self.placed.append((slot, span))
        self.motions.append(FakeMotion())
        return self.motions[-1]


def party(engine_id: str, role: str) -> wire.Party:
    return wire.Party(version=wire.VERSION, engine_id=engine_id, role=role, weights="w", layout=LAYOUT, where=WHERE)


class World:
    """A consumer, connected to a socket of the test's."""

    def __init__(self, name: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.producer = context.socket(zmq.ROUTER)
        self.producer.set(zmq.LINGER, 0)
        self.address = f"inproc://{name}"
        self.producer.bind(self.address)
        self.transport, self.reported = FakeTransport(), list[events.Event]()
        self.poller = zmq.Poller()
        self.consumer = KVConsumer(
            context,
            self.poller,
            lambda: party("consumer", "decode"),
            cast("Transport", self.transport),
            LAYOUT,
            self.reported.append,
            Counters(),
            KVConsumerLimits(10.0, 60.0),
            Load(),
        )
        self.peer = b""

    def take(self, job: int) -> None:
        """A prompt that the other side has in line."""
        request = Request(request_id=str(job), prompt_token_ids=list(range(40)), sampling=SamplingParams(max_tokens=1))
        source = KVSource(how="prefill", address=self.address)
        self.consumer.take(events.Take(job, request, source, [1, 2, 3], 0, 40), 0.0)
        if not self.peer:
            self.peer, hello = self.producer.recv_multipart()
            assert isinstance(wire.decode_from_consumer(hello), wire.Hello)
            self.receive_messages(wire.Welcome(party("producer", "prefill")))
        assert isinstance(self.sent_messages()[0], wire.PrefillRequested)
        self.receive_messages(wire.Accepted(job, 0, 0.0, 0.0))

    def receive_messages(self, *messages: wire.FromProducer) -> None:
        """By the side that gives, and heard by the consumer."""
        for message in messages:
            self.producer.send_multipart([self.peer, wire.encode(message)])
        self.consumer.receive(dict(self.poller.poll(1000)), 0.0)
        self.consumer.advance(0.0)

    def sent_messages(self) -> list[wire.FromConsumer]:
        """What the consumer has said since."""
        found = []
        while self.producer.poll(50):
            found.append(wire.decode_from_consumer(self.producer.recv_multipart()[1]))
        return found

    def granted_slots(self) -> list[int]:
        """The slots of what it has said since."""
        return [message.slot for message in self.sent_messages() if isinstance(message, wire.SlotGranted)]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.node.name)
    yield world
    world.consumer.close()
    world.producer.close()


def written(job: int, serial: int) -> wire.Written:
    return wire.Written(job, serial, 0, 16, (serial, serial + 1))


def test_a_prompt_is_taken_when_all_that_was_written_is_in_its_place(world: World) -> None:
    world.take(1)
    world.receive_messages(wire.SlotRequested(1, 0, "host"), wire.SlotRequested(1, 1, "host"))
    assert world.granted_slots() == [RECEIVE_SLOTS[0], RECEIVE_SLOTS[1]]
    world.receive_messages(written(1, 1), written(1, 0), wire.Prefilled(1, 5, [], 0, 99))
    assert world.transport.placed == [
        (RECEIVE_SLOTS[1], Span([1, 2, 3], [], 0, 16, (1, 2))),
        (RECEIVE_SLOTS[0], Span([1, 2, 3], [], 0, 16, (0, 1))),
    ]
    assert not world.reported
    world.transport.motions[0].end = "done"
    world.consumer.advance(0.1)
    assert not world.reported
    world.transport.motions[1].end = "done"
    world.consumer.advance(0.2)
    world.consumer.advance(0.3)
    assert world.reported == [events.TransferDone(1, 40, 5, [], 0), events.Settled(1)]
    assert world.consumer.num_open == 0


def test_slots_are_granted_in_order_when_they_become_free(world: World) -> None:
    world.take(1)
    world.take(2)
    world.receive_messages(*(wire.SlotRequested(1, serial, "host") for serial in range(len(RECEIVE_SLOTS))))
    world.receive_messages(wire.SlotRequested(2, 100, "host"), wire.SlotRequested(1, 101, "host"))
    assert world.granted_slots() == list(RECEIVE_SLOTS)
    for serial, other in ((3, 100), (0, 101)):
        world.receive_messages(written(1, serial))
        assert not world.granted_slots()
        world.transport.motions[-1].end = "done"
        world.consumer.advance(0.1)
        assert [
            (message.job, message.serial) for message in world.sent_messages() if isinstance(message, wire.SlotGranted)
        ] == [(2 if other == 100 else 1, other)]


@pytest.mark.parametrize("end", ["released", "prefilled", "written", "failed"])
def test_granted_slots_are_free_only_when_nothing_is_written_any_more(world: World, end: str) -> None:
    world.take(1)
    world.take(2)
    world.receive_messages(*(wire.SlotRequested(1, serial, "host") for serial in range(len(RECEIVE_SLOTS))))
    world.receive_messages(wire.SlotRequested(2, 100, "host"))
    world.granted_slots()
    world.consumer.cancel(1)
    world.consumer.advance(0.1)
    messages = world.sent_messages()
    assert messages == [wire.Release([1])]  # and no slot for the other job: those of the first may be written to
    last = {
        "released": wire.Released([1]),
        "prefilled": wire.Prefilled(1, 5, [], 0, 99),
        "written": written(1, 0),
        "failed": wire.Failed(1, "transport", "gone"),
    }[end]
    world.receive_messages(last)
    assert len(world.granted_slots()) == 1
    assert not world.transport.placed
    assert world.reported == ([] if end == "written" else [events.Settled(1)])


def test_what_is_put_in_place_when_a_job_is_given_up_keeps_its_pages_and_its_slot(world: World) -> None:
    world.take(1)
    world.receive_messages(*(wire.SlotRequested(1, serial, "host") for serial in range(len(RECEIVE_SLOTS) + 1)))
    world.receive_messages(written(1, 0))
    world.consumer.cancel(1)
    world.receive_messages(wire.Released([1]))
    assert not world.reported
    assert len(world.granted_slots()) == len(RECEIVE_SLOTS)
    world.transport.motions[0].end = "done"
    world.consumer.advance(0.1)
    assert world.reported == [events.Settled(1)]
    world.take(2)
    world.receive_messages(*(wire.SlotRequested(2, serial, "host") for serial in range(len(RECEIVE_SLOTS))))
    assert sorted(world.granted_slots()) == list(RECEIVE_SLOTS)


def test_the_prompt_is_computed_locally_when_received_kv_cannot_be_placed(world: World) -> None:
    world.take(1)
    world.receive_messages(wire.SlotRequested(1, 0, "host"), written(1, 0))
    world.transport.motions[0].end = "failed"
    world.consumer.advance(0.1)
    [failed] = world.reported
    assert isinstance(failed, events.TransferFailed)
    assert failed.reason == "transport"
    assert wire.Release([1]) in world.sent_messages()
    world.receive_messages(wire.Released([1]))
    assert world.reported[1:] == [events.Settled(1)]


def test_a_slot_is_ignored_when_it_was_not_granted(world: World) -> None:
    world.take(1)
    world.receive_messages(written(1, 7))
    assert not world.transport.placed
    world.receive_messages(wire.SlotRequested(1, 0, "host"), written(1, 0), written(1, 0))
    assert len(world.transport.placed) == 1
    world.consumer.cancel(1)
    assert wire.Release([1]) in world.sent_messages()
    world.take(2)
    world.receive_messages(
        written(1, 0), *(wire.SlotRequested(2, serial, "host") for serial in range(len(RECEIVE_SLOTS)))
    )
    assert RECEIVE_SLOTS[0] not in world.granted_slots(), "what was written there is still put in place"
    assert not world.reported


def granted_nothing(world: World, job: int) -> None:
    """A read that a peer grants, of no more tokens than this engine has."""
    source = KVSource(how="prefix", address=world.address)
    request = Request(request_id=str(job), prompt_token_ids=list(range(40)), sampling=SamplingParams(max_tokens=1))
    world.consumer.take(events.Take(job, request, source, [4, 5, 6], 0, 40), 0.0)
    world.sent_messages()


def test_taker_goes_on_when_the_last_job_of_a_broken_peer_is_granted_nothing(world: World) -> None:
    world.take(1)
    granted_nothing(world, 2)
    world.receive_messages(wire.SlotRequested(1, 0, "host"), written(1, 0))
    world.transport.motions[0].end = "failed"
    world.consumer.advance(0.1)
    world.receive_messages(wire.Released([1]))
    world.receive_messages(wire.KVGranted(2, [], 0, 30.0, False))
    assert [type(event) for event in world.reported] == [events.TransferFailed, events.Settled] * 2
    assert world.consumer.num_open == 0
    assert wire.Release([2]) in world.sent_messages()  # before the connection is closed


def test_slots_of_one_area_are_granted_when_those_of_the_other_are_used_up(world: World) -> None:
    world.take(1)
    world.take(2)
    world.receive_messages(*(wire.SlotRequested(1, serial, "host") for serial in range(len(RECEIVE_SLOTS) + 1)))
    assert world.granted_slots() == list(RECEIVE_SLOTS)
    world.receive_messages(wire.SlotRequested(2, 100, "device"))
    assert [message.job for message in world.sent_messages() if isinstance(message, wire.SlotGranted)] == [2]


def test_new_job_greets_anew_when_the_transport_to_a_peer_has_failed_under_load(world: World) -> None:
    world.take(1)
    world.take(2)  # keeps the first connection busy
    world.receive_messages(wire.SlotRequested(1, 0, "host"), written(1, 0))
    world.transport.motions[0].end = "failed"
    world.consumer.advance(0.1)
    world.sent_messages()
    world.peer = b""
    world.take(3)
    assert world.consumer.num_open == 3


@pytest.mark.parametrize(
    "part",
    [(0, 0, (0, 1)), (-1, 16, (0, 1)), (0, 41, (0, 1)), (0, 16, (0, 5)), (0, 16, (3, 3)), (16, 0, (0, 1))],
    ids=str,
)
def test_part_is_put_nowhere_when_it_is_not_of_its_job(world: World, part: tuple[int, int, tuple[int, int]]) -> None:
    world.take(1)
    world.receive_messages(wire.SlotRequested(1, 0, "host"))
    world.receive_messages(wire.Written(1, 0, *part))
    assert not world.transport.placed


def test_job_is_settled_by_its_peer_when_a_part_was_not_of_it(world: World) -> None:
    world.take(1)
    world.receive_messages(wire.SlotRequested(1, 0, "host"), wire.Written(1, 0, 0, 41, (0, 1)))
    [failed] = world.reported
    assert isinstance(failed, events.TransferFailed)
    assert failed.reason == "transport"
    world.receive_messages(wire.Released([1]))
    assert world.reported[1:] == [events.Settled(1)]


def test_read_is_not_begun_when_granted_pages_hold_fewer_tokens_than_is_said(world: World) -> None:
    world.take(1)
    granted_nothing(world, 2)
    world.receive_messages(wire.KVGranted(2, [1], 40, 30.0, False))
    [failed, settled] = world.reported
    assert isinstance(failed, events.TransferFailed)
    assert failed.reason == "bad_message"
    assert settled == events.Settled(2)


def test_a_transfer_is_done_once_what_has_arrived_is_proved(world: World) -> None:
    digest = FakeDigest()
    world.transport.digests = [digest]
    world.take(1)
    world.receive_messages(wire.Prefilled(1, 5, [], 0, 99, digest=7))
    assert not world.reported
    assert world.consumer.is_busy
    digest.value, digest.end = 7, "done"
    world.consumer.advance(0.0)
    assert world.reported == [events.TransferDone(1, 40, 5, []), events.Settled(1)]


def test_nothing_more_is_reported_when_the_peer_is_lost_while_a_digest_is_computed(world: World) -> None:
    digest = FakeDigest()
    world.transport.digests = [digest]
    world.take(1)
    world.receive_messages(wire.Prefilled(1, 5, [], 0, 99, digest=7), wire.Failed(1, "transport", "lost"))
    digest.value, digest.end = 7, "done"
    world.consumer.advance(0.0)
    assert [type(event) for event in world.reported] == [events.TransferFailed, events.Settled]


def test_no_prompt_is_requested_from_a_source_that_has_sent_wrong_bytes_three_times(world: World) -> None:
    for job in range(3):
        world.transport.digests = [KnownDigest(8)]
        world.take(job)
        world.receive_messages(wire.Prefilled(job, 5, [], 0, 99, digest=7))
    reasons = [event.reason for event in world.reported if isinstance(event, events.TransferFailed)]
    assert reasons == ["mismatch"] * 3
    world.reported.clear()
    request = Request(request_id="3", prompt_token_ids=list(range(40)), sampling=SamplingParams(max_tokens=1))
    source = KVSource(how="prefill", address=world.address)
    world.consumer.take(events.Take(3, request, source, [1, 2, 3], 0, 40), 0.0)
    assert [type(event) for event in world.reported] == [events.TransferFailed, events.Settled]
    assert not world.sent_messages()
