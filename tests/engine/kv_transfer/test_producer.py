"""The side that gives, with a fake transport and a given time: what is written when, and when pages are free."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from mini_infer_engine.core.request import Request, SamplingParams
from mini_infer_engine.kv_transfer import producer as producer_module
from mini_infer_engine.kv_transfer.layout import KVLayout, Pool, Span, pieces
from mini_infer_engine.kv_transfer.producer import KVProducer
from mini_infer_engine.kv_transfer.protocol import events, wire
from mini_infer_engine.kv_transfer.protocol.leases import MAX_LEASE_S
from mini_infer_engine.kv_transfer.staging import staged_write as staged_gift
from mini_infer_engine.kv_transfer.staging_slots import Area
from mini_infer_engine.kv_transfer.stats import Counters
from mini_infer_engine.kv_transfer.topology.path_selection import Place
from mini_infer_engine.kv_transfer.transport import Digest, How, Motion, Progress, TransportError
from tests.support.transfer_peers import FakeDigest

LAYOUT = KVLayout(num_layers=4, halves=2, page_size=16, num_heads=1, head_bytes=4, dtype="float32")
PLACE = Place(ipc_domain="", has_rdma=False)
WHERE = wire.TransportAddress(
    "fake", [wire.RankAddress(metadata=b"", address=0, device="cpu", device_index=0, place=PLACE)]
)
PEER = b"consumer/0"


@dataclass
class FakeMotion:
    num_bytes: int
    end: Progress = "busy"

    def progress(self) -> Progress:
        return self.end


@dataclass
class FakeTransport:
    name: str = "fake"
    tables: list[np.ndarray] = field(default_factory=list)
    motions: list[FakeMotion] = field(default_factory=list)
    is_broken: bool = False
    is_staged: bool = False
    is_lost: bool = False
    staged: list[tuple[int, int, int]] = field(default_factory=list)
    """Slots and tokens."""
    pushed: list[tuple[int, int]] = field(default_factory=list)
    """Slots here and there."""
    digested: list[Span] = field(default_factory=list)
    digests: list[FakeDigest] = field(default_factory=list)
    """The digests that are computed next; others are known at once."""

    def enter_thread(self) -> None: ...

    def describe(self) -> wire.TransportAddress:
        return WHERE

    def add_peer(self, engine_id: str, layout: KVLayout, where: wire.TransportAddress) -> None: ...

    def remove_peer(self, engine_id: str) -> None: ...

    def tend(self) -> None: ...

    def start(self, engine_id: str, how: How, span: Span) -> Motion:
        if self.is_broken:
            raise TransportError("gone")
        self.tables.append(pieces(LAYOUT, LAYOUT, span))
        self.motions.append(FakeMotion(int(self.tables[-1][:, 2].sum())))
        return self.motions[-1]

    def staging_area(self, engine_id: str, span: Span) -> Area | None:
        return "host" if self.is_staged else None

    def slot_bytes(self, engine_id: str, area: Area, pool: Pool = "pages") -> int:
        self._find()
        return LAYOUT.page_bytes

    def stage(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        self._find()
        self.staged.append((slot, span.begin, span.end))
        self.motions.append(FakeMotion(span.end - span.begin))
        return self.motions[-1]

    def push(self, engine_id: str, area: Area, slot: int, their_slot: int, span: Span) -> Motion:
        self._find()
        self.pushed.append((slot, their_slot))
        self.motions.append(FakeMotion(1000 * (span.end - span.begin)))
        return self.motions[-1]

    def place(self, engine_id: str, area: Area, slot: int, span: Span) -> Motion:
        raise AssertionError("this side gives")

    def end_all(self) -> None:
        """All that has begun to move has moved."""
        for motion in self.motions:
            motion.end = "done"

    def digest(self, span: Span, consumer: KVLayout | None = None) -> Digest:
        assert consumer is not None, "this side gives"
        self.digested.append(span)
        return self.digests.pop(0) if self.digests else FakeDigest(end="done")

    def close(self) -> None: ...

    def _find(self) -> None:
        if self.is_lost:
            raise TransportError("it has gone")


@dataclass
class Layers:
    done: int = 0

    def num_done(self) -> int:
        return self.done


@dataclass
class World:
    role: str = "prefill"
    transport: FakeTransport = field(default_factory=FakeTransport)
    sent: list[wire.FromProducer] = field(default_factory=list)
    reported: list[events.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        def send(peer: bytes, message: wire.FromProducer) -> None:
            assert peer == PEER
            self.sent.append(message)

        self.producer = KVProducer(
            lambda: party("producer", self.role), self.transport, LAYOUT, send, self.reported.append, Counters()
        )
        self.producer.handle(PEER, wire.Hello(party("consumer", "decode")), 0.0)
        assert isinstance(self.sent.pop(), wire.Welcome)

    def grant_slot(self, serial: int, now_s: float) -> None:
        """A slot for what is staged, which then is written there."""
        self.producer.handle(PEER, wire.SlotGranted(1, serial, 8 + serial), now_s)
        self.producer.advance(now_s)

    def written(self) -> list[tuple[int, int]]:
        """Of each part that the consumer is told of, its layers."""
        return [message.layers for message in self.sent if isinstance(message, wire.Written)]

    def request_slot(self, now_s: float = 0.0, num_tokens: int = 40) -> str:
        request = Request(
            request_id="", prompt_token_ids=list(range(num_tokens)), sampling=SamplingParams(max_tokens=1)
        )
        self.producer.handle(PEER, wire.PrefillRequested(1, request, [7, 8, 9], 0, 10.0), now_s)
        assert isinstance(self.sent.pop(), wire.Accepted)
        requested = self.reported.pop()
        assert isinstance(requested, events.PrefillRequest)
        return requested.key


def party(engine_id: str, role: str) -> wire.Party:
    return wire.Party(version=wire.VERSION, engine_id=engine_id, role=role, weights="w", layout=LAYOUT, where=WHERE)


@pytest.fixture
def world() -> World:
    return World()


def test_the_token_is_sent_when_the_last_byte_has_arrived(world: World) -> None:
    key = world.request_slot()
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 32))
    world.producer.give(events.Send(key, 1, [1, 2, 3], 32, 40))
    world.producer.end(events.SendEnd(key, 5, [], 0))
    assert len(world.transport.motions) == 1  # one after the other
    world.transport.motions[0].end = "done"
    world.producer.advance(1.0)
    assert world.reported == [events.SendDone(key, 0)]
    assert not world.sent
    world.transport.motions[1].end = "done"
    world.producer.advance(2.0)
    assert world.reported == [events.SendDone(key, 0), events.SendDone(key, 1)]
    assert world.sent == [wire.Prefilled(1, 5, [], 0, 3 * LAYOUT.page_bytes)]
    assert world.producer.num_open == 0


def test_layers_are_written_as_soon_as_they_are_computed(world: World) -> None:
    key, layers = world.request_slot(), Layers()
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 40, layers))
    world.producer.end(events.SendEnd(key, 5, [], 0))
    world.producer.advance(0.0)
    assert not world.transport.motions
    assert world.producer.is_busy  # it looks again soon
    layers.done = 1
    world.producer.advance(0.1)
    assert world.transport.tables[0][:, 2].tolist() == [LAYOUT.layer_bytes] * 3
    layers.done = LAYOUT.num_layers
    world.producer.advance(0.2)
    assert len(world.transport.motions) == 1  # the first is still on its way
    world.transport.motions[0].end = "done"
    world.producer.advance(0.3)
    assert world.transport.tables[1][:, 2].tolist() == [3 * LAYOUT.layer_bytes] * 3
    assert not world.reported  # the pages are still read
    world.transport.motions[1].end = "done"
    world.producer.advance(0.4)
    assert world.reported == [events.SendDone(key, 0)]
    assert world.sent == [wire.Prefilled(1, 5, [], 0, 3 * LAYOUT.page_bytes)]


@pytest.mark.parametrize("by_layers", [False, True])
def test_a_release_is_reported_when_no_write_is_in_flight(world: World, by_layers: bool) -> None:
    key = world.request_slot()
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 32, Layers(1) if by_layers else None))
    world.producer.give(events.Send(key, 1, [1, 2, 3], 32, 40))
    world.producer.handle(PEER, wire.Release([1]), 1.0)
    assert world.reported == [events.JobEnded(key), events.SendDone(key, 1)]  # what was not begun is free at once
    assert not world.sent
    world.transport.motions[0].end = "done"
    world.producer.advance(2.0)
    assert world.reported[2:] == [events.SendDone(key, 0)]
    assert world.sent == [wire.Released([1])]
    assert len(world.transport.motions) == 1
    assert world.producer.num_open == 0


def test_a_job_ends_when_its_lease_expires_and_goes_on_when_renewed(world: World) -> None:
    key = world.request_slot(now_s=0.0)
    world.producer.handle(PEER, wire.Renew([1], 10.0), 5.0)
    world.producer.advance(14.9)
    assert not world.reported
    world.producer.advance(15.0)
    assert world.reported == [events.JobEnded(key)]
    assert isinstance(world.sent[0], wire.Failed)
    assert world.sent[0].reason == "lease_expired"


def test_the_core_gets_a_prompt_before_the_consumer_is_answered(world: World) -> None:
    """The first token waits for the core, and nobody for the answer."""
    sent_before: list[int] = []
    world.producer._report = lambda event: sent_before.append(len(world.sent))
    request = Request(request_id="", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=1))
    world.producer.handle(PEER, wire.PrefillRequested(1, request, [7], 0, 10.0), 0.0)
    assert sent_before == [0]
    assert [type(message) for message in world.sent] == [wire.Accepted]


def test_the_peer_greets_again_when_a_write_has_failed(world: World) -> None:
    key = world.request_slot()
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 40))
    world.transport.motions[0].end = "failed"
    world.producer.advance(1.0)
    assert world.reported == [events.SendDone(key, 0), events.JobEnded(key)]
    assert [type(message) for message in world.sent] == [wire.Failed]
    world.producer.handle(PEER, wire.Renew([1], 10.0), 2.0)
    assert isinstance(world.sent[-1], wire.Refused)


def test_all_pages_are_freed_when_a_write_cannot_begin(world: World) -> None:
    key = world.request_slot()
    world.transport.is_broken = True
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 40))
    assert sorted(map(str, world.reported)) == sorted(map(str, [events.JobEnded(key), events.SendDone(key, 0)]))
    assert world.producer.num_open == 0


@pytest.fixture
def two_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gift, at most."""
    monkeypatch.setattr(staged_gift, "_SLOTS_EACH", 2)


