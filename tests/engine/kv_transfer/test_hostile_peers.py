"""Messages that no honest engine sends, over real sockets: each costs its sender, and no thread ends."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from mini_infer_engine.core.request import KVSource
from mini_infer_engine.kv_transfer.protocol import events, wire
from mini_infer_engine.kv_transfer.staging_slots import RECEIVE_SLOTS
from mini_infer_engine.kv_transfer.worker import TransferWorker
from tests.support.transfer_peers import (
    FROM_CONSUMER,
    FROM_PRODUCER,
    PretendedTransport,
    mutations,
    party,
    prefill_requested,
    transfer_worker,
)

TIMEOUT_MS = 30_000


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


class Peer:
    """An engine that takes, as its socket."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, engine_id: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(address)
        self.engine_id = engine_id

    def send(self, message: wire.FromConsumer) -> None:
        self.socket.send(wire.encode(message))

    def until(self, kind: type[Any]) -> Any:
        """The next message of a kind; others are passed over."""
        while self.socket.poll(TIMEOUT_MS):
            message = wire.decode_from_producer(self.socket.recv())
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__} came")

    def greet(self) -> None:
        self.send(wire.Hello(party(self.engine_id)))
        self.until(wire.Welcome)

    def receive_prompt(self) -> wire.Prefilled:
        """Lends slots for whatever is staged."""
        while True:
            message = self.until(wire.SlotRequested | wire.Prefilled)
            if isinstance(message, wire.Prefilled):
                return message
            self.send(wire.SlotGranted(message.job, message.serial, RECEIVE_SLOTS[message.serial % len(RECEIVE_SLOTS)]))


