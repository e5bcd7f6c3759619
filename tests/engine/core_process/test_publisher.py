import time
from collections.abc import Iterator

import pytest
import zmq

from mini_infer_contract import events
from mini_infer_engine.core_process.publisher import EventPublisher, PortInUseError
from tests.engine.server.dry_server import DryServer, free_port, wait_until


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscribe(context: zmq.Context[zmq.Socket[bytes]], port: int, topic: bytes) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.set(zmq.RCVTIMEO, 60_000)
    socket.subscribe(topic)
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


def load(running: int, now: float, accepted: tuple[str, ...] = ()) -> events.LoadReport:
    return events.LoadReport(now, running, 0, 0, 0.0, list(accepted))


def test_loads_go_out_on_change_not_too_often_and_as_a_heartbeat(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    port = free_port()
    publisher = EventPublisher(context, "127.0.0.1", port, 0)
    socket = subscribe(context, port, events.LOAD_TOPIC)
    early = 1.0
    while not socket.poll(10):  # the subscription has to arrive
        early += 0.1
        publisher.publish_load(load(9, early), early)
    sent = []
    for now, running in ((100.0, 0), (100.005, 1), (100.03, 1), (100.06, 1), (100.9, 1), (101.04, 1)):
        if publisher.load_is_due(now):
            publisher.publish_load(load(running, now), now)
    while len(sent) < 3:
        topic, _, payload = socket.recv_multipart()
        assert topic == events.LOAD_TOPIC
        report = events.decode_load(payload)
        if report.ts >= 100:
            sent.append((report.ts, report.running))
    assert sent == [(100.0, 0), (100.03, 1), (101.04, 1)]
    assert not socket.poll(50)


def test_waiting_for_the_next_load_is_short_only_after_a_postponed_one(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    publisher = EventPublisher(context, "127.0.0.1", 0, 0)
    publisher.publish_load(load(0, 100.0), 100.0)
    assert publisher.load_wait_s(100.0) == pytest.approx(1.0)
    assert not publisher.load_is_due(100.005)
    assert publisher.load_wait_s(100.005) == pytest.approx(0.015)


def test_a_taken_port_is_named(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    port = free_port()
    first = EventPublisher(context, "127.0.0.1", port, 0)
    with pytest.raises(PortInUseError, match=f"{port}.*--replay-port"):
        EventPublisher(context, "127.0.0.1", 0, port)
    first.close()


@pytest.mark.parametrize("limit", ["RING_BATCHES", "RING_BYTES"])
def test_a_full_replay_arrives_to_its_end_in_vllms_frames(
    context: zmq.Context[zmq.Socket[bytes]], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(events.encode(events.KVEventBatch(ts=0.0, events=[events.AllBlocksCleared()])))
    monkeypatch.setattr(
        f"mini_infer_engine.core_process.replays.{limit}", 100 if limit == "RING_BATCHES" else 100 * size
    )
    port = free_port()
    publisher = EventPublisher(context, "127.0.0.1", 0, port)
    for number in range(120):
        publisher.publish_events([events.AllBlocksCleared()], float(number))
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.RCVTIMEO, 60_000)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send_multipart([b"", events.sequence_frame(0)])
    assert publisher.replay is not None
    assert publisher.replay.poll(60_000)
    replies: list[list[bytes]] = []

    def all_came() -> bool:
        publisher.answer_replays()
        while dealer.poll(1):
            replies.append(dealer.recv_multipart())
        return replies[-1:] == [list(events.REPLAY_LAST_FRAMES)]

    wait_until(all_came)
    for number, reply in zip(range(20, 120), replies[:-1], strict=True):
        payload = events.encode(events.KVEventBatch(ts=float(number), events=[events.AllBlocksCleared()]))
        assert reply == events.replay_frames(number, payload)
    publisher.close()


def test_a_server_publishes_replays_and_snapshots_what_is_cached(
    server: DryServer, events_ports: tuple[int, int], context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    socket = subscribe(context, events_ports[0], b"")
    socket.recv_multipart()  # a load report, as there is one each second: the subscription is in force
    prompt = f"{time.time()} and sixteen more tokens, then some"
    headers = {"x-request-id": "seen-by-the-gateway"}
    body = {"model": "dry", "prompt": prompt, "max_tokens": 1}
    assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    stored: list[int] = []
    accepted: list[str] = []
    last = -1

    def has_published_all() -> bool:
        nonlocal last
        topic, sequence, payload = socket.recv_multipart()
        if topic == events.EVENTS_TOPIC:
            last = events.read_sequence(sequence)
            for event in events.decode_batch(payload).events:
                if isinstance(event, events.BlockStored):
                    stored.extend(event.token_ids)
        else:
            accepted.extend(events.decode_load(payload).accepted)
        return "seen-by-the-gateway" in accepted and len(stored) >= 16

    wait_until(has_published_all)
    full = len(prompt) // 16 * 16
    assert bytes(stored[:full]).decode() == prompt[:full]
    snapshot_sequence, chains = events.read_snapshot(server.client.get("/kv_snapshot").content)
    assert snapshot_sequence == last
    tokens = [token for chain in chains for token in chain.token_ids]
    assert prompt[:full].encode() in bytes(min(token, 255) for token in tokens)  # special tokens are above bytes
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.RCVTIMEO, 60_000)
    dealer.connect(f"tcp://127.0.0.1:{events_ports[1]}")
    dealer.send_multipart([b"", events.sequence_frame(last)])
    replies = []
    while (reply := events.read_replay_reply(dealer.recv_multipart())) is not None:
        replies.append(reply)
    assert [sequence for sequence, _ in replies] == [last]
    assert len(events.decode_batch(replies[0][1]).events) >= 1