def test_the_token_is_sent_when_all_staged_slots_are_written(world: World, two_slots: None) -> None:
    key = world.request_slot()
    world.transport.is_staged = True
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 40))
    world.producer.end(events.SendEnd(key, 5, [], 0))
    world.producer.advance(0.0)
    assert [tokens for _, *tokens in world.transport.staged] == [[0, 16], [16, 32]]  # two slots at most
    assert world.sent == [wire.SlotRequested(1, serial, "host") for serial in (0, 1)]  # while they are filled
    world.grant_slot(0, 0.1)
    assert not world.transport.pushed
    world.transport.end_all()
    world.producer.advance(0.2)
    assert world.transport.pushed == [(0, 8)]
    assert len(world.transport.staged) == 2  # both slots are in use
    world.transport.end_all()
    world.producer.advance(0.3)
    assert world.sent[2] == wire.Written(1, 0, 0, 16, (0, LAYOUT.num_layers))
    assert world.transport.staged[2][1:] == (32, 40)
    for serial in (1, 2):
        world.transport.end_all()
        world.grant_slot(serial, 0.4)
    assert not world.reported  # not all is written
    world.transport.end_all()
    world.producer.advance(0.5)
    assert world.reported == [events.SendDone(key, 0)]
    assert world.sent[-1] == wire.Prefilled(1, 5, [], 0, 40_000)
    assert world.producer.num_open == 0