def is_well(worker: TransferWorker, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
    """An honest engine is served."""
    honest = Peer(context, address, "honest")
    honest.greet()
    honest.send(prefill_requested(5))
    assert honest.until(wire.Accepted).job == 5
    key = ""
    while not key.endswith("/5"):  # some that the hostile peer has asked for come first
        key = next_event(worker, events.PrefillRequest).key
    worker.do(events.Send(key, 0, [1, 2, 3], 0, 40))
    worker.do(events.SendEnd(key, 3, [], 0))
    assert honest.receive_prompt().token_id == 3
    assert worker.failure is None


def next_event(worker: TransferWorker, kind: type[Any]) -> Any:
    end_s = time.monotonic() + TIMEOUT_MS / 1000
    while time.monotonic() < end_s:
        event = worker.events.get(timeout=TIMEOUT_MS / 1000)
        if isinstance(event, kind):
            return event
    raise AssertionError(f"no {kind.__name__} came")


@pytest.mark.parametrize("message", FROM_CONSUMER, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("is_staged", [False, True])
def test_giving_thread_goes_on_when_a_peer_mutates_a_message(
    context: "zmq.Context[zmq.Socket[bytes]]", message: wire.FromConsumer, is_staged: bool
) -> None:
    with transfer_worker(PretendedTransport(is_staged)) as (worker, address):
        peer = Peer(context, address, "peer")
        peer.greet()
        peer.send(prefill_requested(1))
        requested = next_event(worker, events.PrefillRequest)
        worker.do(events.Send(requested.key, 0, [1, 2, 3], 0, 32))
        for number, payload in enumerate(mutations(message)):
            peer.socket.send(payload)
            if number % 20 == 0:  # what the core does meanwhile, for whatever was accepted
                while not worker.events.empty():
                    serve(worker, worker.events.get())
        peer.greet()
        peer.send(wire.Release([0, 1, 2**31]))  # or its prompts have slots until their leases end
        is_well(worker, context, address)


def serve(worker: TransferWorker, event: events.Event) -> None:
    match event:
        case events.PrefillRequest(key):
            worker.do(events.Send(key, 0, [1, 2, 3], 0, 40))
            worker.do(events.SendEnd(key, 3, [], 0))
        case events.KVRequest(key):
            worker.do(events.Grant(key, [1, 2, 3], 40))


def test_giving_thread_goes_on_when_frames_are_random(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    draw = random.Random(0)
    with transfer_worker(PretendedTransport()) as (worker, address):
        peer = Peer(context, address, "peer")
        whole = wire.encode(wire.Hello(party("peer")))
        for _ in range(500):
            cut = whole[: draw.randrange(len(whole))] + draw.randbytes(draw.randrange(40))
            frames = [
                draw.choice((b"", draw.randbytes(draw.randrange(200)), cut)) for _ in range(draw.choice((1, 1, 3)))
            ]
            peer.socket.send_multipart(frames)
        nested = Peer(context, address, "nested")
        nested.socket.send(b"\x91" * 100_000)
        is_well(worker, context, address)
        assert worker.stats.faults > 0


def take(job: int, address: str, how: Any = "prefill") -> events.Take:
    source = KVSource(how=how, address=address)
    return events.Take(job, prefill_requested(job).request, source, [1, 2, 3], 0, 40)


class KVProducer:
    """An engine that gives, as its socket: it says right things up to a certain one, and then that."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.identity = b""

    def receive(self, kind: type[Any]) -> Any:
        while self.socket.poll(TIMEOUT_MS):
            self.identity, payload = self.socket.recv_multipart()
            message = wire.decode_from_consumer(payload)
            if isinstance(message, kind):
                return message
            if isinstance(message, wire.Hello):
                self.send(wire.Welcome(party("producer")))
        raise AssertionError(f"no {kind.__name__} came")

    def send(self, *messages: wire.FromProducer) -> None:
        for message in messages:
            self.socket.send_multipart([self.identity, wire.encode(message)])

    def send_raw(self, payload: bytes) -> None:
        self.socket.send_multipart([self.identity, payload])


@pytest.mark.parametrize("message", FROM_PRODUCER, ids=lambda one: type(one).__name__)
def test_taking_thread_goes_on_when_a_peer_mutates_a_message(
    context: "zmq.Context[zmq.Socket[bytes]]", message: wire.FromProducer
) -> None:
    expected_type = wire.KVRequested if isinstance(message, wire.KVGranted | wire.AllWritten) else wire.PrefillRequested
    how = "prefill" if expected_type is wire.PrefillRequested else "prefix"
    with transfer_worker(PretendedTransport(), timeout_s=0.5) as (worker, _):
        producer = KVProducer(context)
        worker.do(take(1, producer.address, how))
        producer.receive(expected_type)
        producer.send(wire.SlotRequested(1, 0, "host"))
        for payload in mutations(message):
            producer.send_raw(payload)
        honest = KVProducer(context)
        worker.do(take(2, honest.address))
        honest.receive(wire.PrefillRequested)
        honest.send(wire.Prefilled(2, 3, [], 0, 100))
        assert next_event(worker, events.TransferDone | events.TransferFailed).job in (1, 2)
        assert worker.failure is None


@pytest.mark.parametrize("attempt", range(2))
def test_every_job_ends_when_answers_are_mutated(context: "zmq.Context[zmq.Socket[bytes]]", attempt: int) -> None:
    """One job for each mutated answer: it comes, or does not, and never waits for ever."""
    draw = random.Random(attempt)
    payloads = [(message, payload) for message in FROM_PRODUCER for payload in mutations(message)]
    with transfer_worker(PretendedTransport(), timeout_s=0.1) as (worker, _):
        for job, (message, payload) in enumerate(draw.sample(payloads, 25), start=1):
            producer = KVProducer(context)
            worker.do(take(1, producer.address, "prefix" if isinstance(message, wire.KVGranted) else "prefill"))
            producer.receive(wire.KVRequested | wire.PrefillRequested)
            producer.send_raw(payload)
            ended = next_event(worker, events.TransferDone | events.TransferFailed)
            assert ended.job == 1, job
            producer.socket.close(linger=0)
        assert worker.failure is None