def test_layers_computed_meanwhile_follow_through_the_staging_slots(world: World) -> None:
    key, layers = world.request_slot(), Layers(1)
    world.transport.is_staged = True
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 16, layers))
    world.producer.end(events.SendEnd(key, 5, [], 0))
    world.producer.advance(0.0)
    for layers.done in (1, 3, 4):
        world.producer.advance(0.1)
    world.transport.end_all()
    for serial in range(3):
        world.grant_slot(serial, 0.2)
    assert not world.reported
    world.transport.end_all()
    world.producer.advance(0.3)
    assert world.written() == [(0, 1), (1, 3), (3, 4)]
    assert world.reported == [events.SendDone(key, 0)]
    assert isinstance(world.sent[-1], wire.Prefilled)


def test_layers_wait_for_more_when_they_do_not_fill_a_staging_slot(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_gift, "_FEW_PARTS", 1)
    key, layers = world.request_slot(), Layers(1)
    world.transport.is_staged = True
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 16, layers))
    for layers.done in (1, 2, 3, 4):
        world.producer.advance(0.1)
    for serial in (0, 1):
        world.transport.end_all()
        world.grant_slot(serial, 0.2)
    world.transport.end_all()
    world.producer.advance(0.3)
    assert world.written() == [(0, 1), (1, 4)]


def test_only_one_transfer_ends_when_the_transport_has_lost_its_consumer(world: World) -> None:
    key, layers = world.request_slot(), Layers(1)
    world.transport.is_staged = True
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 16, layers))
    world.producer.advance(0.0)
    world.transport.is_lost, layers.done = True, 2
    world.producer.advance(0.1)
    world.transport.end_all()
    world.producer.advance(0.2)
    world.producer.advance(0.3)
    assert isinstance(world.sent[-1], wire.Failed)
    assert world.reported == [events.JobEnded(key), events.SendDone(key, 0)]
    assert world.producer.num_open == 0


@pytest.mark.parametrize("end", ["cannot begin", "failed"])
def test_a_transfer_fails_when_a_slot_write_failed_and_the_others_have_ended(world: World, end: str) -> None:
    key = world.request_slot()
    world.transport.is_staged = True
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 32))
    world.producer.advance(0.0)
    world.transport.end_all()
    world.grant_slot(0, 0.1)
    world.transport.is_lost = end == "cannot begin"
    world.grant_slot(1, 0.2)
    assert len(world.transport.pushed) == (1 if world.transport.is_lost else 2)
    world.transport.motions[-1].end = "failed" if end == "failed" else "busy"
    world.producer.advance(0.3)
    assert not isinstance(world.sent[-1], wire.Failed)  # the first slot is still written to
    world.transport.motions[2].end = "done"
    world.producer.advance(0.4)
    assert isinstance(world.sent[-1], wire.Failed)
    assert world.reported == [events.SendDone(key, 0), events.JobEnded(key)]
    assert world.producer.num_open == 0


def test_staging_slots_are_freed_when_the_consumers_lease_expires(world: World, two_slots: None) -> None:
    world.transport.is_staged = True
    for _ in range(5):  # more often than there are slots
        world.transport.motions.clear()
        key = world.request_slot()
        world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 40))
        world.producer.advance(0.0)
        assert len(world.transport.motions) == 2
        world.transport.end_all()
        world.producer.advance(1.0)
        world.producer.advance(10.0)
        world.producer.advance(10.1)
        assert isinstance(world.sent[-1], wire.Failed)
        assert world.reported[-2:] == [events.JobEnded(key), events.SendDone(key, 0)]
        assert world.producer.num_open == 0


def grant_staged(world: World) -> str:
    """Tokens 16 to 40, in two parts."""
    world.transport.is_staged = True
    world.producer.handle(PEER, wire.KVRequested(1, list(range(40)), "", "", 16, 10.0), 0.0)
    requested = world.reported.pop()
    assert isinstance(requested, events.KVRequest)
    world.producer.grant(events.Grant(requested.key, [4, 5, 6], 64))
    assert world.sent.pop() == wire.KVGranted(1, [4, 5, 6], 64, 10.0, is_staged=True)
    world.producer.advance(0.1)
    assert [tokens for _, *tokens in world.transport.staged] == [[16, 32], [32, 40]]  # what is wanted, and no more
    world.transport.end_all()
    return requested.key


def test_what_is_granted_may_be_staged_and_is_free_when_it_is_released(world: World) -> None:
    key = grant_staged(world)
    for serial in (0, 1):
        world.grant_slot(serial, 0.2)
    world.transport.end_all()
    world.producer.advance(0.3)
    assert world.sent[-1] == wire.AllWritten(1)
    world.producer.handle(PEER, wire.Release([1]), 0.5)
    assert world.reported == [events.JobEnded(key)]
    assert world.producer.num_open == 0


@pytest.mark.parametrize("expires", [False, True])
def test_a_grant_is_released_when_no_slot_write_is_in_flight(world: World, expires: bool) -> None:
    key = grant_staged(world)
    world.grant_slot(0, 0.2)
    if expires:
        world.producer.advance(10.0)
        assert world.reported == [events.JobEnded(key)]
    world.producer.handle(PEER, wire.Release([1]), 10.1)
    assert world.reported == [events.JobEnded(key)]
    assert wire.Released([1]) not in world.sent
    world.grant_slot(1, 10.2)
    assert len(world.transport.pushed) == 1  # nothing begins any more
    world.transport.end_all()
    world.producer.advance(10.3)
    assert world.sent[-1] == wire.Released([1])
    assert world.producer.num_open == 0


def test_a_prefill_request_is_refused_when_the_engine_is_a_decode_engine() -> None:
    world = World(role="decode")
    request = Request(request_id="", prompt_token_ids=[1, 2], sampling=SamplingParams())
    world.producer.handle(PEER, wire.PrefillRequested(1, request, [0], 0, 1.0), 0.0)
    assert world.sent == [wire.Failed(1, "role", "this engine's role is decode: it computes no prompts for others")]
    assert not world.reported


def test_what_is_read_is_free_when_it_is_released_or_its_lease_ends(world: World) -> None:
    for job, end in ((1, "release"), (2, "lease")):
        world.producer.handle(PEER, wire.KVRequested(job, [1, 2], "", "", 0, 10.0), 0.0)
        requested = world.reported.pop()
        assert isinstance(requested, events.KVRequest)
        world.producer.grant(events.Grant(requested.key, [3], 16))
        assert world.sent.pop() == wire.KVGranted(job, [3], 16, 10.0)
        if end == "release":
            world.producer.handle(PEER, wire.Release([job]), 1.0)
            assert world.sent.pop() == wire.Released([job])
        else:
            world.producer.advance(10.0)
        assert world.reported.pop() == events.JobEnded(requested.key)
    assert world.producer.num_open == 0


def test_a_second_prompt_is_ignored_when_its_job_number_is_in_use(world: World) -> None:
    key = world.request_slot()
    request = Request(request_id="", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1))
    world.producer.handle(PEER, wire.PrefillRequested(1, request, [7], 0, 10.0), 0.0)
    world.producer.handle(PEER, wire.KVRequested(1, [1, 2], "", "", 0, 10.0), 0.0)
    assert not world.reported
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 40))
    assert world.producer.num_open == 1


def test_prompt_is_refused_when_its_pages_do_not_hold_it(world: World) -> None:
    request = Request(request_id="", prompt_token_ids=[1] * 40, sampling=SamplingParams(max_tokens=1))
    world.producer.handle(PEER, wire.PrefillRequested(1, request, [7, 8], 0, 10.0), 0.0)
    [refusal] = world.sent
    assert isinstance(refusal, wire.Failed)
    assert refusal.reason == "bad_message"
    assert not world.reported


def test_prompt_is_refused_when_too_many_transfers_are_open(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "MAX_OPEN_JOBS", 1)
    world.request_slot()
    world.producer.handle(PEER, wire.KVRequested(2, [1, 2], "", "", 0, 10.0), 0.0)
    [refusal] = world.sent
    assert isinstance(refusal, wire.Failed)
    assert refusal.reason == "overloaded"


def test_idle_peer_is_forgotten_when_too_many_have_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_module, "MAX_PEERS", 3)
    answers: list[tuple[bytes, wire.FromProducer]] = []
    producer = KVProducer(
        lambda: party("producer", "prefill"),
        FakeTransport(),
        LAYOUT,
        lambda peer, message: answers.append((peer, message)),
        lambda event: None,
        Counters(),
    )
    for number in range(5):
        producer.handle(b"%d" % number, wire.Hello(party(f"consumer{number}", "decode")), 0.0)
    assert [type(message) for _, message in answers] == [wire.Welcome] * 5
    producer.handle(b"0", wire.Renew([1], 1.0), 0.0)
    producer.handle(b"4", wire.Renew([1], 1.0), 0.0)
    assert [(peer, type(message)) for peer, message in answers[5:]] == [(b"0", wire.Refused)]


def test_an_engine_stays_connected_when_it_connects_anew_and_there_are_too_many_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producer_module, "MAX_PEERS", 2)
    removed: list[str] = []
    transport = FakeTransport()
    monkeypatch.setattr(transport, "remove_peer", removed.append, raising=False)
    producer = KVProducer(
        lambda: party("producer", "prefill"),
        transport,
        LAYOUT,
        lambda peer, message: None,
        lambda event: None,
        Counters(),
    )
    for identity, engine_id in ((b"0", "first"), (b"1", "second"), (b"2", "first")):
        producer.handle(identity, wire.Hello(party(engine_id, "decode")), 0.0)
    assert removed == []


@pytest.mark.parametrize("lease_s", [3_600.0, 86_400.0])
def test_lease_of_a_peer_is_bounded_when_it_asks_for_a_long_one(world: World, lease_s: float) -> None:
    world.producer.handle(PEER, wire.KVRequested(1, [1, 2], "", "", 0, lease_s), 0.0)
    world.producer.handle(PEER, wire.Renew([1], lease_s), 1.0)
    world.reported.clear()
    world.producer.advance(MAX_LEASE_S + 1.0)
    assert [type(event) for event in world.reported] == [events.JobEnded]


def test_pages_stay_pinned_until_their_digest_is_known(world: World) -> None:
    digests = world.transport.digests = [FakeDigest(), FakeDigest((1 << 64) - 2, "done")]
    first = digests[0]
    key = world.request_slot()
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 32))
    world.producer.give(events.Send(key, 1, [1, 2, 3], 32, 40))
    world.producer.end(events.SendEnd(key, 5, [], 0))
    world.transport.end_all()
    world.producer.advance(1.0)
    assert not world.reported
    assert world.producer.is_busy
    first.value, first.end = 7, "done"
    world.producer.advance(2.0)
    world.transport.end_all()
    world.producer.advance(3.0)
    assert [(span.begin, span.end) for span in world.transport.digested] == [(0, 32), (32, 40)]
    assert world.reported == [events.SendDone(key, 0), events.SendDone(key, 1)]
    assert world.sent == [wire.Prefilled(1, 5, [], 0, 3 * LAYOUT.page_bytes, digest=5)]


def test_the_digest_is_of_all_layers_when_they_are_written_one_by_one(world: World) -> None:
    key, layers = world.request_slot(), Layers()
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 40, layers))
    world.producer.end(events.SendEnd(key, 5, [], 0))
    layers.done = 1
    world.producer.advance(0.1)
    world.transport.end_all()
    assert not world.transport.digested
    layers.done = LAYOUT.num_layers
    world.producer.advance(0.2)
    assert [span.layers for span in world.transport.digested] == [None]


def test_a_job_fails_and_its_pages_are_free_when_a_digest_cannot_be_computed(world: World) -> None:
    world.transport.digests = [FakeDigest(end="failed")]
    key = world.request_slot()
    world.producer.give(events.Send(key, 0, [1, 2, 3], 0, 40))
    world.transport.end_all()
    world.producer.advance(1.0)
    assert isinstance(world.sent[-1], wire.Failed)
    assert world.reported == [events.SendDone(key, 0), events.JobEnded(key)]
    assert world.producer.num_open == 0


def test_a_grant_is_told_with_its_digest_once_that_is_known(world: World) -> None:
    digest = FakeDigest(11)
    world.transport.digests = [digest]
    world.producer.handle(PEER, wire.KVRequested(1, list(range(40)), "", "", 16, 10.0), 0.0)
    requested = world.reported.pop()
    assert isinstance(requested, events.KVRequest)
    world.producer.grant(events.Grant(requested.key, [4, 5, 6], 64))
    assert not world.sent
    assert world.producer.is_busy
    digest.end = "done"
    world.producer.advance(1.0)
    assert [(span.begin, span.end) for span in world.transport.digested] == [(16, 40)]
    assert world.sent == [wire.KVGranted(1, [4, 5, 6], 64, 10.0, digest=11)]
